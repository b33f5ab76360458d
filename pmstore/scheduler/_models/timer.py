"""Learns how long an iteration takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_WINDOW = 128


class Recent:
    """The last values of a series, for what a mean does not tell.

    >>> recent = Recent()
    >>> for value in range(1, 101):
    ...     recent.add(float(value))
    >>> recent.quantile(0.5), recent.quantile(0.99), recent.largest
    (50.0, 99.0, 100.0)
    """

    __slots__ = ("values",)

    def __init__(self, values: Sequence[float] = ()) -> None:
        self.values: deque[float] = deque(values, _WINDOW)

    def add(self, value: float) -> None:
        self.values.append(value)

    def quantile(self, share: float) -> float:
        """Returns the smallest value that `share` of the values do not exceed; 0.0 without
        values."""
        if not self.values:
            return 0.0
        ordered = sorted(self.values)
        return ordered[max(0, -(-round(share * len(ordered) * 1e9) // 10**9) - 1)]

    @property
    def largest(self) -> float:
        return max(self.values, default=0.0)

    def __len__(self) -> int:
        return len(self.values)


class IterationTimer:
    """Learns the seconds of one iteration: a moving average, and the 99th percentile of the last
    128.

    The first iterations (`warm_up`) are not taken in: they compile, allocate and fill caches.
    Commits are not part of an iteration, because the scheduler starts the next one after them. A
    single interval of more than `hiccup` averages (an evaluation, a suspended process) does not
    move the average; eight in a row are taken for a new pace.

    Attributes:
        mean: seconds, undisturbed; 0.0 before the first iteration.
        busy: seconds while a commit is written in the background.
        count: iterations taken in.
    """

    __slots__ = ("_busy_count", "_cold", "_hiccups", "_recent", "busy", "count", "mean")

    _RATE = 0.05
    _HICCUP = 8.0
    _HICCUPS = 8

    def __init__(self, warm_up: int = 3) -> None:
        self._cold = warm_up
        self._hiccups = 0
        self._recent = Recent()
        self._busy_count = 0
        self.mean: float = 0.0
        self.busy: float = 0.0
        self.count: int = 0

    def add(self, seconds: float) -> None:
        """Takes in an iteration without a commit in the background."""
        mean, count = self.mean, self.count
        if count > 20 and seconds <= self._HICCUP * mean:  # nearly always
            self._hiccups = 0
            self.count = count + 1
            self.mean = mean + (seconds - mean) * self._RATE
            self._recent.values.append(seconds)
        else:
            self._add_odd(seconds)

    def _add_odd(self, seconds: float) -> None:
        """Takes in one of the first iterations, or a long one."""
        mean = self.mean
        if self._cold:
            self._cold -= 1
            if mean == 0.0 or seconds < mean:
                self.mean = seconds  # the best guess so far
            return
        if seconds > self._HICCUP * mean and self.count >= 8:
            self._hiccups += 1
            if self._hiccups < self._HICCUPS:
                return
            self.count = 0
        self._hiccups = 0
        count = self.count = self.count + 1
        self.mean = mean + (seconds - mean) * (self._RATE if count > 20 else 1.0 / count)
        self._recent.add(seconds)

    def add_busy(self, seconds: float) -> None:
        """Takes in an iteration beside a commit in the background."""
        if seconds > self._HICCUP * max(self.mean, self.busy):
            return
        self._busy_count += 1
        self.busy += (seconds - self.busy) * max(self._RATE, 1.0 / self._busy_count)

    @property
    def warm(self) -> bool:
        """Whether the mean says something: five iterations after the warm-up."""
        return self.count >= 5

    @property
    def p99(self) -> float:
        return max(self._recent.quantile(0.99), self.mean)

    @property
    def largest(self) -> float:
        """The largest of the last 128 iterations, but not less than the mean; seconds."""
        return max(self._recent.largest, self.mean)

    @property
    def slowdown(self) -> float:
        """The share of time lost while a commit is in the background; 0.0 where that is not
        known."""
        if self._busy_count < 3 or self.busy <= self.mean:
            return 0.0
        return 1.0 - self.mean / self.busy

    def state(self) -> list[float]:
        return [self.mean, self.busy, float(self.count), float(self._busy_count)]

    def restore(self, state: Sequence[float]) -> None:
        """Goes on from what `state` returned. Raises: ValueError for what `state` never gives."""
        if not min(state[:4]) >= 0.0:
            raise ValueError("a time is not negative")
        self.mean, self.busy = state[0], state[1]
        self.count, self._busy_count = int(state[2]), int(state[3])
