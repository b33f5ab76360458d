"""Copies bytes of tensors by all cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

SLICE_BYTES = 8 << 20
"""What a thread copies at once."""

_T = TypeVar("_T")
_R = TypeVar("_R")


def by_all_cores(work: Callable[[_T], _R], items: list[_T]) -> list[_R]:
    """Calls `work` with each item, by all cores. Raises the first exception when all calls are
    over."""
    cores = min(len(os.sched_getaffinity(0)), len(items))
    if cores < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(cores, "pmstore-dcp") as threads:
        try:
            calls = threads.map(work, items)
        except RuntimeError:  # the interpreter ends, and begins no work on threads any more
            return [work(item) for item in items]
        return list(calls)


def as_bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns the bytes of a contiguous tensor on the CPU, of whatever dtype, as uint8 over its
    memory."""
    made: np.ndarray[Any, np.dtype[np.uint8]] = (
        tensor.detach().reshape(-1).view(torch.uint8).numpy()
    )
    return made


def from_bytes(data: torch.Tensor, dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """Returns a tensor over bytes, which are uint8."""
    return data.view(dtype).view(torch.Size(shape))


def size_of(tensor: torch.Tensor) -> int:
    """Returns the bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor is its bytes, in order, and nothing more."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def slices(
    source: torch.Tensor, target: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields pairs of about `SLICE_BYTES`, cut along the first dimension that is longer than 1."""
    size = source.numel() * source.element_size()
    if not size:
        return
    if is_plain(source) and is_plain(target) and source.dtype == target.dtype:
        source, target = (t.reshape(-1).view(torch.uint8) for t in (source, target))
    dim = next((d for d, length in enumerate(source.shape) if length > 1), None)
    if size <= SLICE_BYTES or dim is None:
        yield source, target
        return
    length = max(1, source.shape[dim] * SLICE_BYTES // size)
    for at in range(0, source.shape[dim], length):
        size = min(length, source.shape[dim] - at)
        yield source.narrow(dim, at, size), target.narrow(dim, at, size)


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies, with casts. It works in this thread alone where that can be chosen: torch would start
    threads of its own beside ours."""
    with torch.no_grad():
        if source.dtype == target.dtype and is_plain(source) and is_plain(target):
            np.copyto(as_bytes(target), as_bytes(source))
        elif source.dtype == target.dtype and source.element_size() == 1:
            # torch copies no tensors of its dtypes of less than a byte
            target.view(torch.uint8).copy_(source.view(torch.uint8))
        else:
            target.copy_(source)
