"""Says when the ranks of a job meet: at steps that all of them know.

At a *meeting* every rank starts a ticket, with or without a commit before it. The ticket says what
each rank wants next, and what they make of it, known at the end of the next step, is when they meet
again and what they do then. At the steps between there is no message. Steps are counted as they
are ended, from the joining on, also those that are rolled back and made again: so ranks that train
together meet also if one of them, by mistake, is at another step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

FAR = 1 << 40
"""Steps: not as far as is known."""
BUSY = 0


@dataclass(frozen=True, slots=True)
class Wants:
    """Says what one rank wants, or what all together do: the least of each number, and any stop.

    Attributes:
        steps: from now, at least 1: when to meet next.
        commit: whether to commit then; else to ask again.
        stop: whether a rank was told to stop.
        tiers: for each: in how many steps to commit and flush to it; FAR: not now; BUSY: an earlier
            flush is under way, and no rank begins another.
    """

    steps: int
    commit: bool
    stop: bool = False
    tiers: tuple[int, ...] = ()

    def encode(self) -> list[int]:
        """Returns the wants as numbers. The least of each number over all ranks is what all
        together do."""
        return [2 * self.steps + (not self.commit), -int(self.stop), *self.tiers]


def decode(least: Sequence[int]) -> Wants:
    """Returns the wants of all together, from the least numbers that all ranks said."""
    return Wants(least[0] // 2, least[0] % 2 == 0, least[1] < 0, tuple(least[2:]))


@dataclass(frozen=True, slots=True)
class Meeting:
    """Says what all ranks do at the same step.

    Attributes:
        at: number of the step, as `Meetings.steps` counts.
        commit: whether they commit.
        target: to what: 0: the store; else to the store and the tier before that number.
        stop: whether they stop then.
        busy: numbers of tiers that are not flushed to, as a rank is not ready.
    """

    at: int
    commit: bool
    target: int = 0
    stop: bool = False
    busy: frozenset[int] = frozenset()


def agreed(now: int, wants: Wants) -> Meeting:
    """Returns the meeting of ranks that all want this: what they do, at which step after `now`.

    >>> agreed(100, Wants(9, commit=True, tiers=(5, BUSY)))
    Meeting(at=105, commit=True, target=1, stop=False, busy=frozenset({2}))
    """
    tiers = {number: steps for number, steps in enumerate(wants.tiers, 1) if BUSY < steps < FAR}
    busy = frozenset(number for number, steps in enumerate(wants.tiers, 1) if steps == BUSY)
    steps = min([wants.steps, *tiers.values()])
    if wants.stop:
        steps = 1
    due = [number for number, wanted in tiers.items() if wanted <= steps]
    commit = wants.stop or bool(due) or (wants.commit and wants.steps == steps)
    return Meeting(now + steps, commit, max(due, default=0), wants.stop, busy)


class Meetings:
    """The meetings of one rank.

    Attributes:
        steps: ended since the job was joined.
        next: the next meeting, or the one at the last step. The first is the joining.
    """

    def __init__(self, wants: Callable[[int, frozenset[int]], Wants], every: bool) -> None:
        """Begins at the joining. wants: called at each meeting with how many steps to look ahead at
        most, and which tiers are busy at some rank. every: all ranks commit every step."""
        self._wants = wants
        self._every = every
        self._wish = Wants(1, every)
        self._told_at = -1
        self._void = False  # rolled back since the last ticket was started
        self.steps: int = 0
        self.next: Meeting = Meeting(0, commit=False)

    # ---- the end of a step

    def end_step(self, commit: bool) -> Meeting | None:
        """Counts a step. Returns what is done at it; None: no meeting.

        commit: all ranks were called to commit this step, whatever they have agreed on.
        """
        self.steps += 1
        if commit and not (self._now and self.next.commit):
            self.next = Meeting(self.steps, commit=True, busy=self.next.busy)
        return self.next if self._now else None

    @property
    def _now(self) -> bool:
        return self.steps >= self.next.at  # later: the step at which it was to be has failed

    @property
    def asking(self) -> bool:
        """Whether this step is a meeting without a commit, whose ticket has not been started."""
        return self._now and not self.next.commit and self._told_at < self.next.at

    def rolled_back(self) -> None:
        """Notes a roll back. All ranks still meet where they had agreed to. But the step to be
        committed there is another one now: they only ask again."""
        self._void = True
        self._soften()

    def _soften(self) -> None:
        if self._void and not (self._every or self.next.stop):
            self.next = Meeting(self.next.at, commit=False, busy=self.next.busy)

    # ---- tickets

    def wish(self, ask: bool) -> Wants:
        """Returns what this rank wants, for the ticket of this meeting. ask: asks the rank anew;
        without it there will be no other meeting, and the rank says what it said before.

        Nobody looks further ahead than back: the pace of the first steps says little.
        """
        if ask:
            self._wish = self._wants(max(self.steps, 1), self.next.busy)
        return self._wish

    def told(self) -> int:
        """Notes that the ticket was started. Returns what `heard` is to be given."""
        self._told_at = self.steps
        self._void = False
        return self.steps

    def heard(self, told: int, least: Sequence[int]) -> None:
        """Notes that the ticket has completed: the next meeting is known. told: when the ticket was
        started; least: of all ranks' wishes."""
        self.next = agreed(told, decode(least))
        self._soften()
