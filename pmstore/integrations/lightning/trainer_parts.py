"""Says what of a Trainer goes to `attach`, and what cannot be kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.optim import Optimizer

_UNFIT: dict[tuple[type[Callback], ...], str] = {
    (BaseFinetuning, StochasticWeightAveraging): (
        "exchanges the optimizers' groups or schedulers while it trains, and these cannot be gone "
        "on with. Freeze parameters by requires_grad_ in hooks, with all of them in the optimizer; "
        "average by the callback WeightAveraging"
    ),
    (LearningRateFinder, BatchSizeFinder): (
        "trains several times before the training, and would at each restart. Find the value in a "
        "program of its own, without PmstoreCallback, and write it into this one"
    ),
    (ModelPruning,): (
        "exchanges the module's parameters while it trains, and these cannot be gone on with. "
        "Prune after the training; or in __init__, by torch.nn.utils.prune, and change the masks "
        "in hooks"
    ),
}
"""Callbacks of Lightning that cannot be kept with, and why."""


def refuse(trainer: Any, module: LightningModule, own: Callback) -> None:
    """Refuses a Trainer that cannot be kept, before anything is set up. Raises: TypeError,
    ValueError."""
    ours: bool = isinstance(trainer, Trainer)
    if not ours:
        package = type(trainer).__module__.partition(".")[0]
        raise TypeError(
            f"PmstoreCallback was given to a Trainer of the package {package}: it is one of "
            "lightning's. Write `from lightning.pytorch import Trainer, LightningModule` in place "
            f"of {package}'s; the two are alike"
        )
    if sum(isinstance(one, type(own)) for one in trainer.callbacks) > 1:
        raise ValueError(
            "the Trainer was given PmstoreCallback twice: one of them keeps all of the run"
        )
    strategy = type(trainer.strategy)
    if not isinstance(trainer.strategy, (DDPStrategy, SingleDeviceStrategy)):
        raise ValueError(
            f"PmstoreCallback does not keep what {strategy.__name__} trains: it may be sharded. "
            "Use one device or strategy='ddp', or write checkpoints of it with "
            "torch.distributed.checkpoint and pmstore.dcp.StoreWriter"
        )
    if type(trainer.strategy.launcher).__name__ == "_MultiProcessingLauncher":
        raise ValueError(
            "ranks that are spawned or forked by the Trainer share the memory of the module's "
            "tensors, which a store is to have: use strategy='ddp', which starts programs"
        )
    for one in trainer.callbacks:
        for kinds, why in _UNFIT.items():
            if isinstance(one, kinds):
                raise ValueError(f"{type(one).__name__} {why}")
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            "training_step(dataloader_iter) takes batches by itself, within a step, so that the "
            "place of a step in the data is not known: write training_step(batch, batch_idx)"
        )


def models_of(trainer: Any, module: LightningModule) -> Any:
    """Returns the module alone, or with the models that callbacks hold, such as averages."""
    others = {
        f"{type(one).__name__}{name}": value
        for one in trainer.callbacks
        for name, value in vars(one).items()
        if isinstance(value, nn.Module) and value is not module
    }
    return {"module": module, **others} if others else module


def optimizers_of(trainer: Any, module: LightningModule) -> Any:
    """Returns the one optimizer, or several by name. A name is that of the one submodule whose
    parameters the optimizer trains, if no other one trains any of that; else it is the optimizer's
    number."""
    given = trainer.optimizers
    if len(given) < 2:
        return given[0] if given else None
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found = [_module_of(one, names) for one in given]
    counts = Counter(found)
    return {
        name if name and counts[name] == 1 else str(number): one
        for number, (name, one) in enumerate(zip(found, given, strict=True))
    }


def _module_of(optimizer: Optimizer, names: dict[int, str]) -> str:
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    tops = {names.get(id(one), "").partition(".")[0] for one in parameters}
    return tops.pop() if len(tops) == 1 else ""


def schedulers_of(trainer: Any) -> Any:
    given = [config.scheduler for config in trainer.lr_scheduler_configs]
    return (given if len(given) > 1 else given[0]) if given else None


def loss_of(outputs: Any) -> torch.Tensor | None:
    """Returns the loss of what `training_step` returned, as the Trainer gives it to callbacks; None
    if there is none."""
    if isinstance(outputs, dict):
        outputs = outputs.get("loss")
    return outputs if isinstance(outputs, torch.Tensor) and outputs.numel() == 1 else None
