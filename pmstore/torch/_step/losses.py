"""The loss that a program gives with a step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch


def check_loss(loss: object) -> None:
    """Before anything of the step's end is done. Waits for no accelerator.

    Raises: TypeError: it is no real number; ValueError: it is several.
    """
    if loss is None or loss.__class__ is float:
        return
    kind = type(loss)
    if isinstance(loss, torch.Tensor):
        count, real = loss.numel(), not loss.is_complex()
    else:
        # a str can be made a float too, but has no such method
        real = hasattr(kind, "__float__") or hasattr(kind, "__index__")
        if isinstance(loss, np.ndarray | np.generic):
            real = loss.dtype.kind in "biuf" or _is_small_float(loss.dtype)
        shape = getattr(loss, "shape", ())  # other libraries' arrays have one too
        count = math.prod(shape) if isinstance(shape, tuple) else 1
        if isinstance(loss, np.ndarray) and loss.ndim:
            count = -1  # one of one element is no number to numpy
    if not real:
        raise TypeError(
            f"the loss of a step is a number, or a tensor of one element, not {_told(loss)}: give "
            "run.end_step(loss) the loss, or nothing"
        )
    if count != 1:
        raise ValueError(
            f"the loss of a step is one number, and this is {_told(loss)}: write "
            "run.end_step(loss.mean())"
        )


def _is_small_float(dtype: np.dtype[Any]) -> bool:
    """bfloat16 and others that numpy has not, as JAX's arrays give them."""
    return dtype.kind == "V" and dtype.type is not np.void and hasattr(dtype.type, "__float__")


def _told(loss: object) -> str:
    if hasattr(loss, "shape") and hasattr(loss, "dtype"):
        return f"of shape {tuple(loss.shape)}, dtype {loss.dtype}"
    return repr(loss)[:80]
