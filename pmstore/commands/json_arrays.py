"""Makes an array of a dtype of JSON, without loss: what the dtype cannot hold is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

DTYPES = (
    *("float16", "float32", "float64", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
"""The dtypes that the shell is offered. Any dtype of numpy's is taken."""


def exact_array(parsed: Any, dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Returns the array that the JSON describes. Floats are rounded to the nearest that the dtype
    has.

    Raises: ValueError: an element is of another kind, out of range, too long, or not whole; lists
        of different lengths; no such dtype.

    >>> exact_array([1, 2.0], "uint8").tolist()
    [1, 2]
    >>> exact_array([1.7], "uint8")
    Traceback (most recent call last):
    ValueError: 1.7 is no uint8: it is not whole
    """
    try:
        kind = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        raise ValueError(
            f"--dtype {dtype}: numpy knows no such dtype: give one as float32, int64 or U20"
        ) from None
    for element in _elements(parsed):
        problem = _problem(element, kind)
        if problem:
            raise ValueError(f"{element!r} is no {kind}: {problem}")
    try:
        return np.array(parsed, kind)
    except ValueError as error:
        if "inhomogeneous" in str(error):
            raise ValueError("VALUE is no array: its lists have different lengths") from None
        raise


def _elements(parsed: Any) -> Iterator[Any]:
    if isinstance(parsed, list):
        for item in parsed:
            yield from _elements(item)
    else:
        yield parsed


def _problem(element: Any, kind: np.dtype[Any]) -> str:
    """Says why the dtype cannot hold the element; "" if it can, or numpy is to say."""
    if kind.kind in "SU":
        if not isinstance(element, str):
            return "it is no text"
        length = kind.itemsize // np.dtype(f"{kind.kind}1").itemsize
        if length and len(element) > length:  # 0: as long as the longest
            return f"it has {len(element)} characters"
        return ""
    if kind.kind not in "biufc":
        return ""
    if not isinstance(element, (int, float)):
        return "it is no number"
    if kind.kind in "fc":
        return _beyond_floats(element, kind)
    if not math.isfinite(element) or element != int(element):
        return "it is not whole"
    least, most = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
    return "" if least <= element <= most else f"it is not from {least} to {most}"


def _beyond_floats(element: float, kind: np.dtype[Any]) -> str:
    try:
        number = float(element)
    except OverflowError:
        return "it is out of range"
    with np.errstate(all="ignore"):
        held = kind.type(number)
    if math.isfinite(number) and not np.isfinite(held):
        return f"it is beyond {np.finfo(kind).max:.4g}"
    return "it is too small to be told from 0" if number and held == 0 else ""
