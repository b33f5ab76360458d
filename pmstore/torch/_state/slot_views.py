"""How a native optimizer's parameters and state lie in a slot.

For each parameter its elements and its moments, each at a multiple of 64 bytes, then the numbers of
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from pmstore.torch.optim.base import TABLE

_ALIGN = 64


class Kept(NamedTuple):
    """A parameter, its strides at attach, and the names of its moments, which are float32."""

    parameter: torch.Tensor
    stride: tuple[int, ...]
    names: tuple[str, ...]


def describe_kept(kept: Kept) -> list[Any]:
    """How it lies, as plain data: strides, dtype, names of the moments."""
    dtype = str(kept.parameter.dtype).removeprefix("torch.")
    return [list(kept.stride), dtype, list(kept.names)]


def described_kept(shape: list[int], raw: list[Any]) -> Kept:
    """A tensor without memory stands for the parameter."""
    stride, dtype, names = raw
    like = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    return Kept(like, tuple(stride), tuple(names))


@dataclass(frozen=True, slots=True)
class SlotViews:
    """One slot, as parameters and state. Aliases the slot."""

    parameters: list[torch.Tensor]
    state: list[dict[str, torch.Tensor]]
    # where each parameter and its state are, in that order: a tensor's `.data` can be replaced
    memory: list[list[int]]


def slot_bytes(all_kept: Sequence[Kept]) -> int:
    """Of a slot that holds these."""
    total = 4 * len(all_kept)
    for parameter, _, names in all_kept:
        for dtype in (parameter.dtype, *(torch.float32 for _ in names)):
            total += _padded(parameter, dtype)
    return total


def _padded(parameter: torch.Tensor, dtype: torch.dtype) -> int:
    return -(-parameter.numel() * dtype.itemsize // _ALIGN) * _ALIGN


def make_views(array: np.ndarray[Any, Any], all_kept: Sequence[Kept]) -> SlotViews:
    """A slot's bytes as what it holds."""
    flat = torch.from_numpy(array)
    at = 0

    def take(like: torch.Tensor, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nonlocal at
        size = like.numel() * dtype.itemsize
        made = flat[at : at + size].view(dtype).as_strided(like.shape, stride)
        at += _padded(like, dtype)
        return made

    parameters, state = [], []
    for parameter, stride, names in all_kept:
        parameters.append(take(parameter, stride, parameter.dtype))
        state.append({name: take(parameter, stride, torch.float32) for name in names})
    steps = flat[at : at + 4 * len(parameters)].view(torch.float32)
    for index, held in enumerate(state):
        held["step"] = steps[index]
    tensors = [(one, *held.values()) for one, held in zip(parameters, state, strict=True)]
    return SlotViews(parameters, state, [[one.data_ptr() for one in each] for each in tensors])


def make_table(
    source: SlotViews, target: SlotViews, all_kept: Sequence[Kept]
) -> np.ndarray[Any, Any]:
    """The addresses that a step from one slot into the other needs, without gradients."""
    table = np.zeros(len(source.parameters), TABLE)
    for views, out in ((source, ""), (target, "_out")):
        for row, (_, _, names), one, state in zip(
            table, all_kept, views.parameters, views.state, strict=True
        ):
            row[f"param{out}"], row[f"step{out}"] = one.data_ptr(), state["step"].data_ptr()
            for place, name in enumerate(names):
                row[f"state{out}"][place] = state[name].data_ptr()
    table["count"] = [parameter.numel() for parameter, _, _ in all_kept]
    table["bfloat16"] = [parameter.dtype == torch.bfloat16 for parameter, _, _ in all_kept]
    return table
