"""What a commit to a target costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pmstore.scheduler.timer import Recent


class CostModel:
    """Seconds that a commit to one target takes from the training: C_eff = blocking + slowdown x
    background.

    Blocking time is a fixed part plus one for each dirty byte, by least squares with a forgetting
    factor, where the amounts of dirty bytes are known and differ; else a moving average. Two
    commits in a row that are more than twice, or less than half, of what was expected are a jump
    (another disk, a neighbour on the network): what was known before is dropped.

    Attributes:
        count: commits observed.
        background, slowdown: seconds of writing after the commit returned, and the share of time
            lost meanwhile.
    """

    __slots__ = ("_mean", "_moments", "_odd", "_recent", "background", "count", "slowdown")

    _RATE = 0.2
    _KEEP = 0.9  # of the least squares' weight, at each commit
    _JUMP = 2.0

    def __init__(self) -> None:
        self.count = 0
        self.background = 0.0
        self.slowdown = 0.0
        self._mean = 0.0
        self._odd: tuple[float, float] | None = None
        self._recent = Recent()
        self._moments = [0.0] * 5  # weight, bytes, bytes^2, seconds, bytes x seconds

    def add(self, blocking_seconds: float, dirty_bytes: float | None = None) -> None:
        """A commit that was made. Values that are not finite or negative are ignored."""
        seconds = float(blocking_seconds)
        if not 0.0 <= seconds < math.inf:
            return
        self._watch_for_jump(seconds, dirty_bytes)
        self.count += 1
        # An odd commit counts half: it may be the only one for a long while.
        rate = 0.5 if self._odd is not None else max(self._RATE, 1.0 / self.count)
        self._mean += (seconds - self._mean) * rate
        self._recent.add(seconds)
        if dirty_bytes is not None and 0.0 <= dirty_bytes < math.inf:
            new = (1.0, dirty_bytes, dirty_bytes**2, seconds, dirty_bytes * seconds)
            self._moments = [
                old * self._KEEP + value for old, value in zip(self._moments, new, strict=True)
            ]

    def add_background(self, seconds: float, slowdown: float) -> None:
        """A background part that has ended."""
        if not (0.0 <= seconds < math.inf and 0.0 <= slowdown < 1.0):
            return
        self.background += (seconds - self.background) * (
            1.0 if self.background == 0.0 else self._RATE
        )
        self.slowdown = slowdown

    def _watch_for_jump(self, seconds: float, dirty_bytes: float | None) -> None:
        """Sets `_odd` at a commit unlike those before: (the mean before it, its seconds). The next
        one decides what it was."""
        if self._odd is not None:
            before, odd = self._odd
            self._odd = None
            if self._alike(seconds, odd):
                self.count = 1
                self._mean = odd
                self._recent = Recent([odd])
                self._moments = [0.0] * 5
                return
            self._mean = before  # it was a stray
        if self.count and not self._alike(seconds, self.blocking(dirty_bytes)):
            self._odd = (self._mean, seconds)

    def _alike(self, one: float, other: float) -> bool:
        return one <= self._JUMP * other and other <= self._JUMP * one

    def blocking(self, dirty_bytes: float | None = None) -> float:
        """Expected blocking seconds of a commit of so many bytes."""
        line = self._line()
        if line is None or dirty_bytes is None:
            return self._mean
        return max(line[0] + line[1] * dirty_bytes, 0.0)

    def price(self, dirty_bytes: float | None = None) -> float:
        """C_eff, in seconds; 0.0 before the first commit."""
        return self.blocking(dirty_bytes) + self.slowdown * self.background

    def _line(self) -> tuple[float, float] | None:
        """Fixed seconds and seconds per byte; None where the bytes do not differ enough to tell."""
        weight, x, xx, y, xy = self._moments
        if weight < 2.0:
            return None
        spread = xx / weight - (x / weight) ** 2
        if spread <= (0.1 * x / weight) ** 2:
            return None
        slope = max((xy / weight - x * y / weight**2) / spread, 0.0)
        return max((y - slope * x) / weight, 0.0), slope

    @property
    def fixed_seconds(self) -> float:
        line = self._line()
        return self._mean if line is None else line[0]

    @property
    def seconds_per_byte(self) -> float:
        line = self._line()
        return 0.0 if line is None else line[1]

    @property
    def p99(self) -> float:
        """Of the blocking seconds of the last 128 commits; with fewer than 100 the largest."""
        return max(self._recent.quantile(0.99), self._mean)

    @property
    def largest(self) -> float:
        """Of the blocking seconds of the last 128 commits."""
        return self._recent.largest

    def state(self) -> list[float]:
        return [
            float(self.count),
            self._mean,
            self.background,
            self.slowdown,
            self.p99,
            *self._moments,
        ]

    def restore(self, state: Sequence[float]) -> None:
        """Raises: ValueError for what `state` never gives."""
        if not min(state[:5]) >= 0.0:
            raise ValueError("a commit's cost is not negative")
        self.count = int(state[0])
        self._mean, self.background, self.slowdown = state[1:4]
        self._recent = Recent([state[1], state[4]] if self.count else [])
        self._moments = list(state[5:10])
