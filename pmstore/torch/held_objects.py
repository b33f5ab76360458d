"""Objects of the program's own that modules, optimizers and data sets hold, such as `self.meter =
Meter()`, and dicts with something that is no data. What they count is not kept; that it changes is
told."""

from __future__ import annotations

import argparse
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from pmstore._engine._binding import Watch
from pmstore.torch._data.loader_attributes import Key, Look, parts_in, size_of
from pmstore.torch._state.module_attributes import modules_of, own_keys
from pmstore.torch._state.stateful import is_stateful
from pmstore.torch.changes import asking

_MOST_OBJECTS = 64
"""Objects that are watched; items of one collection that are looked into."""
_MOST_COLLECTIONS = 1000
_OTHERS = (nn.Module, Optimizer, Dataset, Sampler, DataLoader)
"""What other parts of a run keep, or refuse."""
_HOLDERS = (argparse.Namespace, types.SimpleNamespace)
"""Classes of Python's own whose objects hold what the program likes."""
_OF_TORCH = ("defaults", "param_groups", "state")
_LIBRARIES = {"site-packages", "dist-packages"}


class HeldObjects:
    """A `Part` that keeps nothing. It warns, once for each object, where data in its attributes
    has changed since `attach`.

    An attribute that is new, or was None, is no change: a cache. Nor is what a forward leaves
    behind: tensors of a graph, another object in a module.

    Attributes:
        objects: those that are watched, by their places.
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
        seen: dict[int, Any] = {}
        roots: list[tuple[str, Any]] = [("", one) for one in kept]
        for place, one in data.items():
            if is_stateful(one):
                roots += _attributes(place, one, vars(one))
        for _ in _below(roots, seen):
            pass
        roots = []
        for name, module in modules_of(models).items():
            roots += _attributes(name, module, own_keys(module))
        for place, one in data.items():
            roots += _attributes(place, one, vars(one))
        self.objects: dict[str, Any] = dict(_below(roots, seen))
        self._optimizers: set[str] = set()
        for key, one in optimizers.items():
            if _is_of_program(type(one)):
                place = f"optimizer {key!r}" if key else "the optimizer"
                self.objects[place] = one
                self._optimizers.add(place)
        self._see(Look(self.objects))

    def _see(self, look: Look) -> None:
        self._look = look
        asked = look.asked()
        self.watch: Watch | None = None if asked is None else asking(asked)

    def capture(self) -> None:
        """Warns of what has changed."""
        try:
            changed = [*self._changed()]
        except RuntimeError:  # another thread is at it: it looks again at the next step
            self.watch = None
            return
        for place, name in changed:
            if self.objects.pop(place, None) is not None:
                self._tell(place, name)
        if changed:
            self._see(Look(self.objects))

    def restore(self) -> None:
        """Nothing is kept."""

    def _changed(self) -> Iterator[Key]:
        look = self._look
        before = {key for key in look.entries if look.values.get(key, look) is not None}
        changed = look.written()
        if look.watch.look():
            now = Look(self.objects, look)
            changed |= look.differences(now)
            self._see(now)
        for place, name in sorted(changed & before, key=str):
            if place not in self.objects:  # told
                continue
            if place in self._optimizers and (name.startswith("_") or name in _OF_TORCH):
                continue
            if not any(map(_of_graph, parts_in(vars(self.objects[place]).get(name)))):
                yield place, name

    @staticmethod
    def _tell(place: str, name: str) -> None:
        warnings.warn(
            f"{name} in {place} has changed since attach, and is not kept: a run keeps what "
            "modules and data sets hold themselves, and of objects in them what is given to it. "
            "After a restart it is as the program makes it. If the training depends on it, give "
            "the object state_dict() and load_state_dict(), and say attach(stateful={'name': the "
            "object}), or keep the value in an attribute of the module or data set",
            RuntimeWarning,
            stacklevel=2,
        )


def _attributes(place: str, one: object, names: Iterable[str]) -> list[tuple[str, Any]]:
    held = vars(one)
    return [(f"{place}.{name}" if place else name, held[name]) for name in [*names]]


def _below(roots: Iterable[tuple[str, Any]], seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """The objects of the program's own that the roots are or hold, with their places. seen: those
    that are left out, and that were found, by id."""
    level, found, collections = [*roots], 0, set[int]()
    while level and found < _MOST_OBJECTS and len(collections) < _MOST_COLLECTIONS:
        place, one = level.pop(0)
        kind = type(one)
        if id(one) in seen or id(one) in collections or isinstance(one, _OTHERS):
            continue
        if kind in (list, tuple, dict):
            collections.add(id(one))
            items = one.items() if kind is dict else enumerate(one)
            some = [pair for pair, _ in zip(items, range(_MOST_OBJECTS), strict=False)]
            level += [(f"{place}[{at!r}]", part) for at, part in some if _may_hold(part)]
            if kind is dict and size_of(one) is None:
                found += 1
                seen[id(one)] = one
                yield place, _Items(one)
        elif _is_of_program(kind) and type(getattr(one, "__dict__", None)) is dict:
            found += 1
            seen[id(one)] = one
            yield place, one
            level += [
                (f"{place}.{name}", part) for name, part in [*vars(one).items()] if _may_hold(part)
            ]


class _Items:
    """Those of a dict as attributes."""

    def __init__(self, items: dict[Any, Any]) -> None:
        self.__dict__ = items


def _may_hold(part: Any) -> bool:
    return type(part) in (list, tuple, dict) or type(part).__module__ not in ("builtins", "torch")


def _of_graph(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.requires_grad


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
