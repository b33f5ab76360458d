"""Makes the commits between a notice and the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pmstore._engine.history import Announced
from pmstore.scheduler._models.hazard import HazardModel
from pmstore.scheduler._models.timer import IterationTimer
from pmstore.scheduler._notices.guard import PreemptionGuard
from pmstore.scheduler.target import NOTHING, Decision, Target


class Committer(Protocol):
    """Has what the last commits need of a scheduler."""

    targets: list[Target]
    timer: IterationTimer
    hazard: HazardModel
    guard: PreemptionGuard | None

    def follow(self) -> Decision: ...

    def commit(self, target: str | None = None, reason: str = ...) -> Decision: ...


class LastCommits:
    """Says what one scheduler does about a notice, and when the end that it tells of is no failure
    any more: as soon as a commit that was made after the notice has landed. One that takes longer
    than the time that is left saves nothing."""

    def __init__(self) -> None:
        self._target: Target | None = None  # the target that was committed to after the notice

    def wind_up(
        self, scheduler: Committer, guard: PreemptionGuard, clock: Callable[[], float]
    ) -> Decision:
        """Commits at the end of a step if a commit is due before the end. What a commit raises is
        passed on; the next step tries again."""
        if guard.finished:
            return NOTHING
        now = clock()
        target, left = guard.target_for(scheduler.targets, now), guard.time_left(now)
        last = left < guard.needed(scheduler.timer, target.cost)
        if not last and not guard.first:
            if not (decision := scheduler.follow()):
                return NOTHING
        else:
            reason = "preemption notice" if guard.first else "last commit before preemption"
            decision = scheduler.commit(target.name, reason)
            if not decision and left > 0.0:
                return NOTHING  # one in the background is to land first
            guard.first, self._target = False, target
        # Work that could not be committed any more is not begun.
        left = guard.time_left(clock())
        guard.finished = last or left < guard.needed(scheduler.timer, target.cost)
        if self._target is not None and self._target.handle is None:
            self.saved(scheduler, guard)
        return decision

    def landed(self, target: Target, scheduler: Committer) -> None:
        """Notes that a commit in the background has landed."""
        if target is self._target and scheduler.guard is not None:
            self.saved(scheduler, scheduler.guard)

    def saved(self, scheduler: Committer, guard: PreemptionGuard) -> None:
        """Notes that all work that was done before the notice is committed."""
        scheduler.hazard.announce(Announced.PLANNED if guard.planned else Announced.PREEMPTION)

    def over(self, scheduler: Committer) -> None:
        """Notes that the end did not come."""
        self._target = None
        scheduler.hazard.announce(Announced.NOTHING)
