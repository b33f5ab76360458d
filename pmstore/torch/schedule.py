"""When a run's steps are committed, and what is flushed then."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from pmstore import Store
from pmstore.scheduler import CommitPolicy, CommitScheduler, OneTarget, PreemptionGuard
from pmstore.torch.errors import AttachError
from pmstore.torch.progress import Progress
from pmstore.torch.source import Source


def check_schedule(
    store: Store,
    policy: CommitPolicy | CommitScheduler | None,
    tiers: Sequence[str],
    guard: PreemptionGuard | None,
) -> None:
    """Before anything is done. Raises: AttachError: a scheduler of the program's own that does not
    know a tier, or has a guard already."""
    if not isinstance(policy, CommitScheduler):
        return
    known = {target.name for target in policy.targets}
    unknown = {tier for tier in tiers if not store.tiers[tier].every} - known
    if unknown:
        raise AttachError(
            f"the scheduler has no tier {min(unknown)!r}: make it with "
            f"CommitScheduler(policy, store=store, tiers=[{min(unknown)!r}])"
        )
    if guard is not None and policy.guard is not None:
        raise AttachError(
            "the scheduler has a guard already, which attach's guard= would replace: give "
            "it to one of the two. With the scheduler's, break out of the loop when "
            "run.scheduler.stopping is true; with attach's, run.batches() does it"
        )


class Schedule:
    """Puts a policy in charge of a run's commits. A rule gets a scheduler, which chooses among the
    tiers if the rule can.

    Attributes:
        scheduler: None: every step commits.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        progress: Progress,
        policy: CommitPolicy | CommitScheduler | None = None,
        tiers: Sequence[str] = (),
        guard: PreemptionGuard | None = None,
    ) -> None:
        """They were checked: see `check_schedule`."""
        self._store = store
        self._progress = progress
        # it is told how long the job will be; a scheduler of the program's own is not
        self._own = policy is not None and not isinstance(policy, CommitScheduler)
        self._flushed: list[str] = []  # after each commit if they are idle
        tiers = [tier for tier in tiers if not store.tiers[tier].every]
        if policy is None or isinstance(policy, OneTarget):
            self._flushed, tiers = tiers, []
        if policy is not None and not isinstance(policy, CommitScheduler):
            policy = CommitScheduler(policy, store=store, tiers=tiers, run=name)
        if guard is not None and policy is not None:
            policy.guard = guard
        self.scheduler = policy
        self.guard = guard
        self._leave: weakref.finalize[[], Schedule] | None = None
        if guard is not None and guard.enter():
            self._leave = weakref.finalize(self, guard.__exit__)
            self._leave.atexit = False
        if policy is not None:
            policy.steps = progress.finished  # the run may have had another policy before

    def commit(self, loss: float | torch.Tensor | None, optimizer: Optimizer | None) -> bool:
        """Commits the store if the policy says so. Returns whether it did."""
        before, told = self._store.epoch, self.told
        if self.scheduler is not None:
            if optimizer is not None:
                self.scheduler.learning_rate(optimizer.param_groups[0]["lr"])
            self.scheduler.step(loss)
        if self.scheduler is None or (told and self._store.epoch == before):
            self._store.commit()
        self._finish(told)
        return self._store.epoch != before

    @property
    def told(self) -> bool:
        """Whether the run's guard was told to stop."""
        return self.guard is not None and self.guard.noticed()

    @property
    def finished(self) -> bool:
        """Whether it was told, and the last commit has been made."""
        return self.guard is not None and self.guard.finished

    def stop(self) -> None:
        """Told to stop, and no step is under way: commits what is finished."""
        before = self._store.epoch
        if self.scheduler is not None:
            self.scheduler.wind_up()
        if self._store.epoch == before:
            self._store.commit()
        self._finish(True)

    def _finish(self, told: bool) -> None:
        """A run does not go on after the commit that a notice has brought about."""
        if told and self.guard is not None:
            self.guard.first, self.guard.finished = False, True

    def close(self) -> None:
        """The run ends: the signal handlers of before come back."""
        if self._leave is not None:
            self._leave()

    def flush(self) -> None:
        """After a commit: to the tiers that the policy does not choose among. The last one is
        flushed to busy tiers too."""
        for tier in self._flushed:
            if self.finished:
                self._store.flush(tier)
            else:
                self._store.flush_if_idle(tier)

    def rolled_back(self) -> None:
        """After the progress has followed."""
        if self.scheduler is not None:
            self.scheduler.rolled_back()
            self.scheduler.steps = self._progress.finished

    def expect(self, epochs: int | None, source: Source) -> None:
        """Tells the scheduler how many steps the job has: as many for each batch as it had so
        far."""
        if self.scheduler is None or not self._own or epochs is None:
            return
        length = source.length()
        if length is None:
            return
        finished, position = self._progress.finished, self._progress.place.done
        taken = position.data_epoch * length + position.batch
        share = finished / taken if taken and finished else 1.0
        self.scheduler.expect(max(round(epochs * length * share), 1))

    def expect_no_more(self) -> None:
        """The job ends here."""
        if self.scheduler is not None and self._own:
            self.scheduler.expect(self._progress.finished)
