"""Keeps the whole of a run in a bounded number of buckets, whose width doubles as the run gets
longer."""

from __future__ import annotations

from typing import Any

import numpy as np

from pmstore.course.records import Bucket, Step

Rows = np.ndarray[Any, np.dtype[np.float64]]

_SUMS = [
    *(Bucket.LOSSES, Bucket.LOSS_SUM, Bucket.BAD, Bucket.COMMITS, Bucket.SECONDS, Bucket.BYTES)
]
_GREATEST = [Bucket.WIDTH, Bucket.LAST, Bucket.TIME, Bucket.LOSS_MAX, Bucket.SLOWEST]


def filled(curve: Rows) -> Any:
    """Returns which places of `curve` hold a bucket of the present width, as booleans."""
    width = width_of(curve)
    place = np.arange(len(curve))
    with np.errstate(all="ignore"):
        return (curve[:, Bucket.WIDTH] == width) & (curve[:, Bucket.LAST] // width == place)


def width_of(curve: Rows) -> int:
    """Returns how many steps a bucket is wide."""
    width = curve[:, Bucket.WIDTH]
    return int(width[np.isfinite(width) & (width >= 1) & (width < 2**53)].max(initial=1.0))


class Curve:
    """Writes the `curve` of a run into the store's array."""

    def __init__(self, store: Any, array: Rows, first: int) -> None:
        """Takes the store's array. first: what the array has of this step and later ones is
        forgotten."""
        self._store = store
        self._array = array
        array[array[:, Bucket.LAST] >= first] = 0.0
        self._width = width_of(array)

    @property
    def last(self) -> float:
        """The newest step that is in the curve."""
        return float(self._array[:, Bucket.LAST].max())

    def add(self, rows: Rows) -> None:
        """Adds rows of steps, as in `steps`. They are in order, and later than all before. They are
        pending until the next commit."""
        while rows[-1, Step.STEP] // self._width >= len(self._array):
            self._halve()
        places = (rows[:, Step.STEP] // self._width).astype(np.intp)
        firsts = np.concatenate(([0], np.flatnonzero(places[1:] != places[:-1]) + 1))
        new = _summed(rows, firsts)
        new[:, Bucket.WIDTH] = self._width
        places = places[firsts]
        array = self._array
        self._store.will_write(array[places[0] : places[-1] + 1])
        first = places[0]  # the others have just begun
        old = array[first]
        if old[Bucket.WIDTH] == self._width and old[Bucket.LAST] // self._width == first:
            new[:1] = _merged(old[None], new[:1])
        array[places] = new

    def _halve(self) -> None:
        """Merges each two neighbours into one bucket. This happens each time when the run is twice
        as long."""
        array = self._array
        held = filled(array)
        plain = array.copy()
        plain[~held] = _nothing()
        merged = _merged(plain[0::2], plain[1::2])
        self._width *= 2
        merged[:, Bucket.WIDTH] = self._width
        merged[~(held[0::2] | held[1::2])] = 0.0
        self._store.will_write(array)
        array[: len(merged)] = merged
        array[len(merged) :] = 0.0


def _nothing() -> Rows:
    """Returns a bucket that changes none that it is merged with."""
    bucket = np.zeros(len(Bucket))
    bucket[[Bucket.LOSS_MIN, Bucket.LOSS_MAX]] = np.inf, -np.inf
    return bucket


def _merged(one: Rows, other: Rows) -> Rows:
    merged = np.empty_like(one)
    merged[:, _SUMS] = one[:, _SUMS] + other[:, _SUMS]
    merged[:, _GREATEST] = np.maximum(one[:, _GREATEST], other[:, _GREATEST])
    merged[:, Bucket.LOSS_MIN] = np.minimum(one[:, Bucket.LOSS_MIN], other[:, Bucket.LOSS_MIN])
    return merged


def _summed(rows: Rows, firsts: Any) -> Rows:
    """Sums rows into buckets. Each bucket begins at one of `firsts`."""
    loss, seconds = rows[:, Step.LOSS], rows[:, Step.SECONDS]
    good, committed = np.isfinite(loss), seconds == seconds
    sums = np.zeros((len(rows), len(_SUMS)))
    sums[:, 0] = good
    np.copyto(sums[:, 1], loss, where=good)
    sums[:, 2] = (rows[:, Step.GIVEN] == 1.0) & ~good
    sums[:, 3] = committed
    np.copyto(sums[:, 4], seconds, where=committed)
    sums[:, 5] = rows[:, Step.BYTES]
    greatest = np.zeros((len(rows), len(_GREATEST)))
    greatest[:, 1:3] = rows[:, : Step.TIME + 1]
    greatest[:, 3] = np.where(good, loss, -np.inf)
    greatest[:, 4] = sums[:, 4]
    new = np.empty((len(firsts), len(Bucket)))
    new[:, _SUMS] = np.add.reduceat(sums, firsts)
    new[:, _GREATEST] = np.maximum.reduceat(greatest, firsts)
    new[:, Bucket.LOSS_MIN] = np.minimum.reduceat(np.where(good, loss, np.inf), firsts)
    return new
