"""numpy arrays over the heap, and what a store remembers of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, SupportsIndex, TypeAlias

import msgpack
import numpy as np

from pmstore._engine._binding import Memory
from pmstore.errors import CorruptStoreError, FormatVersionError
from pmstore.objects import axes, dtypes

Array = np.ndarray[Any, np.dtype[Any]]
Shape: TypeAlias = SupportsIndex | Sequence[SupportsIndex]

LARGEST_BYTES = (1 << 62) - 1


@dataclass(frozen=True)
class Descriptor:
    """Says what a directory entry has beside the block: enough to make the array or tensor again.

    dtype: as `dtypes.encode_numpy` or `encode_torch` gives it. order: see `axes`.
    """

    torch: bool
    dtype: Any
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None
    requires_grad: bool = False
    parameter: bool = False

    def pack(self) -> bytes:
        if (
            self.order is None
            and not (self.requires_grad or self.parameter)
            and type(self.dtype) is str
        ):
            return _pack_plain(self.torch, self.dtype, self.shape)
        return self._pack()

    def _pack(self) -> bytes:
        data: dict[str, Any] = {
            "kind": "torch" if self.torch else "numpy",
            "dtype": self.dtype,
            "shape": list(self.shape),
        }
        if self.order is not None:
            data["order"] = list(self.order)
        if self.requires_grad:
            data["requires_grad"] = True
        if self.parameter:
            data["parameter"] = True
        packed: bytes = msgpack.packb(data)
        return packed

    @classmethod
    def unpack(cls, meta: bytes) -> Descriptor:
        """Returns the descriptor that `pack` wrote; one that was unpacked before is not worked out
        again. Raises: CorruptStoreError."""
        return _unpack(meta)

    @classmethod
    def _unpack(cls, meta: bytes) -> Descriptor:
        try:
            data = msgpack.unpackb(meta)
            shape = dtypes.decode_shape(data["shape"])
            if data["kind"] not in ("numpy", "torch"):
                raise ValueError("an array of an unknown kind")
            return cls(
                torch=data["kind"] == "torch",
                dtype=data["dtype"],
                shape=shape,
                order=axes.decode_order(data.get("order"), len(shape)),
                requires_grad=data.get("requires_grad") is True,
                parameter=data.get("parameter") is True,
            )
        except dtypes.UNDECODABLE as error:
            raise CorruptStoreError(
                f"the description of an array does not decode: {error!r}"
            ) from error

    def check_dtype(self) -> None:
        """Checks that the dtype can be decoded. torch is not imported: the name of a torch dtype is
        only looked up. Raises: CorruptStoreError, FormatVersionError: as `numpy_dtype`."""
        if not self.torch:
            self.in_numpy  # worked out, and kept  # noqa: B018
        elif self.dtype not in dtypes.TORCH_DTYPES:
            raise CorruptStoreError(f"the dtype of a tensor does not decode: {self.dtype!r}")

    def same_kind(self, other: Descriptor) -> bool:
        """Returns whether both are arrays, or both are tensors, of one shape and dtype."""
        kind = self.torch, self.dtype, self.shape
        return kind == (other.torch, other.dtype, other.shape)

    def dtype_name(self) -> str:
        """Returns the name of the dtype as messages show it."""
        return str(self.dtype if self.torch else numpy_dtype(self))

    @cached_property
    def in_numpy(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """The dtype (see `own_dtype`) and the strides in bytes, worked out once for all arrays of
        this description.

        Raises: as `numpy_dtype`.
        """
        dtype = numpy_dtype(self)
        return dtype, tuple(
            step * dtype.itemsize for step in axes.strides_of(self.shape, self.order)
        )

    @property
    def own_dtype(self) -> np.dtype[Any]:
        """The dtype for one array alone where it has fields: numpy lets a program rename them
        (`x.dtype.names = ...`), and that must not change other arrays."""
        shared = self.in_numpy[0]
        return shared if shared.fields is None and shared.subdtype is None else numpy_dtype(self)


@lru_cache(maxsize=1024)
def _unpack(meta: bytes) -> Descriptor:
    """Unpacks a description, and remembers the result: slots are bound anew at each turn."""
    return Descriptor._unpack(meta)


@lru_cache(maxsize=1024)
def _pack_plain(torch: bool, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Packs the description of a plain array, and remembers the result: a loop stores arrays of the
    same few kinds again and again."""
    return Descriptor(torch, dtype, shape)._pack()


def numpy_dtype(descriptor: Descriptor) -> np.dtype[Any]:
    """Returns a new numpy dtype as the descriptor says. Raises: CorruptStoreError;
    FormatVersionError for a long double of another machine."""
    try:
        return dtypes.decode_numpy(descriptor.dtype)
    except FormatVersionError:
        raise
    except dtypes.UNDECODABLE as error:
        raise CorruptStoreError(f"the dtype of an array does not decode: {error}") from error


def check_bytes(descriptor: Descriptor, itemsize: int, data_bytes: int) -> None:
    """Checks that shape and dtype fill the block exactly. Raises: CorruptStoreError if they do
    not."""
    if bytes_of(descriptor.shape, itemsize) != data_bytes:
        raise CorruptStoreError(
            f"an array of shape {descriptor.shape} with elements of {itemsize} bytes does not fill "
            f"its {data_bytes} bytes"
        )


