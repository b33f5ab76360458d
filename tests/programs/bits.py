"""What a program returns, as bits that can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

Bits = dict[str, tuple[str, bytes]]
"""By path: what it is, and its bytes."""


def bits_of(value: Any) -> Bits:
    """Tensors, arrays, numbers, containers of them, and whatever has a state_dict."""
    return dict(_leaves(value, ""))


def differences(ours: Bits, theirs: Bits, most: int = 6) -> list[str]:
    """Sentences, none if the two are the same."""
    told = [f"{path} is missing" for path in ours if path not in theirs]
    told += [f"{path} is there in addition" for path in theirs if path not in ours]
    for path in ours.keys() & theirs.keys():
        if ours[path] != theirs[path]:
            kinds = {ours[path][0], theirs[path][0]}
            told.append(f"{path}: {' against '.join(sorted(kinds))}")
    return sorted(told)[:most] + ([f"and {len(told) - most} more"] if len(told) > most else [])


def _leaves(value: Any, path: str) -> Iterator[tuple[str, tuple[str, bytes]]]:
    if isinstance(value, torch.Tensor):
        value = value.to_local() if hasattr(value, "to_local") else value  # a DTensor's part
        value = value.detach()
        if value.is_sparse:
            value = value.coalesce().to_dense()
        flat = value.contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        yield path, (f"{value.dtype} {tuple(value.shape)}", raw)
    elif isinstance(value, (np.ndarray, np.generic)):
        value = np.asarray(value)
        yield path, (f"{value.dtype} {value.shape}", value.tobytes())
    elif callable(getattr(value, "state_dict", None)):
        yield from _leaves(value.state_dict(), path)
    elif isinstance(value, Mapping):
        yield path, ("keys", repr(sorted(map(repr, value))).encode())
        for key, item in value.items():
            yield from _leaves(item, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        yield path, ("length", str(len(value)).encode())
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}/{index}")
    elif isinstance(value, float):
        yield path, (f"float {value!r}", np.float64(value).tobytes())
    else:
        assert isinstance(value, (int, str, bytes, bool, type(None))), f"{path}: {value!r}"
        yield path, (f"{value!r}"[:60], repr(value).encode())
