"""Where a run is in its data: what it has trained on, and what the program holds beside that."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pmstore.torch.habit import Habit


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

    def next(self, state: Any = None) -> Position:
        """Behind one batch more."""
        return Position(self.data_epoch, self.batch + 1, self.start, state)


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
    then a step moves the position on as `habit` says.

    Attributes:
        done: behind the last batch that counts as trained on.
        again: batches held when the run was stored, or when a loop was left: the next loop hands
            them out first, loaded with the generators as they were then.
        ahead: of the loop that goes on.
        doubtful: whether those held are held because it looks so, and not because the program said
            so: a loop without look-ahead counts them as trained on.
        habit: what the program does with each batch.
        forwards: of the model, since the process began.
    """

    def __init__(self, done: Position | None = None) -> None:
        self.done: Position = done or Position()
        self.again: deque[Held] = deque()
        self.ahead: int = 0
        self.doubtful: bool = False
        self.habit: Habit = Habit()
        self.forwards: int = 0
        self._held: deque[Held] = deque()
        self._end: Position | None = None  # once the loop has handed out all it has
        self._step: int | None = None  # that was finished last
        # since the last batch was handed out, or the loop had none
        self._before = 0  # forwards until then
        self._commits = 0
        self._using = False  # whether one was released then: the program trains on that
        self._trained = 0  # of those held, once there are no more

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

    @property
    def seen(self) -> tuple[int | None, tuple[int, int] | None]:
        """Of the habit, to be stored with a commit."""
        if self._using and self._commits:
            return self.habit.so_far(self.forwards - self._before, self._commits)
        return self.habit.forwards, self.habit.group

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
        self._using = False
        self.habit.begin()
        self.ahead = ahead
        self.doubtful = False

    def hand_out(self, behind: Position, before: dict[str, Any] | None) -> None:
        self._used()
        self._held.append(Held(behind, before))
        self._using = len(self._held) > self.ahead
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
        self._used()
        self._end = position
        self._using = False
        self._trained = 0
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
        self.habit = Habit()
        self._end = self._step = None
        self._using = False

    def finish(self, step: int) -> None:
        """A step ends; called again for the same step, if storing it failed, nothing happens.

        Raises: LookaheadError: nobody knows which batches it was of.
        """
        if step == self._step:
            return
        commits = self._commits + 1
        if self._end is not None and self._held:
            self._release(len(self._held) - self._trained_now(commits))
            if not self._held:
                self.done = self._end
        elif self.ahead > 1 and not self.doubtful:
            self.habit.check()
        self._step = step
        self._commits = commits

    def _trained_now(self, commits: int) -> int:
        """How many of those held are trained on since the step before."""
        before = self._trained
        if self.doubtful or (before == 0 and len(self._held) == 1):
            self._trained += 1
        else:
            self._trained = max(
                self.habit.trained(self.forwards - self._before, commits), self._trained
            )
        return self._trained - before

    def _used(self) -> None:
        """The program is done with the batch that was released last, if one was."""
        if self._using:
            self.habit.over(self.forwards - self._before, self._commits)
        self._before = self.forwards
        self._commits = 0

    def _release(self, keep: int) -> None:
        """The first of those held count as trained on, but for so many."""
        while len(self._held) > max(keep, 0):
            self.done = self._held.popleft().behind