def bytes_of(shape: Iterable[int], itemsize: int) -> int:
    total = itemsize
    for length in shape:
        total *= length
    return total


def bytes_of_new(descriptor: Descriptor, itemsize: int) -> int:
    """Returns the bytes of the data of a new array. Raises: ValueError: they are more than any
    memory has."""
    data_bytes = bytes_of(descriptor.shape, itemsize)
    if data_bytes > LARGEST_BYTES:
        raise ValueError(f"an array of shape {descriptor.shape} is larger than any memory")
    return data_bytes


def normal_shape(shape: Any) -> tuple[int, ...]:
    """Returns a shape as a tuple of ints. It is given as numpy takes it: an int or a sequence of
    ints.

    Raises: TypeError, ValueError.
    """
    try:
        lengths = (
            (shape.__index__(),)
            if hasattr(shape, "__index__")
            else tuple(length.__index__() for length in shape)
        )
    except (TypeError, AttributeError):
        raise TypeError(f"a shape is an int or a sequence of ints, not {shape!r}") from None
    if any(length < 0 for length in lengths):
        raise ValueError(f"the lengths of a shape are not negative: {lengths}")
    return lengths


def describe_new(shape: Any, dtype: Any) -> tuple[Descriptor, int]:
    """Returns the descriptor of a new array, and the bytes of an element. Raises: TypeError,
    ValueError."""
    if dtypes.is_torch_dtype(dtype):
        raise TypeError(
            f"{dtype} is a torch dtype: make tensors with store.tensor(name, shape, dtype)"
        )
    element = np.dtype(dtype)
    if element.char in "SUV" and element.itemsize == 0:
        element = np.empty(0, element).dtype  # numpy makes 'U' a string of one character here
    lengths = normal_shape(shape)
    # elements that are arrays lengthen the shape, as everywhere in numpy
    while element.subdtype is not None:
        element, inner = element.subdtype
        lengths += inner
    return Descriptor(False, dtypes.encode_numpy(element), lengths), element.itemsize


def describe(value: Array) -> tuple[Array, Descriptor]:
    """Returns what to store for an array, and its descriptor. A dense array is returned itself; of
    another one, a dense copy in C order.

    A subclass is stored as the plain array that it is made of.

    Raises: TypeError for dtypes that cannot be stored, and masked arrays.
    """
    # numpy.ma.MaskedArray, without importing numpy.ma
    if hasattr(value, "filled") and hasattr(value, "mask"):
        raise TypeError(
            "a masked array has two arrays: store .data and .mask under names of their own"
        )
    dtype = dtypes.encode_numpy(value.dtype)
    plain = value.view(np.ndarray) if type(value) is not np.ndarray else value
    if plain.flags.c_contiguous:
        return plain, Descriptor(False, dtype, plain.shape)
    itemsize = plain.dtype.itemsize
    order: Any = False
    if itemsize and all(stride > 0 and stride % itemsize == 0 for stride in plain.strides):
        order = axes.order_of(plain.shape, [stride // itemsize for stride in plain.strides])
    if order is False:
        plain, order = np.ascontiguousarray(plain), None
    return plain, Descriptor(False, dtype, plain.shape, order)


def bind(descriptor: Descriptor, memory: Memory | bytes) -> Array:
    """Returns the array over the memory. It keeps the memory alive, and so the block. It can be
    written if the memory can.

    Raises: CorruptStoreError if numpy has no such array.
    """
    dtype, strides = descriptor.own_dtype, descriptor.in_numpy[1]
    # Not frombuffer().reshape(): the base of every view of this array is to be this array, which
    # the store knows.
    return _made(lambda: np.ndarray(descriptor.shape, dtype, memory, 0, strides))  # type: ignore[arg-type] # any buffer does


def empty(descriptor: Descriptor, writable: bool) -> Array:
    """Returns an array without bytes, which has no block. Raises: as `bind`."""
    if not writable:
        return bind(descriptor, b"")
    dtype = numpy_dtype(descriptor)
    # Not numpy.empty, which makes elements without bytes (U0) into others, and takes memory for
    # them.
    return _made(lambda: np.ndarray(descriptor.shape, dtype))


def _made(make: Callable[[], Array]) -> Array:
    try:
        return make()
    except dtypes.UNDECODABLE as error:
        raise CorruptStoreError(f"there is no array as its description says: {error}") from error


def address(value: Array) -> int:
    """Returns the address of the array's first element."""
    return int(value.__array_interface__["data"][0])


def span(value: Any) -> list[tuple[int, int]]:
    """Returns where the memory of an array or tensor lies, as (address, bytes), for declared
    writes. It is for objects that have no buffer; one without elements has no memory.

    Raises: TypeError if it is neither.
    """
    if isinstance(value, np.ndarray):
        # numpy before 2.0 has it elsewhere
        low, high = getattr(np.lib, "array_utils", np).byte_bounds(value)
        return [(low, high - low)]
    if hasattr(value, "data_ptr") and hasattr(value, "untyped_storage"):
        if value.numel() == 0:
            return []
        last = sum(
            (length - 1) * step for length, step in zip(value.shape, value.stride(), strict=True)
        )
        return [(value.data_ptr(), (last + 1) * value.element_size())]
    raise TypeError(
        f"declared writes are arrays or tensors of the store, not {type(value).__name__}"
    )
