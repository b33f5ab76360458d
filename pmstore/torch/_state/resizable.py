"""Buffers that change their size while they train."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from pmstore.torch._state.sharded import is_sharded

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
    """Of two tensors of one shape and dtype: also where they hold NaN or -0.0."""
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def fill(buffer: torch.Tensor, stored: torch.Tensor) -> None:
    """Makes the buffer what is stored, in shape and bytes, in memory of its own."""
    if buffer.shape == stored.shape and buffer.stride() == stored.stride():
        buffer.detach().copy_(stored)
    else:
        buffer.data = stored.to(buffer.device, copy=True)
