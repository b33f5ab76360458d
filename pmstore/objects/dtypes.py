"""Element types as plain data, so that a store can be read without importing or executing anything
it names.

A numpy dtype is its array-protocol string ('<f4', '>M8[25us]', '|S3'); a structured one a map of
names, formats, offsets, titles and item size; a subarray [base, shape]; a long double also carries
its format, which differs between machines. A torch dtype is its name. `docs/FORMAT.md` has the
details.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from pmstore.errors import FormatVersionError
from pmstore.extras import optional

if TYPE_CHECKING:
    import torch

_MAX_DEPTH = 32
_SIMPLE = re.compile(r"[<>|=](?:[?biufcSUV]\d{1,10}|[mM]8(?:\[\d{0,10}[a-zA-Zµμ]{1,2}\])?)")

TORCH_DTYPES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("complex128", "complex64", "complex32"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    *("bool", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *(f"{sign}{bits}" for sign in ("int", "uint") for bits in range(1, 8)),
)
"""Names of the dense torch dtypes that a store holds, as far as the installed torch has them."""

UNDECODABLE = (
    *(ValueError, TypeError, LookupError, ArithmeticError, AttributeError, SyntaxError),
    *(RecursionError, RuntimeError, struct.error),
    SystemError,  # numpy, for a str of numbers that are no characters
    msgpack.UnpackException,
)
"""What comes out of msgpack, numpy and torch for bytes that are no description, dtype or value:
each decoder of a store's bytes makes a CorruptStoreError of these."""

_NO_NUMBERS = re.compile(r"torch\.(bits.*|float4_.*|u?int[1-7])")


def _longdouble_format() -> str:
    info = np.finfo(np.longdouble)
    return f"{info.nmant}:{info.maxexp}"


# their string says it all, and they are nearly all that is stored
_PLAIN = frozenset("?bBhHiIlLqQefdFD")


def encode_numpy(dtype: np.dtype[Any]) -> Any:
    """Returns the dtype as plain data: str, list and dict.

    Raises:
        TypeError: the dtype holds Python objects, or belongs to another package.

    >>> encode_numpy(np.dtype("float32")), decode_numpy("<f4")
    ('<f4', dtype('float32'))
    """
    if dtype.isbuiltin == 1 and dtype.char in _PLAIN:
        return dtype.str
    descriptor = _encode(dtype)
    # The one test that catches what numpy's strings cannot say: dtypes of other packages,
    # StringDType, titles.
    if decode_numpy(descriptor) != dtype:
        raise TypeError(
            f"cannot store dtype {dtype!r}: only numpy's own dtypes of a fixed size keep their "
            "meaning. Convert the array, or store .view() of it as one of those"
        )
    return descriptor


def _encode(dtype: np.dtype[Any]) -> Any:
    if dtype.hasobject or dtype.char == "T":
        raise TypeError(
            f"cannot store dtype {dtype!r}: its elements are Python objects. Convert the array to "
            "a fixed-size dtype (float64, 'U20', ...), or store a list"
        )
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [_encode(base), list(shape)]
    if dtype.fields is not None and dtype.names is not None:
        fields = [dtype.fields[name] for name in dtype.names]
        titles = [field[2] if len(field) > 2 else None for field in fields]
        if not all(title is None or isinstance(title, str) for title in titles):
            raise TypeError(f"cannot store dtype {dtype!r}: a field's title is not a str")
        record: dict[str, Any] = {
            "names": list(dtype.names),
            "formats": [_encode(field[0]) for field in fields],
            "offsets": [field[1] for field in fields],
            "itemsize": dtype.itemsize,
        }
        if any(titles):
            record["titles"] = titles
        if dtype.isalignedstruct:
            record["aligned"] = True
        return record
    if dtype.char in "gG":
        return {"longdouble": dtype.str, "format": _longdouble_format()}
    return dtype.str


def decode_numpy(descriptor: Any, depth: int = 0) -> np.dtype[Any]:
    """Returns the dtype that `encode_numpy` wrote as plain data.

    Raises:
        ValueError, TypeError: the data describe no dtype.
        FormatVersionError: a long double of another kind of machine.
    """
    if depth > _MAX_DEPTH:
        raise ValueError("a dtype nested too deep")
    if isinstance(descriptor, str):
        if not _SIMPLE.fullmatch(descriptor):
            raise ValueError(f"not the name of a dtype: {descriptor[:40]!r}")
        return np.dtype(descriptor)
    if isinstance(descriptor, list):
        base, shape = descriptor
        return np.dtype((decode_numpy(base, depth + 1), tuple(decode_shape(shape))))
    if not isinstance(descriptor, dict):
        raise TypeError("a dtype is a str, a list or a map")
    if "longdouble" in descriptor:
        written = descriptor.get("format")
        if not isinstance(written, str):
            raise ValueError("a long double without its format")
        if written != _longdouble_format():
            raise FormatVersionError(
                f"the array was written on a machine whose long double has the format {written!r}; "
                f"here it is {_longdouble_format()!r}. Convert it to float64 there"
            )
        dtype = decode_numpy(descriptor["longdouble"], depth + 1)
        if dtype.char not in "gG":
            raise ValueError("not a long double")
        return dtype
    known = {"names", "formats", "offsets", "titles", "itemsize", "aligned"}
    if not {"names", "formats", "offsets", "itemsize"} <= descriptor.keys() <= known:
        raise ValueError("not the parts of a structured dtype")
    record: Any = {
        **descriptor,
        "formats": [decode_numpy(part, depth + 1) for part in descriptor["formats"]],
    }
    made: np.dtype[Any] = np.dtype(record)
    return made


def decode_shape(shape: Any) -> tuple[int, ...]:
    """Checks a shape that was read from a store, and returns it. Raises: ValueError."""
    if not isinstance(shape, list) or len(shape) > 64:
        raise ValueError("not a shape")
    if not all(type(length) is int and 0 <= length < 1 << 63 for length in shape):
        raise ValueError("not the lengths of a shape")
    return tuple(shape)


def encode_torch(dtype: torch.dtype) -> str:
    """Returns the name of the torch dtype, without "torch.".

    Raises:
        TypeError: it is no dense dtype (quantized, for example).
    """
    name = str(dtype).removeprefix("torch.")
    if name not in TORCH_DTYPES:
        raise TypeError(
            f"cannot store tensors of dtype {dtype}: what can be stored is "
            f"{', '.join(TORCH_DTYPES)}"
        )
    return name


def decode_torch(name: Any) -> torch.dtype:
    """Returns the torch dtype of that name.

    Raises:
        ValueError: it is no name of a dtype.
        FormatVersionError: the installed torch does not have it.
    """
    with optional:
        import torch

    if not isinstance(name, str) or name not in TORCH_DTYPES:
        raise ValueError(f"not the name of a torch dtype: {name!r}")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FormatVersionError(
            f"the installed torch {torch.__version__} has no dtype {name}: install a newer one"
        )
    return dtype


def has_numbers(dtype: Any) -> bool:
    """Returns whether torch knows what numbers the bytes of a tensor of that torch dtype are. Of
    some dtypes it only holds the bytes."""
    return _NO_NUMBERS.fullmatch(str(dtype)) is None


def is_torch_dtype(dtype: Any) -> bool:
    """Returns whether it is a torch.dtype, without importing torch."""
    return type(dtype).__module__ == "torch" and type(dtype).__name__ == "dtype"
