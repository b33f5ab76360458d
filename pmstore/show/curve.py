"""A curve of numbers, in text: as a line of dots, with its scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from pmstore.show.units import is_logarithmic

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of a braille letter's dots: rows of two."""
_BRAILLE = 0x2800


def thinned(values: Any, most: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns the values as at most `most` numbers, float64: each is the mean of its neighbours
    that are finite, or nan where none is."""
    numbers = np.asarray(values, np.float64)
    finite = np.isfinite(numbers)
    if len(numbers) <= most:
        return np.where(finite, numbers, np.nan)
    edges = np.linspace(0, len(numbers), most + 1).astype(int)[:-1]
    counts = np.add.reduceat(finite, edges, dtype=np.int64)
    most_there = max(1, int(counts.max()))
    with np.errstate(all="ignore"):  # divided first: no sum is too large
        parts = np.add.reduceat(np.where(finite, numbers, 0.0) / most_there, edges)
        return np.where(counts > 0, parts * (most_there / counts), np.nan)


def curve(
    values: Sequence[float] | Any,
    width: int,
    height: int,
    blocks: bool = True,
    logarithmic: bool = False,
) -> list[str]:
    """Returns the lines of a drawing of the values over their places, from left to right, the
    greatest at the top, with the scale at the left. Values beside each other are joined; where no
    value is finite, none is drawn.

    width: columns in all; fewer, where there are fewer values. blocks: False draws with ASCII.
    logarithmic: the scale is, where the values are positive and far apart; in three lines or more
    it says so.

    >>> curve([0, 1, 2, 3], 9, 2, blocks=False)
    ['3 |  **', '0 |**']
    """
    across, down = (2, 4) if blocks else (1, 1)
    ends = np.asarray(values, np.float64)
    ends = ends[np.isfinite(ends)]
    if not ends.size:
        return []
    first = thinned(values, max(1, width - 4) * across)
    marks = [f"{number:.4g}" for number in (np.nanmax(first), np.nanmin(first))]
    edge = max(map(len, [*marks, "log" * logarithmic]))
    columns = max(1, width - edge - 2)
    points = thinned(values, columns * across)
    low, high = float(np.nanmin(points)), float(np.nanmax(points))
    ends_are = [f"{high:.4g}", f"{low:.4g}"]
    by_log = logarithmic and is_logarithmic(low, high)
    if by_log:
        points = np.log10(points)
        low, high = math.log10(low), math.log10(high)
    rows = height * down
    reach = high / 2 - low / 2  # of which the whole may be more than a number holds
    cells = np.zeros((height, (len(points) + across - 1) // across), np.int64)

    def put(x: int, y: int) -> None:
        at = rows - 1 - y
        dot = _DOTS[at % down][x % across] if blocks else 1
        cells[at // down, x // across] |= dot

    shares = (points / 2 - low / 2) / (reach or 1.0)
    levels = [None if np.isnan(share) else round(float(share) * (rows - 1)) for share in shares]
    for x, level in enumerate(levels):
        if level is not None:
            put(x, level)
    for x, (a, b) in enumerate(pairwise(levels)):
        if a is not None and b is not None and abs(a - b) > 1:  # draws the step between the two
            middle = (a + b) // 2
            for y in range(min(a, b) + 1, max(a, b)):
                put(x if (y <= middle) == (a <= b) else x + 1, y)
    titles = [""] * height
    titles[0], titles[-1] = ends_are
    if by_log and height > 2:
        titles[height // 2] = "log"
    edge = max(map(len, titles))
    bar = "│" if blocks else "|"
    return [
        f"{title:>{edge}} {bar}{''.join(_letter(cell, blocks) for cell in row)}".rstrip()
        for title, row in zip(titles, cells, strict=True)
    ]


def _letter(cell: int, blocks: bool) -> str:
    if not cell:
        return " "
    return chr(_BRAILLE + int(cell)) if blocks else "*"
