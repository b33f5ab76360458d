"""Numbers that a program logs of a step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch


def number(name: str, value: object) -> Any:
    """A float; or a tensor of one element on an accelerator, which is not waited for.

    Raises: TypeError: it is no real number; ValueError: it is several.
    """
    if value.__class__ is float:
        return value
    if isinstance(value, torch.Tensor):
        count, real = value.numel(), not value.is_complex()
    else:
        # a str can be made a float too, but has no such method
        kind = type(value)
        real = hasattr(kind, "__float__") or hasattr(kind, "__index__")
        if isinstance(value, np.ndarray | np.generic):
            real = value.dtype.kind in "biuf" or _is_small_float(value.dtype)
        shape = getattr(value, "shape", ())  # other libraries' arrays have one too
        count = math.prod(shape) if isinstance(shape, tuple) else 1
        if isinstance(value, np.ndarray) and value.ndim:
            count = -1  # one of one element is no number to numpy
    if not real:
        raise TypeError(
            f"run.log({name}=...): a number, or a tensor of one element, not {_told(value)}"
        )
    if count != 1:
        raise ValueError(
            f"run.log({name}=...): one number, and this is {_told(value)}: write "
            f"run.log({name}={name}.mean())"
        )
    if isinstance(value, torch.Tensor):
        return float(value.item()) if value.is_cpu else value.detach()
    return float(value)  # type: ignore[arg-type]


def _is_small_float(dtype: np.dtype[Any]) -> bool:
    """bfloat16 and others that numpy has not, as JAX's arrays give them."""
    return dtype.kind == "V" and dtype.type is not np.void and hasattr(dtype.type, "__float__")


def _told(value: object) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"of shape {tuple(value.shape)}, dtype {value.dtype}"
    return repr(value)[:80]
