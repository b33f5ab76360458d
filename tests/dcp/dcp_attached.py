"""Attached runs that go through torch.distributed.checkpoint, and are killed: `python
dcp_attached.py FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from dcp_runs import assert_same, model, state_of, step
from torch import nn
from torch.distributed.checkpoint.state_dict import set_state_dict

import pmstore
import pmstore.torch.optim
from pmstore.torch import Run

OPTIMIZERS = {
    "adamw": lambda of: torch.optim.AdamW(of.parameters(), lr=1e-2),
    "momentum": lambda of: torch.optim.SGD(of.parameters(), lr=1e-2, momentum=0.9),
    "native": lambda of: pmstore.torch.optim.AdamW(of.parameters(), lr=1e-2),
}
SAVED, MORE = 3, 2


def plain(kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Without any store."""
    made = model()
    by = OPTIMIZERS[kind](made)
    for number in range(steps):
        step(made, by, number)
    return made, by


def in_heap(store: pmstore.Store, made: nn.Module, by: torch.optim.Optimizer) -> bool:
    """Whether each parameter, buffer and state tensor lies in the store."""
    base, size = store._core.pool.info.base, store.info().file_bytes
    tensors = [*made.parameters(), *made.buffers()]
    for state in by.state.values():
        tensors += [one for one in state.values() if isinstance(one, torch.Tensor)]
    return all(base <= one.data_ptr() < base + size for one in tensors)


def begin(path: Path, kind: str) -> tuple[pmstore.Store, Run, nn.Module, torch.optim.Optimizer]:
    store = pmstore.open(path, size="8MiB")
    made = model()
    by = OPTIMIZERS[kind](made)
    return store, pmstore.torch.attach(store, model=made, optimizer=by), made, by


def train(run: Run, made: nn.Module, by: Any, numbers: range) -> None:
    for number in numbers:
        with run.next_step():
            step(made, by, number)
        run.commit()


def load(folder: Path, made: nn.Module, by: torch.optim.Optimizer) -> None:
    state = state_of(made, by)
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
    set_state_dict(made, by, model_state_dict=state["model"], optim_state_dict=state["optim"])


def saved_and_loaded(folder: Path, kind: str) -> Iterator[str]:
    store, run, made, by = begin(folder / f"{kind}.pm", kind)
    train(run, made, by, range(SAVED))
    dcp.save(
        state_of(made, by), storage_writer=dcp.FileSystemWriter(folder / kind, sync_files=False)
    )
    yield f"in the heap after save: {in_heap(store, made, by)}"
    saving = dcp.async_save(
        state_of(made, by),
        storage_writer=dcp.FileSystemWriter(folder / f"{kind}-async", sync_files=False),
    )
    train(run, made, by, range(SAVED, SAVED + MORE))
    saving.result()
    yield f"in the heap after async_save: {in_heap(store, made, by)}"
    load(folder / f"{kind}-async", made, by)
    assert_same(state_of(made, by), state_of(*plain(kind, SAVED)))
    store.commit()
    train(run, made, by, range(10, 10 + MORE))
    yield f"in the heap after load: {in_heap(store, made, by)}"
    with run.next_step():
        step(made, by, 20)  # and is killed before it commits


def loaded_at_first(folder: Path, kind: str) -> Iterator[str]:
    """Another run begins with what the first one saved. Torch steps the optimizer to have state,
    so this stands in a step."""
    store, run, made, by = begin(folder / f"{kind}-other.pm", kind)
    with run.next_step():
        load(folder / kind, made, by)
    run.commit()
    yield f"in the heap after load: {in_heap(store, made, by)}"
    load(folder / kind, made, by)
    train(run, made, by, range(10, 10 + MORE))
    yield f"in the heap: {in_heap(store, made, by)}"
    load(folder / kind, made, by)  # pending


def expected(kind: str) -> dict[str, Any]:
    made, by = plain(kind, SAVED)
    for number in range(10, 10 + MORE):
        step(made, by, number)
    return state_of(made, by)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in OPTIMIZERS:
        for what in (saved_and_loaded, loaded_at_first):
            for line in what(Path(sys.argv[1]), each):
                print(each, line, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
