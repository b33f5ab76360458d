"""An optimizer's parameter groups as plain values, and how two of these differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from pmstore.torch.errors import MismatchError


def describe_groups(
    optimizer: Optimizer, kind: str, names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """For each group the optimizer's kind, and the shapes and names of its parameters. names: by id
    of those that have one."""
    return [
        {
            "class": kind,
            "shapes": [list(parameter.shape) for parameter in group["params"]],
            "names": [names.get(id(parameter)) for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]


def compare_groups(called: str, stored: list[dict[str, Any]], given: list[dict[str, Any]]) -> None:
    """Raises: MismatchError: they differ; it lists how. called: the optimizer, in the message."""
    wrong, count = [], len(stored)
    if len(stored) != len(given):
        wrong.append(f"{len(stored)} parameter groups are stored, {len(given)} given")
        stored = []
    for number, (ours, theirs) in enumerate(zip(stored, given, strict=False)):
        if ours["class"] != theirs["class"]:
            wrong.append(f"stored is the state of {ours['class']}, given is {theirs['class']}")
            break
        if ours["shapes"] != theirs["shapes"]:
            wrong.append(
                f"group {number}: shapes {_short(ours['shapes'])} are stored, "
                f"{_short(theirs['shapes'])} given"
            )
        elif ours["names"] != theirs["names"]:
            wrong.append(
                f"group {number}: its parameters come in another order: "
                f"{_first_change(ours['names'], theirs['names'])}"
            )
        elif ours.get("kept", theirs.get("kept")) != theirs.get("kept"):
            wrong.append(f"group {number}: its parameters have other strides, dtypes or moments")
    if wrong:
        raise MismatchError(
            f"{called} is not the one whose state is stored",
            mismatched=wrong,
            ways=(
                *(
                    ("groups that the program adds while it trains are added before attach",)
                    if len(given) < count
                    else ()
                ),
                'Resume(optimizer="settings") takes the groups given, and the state by name',
                'Resume(optimizer="program") begins with the one given, without state',
            ),
        )


def restore_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Makes the hyperparameters the stored ones. Groups that were added since then go."""
    del optimizer.param_groups[len(groups) :]
    for group, stored in zip(optimizer.param_groups, groups, strict=True):
        for key in [key for key in group if key != "params" and key not in stored]:
            del group[key]
        for key, value in stored.items():
            here = group.get(key)
            if (
                isinstance(here, torch.Tensor)
                and isinstance(value, torch.Tensor)
                and here.shape == value.shape
            ):
                with torch.no_grad():
                    here.copy_(value)  # schedulers hold on to a learning rate that is a tensor
            else:
                group[key] = value


def _short(shapes: list[list[int]]) -> str:
    told = ", ".join(str(tuple(shape)) for shape in shapes[:6])
    return f"[{told}{', ...' if len(shapes) > 6 else ''}] ({len(shapes)})"


def _first_change(stored: list[str | None], given: list[str | None]) -> str:
    ours, theirs = next(pair for pair in zip(stored, given, strict=True) if pair[0] != pair[1])
    return f"{ours} is stored where {theirs} is given"
