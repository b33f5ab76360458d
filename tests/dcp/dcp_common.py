"""What the tests of pmstore.dcp share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from pmstore.dcp import StoreReader, StoreWriter

QUIET = "ignore:torch.distributed is disabled, unavailable or uninitialized"
"""Of torch: each save and load of one process says so."""
OF_DTYPE = "ignore:ComplexHalf support is experimental"

DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128"),
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
]


def bits(tensor: torch.Tensor) -> bytes:
    """Of a tensor of whatever dtype."""
    if not tensor.numel():
        return b""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if not plain.is_contiguous():
        plain = plain.contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def state(seed: float = 0.0) -> dict[str, Any]:
    """A state dict with one of everything, that is another for each seed."""
    generator = torch.Generator().manual_seed(int(seed))
    whole = torch.randn(64, 96, generator=generator)
    return {
        "model": {"w": whole.clone(), "large": torch.randn(700_001, generator=generator)},
        "transposed": whole.t(),
        "column": whole[:, 3],
        "every_other": whole[::2, ::2],
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
        "conjugate": torch.randn(5, dtype=torch.complex64, generator=generator).conj(),
        "list": [torch.randn(3, generator=generator), 7, "text"],
        "step": int(seed),
        "name": f"run {seed}",
        "nothing": None,
    }


def blank(like: Any) -> Any:
    """The same without what it holds."""
    if isinstance(like, torch.Tensor):
        return (
            torch.empty(like.shape, dtype=torch.uint8).view(like.dtype)
            if (like.element_size() == 1 and like.dtype != torch.bool)
            else torch.zeros_like(like, memory_format=torch.contiguous_format)
        )
    if isinstance(like, dict):
        return {key: blank(value) for key, value in like.items()}
    if isinstance(like, list):
        return [blank(value) for value in like]
    return type(like)() if like is not None else "something"


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def save(folder: Path | str, content: dict[str, Any], writer: StoreWriter | None = None) -> None:
    writer = StoreWriter(folder) if writer is None else writer
    dcp.save(content, checkpoint_id=folder, storage_writer=writer)


def load(folder: Path | str, like: dict[str, Any], **how: Any) -> dict[str, Any]:
    made = blank(like)
    dcp.load(made, storage_reader=StoreReader(folder, **how))
    return made
