"""torch tensors over the heap. torch is imported when the first tensor is stored or loaded, and not
before."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

from pmstore._engine._binding import Memory, exchange_with
from pmstore.errors import CorruptStoreError, FormatVersionError
from pmstore.extras import optional
from pmstore.objects import axes, dtypes
from pmstore.objects.array import Descriptor, normal_shape

if TYPE_CHECKING:
    import torch


_introduced: list[Any] = []
"""torch, once C code knows how to look at its tensors."""


def is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Returns whether it is a tensor, without importing torch: where torch was never imported there
    are no tensors."""
    module = sys.modules.get("torch")
    # While torch itself is being imported it has no Tensor yet.
    return module is not None and isinstance(value, getattr(module, "Tensor", ()))


def describe_new(shape: Any, dtype: torch.dtype) -> tuple[Descriptor, int]:
    """Returns the descriptor of a new tensor, and the bytes of an element. Raises: TypeError,
    ValueError."""
    return Descriptor(True, dtypes.encode_torch(dtype), normal_shape(shape)), dtype.itemsize


def describe(value: torch.Tensor) -> tuple[torch.Tensor, Descriptor]:
    """Returns what to store for a tensor, and its descriptor: its data if dense, else a dense copy.
    Its `.grad` is not stored.

    Raises: TypeError for a tensor on another device, sparse, quantized, or of a subclass other than
        Parameter.
    """
    import torch

    if value.is_nested:
        raise TypeError(
            "cannot store a nested tensor: store the tensors of value.unbind() under names of "
            "their own"
        )
    if value.layout != torch.strided:
        raise TypeError(
            f"cannot store a tensor of layout {value.layout}: store value.to_dense(), or its "
            "indices and values"
        )
    if value.is_quantized:
        raise TypeError(
            "cannot store a quantized tensor: store value.int_repr() and its scale and zero point"
        )
    if value.device.type != "cpu":
        raise TypeError(
            f"cannot store a tensor on device {value.device}: a store holds CPU memory. Store "
            "value.cpu()"
        )
    # Buffer is a Tensor to torch >= 2.5, where it only marks; other subclasses (DTensor, ...) are
    # more than their memory.
    if type(value) not in (torch.Tensor, torch.nn.Parameter) and type(value).__name__ != "Buffer":
        raise TypeError(
            f"cannot store a {type(value).__name__}: store the plain tensors that it is made of"
        )
    dtype = dtypes.encode_torch(value.dtype)
    data = value.detach().resolve_conj().resolve_neg()
    order = axes.order_of(data.shape, data.stride())
    if order is False:
        # As bytes where that is possible: torch copies no tensors of its dtypes of less than a
        # byte.
        dense = (
            data.view(torch.uint8).contiguous().view(data.dtype)
            if data.element_size() == 1
            else data.contiguous()
        )
        data, order = dense, None
    parameter = isinstance(value, torch.nn.Parameter)
    return data, Descriptor(True, dtype, tuple(data.shape), order, value.requires_grad, parameter)


def dtype_of(descriptor: Descriptor) -> torch.dtype:
    """Returns the torch dtype as the descriptor says. Raises: CorruptStoreError; FormatVersionError
    if the installed torch does not have it."""
    try:
        return dtypes.decode_torch(descriptor.dtype)
    except FormatVersionError:
        raise
    except dtypes.UNDECODABLE as error:
        raise CorruptStoreError(f"the dtype of a tensor does not decode: {error}") from error


def bind(descriptor: Descriptor, memory: Memory | None) -> torch.Tensor:
    """Returns the tensor over the memory (None: it has no bytes). Its storage keeps the memory
    alive, and so the block.

    Raises: CorruptStoreError if torch has no such tensor.
    """
    introduce()
    dtype = dtype_of(descriptor)
    try:
        return _bind(descriptor, dtype, memory)
    except dtypes.UNDECODABLE as error:
        raise CorruptStoreError(f"there is no tensor as its description says: {error}") from error


def _bind(descriptor: Descriptor, dtype: torch.dtype, memory: Memory | None) -> torch.Tensor:
    import torch

    strides = axes.strides_of(descriptor.shape, descriptor.order)
    # Reinterpreted, not made as dtype: torch warns when a complex32 tensor is made, and it is not
    # the user who makes one. The CPU's, whatever torch.set_default_device says.
    tensor = torch.empty(0, dtype=torch.uint8, device="cpu").view(dtype)
    flat = (
        torch.empty(0, dtype=torch.uint8, device="cpu")
        if memory is None
        else torch.frombuffer(memory, dtype=torch.uint8)
    )
    # Not .view(): a view would carry its base along in autograd and in pickles.
    tensor.set_(flat.untyped_storage(), 0, descriptor.shape, strides)
    if descriptor.parameter:
        return torch.nn.Parameter(tensor, requires_grad=descriptor.requires_grad)
    return tensor.requires_grad_() if descriptor.requires_grad else tensor


def cannot_return(moved: torch.Tensor, descriptor: Descriptor) -> str:
    """Says why a tensor that left its block cannot be copied back into it; "" if it can."""
    import torch

    if moved.layout != torch.strided or moved.device.type != "cpu":
        return f"it is a tensor of layout {moved.layout} on device {moved.device} now"
    if moved.untyped_storage().is_shared():
        return "it lies in shared memory now, where other processes may write at any time"
    if tuple(moved.shape) != descriptor.shape or moved.dtype != dtype_of(descriptor):
        return (
            f"it has shape {tuple(moved.shape)}, dtype {moved.dtype} now; stored is shape "
            f"{descriptor.shape}, dtype {descriptor.dtype_name()}"
        )
    return ""


def take_back(moved: torch.Tensor, descriptor: Descriptor, memory: Memory) -> None:
    """Copies the tensor's bytes into its block, and has it lie there again."""
    import torch

    home = bind(replace(descriptor, requires_grad=False, parameter=False), memory)
    with torch.no_grad():
        home.copy_(moved.detach())
        moved.data = home


def look(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns where and how a tensor lies (address, shape, strides, dtype, type of its device), for
    tensors of which torch does not tell C code."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type


def introduce() -> None:
    """Tells C code, once, how to look at tensors: by torch's own interface for C where it has one,
    else by `look`."""
    with optional:
        import torch

    if not _introduced:
        exchange_with(getattr(torch.Tensor, "__dlpack_c_exchange_api__", None), look)
        _introduced.append(torch)
