"""Where a run is in its data: what it has trained on, and what the program holds beside that."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Position:
    """Batches behind it in its data epoch, and the states that the epoch's order depends on, at
    its start (None: it has not started).

    Attributes:
        state: of a loader that says where it is, as its `state_dict` gave it; else None.
    """

    data_epoch: int = 0
    batch: int = 0
    start: dict[str, Any] | None = None
    state: Any = field(default=None, compare=False)

    def next(self) -> Position:
        """Returns the position behind one batch more."""
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

    A batch counts as trained on when it is handed out, for its step holds it from then on. A
    program that holds batches says how many, and `use` counts them as it trains on each.

    Attributes:
        done: behind the last batch that counts as trained on.
        again: batches held when the run was stored, or when a loop was left: the next loop hands
            them out first, loaded with the generators as they were then.
        ahead: how many are held, as the program says; 0: none.
    """

    def __init__(self, done: Position | None = None) -> None:
        self.done: Position = done or Position()
        self.again: deque[Held] = deque()
        self.ahead: int = 0
        self._held: deque[Held] = deque()
        self._end: Position | None = None  # once the loop has handed out all it has
        self._prefetched = False

    @property
    def held(self) -> int:
        """Batches that were handed out and not trained on."""
        return len(self._held)

    @property
    def given(self) -> Position:
        """The position behind the last batch that the program was given."""
        return self._held[-1].behind if self._held and not self._prefetched else self.done

    @property
    def waiting(self) -> list[Held]:
        """All batches behind the position that were handed out once."""
        return [*self._held, *self.again]

    def begin(self, ahead: int, *, prefetched: bool = False) -> None:
        """A loop begins. What the one before it held, its program no longer does. prefetched: the
        loop itself holds them, and not the program."""
        self._prefetched = prefetched
        self.again.extendleft(reversed(self._held))
        self._held.clear()
        self._end = None
        self.ahead = ahead

    def hand_out(self, behind: Position, before: dict[str, Any] | None) -> None:
        if self.ahead:
            self._held.append(Held(behind, before))
        else:
            self.done = behind

    def use(self) -> bool:
        """The oldest of those held is trained on. Returns whether there was one."""
        if not self._held:
            return False
        self.done = self._held.popleft().behind
        if not self._held and self._end is not None:
            self.done = self._end
        return True

    def end(self, position: Position) -> None:
        """The loop has no more batches; position: behind all of them."""
        self._end = position
        if not self._held:
            self.done = position

    def skip(self, position: Position) -> None:
        """The program leaves an epoch: what it holds, or has been loaded, is passed over.
        position: where the next one begins."""
        self._held.clear()
        self._end = None
        self.done = position
        self.drop(position.data_epoch)

    def drop(self, data_epoch: int) -> None:
        """Batches of earlier data epochs are not handed out again."""
        self.again = deque(one for one in self.again if one.behind.data_epoch >= data_epoch)

    def restore(self, done: Position) -> None:
        """It is what the store's last commit says; `again` and what belongs to it are told
        afterwards."""
        self.done = done
        self.again.clear()
        self._held.clear()
        self.ahead = 0
        self._end = None
