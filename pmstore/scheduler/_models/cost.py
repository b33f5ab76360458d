"""Learns what a commit to a target costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pmstore.scheduler._models.timer import Recent

STATE = 13
"""Numbers in `CostModel.state`."""
_JUMP_CHANCE = 0.01  # that an odd commit begins a new cost, before many are known
_STRAYS = 0.05  # share of strays before any commit is known; it counts as much as ten commits


class CostModel:
    """Learns the seconds that a commit to one target takes from the training: C_eff = blocking +
    slowdown x background.

    Blocking time is a mean: typical seconds x tail. Typical is the mean of ordinary commits, which
    take from half to twice of what was expected: a fixed part plus one for each dirty byte, by
    least squares with a forgetting factor, where the amounts of dirty bytes are known and differ;
    else a moving average. The tail is the mean of seconds / typical over all commits: where one in
    ten is 20 times as dear (a log that is written home, a neighbour on the network), it is 2.9.

    An odd commit is a stray, or the first of a new cost (another disk). Strays in a row are rare:
    the share of strays so far, to the power of their number, against 1 % for a new cost. What is
    expected next is weighed by that. At four to one what was known before is dropped: where no
    commit was odd before, at the second.

    Attributes:
        count: commits observed.
        background, slowdown: seconds of writing after the commit returned, and the share of time
            lost meanwhile.
    """

    __slots__ = (
        *("_mean", "_moments", "_odd", "_ordinary", "_recent", "_strays", "_tail", "_tail_before"),
        *("background", "count", "slowdown"),
    )

    _RATE = 0.1
    _TAIL_RATE = 0.01
    _KEEP = 0.9  # of the least squares' weight, at each commit
    _ODD = 2.0
    _MOST = 50.0  # times typical, for the tail: one suspended machine is no habit

    def __init__(self) -> None:
        self.count: int = 0
        self.background: float = 0.0
        self.slowdown: float = 0.0
        self._ordinary = 0
        self._mean = 0.0
        self._tail = self._tail_before = 1.0
        self._strays = _STRAYS
        self._odd: list[float] = []
        self._recent = Recent()
        self._moments = [0.0] * 5  # weight, bytes, bytes^2, seconds, bytes x seconds

    def add(self, blocking_seconds: float, dirty_bytes: float | None = None) -> None:
        """Takes in a commit that was made. Values that are not finite or negative are ignored."""
        seconds = float(blocking_seconds)
        if not 0.0 <= seconds < math.inf:
            return
        self.count += 1
        self._recent.add(seconds)
        typical = self._typical(dirty_bytes) if self.count > 1 else seconds
        if not self._odd:
            self._tail_before = self._tail
        ratio = min(seconds / typical, self._MOST) if typical else 1.0
        self._tail += (ratio - self._tail) * max(1.0 / (self.count + 4.0), self._TAIL_RATE)
        if seconds <= self._ODD * typical and typical <= self._ODD * seconds:
            self._were_strays()
            self._weigh_strays(0.0)
            self._take(seconds, dirty_bytes)
            return
        if self._odd and (self._odd[0] > typical) != (seconds > typical):
            self._were_strays()
        self._odd.append(seconds)
        if self._jump() > 0.8:
            odd, self._odd = self._odd, []
            self._ordinary = 0
            self._moments = [0.0] * 5
            self._recent = Recent(odd)
            self._tail = self._tail_before
            for one in odd:
                self._take(one, None)

    def _take(self, seconds: float, dirty_bytes: float | None) -> None:
        """Takes in an ordinary commit: moves the mean, and the line through the bytes where they
        are known."""
        self._ordinary += 1
        self._mean += (seconds - self._mean) * max(self._RATE, 1.0 / self._ordinary)
        if dirty_bytes is not None and 0.0 <= dirty_bytes < math.inf:
            new = (1.0, dirty_bytes, dirty_bytes**2, seconds, dirty_bytes * seconds)
            self._moments = [
                old * self._KEEP + value for old, value in zip(self._moments, new, strict=True)
            ]

    def _were_strays(self) -> None:
        for _ in self._odd:
            self._weigh_strays(1.0)
        self._odd.clear()

    def _weigh_strays(self, was_one: float) -> None:
        self._strays += (was_one - self._strays) * max(1.0 / (self.count + 10.0), self._TAIL_RATE)

    def _jump(self) -> float:
        """Returns the probability that the odd commits so far are of a new cost."""
        return _JUMP_CHANCE / (_JUMP_CHANCE + self._strays ** len(self._odd))

    def add_background(self, seconds: float, slowdown: float) -> None:
        """Takes in the background part of a commit, which has ended."""
        if not (0.0 <= seconds < math.inf and 0.0 <= slowdown < 1.0):
            return
        self.background += (seconds - self.background) * (
            1.0 if self.background == 0.0 else self._RATE
        )
        self.slowdown = slowdown

    def _typical(self, dirty_bytes: float | None) -> float:
        """Returns the seconds of an ordinary commit of so many bytes."""
        line = self._line()
        if line is None or dirty_bytes is None:
            return self._mean
        return max(line[0] + line[1] * dirty_bytes, 0.0)

    def blocking(self, dirty_bytes: float | None = None) -> float:
        """Returns the expected blocking seconds of a commit of so many bytes."""
        expected = self._typical(dirty_bytes) * self._tail
        if self._odd:
            expected += self._jump() * (sum(self._odd) / len(self._odd) - expected)
        return expected

    def price(self, dirty_bytes: float | None = None) -> float:
        """Returns C_eff, in seconds; 0.0 before the first commit."""
        return self.blocking(dirty_bytes) + self.slowdown * self.background

    def _line(self) -> tuple[float, float] | None:
        """Returns the fixed seconds and the seconds per byte; None where the bytes do not differ
        enough to tell."""
        weight, x, xx, y, xy = self._moments
        if weight < 2.0:
            return None
        spread = xx / weight - (x / weight) ** 2
        if spread <= (0.1 * x / weight) ** 2:
            return None
        slope = max((xy / weight - x * y / weight**2) / spread, 0.0)
        return max((y - slope * x) / weight, 0.0), slope

    @property
    def p99(self) -> float:
        """The 99th percentile of the blocking seconds of the last 128 commits, but not less than
        the mean of ordinary ones. With fewer than 100 commits it is the largest."""
        return max(self._recent.quantile(0.99), self._mean)

    @property
    def largest(self) -> float:
        """The largest of the blocking seconds of the last 128 commits."""
        return self._recent.largest

    def state(self) -> list[float]:
        return [
            float(self.count),
            self._mean,
            self.background,
            self.slowdown,
            self.p99,
            *self._moments,
            float(self._ordinary),
            self._tail,
            self._strays,
        ]

    def restore(self, state: Sequence[float]) -> None:
        """Goes on from what `state` returned. Raises: ValueError for what `state` never gives."""
        if not min(*state[:5], *state[10:]) >= 0.0:
            raise ValueError("a commit's cost is not negative")
        self.count = int(state[0])
        self._mean, self.background, self.slowdown = state[1:4]
        self._recent = Recent([state[1], state[4]] if self.count else [])
        self._moments = list(state[5:10])
        self._ordinary, self._tail, self._strays = int(state[10]), state[11], state[12]
        self._odd = []
