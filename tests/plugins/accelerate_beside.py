"""A plug-in of pytest for Accelerate's own tests, which stay as they are: each model and optimizer
that they prepare is attached to a store, a step reaches from one `save_state` to the next, and each
of these commits before Accelerate saves.

They load what they saved into other models, so weights are written too: `register` is not used.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

import pmstore
import pmstore.torch

_prepare = Accelerator.prepare
_folder = tempfile.TemporaryDirectory(prefix="pmstore-beside-")
attached: list[Any] = []


def prepare(self: Accelerator, *given: Any, **rest: Any) -> Any:
    prepared = _prepare(self, *given, **rest)
    ones = prepared if isinstance(prepared, tuple) else (prepared,)
    models = [one for one in ones if isinstance(one, nn.Module)]
    optimizers = [one for one in ones if isinstance(one, torch.optim.Optimizer)]
    if len(models) == 1 and len(optimizers) == 1:
        store = pmstore.open(f"{_folder.name}/{len(attached)}.pm", size="2MiB")
        run = pmstore.torch.attach(store, model=models[0], optimizer=optimizers[0])
        attached.append((store, run))
        step = ExitStack()

        def between(change: Callable[[], None]) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                step.close()
                change()
                step.enter_context(run.next_step())

            return hook

        step.enter_context(run.next_step())
        self.register_save_state_pre_hook(between(run.commit))
        self.register_load_state_pre_hook(between(run.rollback))
    return prepared


Accelerator.prepare = prepare


def pytest_terminal_summary(terminalreporter: Any) -> None:
    committed = [run.committed for store, run in attached]
    terminalreporter.write_line(f"attached to stores: {len(attached)}, commits {sum(committed)}")
    assert committed
    assert sum(committed)
