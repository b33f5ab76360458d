"""When a run's steps are committed, and what is flushed then."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch.optim import Optimizer

from pmstore import Store
from pmstore.job.meetings import Meeting, Meetings
from pmstore.mirror.pending_commit import PendingCommit
from pmstore.scheduler import (
    Auto,
    CommitPolicy,
    CommitScheduler,
    CostModel,
    IterationTimer,
    OneTarget,
    PreemptionGuard,
    policy_words,
    rule_of,
)
from pmstore.scheduler._rules.auto import AUTO
from pmstore.scheduler.target import NOTHING, Decision
from pmstore.torch._data.batch_source import Source
from pmstore.torch._job.policy import Together
from pmstore.torch._step.progress import Progress
from pmstore.torch.run_errors import AttachError

MAX_LOSS = 1.0
"""Seconds of work that policy="auto" puts at stake on a disk, if it was told nothing; or more,
where a commit after so long takes more than this share of the time:"""
LOSS_BUDGET = 0.03


def rule_for(
    store: Store,
    policy: CommitPolicy | CommitScheduler | Literal["auto"] | None,
    tiers: Sequence[str],
) -> CommitPolicy | CommitScheduler | None:
    """What attach's `policy` means for this store. None: every step commits.

    "auto" is a rule about what a commit costs here. In memory that is next to nothing: every step
    commits. On a disk commits wait for it.

    Raises: TypeError.
    """
    if policy != AUTO:
        rule = policy if isinstance(policy, CommitScheduler | None) else rule_of(policy)
    elif store.domain == "file":
        rule = Auto(max_loss=MAX_LOSS, loss_budget=LOSS_BUDGET)
    else:
        rule = Auto(max_loss=0.0)
    if isinstance(rule, Auto) and rule.max_loss == 0.0:
        chooses = any(not store.tiers[tier].every for tier in tiers)
        return rule if chooses else None
    return rule


def check_schedule(
    store: Store,
    policy: CommitPolicy | CommitScheduler | None,
    tiers: Sequence[str],
    guard: PreemptionGuard | None,
    *,
    together: bool,
) -> None:
    """Checks a policy before anything is done. together: with the other ranks of a job.

    Raises: AttachError: a scheduler of the program's own does not know a tier, or has a guard
        already.
    """
    if not isinstance(policy, CommitScheduler):
        return
    known = {target.name for target in policy.targets}
    unknown = {tier for tier in tiers if not store.tiers[tier].every} - known
    if unknown:
        raise AttachError(
            f"the scheduler has no tier {min(unknown)!r}: make it with "
            f"CommitScheduler(policy, store=store, tiers=[{min(unknown)!r}])"
        )
    if together and policy.guard is not None:
        raise AttachError(
            "the scheduler has a guard of its own, and the ranks of a job stop together: give the "
            "guard to attach(guard=...), at all ranks, and break out of the loop when "
            "run.stopping is true, or use run.batches(), which does it"
        )
    if guard is not None and policy.guard is not None:
        raise AttachError(
            "the scheduler has a guard already, which attach's guard= would replace: give "
            "it to one of the two. With the scheduler's, break out of the loop when "
            "run.scheduler.stopping is true; with attach's, run.batches() does it"
        )


def describe_schedule(
    store: Store,
    policy: CommitPolicy | CommitScheduler | None,
    tiers: Sequence[str],
    guard: PreemptionGuard | None,
) -> str:
    """Describes a policy in words that are the same at every rank that schedules alike."""
    if isinstance(policy, CommitScheduler):
        targets = ", ".join(target.name for target in policy.targets)
        words = f"{policy_words(policy.policy)} of a scheduler that commits to {targets}"
    else:
        flushed = [tier for tier in tiers if not store.tiers[tier].every]
        words = policy_words(policy) + (f", tiers {', '.join(flushed)}" if flushed else "")
    return words + (", with a guard" if guard is not None else "")


class Schedule:
    """Puts a policy in charge of a run's commits. A rule gets a scheduler, which chooses among the
    tiers if the rule can.

    Attributes:
        scheduler: None: every step commits.
        decision: of the scheduler, about the last commit, or the step that was ended last.
        pending: the commit of the step that was ended last, if it was not waited for.
        capture: writes what Python holds into the store, before each commit.
        foreign: the scheduler is one of the program's own, whose targets commit the store.
        guarded: something may tell the run to stop.
        flushes: tiers are flushed to after commits.
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
            first, *others = policy.targets
            first.commit = self._commit
            for target in others:
                target.commit = partial(self._commit_by, target.commit)
        if guard is not None and policy is not None:
            policy.guard = guard
        self.scheduler = policy
        self.guard = guard
        self.decision: Decision = NOTHING
        self.pending: PendingCommit | None = None
        self.capture: Callable[[], None] = lambda: None
        self.foreign: bool = policy is not None and not self._own
        self.guarded: bool = guard is not None or self.foreign
        self.flushes: bool = bool(self._flushed)
        self._wait = True
        self._together: Together | None = None
        self._stopped = False  # in a job
        self._timer, self._cost = IterationTimer(), CostModel()  # without a scheduler
        self._mark: float | None = None
        self._leave: weakref.finalize[[], Schedule] | None = None
        if guard is not None and guard.enter():
            self._leave = weakref.finalize(self, guard.__exit__)
            self._leave.atexit = False
        if policy is not None:
            policy.steps = progress.finished  # the run may have had another policy before
            if guard is not None:
                guard.fits(policy.timer, policy.targets[0].cost)  # as earlier lives measured

    def join(self) -> Meetings:
        """Joins a job, all ranks of which commit at the same steps from here on."""
        self._together = Together(self._store, self.scheduler, self.guard, self._flushed)
        return self._together.meetings

    def prepare(self, meeting: Meeting | None, counted: bool) -> None:
        """Takes what the ranks of a job agreed on, before a step ends."""
        if self._together is not None and meeting is not None:
            self._together.prepare(meeting, counted)

    def end(
        self,
        loss: float | torch.Tensor | None,
        optimizer: Optimizer | None,
        meeting: Meeting | None = None,
        *,
        counted: bool,
        commit: bool,
        wait: bool,
    ) -> bool:
        """A step has ended; or, if it is not counted, a head, a tail or a loop. Commits the store
        if the policy says so, or commit. Returns whether it did, or has begun to.

        wait: False: `pending` is the commit, which goes on; but the last one before the run stops
        is waited for. meeting: in a job, what all ranks have agreed to do at this step.
        """
        last = (self.guarded or meeting is not None) and self.ends(meeting)
        self.pending, self._wait = None, wait or last
        scheduler = self.scheduler
        if scheduler is None:
            if not self._wait:
                self._commit()
            elif self.guard is not None:
                with self._measured(self.guard):
                    self._commit()
            else:
                self.capture()
                self._store.commit()
            if last:
                self._finish(last)
            return True
        before = self._store.epoch
        commit = commit or last or (meeting is not None and meeting.commit)
        if self.foreign:
            self.capture()
        if counted:
            if optimizer is not None:
                scheduler.learning_rate(optimizer.param_groups[0]["lr"])
            self.decision = scheduler.step(loss, commit=commit and not last)
        else:
            self.decision = scheduler.between(commit=commit and not last)
        if commit and self.pending is None and self._store.epoch == before:
            self._commit()
        if last:
            self._finish(last)
        return self.pending is not None or self._store.epoch != before

    def _commit(self) -> PendingCommit | None:
        """The store, or the handle of that."""
        self.capture()
        if self._wait:
            self._store.commit()
        else:
            self.pending = self._store.commit(wait=False)
        return self.pending

    def _commit_by(self, commit: Callable[[], object]) -> object:
        """That of a tier, which commits the store, and flushes it."""
        self.capture()
        return commit()

    @contextmanager
    def _measured(self, guard: PreemptionGuard) -> Iterator[None]:
        """Measures a commit, and the step before it, for the guard of a run without a policy."""
        began = time.monotonic()
        yield
        ended = time.monotonic()
        if self._mark is not None:
            self._timer.add(began - self._mark)
        self._cost.add(ended - began)
        self._mark = ended
        guard.fits(self._timer, self._cost)

    def ends(self, meeting: Meeting | None) -> bool:
        """Whether the step that ends now is the run's last, as it was told to stop."""
        if self._together is not None:
            return meeting is not None and meeting.stop
        return self.told

    @property
    def told(self) -> bool:
        """Whether the run's guard was told to stop; or that of a scheduler of the program's own,
        which has made its last commit. In a job: and all ranks have agreed to, and done it."""
        if self._together is not None:
            return self.finished
        if self.guard is None:  # a scheduler of the program's own may have one
            return self.scheduler is not None and self.scheduler.stopping
        return self.guard.noticed()

    @property
    def finished(self) -> bool:
        """Whether it was told, and the last commit has been made. In a job that holds for good:
        the ranks' guards may not all know when the notice has expired."""
        if self.guard is None:
            return self.scheduler is not None and self.scheduler.stopping
        return self._stopped or self.guard.finished

    def stop(self) -> None:
        """Told to stop, and no step is under way: commits what is finished."""
        before, self._wait, self.decision = self._store.epoch, True, NOTHING
        if self.scheduler is not None:
            self.decision = self.scheduler.wind_up()
        if self._store.epoch == before:
            self._commit()
        self._finish(True)

    def spare(self) -> None:
        """The program ends, and loses nothing."""
        if self.scheduler is not None:
            self.scheduler.uptime.spared = True

    def _finish(self, told: bool) -> None:
        """A run does not go on after the commit that a notice has brought about."""
        if told and self.guard is not None:
            self.guard.first, self.guard.finished = False, True
            if self._together is not None:
                self._stopped = True
                self._together.stopped()
            if self.scheduler is not None:
                self.scheduler.announce()

    def close(self) -> None:
        """The run ends: the signal handlers of before come back."""
        if self._leave is not None:
            self._leave()
        if self._together is not None:
            self._together.close()

    def flush(self) -> None:
        """Flushes after a commit, to the tiers that the policy does not choose among. The last
        commit is flushed to busy tiers too."""
        if self._together is not None and not self.finished:
            self._together.flush()
            return
        for tier in self._flushed:
            if self.finished:
                self._store.flush(tier)
            else:
                self._store.flush_if_idle(tier)

    def rolled_back(self) -> None:
        """Follows a roll back, after the progress has."""
        if self.scheduler is not None:
            self.scheduler.rolled_back()
            self.scheduler.steps = self._progress.finished

    def expect(self, epochs: int | None, source: Source) -> int | None:
        """Tells the scheduler how many steps the job has: as many for each batch as it had so
        far. Returns it; None: that is not known."""
        length = None if epochs is None else source.length()
        if epochs is None or length is None:
            return None
        finished, position = self._progress.finished, self._progress.place.done
        taken = position.data_epoch * length + position.batch
        share = finished / taken if taken and finished else 1.0
        return self.expect_steps(max(round(epochs * length * share), 1))

    def expect_steps(self, total: int) -> int:
        """Tells the scheduler how many steps the job has. Returns it."""
        if self.scheduler is not None and self._own:
            self.scheduler.expect(total)
        return total

    def expect_no_more(self) -> None:
        """The job ends here, if it has begun."""
        if self.scheduler is not None and self._own and self._progress.finished:
            self.scheduler.expect(self._progress.finished)
