"""Strings, bytes and numbers on a shelf: they behave as their values, and `+=` changes what is
stored."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np

from pmstore.pymm.shelf_names import Core, Shadow, ShelvedCommon
from pmstore.store import Store


class _ValueShadow(Shadow):
    def __init__(self, value: Any) -> None:
        self._value = value

    def store_in(self, store: Store, name: str) -> None:
        store[name] = self._value


class string(_ValueShadow):
    """A str to be put on the shelf, or bytes that are one. encoding: of the bytes, or one that the
    text must be expressible in; stored is UTF-8.

    Raises: UnicodeDecodeError, UnicodeEncodeError, LookupError.
    """

    def __init__(self, string_value: str | builtins.bytes, encoding: str = "utf-8") -> None:
        string_value = plain(string_value)
        if isinstance(string_value, (builtins.bytes, bytearray)):
            string_value = string_value.decode(encoding)
        string_value.encode(encoding)
        super().__init__(str(string_value))


class bytes(_ValueShadow):
    """Bytes to be put on the shelf: of a str with an encoding, or of ints."""

    def __init__(
        self, value: str | Iterable[int] = b"", encoding: str | None = None, errors: str = "strict"
    ) -> None:
        if isinstance(value, str):
            super().__init__(value.encode(encoding or "utf-8", errors))
        else:
            super().__init__(builtins.bytes(value))


class float_number(_ValueShadow):
    """A float to be put on the shelf: `shelf.x = pymm.float_number(0.5)`."""

    def __init__(self, number_value: Any) -> None:
        super().__init__(float(number_value))


class integer_number(_ValueShadow):
    """An int, of any size and sign, to be put on the shelf."""

    def __init__(self, number_value: Any) -> None:
        super().__init__(int(number_value))


class shelved_value(ShelvedCommon):
    """A str, bytes, int or float on a shelf. Operations give plain values; in-place ones store the
    result, atomically, and stay on the shelf. After the attribute was assigned anew or erased, it
    is a plain value that nothing stores.
    """

    __slots__ = ("_core", "_value", "name")
    # Mutable, so not hashable: hash(str(x)), hash(int(x)).
    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def __init__(self, core: Core, name: str, value: Any) -> None:
        self._core = core
        self._value = value
        self.name: str = name

    def _assign(self, value: Any) -> Any:
        core = self._core
        if core.store.closed or core.current().get(self.name) is not self:
            return value
        with core.writing():
            core.store[self.name] = value
        del core.members[self.name]
        if type(value) is type(self._value):
            self._value = value
            core.members[self.name] = self
            return self
        return core.member(self.name)  # `i /= 2`: an int became a float

    def persist(self) -> None:
        """Does nothing: a value is committed when it is assigned. PyMM's programs call it."""

    @property
    def encoding(self) -> str:
        """The encoding of a string, as it lies in the store."""
        return "utf-8"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols are looked for on the class
            raise AttributeError(name)
        return getattr(self._value, name)

    def __repr__(self) -> str:
        return str(self._value)

    def __str__(self) -> str:
        return str(self._value)

    def __format__(self, spec: str) -> str:
        return format(self._value, spec)

    def __bool__(self) -> bool:
        return bool(self._value)

    def __reduce__(self) -> Any:
        return _unchanged, (self._value,)  # copied and pickled as the value

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        del copy  # always one
        return np.array(self._value, dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        # Beside an array it counts as the Python value: a float32 array stays one.
        return getattr(ufunc, method)(*map(plain, inputs), **kwargs)


def _unchanged(value: Any) -> Any:
    return value


def plain(value: Any) -> Any:
    """Returns the value of a shelved one; anything else is returned as it is."""
    return value._value if isinstance(value, shelved_value) else value


def _unary(function: Callable[..., Any]) -> Any:
    return lambda self, *args: function(self._value, *map(plain, args))


def _binary(function: Callable[[Any, Any], Any]) -> Any:
    def method(self: shelved_value, other: Any) -> Any:
        try:
            return function(self._value, plain(other))
        except TypeError:
            if hasattr(type(other), "__array_ufunc__") or isinstance(other, shelved_value):
                raise
            return NotImplemented

    return method


def _reflected(function: Callable[[Any, Any], Any]) -> Any:
    return lambda self, other: function(plain(other), self._value)


def _in_place(function: Callable[[Any, Any], Any]) -> Any:
    return lambda self, other: self._assign(function(self._value, plain(other)))


_UNARY = "abs ceil complex contains float floor index int invert iter len neg pos round trunc"
_ARITHMETIC = "add and floordiv lshift mod mul or pow rshift sub truediv xor"


class _Text(shelved_value):
    __slots__ = ()

    def __int__(self) -> int:
        return int(self._value)

    def __float__(self) -> float:
        return float(self._value)


class shelved_string(_Text):
    """A str on a shelf: what `shelf.x` is after `shelf.x = "text"`."""

    __slots__ = ()


class shelved_bytes(_Text):
    """A bytes on a shelf: what `shelf.x` is after `shelf.x = b"data"`."""

    __slots__ = ()


class shelved_float_number(shelved_value):
    """A float on a shelf: what `shelf.x` is after `shelf.x = 0.5`."""

    __slots__ = ()


class shelved_integer_number(shelved_value):
    """An int on a shelf: what `shelf.x` is after `shelf.x = 1`."""

    __slots__ = ()


_TYPES: dict[type, type[shelved_value]] = {
    str: shelved_string,
    builtins.bytes: shelved_bytes,
    float: shelved_float_number,
    int: shelved_integer_number,
}


def member_type(value: Any) -> type[shelved_value] | None:
    """Returns the type of the member for a stored value; None where PyMM has no type for it (bool,
    lists, ...)."""
    return _TYPES.get(type(value))


def _equip(shelved: type[shelved_value], kind: type) -> None:
    """Gives the class the protocols that its values have, and no others: a shelved float is not an
    index."""
    for name in _UNARY.split():
        if hasattr(kind, f"__{name}__"):
            setattr(shelved, f"__{name}__", _unary(getattr(kind, f"__{name}__")))
    for name in ("eq", "ne", "lt", "le", "gt", "ge", "getitem"):
        if hasattr(kind, f"__{name}__"):
            setattr(shelved, f"__{name}__", _binary(getattr(operator, name)))
    for name in _ARITHMETIC.split():
        function = getattr(operator, f"{name}_" if name in ("and", "or") else name)
        if hasattr(kind, f"__{name}__"):
            setattr(shelved, f"__{name}__", _binary(function))
            setattr(shelved, f"__i{name}__", _in_place(function))
        if hasattr(kind, f"__r{name}__") or name == "add":
            setattr(shelved, f"__r{name}__", _reflected(function))
    if hasattr(kind, "__divmod__"):
        for name, method in (("__divmod__", _binary(divmod)), ("__rdivmod__", _reflected(divmod))):
            setattr(shelved, name, method)


for _kind, _shelved in _TYPES.items():
    _equip(_shelved, _kind)
