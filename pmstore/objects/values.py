"""Python values as bytes and back, without pickle: what `store[name] = value` writes for anything
but arrays.

The bytes are msgpack. What msgpack has no type for is one of the extension types below, whose
payloads are plain data too: nothing in a store is ever executed or imported, so a hostile file can
at worst give a `CorruptStoreError`.

A value comes back equal and of the same type: a tuple stays a tuple, -0.0, nan and infinities stay
what they are, the order of a dict is kept, an `np.float32` stays one. What cannot keep that promise
(subclasses, functions, objects) is refused. What a look-up in a store gives cannot be changed in
place (`pmstore.objects.readonly`): the store would not hear of it.
"""

from __future__ import annotations

import datetime as dt
import re
import struct
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import msgpack
import numpy as np

from pmstore._engine import _binding
from pmstore.errors import CorruptStoreError, FormatVersionError
from pmstore.objects import dtypes
from pmstore.objects.readonly import PLAIN, ReadOnlyBytes, ReadOnlyDict, ReadOnlyList

_binding.read_only(ReadOnlyDict, ReadOnlyList)  # of small values; look_up has the others

MAX_DEPTH = 100
"""Containers within containers. More is a cycle, or nothing a person wrote."""

STORABLE = (
    "None, bool, int, float, complex, str, bytes, bytearray, date, time, datetime, timedelta, "
    "numpy scalars, and lists, tuples and dicts of these; arrays and tensors under a name of their "
    "own"
)

# Extension types of docs/FORMAT.md: never renumber.
_INT = 1  # two's complement, little-endian, any length
_COMPLEX = 2  # two float64
_TUPLE = 3  # empty; first element of a list that is a tuple
_BYTEARRAY = 4
_NUMPY = 5  # msgpack [dtype, bytes]
_DATETIME = 6  # fold (0 or 1) as a digit, then ISO 8601
_DATE = 7
_TIME = 8  # as _DATETIME
_TIMEDELTA = 9  # days, seconds, microseconds as three int64

_Clock = TypeVar("_Clock", dt.datetime, dt.time)

_DELTA = struct.Struct("<qqq")
_PAIR = struct.Struct("<dd")


class _TupleMark:
    """The object that the extension _TUPLE decodes to. It never leaves this module."""


_TUPLE_MARK = _TupleMark()
_TUPLE_EXT = msgpack.ExtType(_TUPLE, b"")


# ---- encoding ------------------------------------------------------------------------------------


def _refuse(value: Any) -> NoReturn:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    hint = ""
    for base in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict):
        if isinstance(value, base):
            hint = (
                f" A subclass would come back as {base.__name__}: convert it, "
                f"{base.__name__}(value)."
            )
    if isinstance(value, np.ndarray) or hasattr(value, "data_ptr"):
        hint = (
            " Arrays and tensors have names of their own: use a group, store['group/name'] = array."
        )
    elif isinstance(value, (set, frozenset)):
        hint = " Store sorted(value), a list."
    elif hasattr(value, "state_dict"):
        hint = (
            " pmstore.torch.attach(store, model=..., optimizer=...) keeps modules and optimizers "
            "of torch in a store."
        )
    raise TypeError(f"cannot store a value of type {name}.{hint} What can be stored: {STORABLE}")


