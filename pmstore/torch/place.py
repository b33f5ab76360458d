"""Where a run is in its data: what it has trained on, and what the program holds beside that."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Position:
    """Batches behind it in its data epoch, and the states that the epoch's order depends on, at
    its start (None: it has not started)."""

    data_epoch: int = 0
    batch: int = 0
    start: dict[str, Any] | None = None

    def next(self) -> Position:
        """Behind one batch more."""
        return Position(self.data_epoch, self.batch + 1, self.start)


@dataclass(frozen=True, slots=True)
class Held:
    """A batch that was handed out and not trained on.

    Attributes:
        behind: the position once it was trained on.
        before: the generators' states before it was loaded; None: loading drew nothing. Of an
            epoch's first batch they are `behind.start`.
    """

    behind: Position
    before: dict[str, Any] | None


class Place:
    """The position that a commit stores, and what follows it.

    The program holds `ahead` batches at a commit that it has not trained on: look-ahead, as
    prefetchers have it. So handing out one batch moves the position behind the one that many
    before it. At the end of the data the batches held are trained on while none is handed out;
    then each step moves the position on by as many batches as the steps before did.

    Attributes:
        done: behind the last batch that counts as trained on.
        again: batches held when the run was stored, or when a loop was left: the next loop hands
            them out first, loaded with the generators as they were then.
        ahead: of the loop that goes on.
        doubtful: whether those held are held because it looks so, and not because the program said
            so: a loop without look-ahead counts them as trained on.
        accumulation: batches a step; None: not known yet.
    """

    def __init__(self, done: Position | None = None) -> None:
        self.done = done or Position()
        self.again: deque[Held] = deque()
        self.ahead = 0
        self.doubtful = False
        self.accumulation: int | None = None
        self._held: deque[Held] = deque()
        self._end: Position | None = None  # once the loop has handed out all it has
        self._trained = 0  # batches that `done` moved by since the last step
        self._last = 0  # by how many it moved for the step before that
        self._step: int | None = None  # that was finished last

    @property
    def given(self) -> Position:
        """Behind the last batch that was handed out."""
        if self._end is not None and self.doubtful:
            return self._end
        return self._held[-1].behind if self._held else self.done

    @property
    def waiting(self) -> list[Held]:
        """All batches behind the position that were handed out once."""
        return [*self._held, *self.again]

    def begin(self, ahead: int) -> None:
        """A loop begins. What the one before it held, its program no longer does."""
        if self._end is not None:
            self.done = self._end  # all of it was the program's to train on
        else:
            self.again.extendleft(reversed(self._held))
            if self.doubtful and ahead == 0 and self.again:
                self.done = self.again[-1].behind
                self.again.clear()
        self._held.clear()
        self._end = None
        self._trained = 0
        self.ahead = ahead
        self.doubtful = False

    def hand_out(self, behind: Position, before: dict[str, Any] | None) -> None:
        self._held.append(Held(behind, before))
        self._release(self.ahead)

    def doubt(self) -> None:
        """The program seems to hold one batch more than it says: keep it as held, for now."""
        self.ahead += 1
        self.doubtful = True

    def believe(self, ahead: int) -> None:
        """It does not."""
        self.ahead = ahead
        self.doubtful = False
        self._release(ahead)

    def end(self, position: Position) -> None:
        """The loop has no more batches; position: behind all of them."""
        self._end = position
        if not self._held:
            self.done = position

    def restore(self, done: Position) -> None:
        """It is what the store's last commit says; `again` and what belongs to it are told
        afterwards."""
        self.done = done
        self.again.clear()
        self._held.clear()
        self.ahead = 0
        self.doubtful = False
        self.accumulation = None
        self._end = self._step = None
        self._trained = self._last = 0

    def finish(self, step: int) -> None:
        """A step ends; called again for the same step, if storing it failed, nothing happens."""
        if step == self._step:
            return
        self._step = step
        if self._end is not None and self._held:
            if self.accumulation is None:
                self.accumulation = self._trained + 1
            self._release(len(self._held) - max(self.accumulation - self._trained, 1))
            self._trained = 0
            if not self._held:
                self.done = self._end
        elif self._trained:
            # One that differs may be a step that was left out: nan, or the end of an epoch.
            if self.accumulation is None or self._trained == self._last:
                self.accumulation = self._trained
            self._last, self._trained = self._trained, 0

    def _release(self, keep: int) -> None:
        """The first of those held count as trained on, but for so many."""
        while len(self._held) > max(keep, 0):
            self.done = self._held.popleft().behind
            self._trained += 1
