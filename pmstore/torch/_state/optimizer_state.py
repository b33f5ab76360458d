"""What an optimizer holds, and how it is taken apart for a store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from operator import is_
from typing import Any, cast

import torch
from torch.optim import Optimizer

from pmstore._base.mapping_protocol import Held
from pmstore._base.text import encode_name
from pmstore.torch._state.sharded import ShardRecord
from pmstore.torch.run_errors import AttachError, MismatchError

_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))


def is_constant(item: object) -> bool:
    """Whether the object is data that cannot change."""
    return type(item) in _IMMUTABLE or (type(item) is tuple and all(map(is_constant, item)))


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Returns the parameters in the order of the groups, as `Optimizer.state_dict` numbers them."""
    parameters: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def state_block(index: int, key: str) -> str:
    """Where the state of a parameter lies, under the optimizer's path."""
    return f"state/{index}.{encode_name(key)}"


def read_layout(
    store: Held, path: str
) -> tuple[list[dict[str, Any]], list[list[Any]], list[int], dict[str, ShardRecord]]:
    """What is stored of an optimizer: groups, [parameter, key] of state tensors, parameters that
    are in no module, and shard records by block."""
    groups, tensors, own, *shards = store[f"{path}/layout"]
    return groups, tensors, own, dict(shards[0]) if shards else {}


def drop_tensors(state: dict[str, Any], kept: Container[str]) -> None:
    """Removes the tensors of one parameter's state that are not among the kept ones."""
    for key in [key for key, value in state.items() if isinstance(value, torch.Tensor)]:
        if key not in kept:
            del state[key]


def tables_of_groups(optimizer: Optimizer) -> list[Any]:
    """What holds groups, their settings and their parameters."""
    groups = optimizer.param_groups
    return [groups, *groups, *(group["params"] for group in groups)]


def tables_of_state(optimizer: Optimizer) -> list[Any]:
    """What holds state, and that of each parameter."""
    state = cast(dict[Any, Any], optimizer.state)
    return [state, *state.values()]


def holds_constants(optimizer: Optimizer) -> bool:
    """Whether it holds nothing, beside tensors, that can change and stay the same object: else the
    tables do not tell of all changes."""
    groups, state = optimizer.param_groups, cast(dict[Any, Any], optimizer.state)
    if type(groups) is not list or type(state) not in (dict, defaultdict):
        return False
    for group in groups:
        if type(group) is not dict or type(group["params"]) is not list:
            return False
        if not all(is_constant(value) for key, value in group.items() if key != "params"):
            return False
    for key, held in state.items():
        if not isinstance(key, torch.Tensor) or type(held) is not dict:
            return False
        if not all(
            isinstance(value, torch.Tensor) or is_constant(value) for value in held.values()
        ):
            return False
    return True


def plain_state(optimizer: Optimizer, called: str) -> dict[Any, Any]:
    """State that is no tensor: by the number of its parameter, and under "others" what belongs to
    none.

    Raises: AttachError: there is state of a tensor that is none of its parameters."""
    parameters = parameters_of(optimizer)
    rest: dict[Any, Any] = {}
    for index, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter, {})
        plain = {key: one for key, one in state.items() if not isinstance(one, torch.Tensor)}
        if plain:
            rest[index] = plain
    known = {id(parameter) for parameter in parameters}
    others: dict[Any, Any] = {}
    for key, value in cast(dict[Any, Any], optimizer.state).items():
        if isinstance(key, torch.Tensor):
            if id(key) not in known:
                raise AttachError(
                    f"{called} has state of a tensor that is in none of its groups: remove it "
                    "from .state"
                )
        else:
            others[key] = value
    if others:
        rest["others"] = others
    return rest


# ---- parameter groups as plain values, and how two of these differ


def describe_groups(
    optimizer: Optimizer, kind: str, names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Returns for each group the optimizer's kind, and the shapes and names of its parameters.
    names: by id of the parameters that have one."""
    return [
        {
            "class": kind,
            "shapes": [list(parameter.shape) for parameter in group["params"]],
            "names": [names.get(id(parameter)) for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]


_ADDED_BEFORE = (
    "groups that the program gave at its last start, or that have parameters of no model, are "
    "added before attach"
)


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
                *((_ADDED_BEFORE,) if len(given) < count else ()),
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
