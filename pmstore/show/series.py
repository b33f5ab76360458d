"""What a run tells of its steps, as series of points that a chart can show: thinned, with the least
and the greatest of what each point stands for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pmstore.course.logged import arrays_of, names_of, sound_rows
from pmstore.course.reader import Told

if TYPE_CHECKING:
    from pmstore.store import Store

Numbers = np.ndarray[Any, np.dtype[np.float64]]
POINTS = 1000
"""Of a series, at most."""
NAMES = 64
"""Names of a run that are told, of those that it logged first."""
LETTERS = 80
"""Of a name, as it is told."""
SPEED, COST, BYTES = "steps a second", "seconds of a commit", "bytes of a commit"


@dataclass(frozen=True)
class Series:
    """Points in the order of their steps. One may stand for several: then `value` is their mean.

    Attributes:
        bad: values that were not finite; they are in no point.
        last: the newest value, finite or not.
        bad_from: the step from which on no value was finite; nan: the newest one is.
        gaps: steps behind which something is not known: no line is drawn over them.
    """

    step: Numbers
    value: Numbers
    low: Numbers
    high: Numbers
    bad: int
    last: float
    bad_from: float
    gaps: tuple[int, ...] = ()

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest of all values; nan if there are none."""
        if not self.value.size:
            return float("nan"), float("nan")
        return float(self.low.min()), float(self.high.max())

    @property
    def breaks(self) -> list[int]:
        """The places of the points that follow a gap."""
        places = np.unique(np.searchsorted(self.step, self.gaps, side="right"))
        return [place for place in places.tolist() if 0 < place < len(self.step)]


def series(step: Any, value: Any, low: Any = None, high: Any = None, bad: int = -1) -> Series:
    """Makes a series of values, of which some may not be finite. bad: how many that are; default:
    one for each."""
    step, value = np.asarray(step, np.float64), np.asarray(value, np.float64)
    last = float(value[-1]) if value.size else float("nan")
    good = np.isfinite(value)
    sound = int(np.flatnonzero(good)[-1]) + 1 if good.any() else 0
    bad_from = float(step[sound]) if sound < len(step) else float("nan")
    bad = int(np.count_nonzero(~good)) if bad < 0 else bad
    step, value = step[good], value[good]
    low = value if low is None else np.asarray(low, np.float64)[good]
    high = value if high is None else np.asarray(high, np.float64)[good]
    return Series(step, value, low, high, bad, last, bad_from)


def thinned(of: Series, most: int) -> Series:
    """Returns the series with at most so many points."""
    if len(of.step) <= most:
        return of
    edges = np.linspace(0, len(of.step), most + 1).astype(np.intp)
    first, counts = edges[:-1], np.diff(edges)
    with np.errstate(all="ignore"):  # divided first: no sum is too large
        value = np.add.reduceat(of.value / np.repeat(counts, counts), first)
    low, high = np.minimum.reduceat(of.low, first), np.maximum.reduceat(of.high, first)
    return replace(of, step=of.step[edges[1:] - 1], value=value, low=low, high=high)


def logged(store: Store, run: str) -> dict[str, Series]:
    """Reads what the program logged, by name, in the order of first use. Of a name that was logged
    twice in a step, the last value counts."""
    names = names_of(store, run)[:NAMES]
    rows = sound_rows(arrays_of(store, run), len(names))
    found = {}
    for number, name in enumerate(names, 1):
        steps, values = rows[rows[:, 1] == number][:, (0, 2)].T
        if steps.size:
            newest = np.append(steps[1:] != steps[:-1], True)
            found[name[:LETTERS]] = thinned(series(steps[newest], values[newest]), POINTS)
    return found


def of_course(course: Told) -> dict[str, Series]:
    """Returns what pmstore itself saw of the steps: the loss that the program gave, speed, and the
    cost of commits; without those of which nothing is known. The newest steps before a kill are not
    known: there is a gap where a life began."""
    whole = list(course.whole())
    last = np.array([one.last for one in whole], np.float64)
    commits = np.array([one.commits for one in whole], np.float64)
    loss, least, most, seconds, slowest, written = (
        np.array([getattr(one, name) for one in whole], np.float64)
        for name in ("loss", "loss_min", "loss_max", "seconds", "slowest", "bytes")
    )
    with np.errstate(all="ignore"):
        cost, each = seconds / commits, written / commits
    bad = np.array([one.bad for one in whole], np.int64)
    given = (loss == loss) | (bad > 0)
    found = {
        "loss": series(last[given], loss[given], least[given], most[given], int(bad.sum())),
        SPEED: _speed(course, last, np.array([one.time for one in whole], np.float64)),
        COST: series(last[commits > 0], cost[commits > 0], None, slowest[commits > 0]),
        BYTES: series(last[commits > 0], each[commits > 0]),
    }
    gaps = tuple(start.step for start in course.starts)
    return {
        name: replace(thinned(one, POINTS), gaps=gaps)
        for name, one in found.items()
        if one.value.size or one.bad
    }


_SPANS = 100


def _speed(course: Told, last: Numbers, time: Numbers) -> Series:
    """Returns the steps a second of equal parts of the run, without the time between two lives."""
    if len(last) < 2:
        return series([], [])
    parts = np.linspace(last[0], last[-1], _SPANS + 1)
    at = np.unique(np.searchsorted(last, parts).clip(0, len(last) - 1))
    last, time = last[at], time[at]
    spans = np.diff(time)
    for start in course.starts:
        if start.life.after is not None:
            where = int(np.searchsorted(last, start.step, side="right")) - 1
            if 0 <= where < len(spans):
                spans[where] -= start.time - start.life.after
    with np.errstate(all="ignore"):
        rates = np.where(spans > 0.0, np.diff(last) / spans, np.nan)
    good = np.isfinite(rates)
    return series(last[1:][good], rates[good])
