"""What a program does with each batch, as far as it does the same with all of them.

At the end of the data a program that holds batches trains on them while none is handed out. Which
of them a commit is of is told from what was seen before: so many forwards a batch; or, where these
differ, so many commits for so many batches.
"""

from __future__ import annotations

from pmstore.torch.errors import LookaheadError


class Habit:
    """Of one loop; known at its beginning is that of the loop before.

    Attributes:
        forwards: of the model with each batch; 0: none are seen; -1: they differ; None: not known.
        group: batches, and commits after them; (0, 0): they differ; None: not known.
    """

    def __init__(self) -> None:
        self.forwards: int | None = None
        self.group: tuple[int, int] | None = None
        self._waiting = 0  # batches since the last commit
        self._fresh = True
        self._fresh_group = True

    def begin(self) -> None:
        """A loop begins, which may do otherwise than the one before."""
        self._waiting = 0
        self._fresh = self._fresh_group = True

    def over(self, forwards: int, commits: int) -> None:
        """The program is done with a batch."""
        if self._fresh or self.forwards is None:
            self.forwards = forwards
            self._fresh = False
        elif forwards != self.forwards:
            self.forwards = -1
        self._waiting += 1
        if not commits:
            return
        group, self._waiting = (self._waiting, commits), 0
        if self._fresh_group or self.group is None:
            self.group = group
            self._fresh_group = False
        elif group != self.group:
            self.group = (0, 0)

    def so_far(self, forwards: int, commits: int) -> tuple[int | None, tuple[int, int] | None]:
        """What to store of it in the middle of a batch: a process that is killed soon has seen no
        batch to its end."""
        known, group = self.forwards, self.group
        if known is None:
            known = forwards
        elif 0 < known < forwards:
            known = -1
        return known, group or (self._waiting + 1, commits)

    def check(self) -> None:
        """Raises: LookaheadError: of the batches held at the end nobody will know which were
        trained on."""
        if self.forwards in (-1, 0) and self.group == (0, 0):
            raise LookaheadError(
                "the program holds two batches or more that it has not trained on, and does "
                "something else with each batch: neither the forwards of a batch nor the commits "
                "are always the same number. So at the end of the data nobody knows which batches "
                f"a commit is of. {_WAYS}"
            )

    def trained(self, forwards: int, commits: int) -> int:
        """How many of the batches held were trained on, since the last was handed out.

        Args: forwards, commits: since then; this commit among them.

        Raises: LookaheadError: it is not known.
        """
        if self.forwards is None and self.group is None and forwards == 1:
            self.forwards = 1  # the first epoch is as short as what is held
        if self.forwards is not None and self.forwards > 0:
            return -(-forwards // self.forwards)
        if self.group is not None and self.group[0]:
            batches, each = self.group
            return batches - self._waiting % batches + batches * ((commits - 1) // each)
        raise LookaheadError(
            "the data epoch is at its end, the program holds two batches or more, and it was not "
            "seen before how many forwards or commits it makes with one: so nobody knows which "
            f"batches this commit is of. {_WAYS}, or go through several data epochs in one loop, "
            "run.batches(epochs=...)"
        )


_WAYS = (
    "Hold one batch at most, run.batches(ahead=1), or none: DataLoader(num_workers=..., "
    "prefetch_factor=...) loads ahead as well"
)
