"""How much work a kill could have taken back, at the worst."""

from __future__ import annotations


class Stake:
    """Of one run, in the process that trains it. Work is at stake from the end of one commit to the
    end of the next: so much time, with what the program did in it, a kill takes back.

    Attributes:
        seconds, steps: the most that ever was; each by itself.
    """

    __slots__ = ("_at", "_step", "seconds", "steps")

    def __init__(self, now: float, step: int) -> None:
        """now: of any steady clock. step: the newest that is committed."""
        self.seconds: float = 0.0
        self.steps: int = 0
        self._at = now
        self._step = step

    def see(self, now: float, step: int) -> None:
        """So far the program has come, and nothing was committed."""
        if now - self._at > self.seconds:
            self.seconds = now - self._at
        if step - self._step > self.steps:
            self.steps = step - self._step

    def end(self, now: float, step: int) -> None:
        """Step `step` is committed, or all behind it was taken back."""
        self._at = now
        self._step = step

    def pause(self, seconds: float) -> None:
        """So long the program did nothing that would have to be done again."""
        self._at += seconds
