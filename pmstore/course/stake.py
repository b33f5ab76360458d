"""Measures how much work a kill could have taken back, at the worst."""

from __future__ import annotations


class Stake:
    """Measures the work at stake of one run, in the process that trains it. Work is at stake from
    the end of one commit to the end of the next: a kill takes back so much time, with what the
    program did in it.

    Attributes:
        seconds, steps: the most that ever was; each by itself.
    """

    __slots__ = ("_at", "_step", "seconds", "steps")

    def __init__(self, now: float, step: int) -> None:
        """Begins to measure. now: of any steady clock. step: the newest that is committed."""
        self.seconds: float = 0.0
        self.steps: int = 0
        self._at = now
        self._step = step

    def see(self, now: float, step: int) -> None:
        """Notes that the program has come to this step, and nothing was committed since."""
        if now - self._at > self.seconds:
            self.seconds = now - self._at
        if step - self._step > self.steps:
            self.steps = step - self._step

    def end(self, now: float, step: int) -> None:
        """Notes that step `step` is committed, or that all behind it was taken back."""
        self._at = now
        self._step = step

    def pause(self, seconds: float) -> None:
        """Notes that for so long the program did nothing that would have to be done again."""
        self._at += seconds
