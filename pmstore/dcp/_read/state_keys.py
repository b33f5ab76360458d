"""Lists the keys under which a checkpoint has what a stored run holds. They are those of a state
dict that `torch.distributed.checkpoint.state_dict.get_state_dict` has made and the planner has
flattened.

    model.<name>                        parameters and buffers
    optim.state.<parameter>.<state>     an optimizer's state
    optim.param_groups.<number>.<what>  its hyperparameters; also, as flatten_optimizer_state_dict
                                        has it, optim.param_groups.<parameter>.<what>
    lr_scheduler.<what>, scaler.<what>  their state_dict(), flattened
    <key>.<what>                        that of attach(stateful={key: ...})
    step                                of the run

Where there are several models or optimizers, their keys stand in between: model.<key>.<name>. What
only one of them has is there without the key too: torch puts several optimizers together so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from pmstore._base.text import decode_name
from pmstore.torch._read.stored import StoredOptimizer, StoredRun, StoredTensor
from pmstore.torch.keys import full_name

_BESIDE = re.compile(r"(?<![^.])(?:_orig_mod|_checkpoint_wrapped_module)\.")
"""What torch.compile and checkpoint_wrapper put into names, and torch's state dicts leave out."""

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Prefixes:
    """The keys under which a program's state dict has models and optimizers; "" puts them at its
    top."""

    model: str = "model"
    optimizer: str = "optim"


@dataclass(frozen=True)
class Listed:
    """Holds what a checkpoint has, by key.

    items: tensors that are read when they are wanted, and plain objects, by key.
    paths: where each lies in the nested state dict.
    twins: keys of what is there under another key too.
    """

    items: dict[str, Any]
    paths: dict[str, Path]
    twins: set[str]


def listed(run: StoredRun, prefixes: Prefixes) -> Listed:
    """Lists what the run holds by key. Reads plain state, and no tensor of a model or optimizer.

    Raises: ValueError: two things would have one key.
    """
    models = _models(run)
    names = _names(models)
    items, paths = _flat(_nested(run, models, names, prefixes))
    twins: set[str] = set()
    for nested in _twins(run, models, names, prefixes):
        more, where = _flat(nested)
        twins |= more.keys() - items.keys()
        items, paths = {**more, **items}, {**where, **paths}
    return Listed(items, paths, twins)


