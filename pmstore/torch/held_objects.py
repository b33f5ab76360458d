"""Objects of the program's own that modules, optimizers and data sets hold, such as `self.meter =
Meter()`, and dicts with something that is no data. What they count is not kept; that it changes is
told."""

from __future__ import annotations

import argparse
import sys
import sysconfig
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from pmstore.objects.core import in_heap
from pmstore.objects.structure import COLLECTIONS
from pmstore.torch._state.module_attributes import modules_of, own_keys
from pmstore.torch._state.optimizer_state import is_constant
from pmstore.torch._state.stateful import is_stateful
from pmstore.torch.changes import sample_of

_MOST_OBJECTS = 64
"""Objects that are watched, items of a collection that are looked into, attributes of an object."""
_MOST_LOOKS = 2000
"""Objects and collections that are looked into for them."""
_OTHERS = (nn.Module, Optimizer, Dataset, Sampler, DataLoader)
"""What other parts of a run keep, or refuse."""
_HOLDERS = (argparse.Namespace, types.SimpleNamespace)
"""Classes of Python's own whose objects hold what the program likes."""
_OF_TORCH = ("defaults", "param_groups", "state")
_LIBRARIES = {"site-packages", "dist-packages"}

Table = dict[Any, Any]
"""The attributes of an object, or a dict."""
Finding = Callable[[], Table | None]
"""What gives a table, as long as the object of which it is lives."""
Place = tuple[str, Any]
"""What an object is called, and it."""


