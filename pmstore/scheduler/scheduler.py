"""Decides when to commit, and to which target."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from pmstore.scheduler._models.cost import CostModel
from pmstore.scheduler._models.hazard import HazardModel
from pmstore.scheduler._models.termination import TerminationModel
from pmstore.scheduler._models.timer import IterationTimer
from pmstore.scheduler._models.worth import Worth
from pmstore.scheduler._notices.guard import PreemptionGuard
from pmstore.scheduler._rules.auto import AUTO, Auto
from pmstore.scheduler._rules.outlook import CommitPolicy
from pmstore.scheduler._rules.rules import rule_of
from pmstore.scheduler.foresight import Wish, foresee
from pmstore.scheduler.known import Known, sane_total
from pmstore.scheduler.last_commits import LastCommits
from pmstore.scheduler.schedule_record import Memory, pack, unpack
from pmstore.scheduler.target import (
    NOTHING,
    Decision,
    Target,
    commits_of,
    cost_key,
    decided,
    error_of,
    is_done,
)
from pmstore.scheduler.uptime import Uptime
from pmstore.scheduler.warning import OnceWarner

if TYPE_CHECKING:
    from pmstore import Store

_NOTHING_KNOWN = Known()
_REFRESH_SECONDS = 0.1
_LONG_SECONDS = 3600.0  # an interval of more than this and of a thousand iterations is no iteration


class CommitScheduler:
    """Decides at the end of every training step whether to commit now, and to what, and does it.

        scheduler = CommitScheduler(store=store)
        for batch in batches:
            loss = train(batch)
            scheduler.step(loss)

    It learns iteration times, commit costs, the failure rate (with a store: across restarts) and,
    if the policy asks for it, the loss curve.

    Args:
        policy: the rule. "auto" keeps the expected running time least; `Auto(objective)` is for
            those who want something else; `EveryN`, `EverySeconds`, or one of your own
            (`CommitPolicy`).
        store: open for writing: what is committed. It keeps the scheduler's own state (committed
            with the user's), the lengths of runs, and the failure history (in the record that no
            roll back touches).
        tiers: of the store, nearest first, that it is to be flushed to as well.
        targets: in place of the store's own commit and its tiers: name to a callable that commits
            and returns when the training may go on; fastest first. If it returns something with
            `done` (a method or property) the commit is written in the background until that is
            true.
        clock: seconds, steady. Everything the scheduler knows about time comes from it.
        known: what need not be learned.
        run: name of this run in the store: state is kept by run, and earlier runs tell how runs
            end.
        guard: of preemption notices.
        dirty_bytes: bytes that a commit now would write; None: not known.

    Raises:
        ValueError: no target, more than 8, or tiers beside targets or without a store. TypeError:
            a policy that is none. Bad values of `known` are replaced by sane ones with a warning,
            as bad losses and clocks are in `step`.
    """

    def __init__(
        self,
        policy: CommitPolicy | Literal["auto"] = AUTO,
        *,
        store: Store | None = None,
        tiers: Sequence[str] = (),
        targets: Mapping[str, Callable[[], object]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        known: Known = _NOTHING_KNOWN,
        run: str = "run",
        guard: PreemptionGuard | None = None,
        dirty_bytes: Callable[[], float] | None = None,
    ) -> None:
        self.policy: CommitPolicy = rule_of(policy)
        commits = commits_of(store, tiers, targets)
        self._warn = OnceWarner()
        self._clock, self._dirty_bytes = clock, dirty_bytes
        self._rule = self.policy if isinstance(self.policy, Auto) else Auto()
        self.guard = guard
        self.hazard: HazardModel = known.hazard or HazardModel(store)
        self.timer: IterationTimer = IterationTimer()
        self.total_steps: int | None = sane_total(known.total_steps, self._warn)
        self.targets: list[Target] = [
            Target(i, name, commits[name], cost_key(run, name)) for i, name in enumerate(commits)
        ]
        self.targets_down: list[Target] = self.targets[::-1]
        self._known_rates = known.rates([*commits], self._warn)
        self.decisions: deque[Decision] = deque(maxlen=4096)
        self._memory = Memory(store, run, len(self.targets)) if store is not None else None
        if self._memory is not None and not self.hazard.found:
            self.hazard.adopt(self._memory.counts())
        self.worth: Worth = self._rule.worth(
            lambda: known.termination or self._early_ends(), self.total_steps, self._warn
        )
        self._learns = self.worth.learns
        self._begin()
        self.uptime: Uptime = Uptime(store, self.hazard, self.targets, clock)
        self._recall()
        for target in self.targets:  # a crash takes back what the first commit has cost
            if not target.cost.count and (seconds := self.hazard.cost(target.key)) is not None:
                target.cost.add(seconds)
        self._refresh()

    def _begin(self) -> None:
        """Sets everything as it is at the start of a run."""
        self.steps: int = 0
        self.work_seconds: float = 0.0
        self.elapsed_seconds: float = 0.0
        self.loss: Any = None
        self.hazard_rate: float = 0.0
        self.worth.reset()
        self._flying = 0
        self._last_commits = LastCommits()
        self._refresh_at = 0
        self._longest = _LONG_SECONDS
        self._mark = self._clock()

    # ---- what users call

    def step(self, loss: Any = None, *, commit: bool = False) -> Decision:
        """Ends a training step, and commits if that is due.

        Takes less than 2 us if it does not. Bad losses and clocks never raise; what a commit
        callable raises is passed on, and the scheduler then counts it as not made.

        Args:
            loss: of this step; used by the objectives with a loss curve. A number, or a tensor with
                one element: of many steps, one tensor in 16 is read; one on a CUDA device later,
                without waiting for it.
            commit: in any case, to the first target where the rule names none.
        """
        now = self._clock()
        dt = now - self._mark
        if not 0.0 <= dt <= self._longest:
            dt = self._odd_interval(dt)
        self._mark = now
        if self._flying:
            self.timer.add_busy(dt)
            for target in self.targets:
                if target.handle is not None:
                    self._look_at_handle(target, now)
        else:
            self.timer.add(dt)
        self.work_seconds += dt
        for target in self.targets:
            work = target.work = target.work + dt
            target.risk += target.hazard * dt * work
            target.steps += 1
        steps = self.steps = self.steps + 1
        self.loss = loss
        if (self._learns and self.worth.step(steps, loss)) or steps >= self._refresh_at:
            self._refresh()
        if self.guard is not None:
            if self.guard.noticed():
                return self.wind_up()
            if self.hazard.announced and not self.guard.finished:
                self._last_commits.over(self)
        decision = self.follow()
        return self.commit() if commit and not decision else decision

    def commit(self, target: str | None = None, reason: str = "asked for") -> Decision:
        """Commits now, whatever the rule says, and accounts for it. target: None: the first.

        Raises: KeyError for a target that is none; what the commit raises.
        """
        chosen = self.targets[0] if target is None else {t.name: t for t in self.targets}[target]
        return self._commit(chosen, reason)

    def between(self, *, commit: bool = False) -> Decision:
        """Ends what is no step: a validation, the head of an epoch. Its time is at risk like that
        of steps, but is not taken for the time of one. Commits as `step` does.

        commit: in any case, to the first target where the rule names none.
        """
        now = self._clock()
        dt, self._mark = now - self._mark, now
        if 0.0 <= dt < math.inf:
            for target in self.targets:
                work = target.work = target.work + dt
                target.risk += target.hazard * dt * work
        decision = self.follow() if self.targets[0].steps else NOTHING
        return self.commit() if commit and not decision else decision

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wraps an evaluation or anything else that is no iteration: its time is at risk, but is
        not work."""
        began = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - began
            if 0.0 <= seconds < math.inf:
                self._mark += seconds
                for target in self.targets:
                    target.risk += target.hazard * seconds * target.work

    def learning_rate(self, value: float) -> None:
        """Tells the learning rate, which may begin a new segment of the loss curve."""
        if self._learns:
            self.worth.learning_rate(self.steps, value)

    def expect(self, total_steps: int | None) -> None:
        """Tells how many steps the job has in all, as far as is known now."""
        total = sane_total(total_steps, self._warn)
        if total != self.total_steps:
            self.total_steps = total
            self._refresh()

    def foresee(self, limit_steps: int, busy: Collection[int] = ()) -> Wish:
        """Returns when the rule will commit next, and to what, at most so many steps from now.
        busy: targets that it will not commit to. Changes nothing. See
        `pmstore.scheduler.foresight.foresee`."""
        return foresee(self.policy, self, limit_steps, busy, self._mark)

    def rolled_back(self) -> None:
        """Takes the scheduler back to the last commit, as the user's state was."""
        flying, costs = self._flying, [target.cost for target in self.targets]
        self._begin()
        for target in self.targets:
            target.reset()
        self._recall()
        self._flying = flying
        for target, cost in zip(self.targets, costs, strict=True):
            target.cost = cost  # what was measured stays measured
        self._refresh()

    @property
    def stopping(self) -> bool:
        """Whether a preemption notice came and the last commit has been made: more work would be
        lost."""
        return self.guard is not None and self.guard.finished

    # ---- committing

    def _commit(self, target: Target, reason: str) -> Decision:
        if target.handle is not None:  # one at a time is in the background
            return NOTHING
        decision = decided(
            target, reason, self.targets, self.worth.weight, self.steps, self.work_seconds
        )
        saved = self.targets[: target.number + 1]
        before = [(each.work, each.risk, each.steps) for each in saved]
        for each in saved:
            each.reset()  # before the commit: its state is part of it
        dirty = self._dirty()
        began = self._clock()
        self._expose(began)
        try:
            if self._memory is not None:
                self._memory.write(
                    self.state(), self.work_seconds, self._finished(), self.hazard.counts()
                )
            handle = target.commit()
        except BaseException:
            for each, values in zip(saved, before, strict=True):
                each.work, each.risk, each.steps = values  # nothing is safer than it was
            self._mark = self._clock()
            target.put_off(self._mark - began)
            raise
        ended = self._clock()
        target.cost.add(ended - began, dirty)
        self.hazard.keep_cost(target.key, ended - began)
        if handle is not None and hasattr(handle, "done"):
            target.handle, target.launched, target.stake = handle, ended, before[-1]
            self._flying += 1
            self._look_at_handle(target, ended)
        self._reprice(target)
        if self.guard is not None:
            self.guard.fits(self.timer, self.targets[0].cost)
        self._expose(ended)
        self.hazard.save()
        self._mark = ended
        self.decisions.append(decision)
        return decision

    def _reprice(self, target: Target) -> None:
        target.reprice(self._dirty())
        self._rule.reprice(target)

    def _look_at_handle(self, target: Target, now: float) -> None:
        """Looks whether the commit in the background has ended, and how."""
        if not is_done(target.handle):
            return
        handle, target.handle = target.handle, None
        self._flying -= 1
        error = error_of(handle)
        if error is None:
            if now > target.launched:
                target.cost.add_background(now - target.launched, self.timer.slowdown)
            self._warn.forget(f"flush {target.name}")
            self._last_commits.landed(target, self)
        self._reprice(target)
        if error is not None:
            target.put_back()
            self._warn(
                f"flush {target.name}",
                f"a commit to {target.name!r} failed in the background and is tried again: {error}",
            )

    def wind_up(self) -> Decision:
        """Commits after a preemption notice: commits now, goes on while there is time, and commits
        a last time. `step` calls it. A program that has a guard and ends no step now may call it
        too."""
        assert self.guard is not None
        return self._last_commits.wind_up(self, self.guard, self._clock)

    def announce(self) -> None:
        """Notes that all work was committed after a notice, by whoever: no failure ends this
        run."""
        if self.guard is not None:
            self._last_commits.saved(self, self.guard)

    def follow(self) -> Decision:
        """Asks the rule, and commits to the target that it names, unless that failed a short while
        ago."""
        number = self.policy.decide(self)
        if number < 0 or (target := self.targets[number]).work < target.retry_work:
            return NOTHING
        return self._commit(target, self.policy.reason)

    # ---- models

    def _refresh(self) -> None:
        """Brings hazards up to date, which change slowly: after every 1.5 % more steps, and no more
        often than ten times a second."""
        ahead, mean = self.steps // 64, self.timer.mean
        if self._memory is not None:  # the time lived is saved often enough
            ahead = min(ahead, int(self.hazard.save_seconds / (2.0 * mean)) if mean > 0.0 else 8)
        ahead = max(ahead, int(_REFRESH_SECONDS / mean)) if mean > 0.0 else ahead
        self._refresh_at = self.steps + 1 + ahead
        total = self.total_steps
        self.uptime.finished = total is not None and self.steps >= total
        if total is not None and self.steps < total:
            self._refresh_at = min(self._refresh_at, total)
        elif total == self.steps and self._memory is not None:
            # the run reached its end, whoever commits that
            self._memory.write(self.state(), self.work_seconds, True, self.hazard.counts())
        self._longest = max(_LONG_SECONDS, 1000.0 * self.timer.mean)
        self._expose(self._mark)
        self.hazard.save()
        self.worth.refresh(self.steps, total)
        for target in self.targets:
            if self._known_rates:
                rate = self._known_rates[target.number]
            else:
                rate = self.hazard.rate(target.number, len(self.targets))
            target.rate = rate
            target.hazard = self.worth.hazard(rate)
            self._reprice(target)
        self.hazard_rate = sum(self._known_rates) if self._known_rates else self.hazard.rate()

    def _expose(self, now: float) -> None:
        self.elapsed_seconds += self.uptime.lived(now)

    def _dirty(self) -> float | None:
        return float(self._dirty_bytes()) if self._dirty_bytes is not None else None

    def _finished(self) -> bool:
        """Returns whether the run is at its end. Without a number of steps no end is early."""
        return self.total_steps is None or self.steps >= self.total_steps

    def _early_ends(self) -> TerminationModel:
        """Returns the model of early ends, from the earlier runs in the store."""
        return TerminationModel(self._memory.earlier_runs() if self._memory is not None else ())

    # ---- bad input

    def _odd_interval(self, dt: float) -> float:
        self._warn(
            "clock",
            f"the clock moved by {dt:g} s between two steps, which no iteration takes: counted as "
            "one of the usual length. Put `with scheduler.paused():` around what is no iteration, "
            "and use a steady clock",
        )
        self.uptime.jumped(dt - self.timer.mean)
        return self.timer.mean

    # ---- with the user's state

    def state(self) -> list[float]:
        """Returns the numbers that a commit of the user's state has to hold for the scheduler to go
        on from it."""
        return pack(self)

    def restore(self, state: list[float]) -> None:
        """Goes on from a `state()`, of this scheduler or one with as many targets."""
        self._restore(state)
        self._refresh()

    def _recall(self) -> None:
        """Goes on from the state in the store, if there is one that can be read."""
        if self._memory is None:
            return
        try:
            state = self._memory.read()
            if state is not None:
                self._restore(state)
        # the store's checks do not know what these numbers mean
        except (ValueError, OverflowError, IndexError) as error:
            self._warn("state", f"the stored scheduler state is damaged, it starts anew: {error}")
            self._begin()
            self.timer = IterationTimer()
            for target in self.targets:
                target.reset()
                target.cost = CostModel()

    def _restore(self, state: list[float]) -> None:
        if not unpack(self, state):
            self._warn("state", "the stored scheduler state is of another version: it starts anew")
