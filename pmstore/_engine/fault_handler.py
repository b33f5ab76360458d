"""The engine's fault handler stays the first one, whoever else installs theirs."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from pmstore._engine._native import lib as _lib


def _handler_first(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        _lib.pms_handler_install()
        return result

    return wrapper


def _stay_first_in_child() -> None:
    """Keeps the engine's handler first in a forked worker of torch's DataLoader. The worker's loop
    puts handlers of its own over all others; without this, the engine could not say that a write
    went into the parent's store."""
    handlers = sys.modules.get("torch.utils.data._utils.signal_handling")
    name = "_set_worker_signal_handlers"
    if hasattr(handlers, name):
        setattr(handlers, name, _handler_first(getattr(handlers, name)))


def stay_first() -> None:
    """Keeps the engine's SIGSEGV handler before that of faulthandler.

    faulthandler.enable() puts its handler over the engine's, for which a first write into a
    protected page is not an error. The engine notices that at its next call, but the next thing may
    be a write by numpy, without a call. So enable (and disable, which restores what was there
    before it) are followed by putting the engine's handler first again, chained to the new one: a
    real segmentation fault still prints its traceback."""
    faulthandler.enable = _handler_first(faulthandler.enable)
    faulthandler.disable = _handler_first(faulthandler.disable)
    os.register_at_fork(after_in_child=_stay_first_in_child)
