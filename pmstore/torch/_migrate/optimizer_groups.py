"""A stored optimizer's state for one with other parameters or groups: by the parameters' names."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from pmstore.torch._state.common_part import copy_common, fits

_ZEROS_AT_FIRST = frozenset(
    ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta")
)
"""Of torch.optim: zeros are what a row's state is before its first step."""
_OF_ALL_PARAMETERS = frozenset(("LBFGS",))
"""Whose state belongs to all parameters together: it ends when these change."""


@dataclass(frozen=True, slots=True)
class HeldOptimizer:
    """What a store holds of an optimizer. Tensors are copies. A parameter that is in no module has
    a name by its number among such."""

    groups: list[dict[str, Any]]
    """Hyperparameters."""
    names: list[list[str]]
    """Of the parameters, by group."""
    shapes: dict[str, list[int]]
    dtypes: dict[str, torch.dtype]
    """Where it is known."""
    state: dict[str, dict[str, Any]]
    others: dict[Any, Any]
    """State that belongs to no parameter."""
    own: dict[str, torch.Tensor]
    """Parameters that are in no module."""

    def group_of(self, names: list[str]) -> int | None:
        """The stored group of the first of the names that is stored."""
        where = {name: number for number, group in enumerate(self.names) for name in group}
        return next((where[name] for name in names if name in where), None)


def names_of(described: list[dict[str, Any]]) -> list[list[str]]:
    """Returns the parameters' names in each group of a stored layout."""
    found, unnamed = [], 0
    for group in described:
        names = []
        for name in group["names"]:
            if name is None:
                name, unnamed = f"..{unnamed}", unnamed + 1
            names.append(name)
        found.append(names)
    return found


def stand_in(
    optimizer: Optimizer, names: list[list[str]], held: HeldOptimizer, groups: list[dict[str, Any]]
) -> Optimizer:
    """An optimizer over the program's parameters, with the stored state of those that have a name
    in common, and these hyperparameters. The program's own is untouched."""
    made: Any = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.state = defaultdict(dict)
    made.param_groups = [
        {"params": list(given["params"]), **group}
        for given, group in zip(optimizer.param_groups, groups, strict=True)
    ]
    kind = type(optimizer).__name__
    flat = [name for group in names for name in group]
    if kind in _OF_ALL_PARAMETERS and flat != list(held.shapes):
        return made  # type: ignore[no-any-return]
    padded = kind in _ZEROS_AT_FIRST and type(optimizer).__module__.startswith("torch.optim")
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for name, parameter in zip(flat, parameters, strict=True):
        stored = held.state.get(name)
        if stored is not None and (
            list(parameter.shape) == held.shapes[name]
            or (padded and fits(held.shapes[name], parameter.shape))
        ):
            state = {
                key: _fitted(value, name, parameter, held) if torch.is_tensor(value) else value
                for key, value in stored.items()
            }
        else:
            state = dict(optimizer.state.get(parameter, {}))
        if state:
            made.state[parameter] = state
    made.state.update(held.others)
    return made  # type: ignore[no-any-return]


def _fitted(
    value: torch.Tensor, name: str, parameter: torch.Tensor, held: HeldOptimizer
) -> torch.Tensor:
    """Returns the value with the parameter's rows, and of its dtype if it was of that dtype."""
    old = held.shapes[name]
    if value.dim() and value.dtype == held.dtypes.get(name, parameter.dtype):
        value = value.to(parameter.dtype)
    if list(value.shape) == old and list(parameter.shape) != old:
        grown = torch.zeros_like(parameter, dtype=value.dtype, device=value.device)
        copy_common(grown, value)
        return grown
    return value
