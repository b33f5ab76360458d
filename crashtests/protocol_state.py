"""What the check of global commits knows of a job: see `protocol_model.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Content(NamedTuple):
    """Ghost: where the state of a run comes from. Two are equal only if their bytes are."""

    attempt: int = 0  # of all processes: whose training made it
    step: int = 0
    updates: int = 0  # in that attempt
    rollbacks: tuple[int, ...] = ()  # updates before each
    alone: int = 0  # steps trained outside the job
    adapted: int = 0  # attempt that made it fit an edited program


NOTHING = Content()


class Key(NamedTuple):
    """Of a generation. Two versions are of one generation if their keys are equal."""

    term: int  # that made it
    number: int
    step: int
    mark: tuple[int, ...]  # of the draw of its term, and of all updates and roll backs since


def no_run(step: int) -> Key:
    """Of a store without a run in a job; it may hold one that was made without a job."""
    return Key(-1, -1, step, ())


class Version(NamedTuple):
    """What a store holds: the job's record, and ghosts."""

    key: Key
    previous: Key | None  # of what is held, as the record says
    content: Content


class Post(NamedTuple):
    """What a rank gives to a ticket."""

    number: int
    step: int
    kind: str
    mark: tuple[int, ...]
    wish: int  # in how many steps to meet, times 2; one more: without a commit
    stop: bool
    half: bool = False

    def agrees(self, other: Post) -> bool:
        """In what has to be alike."""
        return self[:4] == other[:4]


class Rank(NamedTuple):
    current: Version
    held: Version | None = None
    # of the process
    at: str = "down"
    step: int = 0
    updates: int = 0  # since joining
    rollbacks: tuple[int, ...] = ()  # ghost: updates before each; the mark knows how many
    ended: int = 0  # steps since joining, also those that were rolled back
    meeting: int = 0  # at which of those
    commits: bool = False  # at the meeting
    stops: bool = False
    void: bool = False  # rolled back since the last ticket was started
    half: bool = False  # this rank, or after a ticket any, leaves in the middle of a step
    posts: tuple[Post, ...] = ()
    taken: int = 0  # tickets that were waited for
    landing: Version | None = None  # of commit(wait=False), on its way
    due: tuple[int, ...] | None = None  # mark of the commit whose ticket is to be started
    told: bool = False
    # beside it
    copy: tuple[Version, Version | None] | None = None
    mine: bool = True  # the store is the one that this rank made

    @property
    def alive(self) -> bool:
        return self.at not in ("down", "done")

    def dead(self) -> Rank:
        return Rank(self.current, self.held, posts=self.posts, copy=self.copy, mine=self.mine)


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    attempt: int = 0  # ghost: how often all processes were started
    target: Key | None = None  # that they join at
    term: int = 0
    acknowledged: int = -1  # ghost
    newest: int = -1  # ghost: the highest number that any rank has committed since the last join
    strays: int = 0  # left: roll backs and left-out commits of one rank
    signals: int = 0
    halves: int = 0  # left: of one rank, that leaves in the middle of a step
    copies: int = 0
    acts: int = 0  # left: of people, by hand
    edits: int = 0  # left
    edited: bool = False  # the program, so that the run is made to fit it when all join
    tampered: bool = False  # by hand, so that refusing is right
    strayed: bool = False


class World(NamedTuple):
    """What may happen, and how often."""

    name: str
    ranks: int = 2
    steps: int = 3
    attempts: int = 3
    wait: bool = True  # for each commit; else commit(wait=False)
    wishes: tuple[int, ...] = (2,)  # as in `Post`; the first alone: every step commits
    strays: int = 0
    signals: int = 0
    halves: int = 0
    copies: int = 0
    branch: bool = False  # all stores are copied at once
    acts: tuple[str, ...] = ()
    act_count: int = 0
    edits: int = 0


class Violation(Exception):
    pass


Move = tuple[str, State]
Steps = Iterator[tuple[str, Rank, dict[str, object]]]
"""Of one rank: what it is called, the rank afterwards, what else of the state changes."""
