"""A stored scheduler's place under other settings, and the learning rates that follow from both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler as torch_schedulers

_BY_PLACE_ALONE = (torch_schedulers.LambdaLR, torch_schedulers.CosineAnnealingWarmRestarts)
"""Their `get_lr` depends on nothing but settings and place, and writes nothing."""
Groups = list[dict[str, Any]]


def with_settings(stored: dict[str, Any], given: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    """The stored state with those settings of the given one. "schedulers[1].gamma" is the setting
    of an inner scheduler."""
    made = {key: given[key] if key in keys and key in given else stored[key] for key in stored}
    inner = stored.get("_schedulers")
    if isinstance(inner, (list, tuple)) and len(inner) == len(given.get("_schedulers", ())):
        made["_schedulers"] = [
            with_settings(
                ours,
                theirs,
                {
                    key.removeprefix(prefix)
                    for key in keys
                    if key.startswith(prefix := f"schedulers[{number}].")
                },
            )
            for number, (ours, theirs) in enumerate(zip(inner, given["_schedulers"], strict=True))
        ]
    return made


def with_bases(stored: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The stored state with the base rates of the given one."""
    made = dict(stored)
    if "base_lrs" in stored and "base_lrs" in given:
        made["base_lrs"] = list(given["base_lrs"])
    if "_schedulers" in stored:
        made["_schedulers"] = [
            with_bases(ours, theirs)
            for ours, theirs in zip(stored["_schedulers"], given["_schedulers"], strict=True)
        ]
    return made


def for_groups(
    stored: dict[str, Any], given: dict[str, Any], origins: list[int | None], before: int
) -> dict[str, Any]:
    """The stored state for other parameter groups: what it has one of for each of the `before`
    stored groups is put in the new order; of new groups it is the given. origins: of each group of
    now the stored one."""
    made = {}
    for key, value in stored.items():
        theirs = given.get(key)
        if key == "_schedulers" and isinstance(theirs, (list, tuple)):
            made[key] = [
                for_groups(ours, one, origins, before)
                for ours, one in zip(value, theirs, strict=True)
            ]
        elif (
            isinstance(value, list)
            and isinstance(theirs, list)
            and (len(value), len(theirs)) == (before, len(origins))
        ):
            made[key] = [
                theirs[number] if origin is None else value[origin]
                for number, origin in enumerate(origins)
            ]
        else:
            made[key] = value
    return made


def rates(scheduler: Any, state: dict[str, Any]) -> list[float] | None:
    """The learning rates at the state's place; None: they depend on the rates before. Touches
    nothing."""
    clone = copy.copy(scheduler)
    vars(clone).update({key: one for key, one in state.items() if key not in ("lr_lambdas",)})
    if "_schedulers" in state:
        return None
    closed: Callable[[], Any] | None = getattr(clone, "_get_closed_form_lr", None)
    if closed is None and isinstance(scheduler, _BY_PLACE_ALONE):
        clone._get_lr_called_within_step = True  # else it warns
        closed = clone.get_lr
    return None if closed is None else [float(one) for one in closed()]


def base_of(group: dict[str, Any]) -> float:
    return float(group.get("initial_lr", group.get("lr", 0.0)))


def set_rate(group: dict[str, Any], rate: float) -> None:
    """A rate that is a tensor stays one."""
    held = group.get("lr")
    group["lr"] = torch.full_like(held, rate) if isinstance(held, torch.Tensor) else rate


def scale_rate(group: dict[str, Any], given: dict[str, Any]) -> None:
    """As the base rates are to each other, where no formula says what the rate is now."""
    old, new = base_of(group), base_of(given)
    set_rate(group, float(group["lr"]) * new / old if old else float(given["lr"]))
