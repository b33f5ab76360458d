"""Says what a commit rule is, and what it may look at."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from pmstore.scheduler._models.hazard import HazardModel
from pmstore.scheduler._models.timer import IterationTimer
from pmstore.scheduler.target import Target

NEVER = -1
"""What a rule answers that commits to no target now."""


class Outlook(Protocol):
    """Has all that a rule may look at: a scheduler, as a rule sees it.

    Attributes:
        steps: finished steps of the run, over all its processes.
        work_seconds: time that these steps took.
        elapsed_seconds: time that the run's processes lived, with commits and everything else, but
            not the time from a kill to the next start.
        loss: of the step that has just ended, as the program gave it; None: it gave none.
        timer: how long an iteration takes.
        hazard: how often the job fails. hazard_rate: the same as one rate, failures per second.
        targets: of commits, fastest first. Of each: `work` (seconds of it since that target's last
            commit), `steps` (since then), `risk`, `price` (C_eff in seconds; NaN before the first
            commit).
        targets_down: the same, slowest first.
    """

    steps: int
    work_seconds: float
    elapsed_seconds: float
    loss: Any
    timer: IterationTimer
    hazard: HazardModel
    hazard_rate: float
    targets: list[Target]
    targets_down: list[Target]


@runtime_checkable
class CommitPolicy(Protocol):
    """A rule that says when to commit. The scheduler measures, accounts and calls the commits; the
    rule looks at it and chooses.

    A rule keeps no state of its own that a roll back would have to undo. One that keeps none at all
    can be asked ahead (see `CommitScheduler.foresee`), as ranks of a job have to.
    """

    reason: str
    """The reason of the last decision to commit, for the log."""

    def decide(self, outlook: Outlook, /) -> int:
        """Returns the number of the target that commits now; -1: none. It is called at the end of
        every step."""
        ...