def _flat(nested: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    return flatten_state_dict(nested)


def _models(run: StoredRun) -> dict[str, dict[str, tuple[str, Any]]]:
    """Returns (full name, what it is) by name, of each model, by its key."""
    found: dict[str, dict[str, tuple[str, Any]]] = {key: {} for key in run.keys("model")}
    for full, tensor in run.tensors.items():
        key, name = ("", full) if "" in found else map(decode_name, full.split("/", 1))
        found[key][name] = (full, tensor)
    for key in run.keys("model_extra_state"):
        for module, state in run.stateful("model_extra_state", key).items():
            name = f"{module}._extra_state" if module else "_extra_state"
            found[key][name] = (full_name(key, name), state)
    return {key: _bare(model) for key, model in found.items()}


def _bare(model: dict[str, tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
    """Returns the model by names without what wrappers put before them. Names stay as they are
    where two would become one."""
    while model and all(name.startswith("module.") for name in model):
        model = {name.removeprefix("module."): one for name, one in model.items()}
    bare = {_BESIDE.sub("", name): one for name, one in model.items()}
    return bare if len(bare) == len(model) else model


def _names(models: dict[str, dict[str, tuple[str, Any]]]) -> dict[str, tuple[str, str]]:
    """Returns the key of the model and the name in it, by full name."""
    return {full: (key, name) for key, model in models.items() for name, (full, _) in model.items()}


def _nested(
    run: StoredRun,
    models: dict[str, dict[str, tuple[str, Any]]],
    names: dict[str, tuple[str, str]],
    prefixes: Prefixes,
) -> dict[str, Any]:
    nested: dict[str, Any] = {"step": run.step}
    for key, model in models.items():
        _put(nested, prefixes.model, key, {name: one for name, (_, one) in model.items()})
    for key in run.keys("optimizer"):
        _put(nested, prefixes.optimizer, key, _optimizer(run.optimizer(key), names))
    for kind in ("lr_scheduler", "scaler"):
        for key in run.keys(kind):
            _put(nested, kind, key, _plain(run.stateful(kind, key)))
    for key in run.keys("stateful"):
        _put(nested, key, "", _plain(run.stateful("stateful", key)))
    return nested


def _put(nested: dict[str, Any], prefix: str, key: str, what: dict[str, Any]) -> None:
    place = nested
    for part in (*prefix.split("."), key):
        place = place.setdefault(part, {}) if part else place
    clash = next((one for one in what if one in place), None)
    if clash is not None:
        raise ValueError(
            f"{'.'.join(filter(None, (prefix, key, clash)))} would be the key of two things of the "
            "run: give other prefixes, such as model='net' or optimizer='opt'"
        )
    place.update(what)


def _optimizer(stored: StoredOptimizer, names: dict[str, tuple[str, str]]) -> dict[str, Any]:
    called = _called(stored, names)
    state = {called[index]: _plain(of) for index, of in stored.state.items()}
    state |= {str(key): _plain(value) for key, value in stored.others.items()}
    groups = [
        {**_plain(group), "params": [called[index] for index in group["params"]]}
        for group in stored.groups
    ]
    made: dict[str, Any] = {"state": state, "param_groups": groups}
    if stored.own:
        made["parameters"] = {called[index]: one for index, one in stored.own.items()}
    return made


def _called(stored: StoredOptimizer, names: dict[str, tuple[str, str]]) -> list[str]:
    """Returns the names of the optimizer's parameters: with the key of their model where they are
    of several models."""
    known = [names.get(name) if name is not None else None for name in stored.names]
    several = len({one[0] for one in known if one is not None}) > 1
    return [
        f"..{index}" if one is None else f"{one[0]}.{one[1]}" if several else one[1]
        for index, one in enumerate(known)
    ]


def _twins(
    run: StoredRun,
    models: dict[str, dict[str, tuple[str, Any]]],
    names: dict[str, tuple[str, str]],
    prefixes: Prefixes,
) -> Iterator[dict[str, Any]]:
    """Yields what is there under other keys too, as nested state dicts."""
    for key, model in models.items():  # as the program's own state_dict() has them
        nested: dict[str, Any] = {}
        own = (full.split("/", 1)[-1] if key else full for full, _ in model.values())
        ones = (one for _, one in model.values())
        _put(nested, prefixes.model, key, dict(zip(map(_decoded(key), own), ones, strict=True)))
        yield nested
    optimizers = [_optimizer(run.optimizer(key), names) for key in run.keys("optimizer")]
    if len(models) > 1:
        nested = {}
        _put(
            nested,
            prefixes.model,
            "",
            _only([{name: one for name, (_, one) in model.items()} for model in models.values()]),
        )
        yield nested
    if len(optimizers) > 1:
        nested = {}
        groups = [group for one in optimizers for group in one["param_groups"]]
        state = _only([one["state"] for one in optimizers])
        _put(nested, prefixes.optimizer, "", {"state": state, "param_groups": groups})
        yield nested
    for key, one in zip(run.keys("optimizer"), optimizers, strict=True):
        for place in {key, ""}:
            nested = {}
            _put(nested, prefixes.optimizer, place, _by_parameter(one["param_groups"]))
            yield nested


def _decoded(key: str) -> Any:
    return decode_name if key else str


def _only(several: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what is under a name that only one of several has."""
    count = Counter(name for one in several for name in one)
    return {name: what for one in several for name, what in one.items() if count[name] == 1}


def _by_parameter(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns hyperparameters by parameter, as flatten_optimizer_state_dict has them."""
    return {
        f"param_groups.{name}.{what}": value
        for group in groups
        for name in group["params"]
        for what, value in group.items()
        if what != "params"
    }


def _plain(state: Any) -> Any:
    """Returns the state with numbers of numpy as Python's: torch.load refuses them otherwise."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_plain, state))
    return state.item() if isinstance(state, np.generic) else state


__all__ = ["Listed", "Prefixes", "StoredTensor", "listed"]
