"""Sends tensors of a store to other processes of `torch.multiprocessing`.

torch moves the storage of a tensor to shared memory, in place, when it is sent or `share_memory_()`
is called: from then on the tensor, and each that shares its storage, lies outside the store, and
what is written to it is never stored. So a tensor that is sent is copied to shared memory, and
stays where it is. `share_memory_()`, whose caller means this very tensor, is refused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import wraps
from multiprocessing import context, reduction
from typing import Any

import torch

from pmstore.errors import MovedError

_once = threading.Lock()  # taken by the first `install`, for good


def install(owner: Callable[[int], str | None]) -> None:
    """Has torch ask first, once a process. owner: path of the store in whose heap an address is,
    if that is open for writing.

    What torch does when it moves a storage are two methods of `UntypedStorage`, written in Python,
    through which all ways to shared memory lead. Where a version of torch lacks one of them, the
    commit and the next look-up find what was moved.
    """
    if not _once.acquire(blocking=False):
        return
    for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
        if callable(getattr(torch.UntypedStorage, name, None)):
            setattr(
                torch.UntypedStorage, name, _refusing(getattr(torch.UntypedStorage, name), owner)
            )
    # a module of torch's without a promise; then sending is refused, as above
    with contextlib.suppress(AttributeError):
        reduce = torch.multiprocessing.reductions.reduce_storage
        reduction.register(torch.UntypedStorage, _copying(reduce, owner))


def _refusing(move: Callable[..., Any], owner: Callable[[int], str | None]) -> Callable[..., Any]:
    @wraps(move)
    def refuse(storage: Any, *arguments: Any, **named: Any) -> Any:
        if storage.device.type == "cpu" and (path := owner(storage.data_ptr())) is not None:
            raise MovedError(
                f"{path}: a tensor of the store cannot be moved to shared memory: other "
                "processes would write where no commit sees it. Share a copy, "
                "tensor.clone().share_memory_() or copy.deepcopy(model).share_memory(), and copy "
                "back what is to be stored. (Sending a tensor through a queue of "
                "torch.multiprocessing copies it)"
            )
        return move(storage, *arguments, **named)

    return refuse


def _copying(
    reduce: Callable[[Any], Any], owner: Callable[[int], str | None]
) -> Callable[[Any], Any]:
    def reduce_storage(storage: Any) -> Any:
        if storage.device.type != "cpu" or owner(storage.data_ptr()) is None:
            return reduce(storage)
        copy = storage.clone()
        reduced = reduce(copy)
        process = context.get_spawning_popen()
        # it is given the copy's descriptor when all is pickled: the copy lives as long as it does
        if process is not None:
            process.__dict__.setdefault("_pmstore_copies", []).append(copy)
        return reduced

    return reduce_storage
