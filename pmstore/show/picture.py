"""Statistics of an array, and a small picture of it in text. Works through large arrays piece by
piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from pmstore.objects import dtypes
from pmstore.show.shades import SHADES, SHADES_ASCII

BARS, BARS_ASCII = " ▁▂▃▄▅▆▇█", " _.-=+*#@"
BINS = 40
FEW = 24
"""Values in a row up to which each is a bar; more are a curve."""
_PIECE = 1 << 18  # elements

Numbers = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Statistics:
    """The statistics of an array's finite elements; complex ones count by magnitude. A number is
    None where there is no such element."""

    elements: int = 0
    zeros: int = 0
    nan: int = 0
    infinite: int = 0
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    std: float | None = None
    histogram: list[int] = field(default_factory=list)
    """Counts of 40 equal parts of minimum to maximum."""


def is_numeric(value: Any) -> bool:
    """Returns whether there are statistics and pictures of it: its elements are numbers or truth
    values."""
    return (
        dtypes.has_numbers(value.dtype)
        if hasattr(value, "data_ptr")
        else value.dtype.kind in "biufc"
    )


def _pieces(value: Any) -> Iterator[Numbers]:
    """Yields the elements as float64 in pieces of bounded size, in any order that is the same each
    time."""
    if hasattr(value, "data_ptr"):
        import torch

        # dense in the store, whatever the order of its axes
        flat = value.detach().as_strided((value.numel(),), (1,))
        for at in range(0, flat.numel(), _PIECE):
            piece = flat[at : at + _PIECE]
            if piece.is_complex():  # complex32 has no arithmetic
                yield np.abs(piece.to(torch.complex128).numpy())
            else:
                yield piece.to(torch.float64).numpy()
        return
    flat = value.ravel(order="K")
    for at in range(0, flat.size, _PIECE):
        piece = flat[at : at + _PIECE]
        yield (np.abs(piece) if piece.dtype.kind == "c" else piece).astype(np.float64)


def statistics(value: Any, progress: Callable[[int], None] = lambda done: None) -> Statistics:
    """Returns the statistics of an array or tensor of numbers. progress: called with the number of
    elements worked on since the last call; each element is worked on twice.

    >>> s = statistics(np.array([0.0, 1.0, 2.0, np.nan]))
    >>> s.elements, s.zeros, s.nan, s.minimum, s.maximum, s.mean
    (4, 1, 1, 0.0, 2.0, 1.0)
    """
    found = Statistics()
    low, high, count, mean, squares = np.inf, -np.inf, 0, 0.0, 0.0
    with np.errstate(all="ignore"):
        for piece in _pieces(value):
            progress(piece.size)
            found.elements += piece.size
            found.zeros += int(np.count_nonzero(piece == 0))
            nan = int(np.count_nonzero(np.isnan(piece)))
            piece = piece[np.isfinite(piece)] if not np.isfinite(piece).all() else piece
            found.nan += nan
            if not piece.size:
                continue
            low, high = min(low, float(piece.min())), max(high, float(piece.max()))
            # Chan, Golub and LeVeque's way of putting variances of parts together: no sum of large
            # squares.
            part = float(piece.mean())
            delta, total = part - mean, count + piece.size
            squares += (
                float(((piece - part) ** 2).sum()) + delta * delta * count * piece.size / total
            )
            mean += delta * piece.size / total
            count = total
        found.infinite = found.elements - found.nan - count
        if not count:
            return found
        found.minimum, found.maximum, found.mean, found.std = (
            low,
            high,
            mean,
            float(np.sqrt(squares / count)),
        )
        counts = np.zeros(BINS, np.int64)
        for piece in _pieces(value):
            progress(piece.size)
            if high > low and np.isfinite(high - low):
                counts += np.histogram(piece[np.isfinite(piece)], BINS, (low, high))[0]
            else:
                counts[0] += int(np.isfinite(piece).sum())
        found.histogram = counts.tolist()
    return found


def _levels(values: Numbers, steps: int) -> Numbers:
    """Returns a level for each value, from 0 for the least to `steps` for the greatest; -1 where it
    is not finite."""
    finite = np.isfinite(values)
    if not finite.any():
        return np.full(values.shape, -1)
    low, high = values[finite].min(), values[finite].max()
    with np.errstate(all="ignore"):
        scaled = (values - low) / (high - low) if high > low else np.full(values.shape, 0.5)
        levels = np.rint(np.nan_to_num(scaled) * steps).astype(int)
    return np.where(finite, levels, -1)


def sparkline(values: Any, blocks: bool = True) -> str:
    """Draws the values as a row of bars. What is not finite is `?`.

    >>> sparkline([0, 1, 2, 3, float("nan")])
    '▁▃▆█?'
    """
    levels = _levels(np.asarray(values, np.float64), len(BARS) - 2)
    bars = BARS if blocks else BARS_ASCII
    return "".join("?" if level < 0 else bars[level + 1] for level in levels)


def histogram_line(counts: list[int], blocks: bool = True) -> str:
    """Draws counts as a row of bars, in which only an empty part is empty."""
    most, bars = max(counts, default=0), BARS if blocks else BARS_ASCII
    return "".join(
        bars[0 if not count else max(1, round(count / most * (len(bars) - 1)))] for count in counts
    )


def heat(values: Any, blocks: bool = True) -> list[str]:
    """Draws a matrix as rows of shades, two characters an element."""
    shades = SHADES if blocks else SHADES_ASCII
    levels = _levels(np.asarray(values, np.float64), len(shades) - 1)
    return ["".join("??" if level < 0 else shades[level] * 2 for level in row) for row in levels]


def shrink(values: Numbers, most: int, axis: int) -> Numbers:
    """Returns the values with at most `most` along the axis: each is the mean of its neighbours."""
    length = values.shape[axis]
    if length <= most:
        return values
    edges = np.linspace(0, length, most + 1).astype(int)
    with np.errstate(all="ignore"):
        return np.stack(
            [values.take(range(a, b), axis).mean(axis) for a, b in pairwise(edges)], axis
        )


def as_numbers(value: Any) -> Numbers:
    if hasattr(value, "data_ptr"):
        import torch

        value = value.detach()
        value = value.to(torch.complex128 if value.is_complex() else torch.float64).numpy()
    return (
        np.abs(value).astype(np.float64)
        if value.dtype.kind == "c"
        else np.asarray(value, np.float64)
    )


PICTURED = 1 << 22
"""How many elements a matrix that is pictured has at most. A histogram tells more of a larger
one."""


def picture(
    value: Any, found: Statistics, width: int = 64, height: int = 20, blocks: bool = True
) -> tuple[str, list[str]]:
    """Returns what is pictured ("rows and columns" or "histogram"), and the lines of the picture.
    Arrays of one axis are drawn by `sparkline` and `curve`."""
    if (
        found.minimum is not None
        and value.ndim == 2
        and found.elements <= PICTURED
        and min(value.shape) > 1
    ):
        small = shrink(shrink(as_numbers(value), height, 0), width // 2, 1)
        return "rows and columns", heat(small, blocks)
    together = -(-BINS // max(1, width))
    counts = [sum(found.histogram[at : at + together]) for at in range(0, BINS, together)]
    return "histogram", [histogram_line(counts, blocks)] if sum(counts) > 1 else []
