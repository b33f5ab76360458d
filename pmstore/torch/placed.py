"""A tensor of the training program and the block of the heap that holds its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from pmstore import Store
from pmstore.torch.errors import AttachError, MismatchError

UNFIT = "tensors were replaced by others that do not fit their place in the store"
Memory = np.ndarray[Any, np.dtype[np.uint8]]


class Placed:
    """A stored tensor in the shape and strides in which the program sees it.

    `heap` aliases the store: writing it writes the store. It holds the block, not the store, open
    (see `Store.close`).
    """

    __slots__ = ("dtype", "heap", "memory", "pointer", "shape", "stride")

    def __init__(self, heap: torch.Tensor, memory: Memory | None = None) -> None:
        self.heap = heap
        self.pointer = heap.data_ptr()
        self.shape = heap.shape
        self.stride = heap.stride()
        self.dtype = heap.dtype
        # What is declared before it is written: an array, because its buffer is found without a
        # call into Python.
        self.memory: Memory = _memory(heap) if memory is None else memory

    @classmethod
    def create(cls, store: Store, path: str, value: torch.Tensor) -> Placed:
        """A new block with the value's bytes, in its order of dimensions if it is dense. The value
        is untouched."""
        store[path] = value.detach()
        return cls.open(store, path)

    @classmethod
    def open(cls, store: Store, path: str) -> Placed:
        """The block that is there. Reads no data."""
        heap = store[path]
        if not isinstance(heap, torch.Tensor):
            raise AttachError(
                f"{path!r} in the store is no tensor: it was written by something else than attach"
            )
        return cls(heap)

    def view(self, shape: Sequence[int], stride: Sequence[int], offset: int) -> Placed:
        """Another tensor over this block's memory, which is one-dimensional."""
        return Placed(self.heap.as_strided(shape, stride, offset), self.memory)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's bytes are this block, seen in the same way."""
        return (
            tensor.data_ptr() == self.pointer
            and tensor.shape == self.shape
            and tensor.dtype is self.dtype
            and tensor.stride() == self.stride
        )


class Places:
    """Tensors and the blocks in which they should lie: whether all still do is looked at in every
    step, so all at once."""

    __slots__ = ("_dtypes", "_pointers", "_shapes", "_strides", "_tensors")

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, Placed]]) -> None:
        pairs = list(pairs)
        self._tensors = [tensor for tensor, _ in pairs]
        self._pointers = [placed.pointer for _, placed in pairs]
        self._shapes = [placed.shape for _, placed in pairs]
        self._strides = [placed.stride for _, placed in pairs]
        self._dtypes = [placed.dtype for _, placed in pairs]

    def hold(self) -> bool:
        """Whether `Placed.holds` is true of each pair."""
        tensors = self._tensors
        return (
            [tensor.data_ptr() for tensor in tensors] == self._pointers
            and [tensor.shape for tensor in tensors] == self._shapes
            and [tensor.dtype for tensor in tensors] == self._dtypes
            and [tensor.stride() for tensor in tensors] == self._strides
        )


def _memory(heap: torch.Tensor) -> Memory:
    """All bytes of the tensor's storage."""
    if not heap.numel():
        return np.empty(0, np.uint8)
    memory: Memory = (
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(heap.untyped_storage()).numpy()
    )
    return memory


def check_movable(name: str, tensor: torch.Tensor, devices: Sequence[str] = ("cpu",)) -> None:
    """Raises AttachError if the tensor is of a kind whose bytes cannot be in a store, or on none of
    the devices."""
    if isinstance(tensor, UninitializedTensorMixin):
        raise AttachError(
            f"{name} has no shape yet (a lazy module): run one batch through the model before "
            "attach"
        )
    if tensor.device.type == "meta":
        raise AttachError(
            f"{name} is on the meta device and has no data: initialise it first, "
            "model.to_empty(device='cpu')"
        )
    if tensor.device.type not in devices:
        raise AttachError(
            f"{name} is on {tensor.device}: attach takes tensors on {' and '.join(devices)}"
            + ("" if "cuda" in devices else " (those of a model on cuda are mirrored)")
            + ". Move it with .cpu(), or keep a copy on the CPU and commit that"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise AttachError(
            f"{name} is {tensor.layout}{' and quantized' * tensor.is_quantized}: only dense "
            "tensors can be moved"
        )


def take_in(pairs: Iterable[tuple[str, torch.Tensor, Placed]]) -> None:
    """Copies tensors whose storage left the heap into their blocks, and binds them to these again.

    Everything is checked before anything is written. A source may itself lie in one of the blocks
    (state that changed places); such sources are copied aside first.

    Raises:
        MismatchError: a shape, dtype or device is not the block's, or it is shared memory, where
            other processes may write at any time. Nothing was changed.
    """
    pairs = list(pairs)
    wrong = [
        f"{name}: {_describe(tensor)}, but the store holds {_describe(placed.heap)}"
        for name, tensor, placed in pairs
        if tensor.shape != placed.shape
        or tensor.dtype != placed.dtype
        or tensor.device.type != "cpu"
        or _is_shared(tensor)
    ]
    if wrong:
        raise MismatchError(UNFIT, mismatched=wrong)
    targets = {placed.heap.untyped_storage().data_ptr() for _, _, placed in pairs}
    sources = [tensor.detach() for _, tensor, _ in pairs]
    sources = [
        source.clone() if source.untyped_storage().data_ptr() in targets else source
        for source in sources
    ]
    with torch.no_grad():
        for (_, tensor, placed), source in zip(pairs, sources, strict=True):
            placed.heap.copy_(source)
            tensor.data = placed.heap


def set_apart(tensor: torch.Tensor) -> None:
    """Gives the tensor memory that is nobody's place. Shared memory stays: `take_in` refuses it."""
    if not _is_shared(tensor):
        tensor.data = tensor.data.clone()


def _is_shared(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.untyped_storage().is_shared()
    )


def _describe(tensor: torch.Tensor) -> str:
    device = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    device += " in shared memory" if _is_shared(tensor) else ""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{device}"
