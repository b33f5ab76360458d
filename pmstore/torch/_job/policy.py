"""When a run's steps are committed in a job of several ranks."""

from __future__ import annotations

from collections.abc import Sequence

from pmstore import Store
from pmstore.job.meetings import BUSY, FAR, Meeting, Meetings, Wants
from pmstore.scheduler import Agreed, Auto, CommitScheduler, EveryN, PreemptionGuard


class Together:
    """This rank's rule, guard and tiers say what it wants; what all have agreed on is done.

    Attributes:
        meetings: of the ranks.
    """

    def __init__(
        self,
        store: Store,
        scheduler: CommitScheduler | None,
        guard: PreemptionGuard | None,
        flushed: Sequence[str],
    ) -> None:
        """flushed: tiers that are flushed to after commits, beside the scheduler's targets."""
        self._store = store
        self._scheduler = scheduler
        self._guard = guard
        self._flushed = flushed
        self._busy: frozenset[int] = frozenset()  # of the last meeting
        every = scheduler is None
        if scheduler is not None:
            rule = scheduler.policy
            every = (isinstance(rule, EveryN) and rule.interval == 1) or (
                isinstance(rule, Auto) and rule.max_loss == 0.0
            )
            self._agreed = scheduler.policy = Agreed(rule)
            scheduler.guard = None  # one rank's notice is no reason for this one to stop
        self.meetings: Meetings = Meetings(self._wants, every)

    def close(self) -> None:
        """The run ends: a scheduler of the program's own has its rule again."""
        if self._scheduler is not None and self._scheduler.policy is self._agreed:
            self._scheduler.policy = self._agreed.policy
            self._scheduler.guard = self._guard

    # ---- what this rank wants

    def _wants(self, limit_steps: int, busy: frozenset[int]) -> Wants:
        guard = self._guard
        if guard is not None and guard.finished:
            return Wants(1, commit=True, tiers=self._tiers())
        if guard is not None and guard.noticed():
            return Wants(1, commit=True, stop=True, tiers=self._tiers(1, self._last_target(guard)))
        if self._scheduler is None:
            return Wants(1, commit=True, tiers=self._tiers())
        wish = self._scheduler.foresee(limit_steps, () if self._flushed else busy)
        # Where another rank has no room for that flush, they meet then to ask again.
        return Wants(wish.steps, wish.target == 0, tiers=self._tiers(wish.steps, wish.target))

    def _tiers(self, steps: int = FAR, target: int = 0) -> tuple[int, ...]:
        """steps: in how many the target is to be flushed to."""
        if self._scheduler is None or self._flushed:
            tiers = self._store._open_tiers()
            return tuple(FAR if tiers.idle(name) else BUSY for name in self._flushed)
        return tuple(
            BUSY if tier.handle is not None else steps if tier.number == target else FAR
            for tier in self._scheduler.targets[1:]
        )

    def _last_target(self, guard: PreemptionGuard) -> int:
        if self._scheduler is None:
            return 0
        return guard.target_for(self._scheduler.targets, self._scheduler._clock()).number

    # ---- what all do

    def prepare(self, meeting: Meeting, counted: bool) -> None:
        """Takes what the ranks agreed on, before the step ends. counted: the scheduler counts that
        step."""
        self._busy = meeting.busy
        scheduler = self._scheduler
        if scheduler is not None and meeting.commit:
            scheduler.targets[max(meeting.target, 0)].retry_work = 0.0  # what all do is not put off
            self._agreed.agree(scheduler.steps + counted, meeting.target)

    def stopped(self) -> None:
        """All ranks have."""
        if self._scheduler is not None:
            self._scheduler.guard = self._guard  # which says so

    def flush(self) -> None:
        """Flushes after a commit, to the tiers that were idle at all ranks when they agreed on
        it."""
        for number, tier in enumerate(self._flushed, 1):
            if number not in self._busy:
                self._store.flush(tier)
