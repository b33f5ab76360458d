"""Estimates how likely the user ends the run early."""

from __future__ import annotations

import math
from collections.abc import Iterable


class TerminationModel:
    """Estimates the early ends per second of work, from the lengths of earlier runs: ends before
    time / seconds of all runs.

    The maximum-likelihood rate of a constant hazard with censoring: a run that reached its end was
    not terminated, but adds its seconds. Without earlier runs it is 0: nothing is assumed of a
    user.

    >>> TerminationModel([(1800.0, False), (7200.0, True)]).rate * 3600
    0.4
    """

    def __init__(self, runs: Iterable[tuple[float, bool]] = ()) -> None:
        """Takes in the earlier runs. runs: (seconds of work, whether it reached its end)."""
        self.ended_early: int = 0
        self.seconds: float = 0.0
        for seconds, finished in runs:
            self.add(seconds, finished)

    def add(self, seconds: float, finished: bool) -> None:
        """Takes in one earlier run. Lengths that are not finite or not positive are ignored."""
        if 0.0 < seconds < math.inf:
            self.seconds += seconds
            self.ended_early += not finished

    @property
    def rate(self) -> float:
        """The early ends per second of work; 0.0 without earlier runs."""
        return self.ended_early / self.seconds if self.seconds else 0.0
