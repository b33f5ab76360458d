"""What a program hands to `attach`, as plain data: its settings, before the stored ones are loaded.

The store has what the training made of them since. So what a program changed can be seen only by
comparing what it gives now with what it gave before.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
)
from torch.utils.data.distributed import DistributedSampler

from pmstore.torch.keys import full_name, under
from pmstore.torch.program import Program

Settings = dict[str, Any]

_MOVES = frozenset(
    (
        "optimizer",
        "base_lrs",  # of the optimizer's groups
        "last_epoch",
        "best",
        "num_bad_epochs",
        "cooldown_counter",
        "T_cur",
        "T_i",
        "verbose",
        "_step_count",
        "_last_lr",
        "_is_initial",
        "_get_lr_called_within_step",
    )
)
"""Attributes of schedulers that are a place and no setting."""


def plain(value: Any) -> Any:
    """The value as plain data. Of what is no data, only that it is there."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else f"tensor {tuple(value.shape)}"
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 63 else str(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, Mapping):
        return sorted(
            ([str(key), plain(one)] for key, one in value.items()), key=lambda one: one[0]
        )
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    return "a function" if callable(value) else f"a {type(value).__qualname__}"


def same(ours: Any, theirs: Any) -> bool:
    """Whether two plain values are; a learning rate that went through float32 is."""
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, float) or isinstance(theirs, float):
        if not all(isinstance(one, (int, float)) for one in (ours, theirs)):
            return False
        return math.isclose(ours, theirs, rel_tol=1e-6) or (ours != ours and theirs != theirs)
    return bool(ours == theirs)


def settings_of_optimizer(optimizer: Optimizer) -> Settings:
    """Its class, and each group's hyperparameters."""
    groups = [
        {str(key): plain(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {"class": _kind(optimizer), "groups": groups}


def settings_of_scheduler(scheduler: Any) -> Settings:
    """Its class, and the attributes that are settings; of schedulers in it too."""
    held: Mapping[str, Any] = getattr(scheduler, "__dict__", {})
    found: Settings = {"class": _kind(scheduler)}
    for key, value in held.items():
        if key == "_schedulers":
            for number, one in enumerate(value):
                inner = settings_of_scheduler(one)
                found.update({f"schedulers[{number}].{name}": it for name, it in inner.items()})
        elif key not in _MOVES:
            found[key] = plain(value)
    return found


def settings_of_loader(loader: Any) -> Settings:
    """What the order of an epoch, and the batches in it, depend on."""
    found: Settings = {"class": _kind(loader)}
    if not isinstance(loader, DataLoader):
        return {**found, "length": _length(loader)}
    found["length of the data set"] = _length(loader.dataset)
    if rows := _rows(loader.dataset):
        found["rows of the data set"] = rows
    batches: Any = loader.batch_sampler
    sampler: Any = loader.sampler
    if batches is not None and type(batches) is not BatchSampler:
        found["batch_sampler"] = _kind(batches)
        sampler = getattr(batches, "sampler", None)
        found["batch_size"] = plain(getattr(batches, "batch_size", None))
        found["drop_last"] = plain(getattr(batches, "drop_last", None))
    else:
        found["batch_size"] = loader.batch_size
        found["drop_last"] = loader.drop_last
    if sampler is None:
        return found
    found["sampler"] = {RandomSampler: "shuffle=True", SequentialSampler: "shuffle=False"}.get(
        type(sampler), _kind(sampler)
    )
    found["samples of a data epoch"] = _length(sampler)
    if isinstance(sampler, RandomSampler):
        found["replacement"] = sampler.replacement
    if isinstance(sampler, DistributedSampler):
        for key in ("shuffle", "seed", "num_replicas"):
            found[key] = plain(getattr(sampler, key))
    return found


def settings_of_scaler(scaler: Any) -> Settings:
    """Returns the settings of a gradient scaler; its scale is no setting."""
    found: Settings = {"class": _kind(scaler)}
    held: Mapping[str, Any] = getattr(scaler, "__dict__", {})
    for key in ("_enabled", "_growth_factor", "_backoff_factor", "_growth_interval"):
        if key in held:  # a disabled one has only that
            found[key.removeprefix("_")] = plain(held[key])
    return found


_SETTINGS_OF: dict[str, Callable[[Any], Settings]] = {
    "lr_scheduler": settings_of_scheduler,
    "scaler": settings_of_scaler,
}


def fingerprint(program: Program) -> dict[str, Settings]:
    """Returns the settings by piece, whose names are paths under the run's name. Touches
    nothing."""
    found = {
        under("optimizer", key): settings_of_optimizer(one)
        for key, one in program.optimizers.items()
    }
    for key, stateful in program.statefuls.items():
        if stateful is not None and key.partition("/")[0] in _SETTINGS_OF:
            found[key] = _SETTINGS_OF[key.partition("/")[0]](stateful)
    if program.loader is not None:
        found["loader"] = settings_of_loader(program.loader)
    found["trainable"] = {
        full_name(key, name): parameter.requires_grad
        for key, model in program.models.items()
        for name, parameter in model.named_parameters()
    }
    return found


def _rows(data: Any) -> str:
    """Which rows of others a data set has, in words that differ where these do; "" if it has all,
    or does not say. (`random_split` without a seed chooses others at each start.)"""
    if isinstance(data, ConcatDataset):
        return "; ".join(filter(None, map(_rows, data.datasets)))
    if not isinstance(data, Subset):
        return ""
    try:
        given = data.indices
        rows = (
            np.arange(given.start, given.stop, given.step)  # which is a hundred times as fast
            if type(given) is range
            else np.asarray(given)
        )
    except (AttributeError, OverflowError, RuntimeError, TypeError, ValueError):
        return ""
    if rows.dtype.kind not in "iu" or not rows.size:
        return _rows(data.dataset)
    digest = hashlib.blake2b(rows.astype("<i8").tobytes(), digest_size=4).hexdigest()
    said = f"{rows.size:,} that begin with {', '.join(map(str, rows[:3].tolist()))} ({digest})"
    return "; ".join(filter(None, (said, _rows(data.dataset))))


def _kind(item: Any) -> str:
    return type(item).__qualname__


def _length(item: Any) -> int | None:
    try:
        return len(item) if isinstance(item, Sized) else None
    except (TypeError, NotImplementedError, AttributeError):
        return None
