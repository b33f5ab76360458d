"""What an optimizer holds, and how it is taken apart for a store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from typing import Any, cast

import torch
from torch.optim import Optimizer

from pmstore.base.held import Held
from pmstore.base.words import encode_name
from pmstore.torch._state.sharded import ShardRecord
from pmstore.torch.errors import AttachError

_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))


def is_constant(item: object) -> bool:
    """Whether the object is data that cannot change."""
    return type(item) in _IMMUTABLE or (type(item) is tuple and all(map(is_constant, item)))


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """In the order of the groups, as `Optimizer.state_dict` numbers them."""
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
    """Of one parameter: those that are not among the kept ones vanish."""
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
