"""Makes what a look-up gives in place of a list, dict or bytearray: a copy that cannot be changed.

A value is a copy each time it is looked up, so that a change of one in place would be lost without
a word: `store["h"].append(1)`. Here it raises. Everything else is as of the plain type, of which
these are subclasses; what is made of them (`list(x)`, `x.copy()`, `x + y`, a slice, a pickle) is of
the plain type, and `copy.deepcopy(x)` all the way down. An augmented assignment makes a new object,
so that `store["h"] += [1]` does what it says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

_COPY = "a value that was looked up is a copy: to change it here would not change the store. "
_LISTS = (
    "Assign the whole, store[name] = [*value, item]; or keep a store.list(name), whose items are "
    "changed and appended in the store"
)
_DICTS = (
    "Assign the whole, store[name] = {**value, key: item}; or keep a group, "
    "store[f'{name}/{key}'] = item"
)
_BYTES = "Assign the whole, store[name] = value + more"
_IN_PLACE = ("__iadd__", "__imul__", "__ior__")
_CHANGING = (
    *("__setitem__", "__delitem__", "append", "clear", "extend", "insert", "pop", "remove"),
    *("reverse", "sort", "popitem", "setdefault", "update"),
)


def _refusing(name: str, told: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(_COPY + told)

    refuse.__name__ = name
    return refuse


def _of_a_copy(plain: type, name: str) -> Callable[[Any, Any], Any]:
    in_place = getattr(plain, name)

    def of_a_copy(self: Any, other: Any) -> Any:
        return in_place(plain(self), other)

    of_a_copy.__name__ = name
    return of_a_copy


def _read_only(plain: type, told: str) -> Callable[[type], type]:
    """Returns a class decorator. In a class decorated so, methods that change the object raise an
    error that tells how to write it instead. Those of augmented assignments return an object of the
    plain type."""

    def methods(kind: type) -> type:
        for name in _CHANGING:
            if hasattr(plain, name):
                setattr(kind, name, _refusing(name, told))
        for name in _IN_PLACE:
            if hasattr(plain, name):
                setattr(kind, name, _of_a_copy(plain, name))
        return kind

    return methods


@_read_only(list, _LISTS)
class ReadOnlyList(list[Any]):
    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return list, (list(self),)


@_read_only(dict, _DICTS)
class ReadOnlyDict(dict[Any, Any]):
    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return dict, (dict(self),)


@_read_only(bytearray, _BYTES)
class ReadOnlyBytes(bytearray):
    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return bytearray, (bytearray(self),)

    def __repr__(self) -> str:
        return repr(bytearray(self))


PLAIN: dict[type, type] = {ReadOnlyList: list, ReadOnlyDict: dict, ReadOnlyBytes: bytearray}
"""The plain type of each. A class of pmstore's own can add itself: its objects are stored as plain
ones."""


def plain_type(value: Any) -> type:
    """Returns the type of the value that was stored, where a look-up gave a read-only copy of
    it."""
    return PLAIN.get(type(value), type(value))
