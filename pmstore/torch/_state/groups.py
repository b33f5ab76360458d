"""An optimizer's parameter groups as plain values, and how two of these differ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import is_
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


def arrange_groups(
    optimizer: Optimizer, wanted: list[list[tuple[torch.Tensor | None, torch.Tensor | None]]]
) -> None:
    """Makes the groups hold these parameters: of each the first that is known of what has its name
    and what was at its place; else what is there. Groups that were added since then go; those that
    are gone come back, without their settings (see `restore_groups`)."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    groups += [{"params": []} for _ in range(len(wanted) - len(groups))]
    del groups[len(wanted) :]
    for group, places in zip(groups, wanted, strict=True):
        here = group["params"]
        there = [
            named if named is not None else before if before is not None else here[place]
            for place, (before, named) in enumerate(places)
        ]
        if [*map(id, here)] != [*map(id, there)]:
            here[:] = there
    alive = {id(one) for group in groups for one in group["params"]}
    for key in [key for key in optimizer.state if isinstance(key, torch.Tensor)]:
        if id(key) not in alive:  # of parameters that were added since then
            del optimizer.state[key]


def are_moved(
    called: str,
    given: Sequence[torch.Tensor],
    stored: Sequence[torch.Tensor],
    names: Callable[[], Collection[int]],
) -> bool:
    """Whether the given parameters are others than the stored ones, or in another order. names:
    ids of those that have one.

    Raises: MismatchError: one without a name has another place than it had, or none.
    """
    if len(given) == len(stored) and all(map(is_, given, stored)):
        return False
    named = names()
    places = {id(one): place for place, one in enumerate(given)}
    wrong = []
    for place, one in enumerate(stored):
        now = places.get(id(one))
        gone = now is None and (place >= len(given) or id(given[place]) in named)
        if id(one) not in named and (gone or now not in (None, place)):
            wrong.append(f"parameter {place} is " + ("gone" if now is None else f"parameter {now}"))
    if wrong:
        raise MismatchError(
            f"the groups of {called} were changed. Parameters that are in no module of a model "
            "given to attach are known by their places: let these stay, and let new ones come "
            "last, or give attach the modules too. run.rollback() brings the groups back",
            mismatched=wrong,
        )
    return True


def restore_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Makes the hyperparameters of each the stored ones."""
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
