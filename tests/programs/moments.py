"""What a life counts, and what happens to it at which count."""

from __future__ import annotations

import os
import signal

from pmstore.testing import primitives_seen


class Boom(Exception):
    """What is raised in the middle of a step."""


class Life:
    """Counts moments of the program and calls of Python functions, and does what is planned.

    unit, at: when: at that moment, call, or persistence primitive. deed: kill, term, raise,
    interrupt, break.
    """

    def __init__(self, journal: int, unit: str, at: int, deed: str) -> None:
        self.counts = {"moment": 0, "call": 0}
        self._journal = journal
        self._unit, self._at, self._deed = unit, at, deed
        self._stopped = False
        self._begun = False

    def note(self, *words: object) -> None:
        """A line that outlives a SIGKILL."""
        os.write(self._journal, (" ".join(map(str, words)) + "\n").encode())

    def moment(self, begun: bool) -> bool:
        """Before each statement. Returns whether the loop is to be left."""
        self._begun = begun
        if not self._stopped:
            self._count("moment")
        return self._stopped

    def call(self, frame: object, event: str, argument: object) -> None:
        """A function for sys.setprofile."""
        if event == "call":
            self._count("call")

    def _count(self, unit: str) -> None:
        self.counts[unit] += 1
        if unit == self._unit and self.counts[unit] == self._at:
            self.note("fired", self._deed, int(self._begun))
            self._do()

    def _do(self) -> None:
        if self._deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._deed == "term":
            signal.raise_signal(signal.SIGTERM)
        elif self._deed == "raise":
            raise Boom
        elif self._deed == "interrupt":
            raise KeyboardInterrupt
        else:
            self._stopped = True

    def reached(self, step: int) -> None:
        """The program's state is there: what follows are steps."""
        counts = {**self.counts, "primitive": primitives_seen()}
        self.note("reached", step, *counts.values())
