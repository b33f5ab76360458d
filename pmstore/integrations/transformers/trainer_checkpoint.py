"""Writes a stored training as a checkpoint of the Trainer's own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from pmstore import Store
from pmstore.integrations.transformers.trainer_state import StoredState
from pmstore.torch._random.search import put_python
from pmstore.torch._read.stored import StoredRun, StoreHolding
from pmstore.torch.kept_structure import Structure


def export(store: Store, trainer: Trainer, folder: Path) -> None:
    """Writes all that the Trainer writes itself: weights, optimizer, scheduler, scaler, generators,
    its state. With several ranks, each writes its generators, and the first writes the rest."""
    run, kept = StoredRun(StoreHolding(store)), StoredState(store)
    folder.mkdir(parents=True, exist_ok=True)
    args = trainer.args
    rank = f"_{args.process_index}" if args.world_size > 1 else ""
    torch.save(_generators(store), folder / f"rng_state{rank}.pth")
    if not args.should_save:
        return
    assert trainer.model is not None
    names = trainer.model.state_dict().keys()
    weights = {name: run.tensors[name].read().clone() for name in names if name in run.tensors}
    trainer._save(str(folder), state_dict=weights)
    torch.save(_optimizer(run), folder / "optimizer.pt")
    torch.save(run.stateful("lr_scheduler", ""), folder / "scheduler.pt")
    if run.pieces.get("scaler"):
        torch.save(run.stateful("scaler", ""), folder / "scaler.pt")
    kept.read().save_to_json(str(folder / "trainer_state.json"))


def _optimizer(run: StoredRun) -> dict[str, Any]:
    """Returns the optimizer's state as `Optimizer.state_dict` does."""
    stored = run.optimizer("")
    state = {
        index: {
            key: value if not hasattr(value, "read") else value.read().clone()
            for key, value in one.items()
        }
        for index, one in stored.state.items()
    }
    return {"state": state, "param_groups": stored.groups}


def _generators(store: Store) -> dict[str, Any]:
    """Returns the states of generators as the Trainer saves them. The Trainer sets generators
    before it opens a data epoch, and within one after it has skipped: the states are those of these
    moments."""
    data = Structure(store, "run/stateful/data").read()
    if not data["amid"] and data["start"]:
        python, numpy, cpu = (data["start"][name] for name in ("python", "numpy", "torch"))
    else:
        python, numpy, cpu = (Structure(store, f"run/rng/{name}").read() for name in _PARTS)
    generator = random.Random()
    put_python(python, generator)
    found = {"python": generator.getstate(), "numpy": numpy, "cpu": cpu}
    cuda = Structure(store, "run/rng/cuda")
    if cuda.stored:
        states = cuda.read()
        found["cuda"] = states if len(states) > 1 else states[0]
    return found


_PARTS = ("python", "numpy", "torch")