def _lower_int(value: int) -> Any:
    if -(1 << 63) <= value < (1 << 64):
        return value
    return msgpack.ExtType(_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _lower_clock(value: dt.datetime | dt.time) -> Any:
    code = _DATETIME if isinstance(value, dt.datetime) else _TIME
    payload = f"{value.fold}{value.isoformat()}".encode()
    if repr(_RAISE[code](payload)) != repr(value):  # a named or rule-based time zone
        whole = (
            "value.astimezone(datetime.timezone.utc)"
            if code == _DATETIME
            else "value.replace(tzinfo=None)"
        )
        raise TypeError(
            f"cannot store {value!r}: of time zones only fixed offsets from UTC without a name "
            f"survive. Store {whole}, and the zone's name beside it if it matters"
        )
    return msgpack.ExtType(code, payload)


def _same(value: Any) -> Any:
    return value


_LOWER: dict[type, Callable[[Any], Any]] = {
    type(None): _same,
    bool: _same,
    int: _lower_int,
    float: _same,
    str: _same,
    bytes: _same,
    bytearray: lambda value: msgpack.ExtType(_BYTEARRAY, bytes(value)),
    complex: lambda value: msgpack.ExtType(_COMPLEX, _PAIR.pack(value.real, value.imag)),
    dt.datetime: _lower_clock,
    dt.time: _lower_clock,
    dt.date: lambda value: msgpack.ExtType(_DATE, value.isoformat().encode()),
    dt.timedelta: lambda value: msgpack.ExtType(
        _TIMEDELTA, _DELTA.pack(value.days, value.seconds, value.microseconds)
    ),
}

LEAVES = _LOWER.keys()
"""Types of values that hold no others."""


def _lower(value: Any, depth: int) -> Any:
    """Returns the value in terms of msgpack's own types and extension types."""
    kind = PLAIN.get(type(value), type(value))
    leaf = _LOWER.get(kind)
    if leaf is not None:
        return leaf(value)
    if kind is list or kind is tuple or kind is dict:
        if depth == MAX_DEPTH:
            raise ValueError(
                f"cannot store a value nested more than {MAX_DEPTH} deep, or one that contains "
                "itself"
            )
        depth += 1
        if kind is dict:
            return {_lower(key, depth): _lower(item, depth) for key, item in value.items()}
        items = [_lower(item, depth) for item in value]
        if kind is tuple:
            items.insert(0, _TUPLE_EXT)
            # msgpack packs it as an array, and on the way there it can be a key
            return tuple(items)
        return items
    if isinstance(value, np.generic):
        packed = _pack([dtypes.encode_numpy(value.dtype), value.tobytes()])
        return msgpack.ExtType(_NUMPY, packed)
    _refuse(value)


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return packed


def encode(value: Any) -> bytes:
    """Returns the bytes of the value.

    Raises:
        TypeError: it, or something in it, is of a type that cannot be stored; the message says what
            can.
        ValueError: it contains itself, or is nested more than 100 deep.

    >>> decode(encode({"lr": 1e-3, (1, 2): [None, 2**100]}))
    {'lr': 0.001, (1, 2): [None, 1267650600228229401496703205376]}
    """
    known = _binding.encode(value, ())  # None: it is not plain
    return known[0] if known is not None else _pack(_lower(value, 0))


class Encoded(bytes):
    """The bytes of a value as `encode` made them, which a store takes as they are."""


# ---- decoding ------------------------------------------------------------------------------------


def _raise_numpy(payload: bytes) -> np.generic:
    descriptor, data = msgpack.unpackb(payload, unicode_errors="surrogatepass", strict_map_key=True)
    dtype = dtypes.decode_numpy(descriptor)
    if not isinstance(data, bytes) or len(data) != dtype.itemsize:
        raise ValueError("a numpy scalar of the wrong length")
    return np.ndarray((), dtype, data)[()]  # type: ignore[no-any-return]


def _fold(text: str) -> int:
    if text[:1] not in ("0", "1"):
        raise ValueError("a time without fold")
    return int(text[0])


_TINY_OFFSET = re.compile(r"([+-])00:00:00\.([0-9]{6})$")


def _clock(kind: type[_Clock], payload: bytes) -> _Clock:
    text = payload.decode("ascii")
    value = kind.fromisoformat(text[1:]).replace(fold=_fold(text))
    tiny = _TINY_OFFSET.search(text)  # from UTC, of less than a second: Python reads it as none
    if tiny:
        value = value.replace(tzinfo=dt.timezone(dt.timedelta(microseconds=int(tiny[1] + tiny[2]))))
    return value


_RAISE: dict[int, Callable[[bytes], Any]] = {
    _INT: lambda payload: int.from_bytes(payload, "little", signed=True),
    _COMPLEX: lambda payload: complex(*_PAIR.unpack(payload)),
    _TUPLE: lambda payload: _TUPLE_MARK,
    _BYTEARRAY: bytearray,
    _NUMPY: _raise_numpy,
    _DATETIME: lambda payload: _clock(dt.datetime, payload),
    _DATE: lambda payload: dt.date.fromisoformat(payload.decode("ascii")),
    _TIME: lambda payload: _clock(dt.time, payload),
    _TIMEDELTA: lambda payload: dt.timedelta(*_DELTA.unpack(payload)),
}


def _ext_hook(code: int, payload: bytes) -> Any:
    raise_ = _RAISE.get(code)
    if raise_ is None:
        raise ValueError(f"unknown extension type {code}: written by a newer pmstore?")
    return raise_(bytes(payload))


def _read_only_ext_hook(code: int, payload: bytes) -> Any:
    return ReadOnlyBytes(payload) if code == _BYTEARRAY else _ext_hook(code, payload)


def _list_hook(items: list[Any]) -> Any:
    if items and items[0] is _TUPLE_MARK:
        del items[0]
        return tuple(items)
    return items


def _read_only_list_hook(items: list[Any]) -> Any:
    if items and items[0] is _TUPLE_MARK:
        return tuple(items[1:])
    return ReadOnlyList(items)


def decode(data: bytes) -> Any:
    """Returns the value that `encode` made the bytes of: a new object each time.

    Raises:
        CorruptStoreError: the bytes are not what `encode` writes.
        FormatVersionError: a long double of another kind of machine.
    """
    return _unpack(data, ext_hook=_ext_hook, list_hook=_list_hook)


def look_up(data: bytes) -> Any:
    """Returns the value as `decode` does, but lists, dicts and bytearrays, and those in them,
    cannot be changed in place."""
    return _unpack(
        data, ext_hook=_read_only_ext_hook, list_hook=_read_only_list_hook, object_hook=ReadOnlyDict
    )


def _unpack(data: bytes, **hooks: Callable[..., Any]) -> Any:
    try:
        # Bounded by the length of data in memory, by msgpack's own stack in depth, and it does not
        # recurse.
        value = msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass", **hooks)
    except FormatVersionError:
        raise
    except dtypes.UNDECODABLE as error:
        raise CorruptStoreError(f"a stored value does not decode: {error}") from error
    if value is _TUPLE_MARK:
        raise CorruptStoreError("a stored value does not decode: a tuple's mark alone")
    return value
