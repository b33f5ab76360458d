"""A tensor of the training program and the block of the heap that holds its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from pmstore import Store
from pmstore.torch._state.sharded import is_sharded, local, record_of
from pmstore.torch.run_errors import AttachError, MismatchError

UNFIT = "tensors were replaced by others that do not fit their place in the store"
Memory = np.ndarray[Any, np.dtype[np.uint8]]


class Placed:
    """A stored tensor in the shape and strides in which the program sees it.

    `heap` aliases the store: writing it writes the store. It holds the block, not the store, open
    (see `Store.close`).
    """

    __slots__ = ("dtype", "heap", "memory", "pointer", "shape", "stride")

    def __init__(self, heap: torch.Tensor, memory: Memory | None = None) -> None:
        self.heap: torch.Tensor = heap
        self.pointer: int = heap.data_ptr()
        self.shape: torch.Size = heap.shape
        self.stride: tuple[int, ...] = heap.stride()
        self.dtype: torch.dtype = heap.dtype
        # What is declared before it is written: an array, because its buffer is found without a
        # call into Python.
        self.memory: Memory = _memory(heap) if memory is None else memory

    @classmethod
    def create(cls, store: Store, path: str, value: torch.Tensor) -> Placed:
        """A new block with the value's bytes, in its order of dimensions if it is dense. The value
        is untouched."""
        store[path] = local(value).detach()
        return cls.open(store, path)

    @classmethod
    def open(cls, store: Store, path: str) -> Placed:
        """The block that is there. Reads no data."""
        heap = store[path]
        if not isinstance(heap, torch.Tensor):
            raise AttachError(
                f"{path!r} in the store is no tensor: it was written by something else than attach"
            )
        # Not what the store has given out, which it looks at before each commit: nobody else has
        # this one, so that it cannot leave.
        return cls(heap.detach())

    def view(self, shape: Sequence[int], stride: Sequence[int], offset: int) -> Placed:
        """Another tensor over this block's memory, which is one-dimensional."""
        return Placed(self.heap.as_strided(shape, stride, offset), self.memory)

    def bind(self, tensor: torch.Tensor) -> None:
        """Makes the tensor's memory this block: of a DTensor, that of its part."""
        if is_sharded(tensor):
            # The object too: that of FSDP is a view, and would keep what it is a view of.
            tensor._local_tensor = self.heap.detach()  # type: ignore[attr-defined]
        else:
            tensor.data = self.heap

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's bytes, or those of its part, are this block, seen in the same
        way."""
        tensor = local(tensor)
        return (
            tensor.data_ptr() == self.pointer
            and tensor.shape == self.shape
            and tensor.dtype is self.dtype
            and tensor.stride() == self.stride
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
    if is_sharded(tensor):
        _check_shard(name, tensor)
        tensor = local(tensor)
    elif hasattr(tensor, "local_shards"):
        raise AttachError(
            f"{name} is a ShardedTensor, of the older way to shard: use DTensor, "
            "torch.distributed.tensor.distribute_tensor or fully_shard"
        )
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
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        more = f"{' and quantized' * tensor.is_quantized}{' and nested' * tensor.is_nested}"
        raise AttachError(f"{name} is {tensor.layout}{more}: only dense tensors can be moved")


def _check_shard(name: str, tensor: torch.Tensor) -> None:
    """Raises AttachError if the DTensor is of a kind that cannot be stored."""
    try:
        record = record_of(tensor)
    except ValueError as error:
        raise AttachError(f"{name}: {error}") from None
    assert record is not None
    if any(one[0] == "partial" for one in record["placements"]):
        raise AttachError(
            f"{name} is a DTensor that is still to be added up over ranks (Partial): "
            "redistribute() it to Replicate or Shard before attach"
        )
    if not record["coordinate"]:
        raise AttachError(
            f"{name} is a DTensor over a mesh of ranks {record['ranks']}, and this rank has no "
            "part of it: give attach what this rank trains"
        )
    part = local(tensor)
    if type(part) is not torch.Tensor:
        raise AttachError(
            f"{name} is a DTensor of {type(part).__qualname__}: its parts have to be plain tensors"
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
        for name, tensor, placed in ((name, local(one), placed) for name, one, placed in pairs)
        if tensor.shape != placed.shape
        or tensor.dtype != placed.dtype
        or tensor.device.type != "cpu"
        or _is_shared(tensor)
    ]
    if wrong:
        raise MismatchError(UNFIT, mismatched=wrong)
    targets = {placed.heap.untyped_storage().data_ptr() for _, _, placed in pairs}
    sources = [local(tensor).detach() for _, tensor, _ in pairs]
    sources = [
        source.clone() if source.untyped_storage().data_ptr() in targets else source
        for source in sources
    ]
    with torch.no_grad():
        for (_, tensor, placed), source in zip(pairs, sources, strict=True):
            placed.heap.copy_(source)
            placed.bind(tensor)


def set_apart(tensor: torch.Tensor) -> None:
    """Gives the tensor memory that is nobody's place. Shared memory stays: `take_in` refuses it."""
    part = local(tensor)
    if _is_shared(part):
        return
    if part is tensor:
        tensor.data = tensor.data.clone()
    else:
        tensor._local_tensor = part.detach().clone()  # type: ignore[attr-defined]


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


# ---- buffers that change their size while they train


LIMIT = 1 << 20  # bytes; larger buffers are too dear to be compared and copied at each commit


def is_loose(module: nn.Module, buffer: torch.Tensor) -> bool:
    """Whether a buffer has to lie outside the heap, because its module may call `resize_` on it,
    and torch resizes only memory of its own. It is copied in at each commit.

    Observers of quantization are such modules. An empty buffer is of use only once it has grown.
    """
    if isinstance(buffer, UninitializedTensorMixin) or buffer.layout is not torch.strided:
        return False  # attach refuses it
    if is_sharded(buffer):
        return False  # its part has the shape that its mesh gives it
    return not buffer.numel() or (buffer.nbytes <= LIMIT and _resizes(type(module)))


def _resizes(kind: type) -> bool:
    """Whether a method of the class speaks of `resize_`."""
    known = _kinds.get(kind)
    if known is None:
        known = _kinds[kind] = any(
            "resize_" in _names(method.__code__)
            for base in kind.__mro__
            for method in vars(base).values()
            if isinstance(method, FunctionType)
        )
    return known


_kinds: dict[type, bool] = {}


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors of one shape and dtype have the same bytes: NaN and -0.0, too."""
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def fill(buffer: torch.Tensor, stored: torch.Tensor) -> None:
    """Makes the buffer what is stored, in shape and bytes, in memory of its own."""
    if buffer.shape == stored.shape and buffer.stride() == stored.stride():
        buffer.detach().copy_(stored)
    else:
        buffer.data = stored.to(buffer.device, copy=True)