class HeldObjects:
    """A `Part` that keeps nothing. It warns, once for each object, where a number or text in it is
    another, a tensor or array was written, or a collection got longer or shorter.

    An attribute that is new, or was None, or a dict that was empty, is no change: a cache. Nor is
    what a forward leaves behind: tensors of a graph, another object in a module.

    Attributes:
        watched: what tables are called, what gives them, and what was seen in them.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        data: Mapping[str, object],
        kept: Iterable[object],
    ) -> None:
        """data: data sets and samplers, by their places. kept: what answers for itself and for all
        that it holds."""
        self.watch: None = None
        modules = modules_of(models)
        self._kept: set[int] = set()  # tensors, by id
        self._optimizers: set[int] = set()  # their tables
        for module in modules.values():
            self._kept.update(map(id, module._parameters.values()))
            self._kept.update(map(id, module._buffers.values()))
        answers: list[Place] = [("", one) for one in kept]
        roots: list[Place] = []
        for name, module in modules.items():
            roots += _attributes(name, module, own_keys(module))
        for place, one in data.items():
            (answers if is_stateful(one) else roots).extend(_attributes(place, one, vars(one)))
        seen: set[int] = set()
        for _ in _below(answers, seen, _MOST_LOOKS):
            pass
        watched = [*_below(roots, seen, _MOST_OBJECTS)]
        for key, optimizer in optimizers.items():
            if _is_of_program(type(optimizer)):
                called = f"optimizer {key!r}" if key else "the optimizer"
                watched.append((called, _finding(optimizer)))
                self._optimizers.add(id(vars(optimizer)))
        self.watched: list[tuple[str, Finding, Table]] = [(*each, {}) for each in watched]
        self.begin()

    def begin(self) -> None:
        """The first loop begins. What stands before it a program does at each start."""
        self.watched = [(place, find, self._look(find())) for place, find, _ in self.watched]

    def capture(self) -> None:
        """Warns of what has changed."""
        told: list[tuple[str, str | int]] = []
        for at, (place, find, before) in enumerate(self.watched):
            now = self._look(find())
            if now != before:
                changed = (name for name, one in before.items() if _differ(one, now.get(name, one)))
                told += [(place, name) for name in islice(changed, 1)]
                self.watched[at] = place, find, now
        if told:
            places = {place for place, _ in told}
            self.watched = [each for each in self.watched if each[0] not in places]
            for place, name in told:
                self._tell(place, name)

    def restore(self) -> None:
        """Nothing is kept."""

    def _look(self, table: Table | None) -> Table:
        try:
            items = [*islice(table.items(), _MOST_OBJECTS)] if table is not None else []
        except RuntimeError:  # another thread has put something in
            return {}
        items = [each for each in items if type(each[0]) in (str, int)]
        if id(table) in self._optimizers:
            items = [each for each in items if each[0] not in _OF_TORCH and each[0][:1] != "_"]
        return {name: seen for name, value in items if (seen := self._seen(value)) is not None}

    def _seen(self, value: Any) -> Any:
        """Returns what tells that a value is another; None: nothing does, or that is no change."""
        kind: Any = type(value)
        if value is None:
            return None
        if kind is tuple and (len(value) > _MOST_OBJECTS or tuple in map(type, value)):
            return kind, len(value)
        if is_constant(value):
            return kind, value
        if issubclass(kind, np.generic):
            return kind, value.tobytes()
        if kind is torch.Tensor:
            if value.requires_grad or id(value) in self._kept or value.is_inference():
                return None
            strided = value.layout is torch.strided and not value.is_nested
            if strided and in_heap(value.data_ptr()):
                return None
            return kind, id(value), value._version
        if kind is np.ndarray and value.dtype.kind in "biufc":
            return None if isinstance(value.base, np.memmap) else (kind, sample_of(value))
        if kind in COLLECTIONS and kind is not tuple:
            return (kind, len(value)) if value or not isinstance(value, dict) else None
        return None

    @staticmethod
    def _tell(place: str, name: str | int) -> None:
        warnings.warn(
            f"{name} in {place} has changed since the run's first loop began, and is not kept: a "
            "run keeps what modules and data sets hold themselves, and of objects in them what is "
            "given to it. After a restart it is as the program makes it. If the training depends "
            "on it, keep the value in an attribute of the module or data set, or give the object "
            "state_dict() and load_state_dict() and say attach(stateful={'name': the object})",
            RuntimeWarning,
            stacklevel=2,
        )


def _attributes(place: str, one: object, names: Iterable[str]) -> list[Place]:
    held = vars(one)
    return [(f"{place}.{name}" if place else name, held[name]) for name in [*names]]


def _differ(one: Any, other: Any) -> bool:
    return bool(one != other) and repr(one) != repr(other)  # nan is nan


def _finding(one: object) -> Finding:
    """Returns what gives its table, and holds on to nothing that the program drops, if it can."""
    try:
        there = weakref.ref(one)
    except TypeError:  # a dict, or a namespace
        return lambda: one if type(one) is dict else _table_of(one)
    return lambda: _table_of(there())


def _below(roots: Iterable[Place], seen: set[int], most: int) -> Iterator[tuple[str, Finding]]:
    """The tables of the program's own objects that the roots are or hold, so many at most, with
    what they are called. seen: ids of what is left out; what was found is added."""
    level, looks, found = [*roots], 0, 0
    while level and found < most and looks < _MOST_LOOKS:
        place, one = level.pop(0)
        looks += 1
        kind = type(one)
        if id(one) in seen or issubclass(kind, _OTHERS):
            continue
        if kind in (list, tuple, dict):
            seen.add(id(one))
            every = one.items() if kind is dict else enumerate(one)
            items = [*islice(every, _MOST_OBJECTS)]
            level += [(f"{place}[{_key(at)}]", part) for at, part in items if _may_hold(part)]
            if kind is dict and not all(map(_is_data, [part for _, part in items])):
                found += 1
                yield place, _finding(one)
        elif _is_of_program(kind) and (table := _table_of(one)) is not None:
            seen.add(id(one))
            found += 1
            yield place, _finding(one)
            level += [
                (f"{place}.{name}", part) for name, part in [*table.items()] if _may_hold(part)
            ]


def _table_of(one: object) -> Table | None:
    try:
        table = object.__getattribute__(one, "__dict__")
    except Exception:  # it has none, or a property of that name
        return None
    return table if type(table) is dict else None


def _key(key: Any) -> str:
    """A key in a message."""
    return repr(key) if type(key) in (str, int) else f"a {type(key).__name__}"


def _may_hold(part: Any) -> bool:
    return type(part) in (list, tuple, dict) or type(part).__module__ not in ("builtins", "torch")


def _is_data(part: Any) -> bool:
    kind: Any = type(part)
    return kind in COLLECTIONS or kind in (torch.Tensor, np.ndarray) or is_constant(part)


def _is_of_program(kind: type) -> bool:
    """Whether a class is the program's own, and no library's."""
    if kind in _HOLDERS:
        return True
    name = kind.__module__
    if name == "__main__":
        return True
    module = sys.modules.get(name)
    file = vars(module).get("__file__") if isinstance(module, types.ModuleType) else None
    if not isinstance(file, str) or name.partition(".")[0] == "pmstore":
        return False
    path = Path(file)
    return not (
        _LIBRARIES & {*path.parts}
        or path.is_relative_to(sysconfig.get_path("stdlib"))
        or path.is_relative_to(sysconfig.get_path("platstdlib"))
    )
