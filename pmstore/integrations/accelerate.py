"""Hugging Face's Accelerate: `save_state` and `load_state` by the store.

    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with pmstore.open("run.pm") as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        pmstore.integrations.accelerate.register(accelerator, run)
        for batch in run.batches(epochs=3):
            with accelerator.accumulate(model):
                ...

`attach` takes what `accelerator.prepare` returned. See docs/INTEGRATIONS.md.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import nn

from pmstore.extras import optional
from pmstore.integrations.versions import tested
from pmstore.torch import Run
from pmstore.torch._data.accelerate_loader import PreparedLoader
from pmstore.torch._state.stateful import StatefulPart
from pmstore.torch.run_errors import AttachError

with optional:
    from accelerate import Accelerator

tested("accelerate", "1.15", "1.15")

NOTE = "pmstore.json"
"""The file in each folder that `save_state` writes. It says which commit of which store the folder
belongs to."""


class Registered:
    """Holds the hooks that `register` has set. `remove` removes them."""

    def __init__(self, handles: tuple[Any, ...]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Removes the hooks: Accelerate saves and loads weights itself again. Idempotent."""
        for handle in self._handles:
            handle.remove()


def register(accelerator: Accelerator, run: Run) -> Registered:
    """Has `accelerator.save_state` commit the run and write no weights, and `load_state` take the
    run back to that commit. The run keeps how many batches the accelerator has accumulated, and how
    often it has iterated its other loaders: prepare these before. Call it between `attach` and
    `run.batches()`.

    `save_state(folder)` ends the open step by `run.commit()`: all is durable, as far as the store's
    domain reaches, before Accelerate writes a file. It still writes those of optimizers,
    schedulers, samplers, scaler and generators: nothing of them is needed here, and Accelerate
    gives no way to leave them out. The folder has no weights; it names the store and the step.

    `load_state(folder)`: what is not committed is dropped, as by `run.rollback()`. Accelerate then
    loads its files, which hold the same. If the store has gone on since the folder was saved, they
    do not, and it is refused.

    Raises (register): AttachError: the run is detached, another one is registered, or the
    accelerator uses FSDP or DeepSpeed, which save weights by other ways. save_state raises what
    `run.commit` raises; load_state AttachError: the folder is of another store or step.
    """
    if not run.attached:
        raise AttachError("register takes a run that is attached to an open store")
    if accelerator.distributed_type in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise AttachError(
            f"an Accelerator of the kind {accelerator.distributed_type.value} saves weights by "
            "other ways than its hooks: call run.commit() alone, without save_state"
        )
    if any(isinstance(hook, _Save) for hook in accelerator._save_model_state_pre_hook.values()):
        raise AttachError("a run is registered with this accelerator: call its remove() before")
    _count(accelerator, run)
    return Registered(
        (
            accelerator.register_save_state_pre_hook(_Save(accelerator, run)),
            accelerator.register_load_state_pre_hook(_Load(run)),
        )
    )


class _Counted:
    """Holds what the accelerator counts: batches, by which it steps; and how often each loader was
    iterated that is not the run's, as a seedable sampler shuffles by that."""

    def __init__(self, accelerator: Accelerator, loader: Any) -> None:
        """loader: of the run."""
        self._accelerator = accelerator
        self._loader = loader

    def _others(self) -> list[Any]:
        loaders = [one for one in self._accelerator._dataloaders if one is not self._loader]
        return [one for one in loaders if hasattr(one, "iteration")]

    def state_dict(self) -> dict[str, Any]:
        iterations = [one.iteration for one in self._others()]
        return {"step": self._accelerator.step, "iterations": iterations}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._accelerator.step = state_dict["step"]
        for one, iteration in zip(self._others(), state_dict["iterations"], strict=False):
            one.iteration = iteration


class _CountedPart(StatefulPart):
    """Keeps these numbers in the store, from the first commit after `register` on."""

    def restore(self) -> None:
        if self.stored:
            super().restore()


def _count(accelerator: Accelerator, run: Run) -> None:
    pieces = run._steps.pieces
    source = pieces.loader.source if pieces.loader is not None else None
    prepared = source if isinstance(source, PreparedLoader) else None
    counted = _Counted(accelerator, prepared.prepared if prepared is not None else None)
    part = _CountedPart(run.store, f"{run.name}/accelerator", counted)
    part.restore()
    pieces.parts.append(part)
    if prepared is not None:
        prepared.counted = True


class _Save:
    def __init__(self, accelerator: Accelerator, run: Run) -> None:
        self._accelerator = accelerator
        self._run = run

    def __call__(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        _check_models(self._run, models)
        self._run.commit()
        weights.clear()
        if self._accelerator.is_main_process:
            Path(folder, NOTE).write_text(json.dumps(_named(self._run)) + "\n")


class _Load:
    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(self, models: list[nn.Module], folder: str | os.PathLike[str]) -> None:
        run = self._run
        _check_models(run, models)
        try:
            noted = json.loads(Path(folder, NOTE).read_text())
        except FileNotFoundError:
            raise AttachError(
                f"{folder} was not saved with pmstore's hooks, and the weights in it are of "
                "another state: call load_state before register, and before attach"
            ) from None
        if noted["run"] != run.name or noted["step"] != run.committed:
            raise AttachError(
                f"{folder} is of step {noted['step']} of the run {noted['run']!r}, and the store's "
                f"last commit is step {run.committed} of {run.name!r}: attach has gone on from "
                "there already, so leave out load_state. To go back, run.rewind(to=...) takes what "
                "run.keep(...) kept"
            )
        run.rollback()
        models.clear()


def _named(run: Run) -> dict[str, Any]:
    return {"run": run.name, "step": run.committed}


def _check_models(run: Run, models: list[nn.Module]) -> None:
    """Checks that the accelerator's models are the run's. Raises: AttachError: one is not; its
    weights would be dropped."""
    kept = {id(one) for model in run._steps.pieces.modules for one in model.parameters()}
    for model in models:
        if not all(id(one) in kept for one in model.parameters()):
            raise AttachError(
                f"the accelerator has a {type(model).__qualname__} that was not given to attach, "
                "and its weights would not be saved: attach(..., model={...}) takes several"
            )
