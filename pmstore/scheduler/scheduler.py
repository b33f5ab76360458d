"""When to commit, and to which target."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from pmstore.scheduler.cost import CostModel
from pmstore.scheduler.hazard import HazardModel
from pmstore.scheduler.known import Known, refuse_wrong_call, sane_total
from pmstore.scheduler.loss_fit import LossFit
from pmstore.scheduler.losses import Losses
from pmstore.scheduler.memory import HUGE, Memory, pack, unpack
from pmstore.scheduler.policies import CommitPolicy, ConvergenceAware
from pmstore.scheduler.preemption import PreemptionGuard
from pmstore.scheduler.target import NOTHING, Decision, Target, commits_of, error_of, is_done
from pmstore.scheduler.termination import TerminationModel
from pmstore.scheduler.timer import IterationTimer

if TYPE_CHECKING:
    from pmstore import Store

_NOTHING_KNOWN = Known()
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
        policy: the rule; None: `ConvergenceAware()`, which keeps the expected running time least.
            docs/SCHEDULER.md has others.
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
        policy: CommitPolicy | None = None,
        *others: NoReturn,
        store: Store | None = None,
        tiers: Sequence[str] = (),
        targets: Mapping[str, Callable[[], object]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        known: Known = _NOTHING_KNOWN,
        run: str = "run",
        guard: PreemptionGuard | None = None,
        dirty_bytes: Callable[[], float] | None = None,
        **more: NoReturn,
    ) -> None:
        refuse_wrong_call(known, others, more)
        self.policy: CommitPolicy = ConvergenceAware() if policy is None else policy
        if not isinstance(self.policy, CommitPolicy):
            raise TypeError(
                f"policy={policy!r}: a rule, such as ConvergenceAware('time') or EveryN(10). What "
                "is committed to goes into store= and tiers=, or targets="
            )
        commits = commits_of(store, tiers, targets)
        self._warned: set[str] = set()
        self._clock = clock
        self._dirty_bytes = dirty_bytes
        self._rule = self.policy if isinstance(self.policy, ConvergenceAware) else None
        self._wants_loss = self._rule is not None and self._rule.wants_loss
        self.guard = guard
        self.hazard = known.hazard or HazardModel(store)
        self.timer = IterationTimer()
        self.fit = LossFit(sane_total(known.total_steps, self._warn))
        self.targets = [Target(i, name, one) for i, (name, one) in enumerate(commits.items())]
        self.targets_down = self.targets[::-1]
        self._known_rates = known.rates([*commits], self._warn)
        self.decisions: deque[Decision] = deque(maxlen=4096)
        self._losses = Losses(self._warn)
        self._memory = Memory(store, run, len(self.targets)) if store is not None else None
        if self._memory is not None and not self.hazard.found:
            self.hazard.adopt(self._memory.counts())
        self.termination = known.termination or TerminationModel(
            self._memory.earlier_runs() if self._memory else ()
        )
        self._begin()
        self._exposed_at = self._mark
        self._recall()
        self._refresh()

    def _begin(self) -> None:
        """As at the start of a run."""
        self.steps = 0
        self.work_seconds = self.elapsed_seconds = 0.0
        self.loss: Any = None
        self.weight = 1.0
        self.hazard_rate = 0.0
        self.losses_seen = 0
        self._flying = 0
        self._refresh_at = 0
        self._longest = _LONG_SECONDS
        self._lr: float | None = None
        self._mark = self._clock()

    # ---- what users call

    def step(self, loss: Any = None) -> Decision:
        """Ends a training step, and commits if that is due.

        Takes less than 2 us when it does not commit. Bad losses and clocks never raise; what a
        commit callable raises is passed on, and the scheduler then counts it as not made.

        Args:
            loss: of this step; used by the objectives with a loss curve. A number, or a tensor with
                one element; one on a CUDA device is read later, without waiting for it.
        """
        now = self._clock()
        dt = now - self._mark
        if not 0.0 <= dt <= self._longest:
            dt = self._odd_interval(dt)
        self._mark = now
        if self._flying:
            self._look_at_flying(now, dt)
        else:
            self.timer.add(dt)
        self.work_seconds += dt
        for target in self.targets:
            work = target.work = target.work + dt
            target.risk += target.hazard * dt * work
            target.steps += 1
        steps = self.steps = self.steps + 1
        self.loss = loss
        if self._wants_loss:
            if loss.__class__ is float and -HUGE < loss < HUGE:
                self.losses_seen += 1
                self.fit.add(steps, loss)
                if self.fit.closed:
                    self._refit()
            else:
                for at, value in self._losses.read(steps, loss):
                    self._add_loss(at, value)
        if steps >= self._refresh_at:
            self._refresh()
        if self.guard is not None and self.guard.noticed():
            return self.wind_up()
        number = self.policy.decide(self)
        if number < 0:
            return NOTHING
        return self._commit(self.targets[number], self.policy.reason)

    def commit(self, target: str | None = None, reason: str = "asked for") -> Decision:
        """Commits now, whatever the rule says, and accounts for it. target: None: the first.

        Raises: KeyError for a target that is none; what the commit raises.
        """
        chosen = self.targets[0] if target is None else {t.name: t for t in self.targets}[target]
        return self._commit(chosen, reason)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around an evaluation or anything else that is no iteration: its time is at risk, but is
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
        """Tells the learning rate. A jump by more than a third starts a new segment of the loss
        curve."""
        old, self._lr = self._lr, value
        if old is None or not (0.0 < old < math.inf and 0.0 < value < math.inf):
            return
        if not 0.75 <= value / old <= 4 / 3:
            self.fit.new_segment(self.steps)

    def expect(self, total_steps: int | None) -> None:
        """Tells how many steps the job has in all, as far as is known now."""
        total = sane_total(total_steps, self._warn)
        if total != self.fit.total_steps:
            self.fit.total_steps = total
            self._refresh()

    def rolled_back(self) -> None:
        """The user's state went back to the last commit: so does the scheduler's."""
        flying, costs = self._flying, [target.cost for target in self.targets]
        self._begin()
        self.fit = LossFit(self.fit.total_steps)
        for target in self.targets:
            target.reset()
        self._recall()
        self._flying = flying
        for target, cost in zip(self.targets, costs, strict=True):
            target.cost = cost  # what was measured stays measured
            self._reprice(target)
        self._refresh()

    @property
    def stopping(self) -> bool:
        """A preemption notice came and the last commit has been made: more work would be lost."""
        return self.guard is not None and self.guard.finished

    # ---- committing

    def _commit(self, target: Target, reason: str) -> Decision:
        if target.handle is not None:  # one at a time is in the background
            return NOTHING
        decision = Decision(
            target.name,
            reason,
            target.risk,
            target.price,
            target.hazard,
            self.weight,
            self._overhead(),
            self.steps,
            self.work_seconds,
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
            raise
        ended = self._clock()
        target.cost.add(ended - began, dirty)
        if handle is not None and hasattr(handle, "done"):
            target.handle, target.launched, target.stake = handle, ended, before[-1]
            self._flying += 1
            self._look_at_handle(target, ended)
        self._reprice(target)
        self._expose(ended)
        self.hazard.save()
        self._mark = ended
        self.decisions.append(decision)
        return decision

    def _reprice(self, target: Target) -> None:
        target.price = target.cost.price(self._dirty()) if target.cost.count else math.nan
        rule = self._rule
        if rule is not None and target.price == target.price:
            target.free_work = target.price / rule.free_budget if rule.free_budget else math.inf
            target.least_work = target.price / rule.max_overhead if rule.max_overhead else 0.0

    def _look_at_flying(self, now: float, dt: float) -> None:
        self.timer.add_busy(dt)
        for target in self.targets:
            if target.handle is not None:
                self._look_at_handle(target, now)

    def _look_at_handle(self, target: Target, now: float) -> None:
        """Whether the commit in the background has ended, and how."""
        if not is_done(target.handle):
            return
        handle, target.handle = target.handle, None
        self._flying -= 1
        error = error_of(handle)
        if error is None:
            if now > target.launched:
                target.cost.add_background(now - target.launched, self.timer.slowdown)
            self._warned.discard(f"flush {target.name}")
        self._reprice(target)
        if error is not None:
            target.put_back()
            self._warn(
                f"flush {target.name}",
                f"a commit to {target.name!r} failed in the background and is tried again: {error}",
            )

    def wind_up(self) -> Decision:
        """After a preemption notice: commit now, go on while there is time, commit a last time.
        `step` calls it; who has a guard and ends no step now may."""
        guard, now = self.guard, self._clock()
        assert guard is not None
        if guard.finished:
            return NOTHING
        target = guard.target_for(self.targets, now)
        if guard.first:
            guard.first = False
            self.hazard.preempted()
            decision = self._commit(target, "preemption notice")
        elif guard.time_left(now) < guard.needed(self.timer, target.cost):
            guard.finished = True
            return self._commit(target, "last commit before preemption")
        else:
            number = self.policy.decide(self)
            if number < 0:
                return NOTHING
            decision = self._commit(self.targets[number], self.policy.reason)
        # Work that could not be committed any more is not begun.
        guard.finished = guard.time_left(self._clock()) < guard.needed(self.timer, target.cost)
        return decision

    # ---- models

    def _refit(self) -> None:
        self.fit.refit(self.steps)
        self._refresh()

    def _refresh(self) -> None:
        """Brings hazards up to date: they change slowly, so this is done after every 1.5 % more
        steps."""
        self._refresh_at = self.steps + 1 + self.steps // 64
        total = self.fit.total_steps
        if total is not None and self.steps < total:
            self._refresh_at = min(self._refresh_at, total)
        elif total == self.steps and self._memory is not None:
            # the run reached its end, whoever commits that
            self._memory.write(self.state(), self.work_seconds, True, self.hazard.counts())
        self._longest = max(_LONG_SECONDS, 1000.0 * self.timer.mean)
        self._expose(self._mark)
        self.hazard.save()
        if self._wants_loss:
            self.weight = self.fit.weight(self.steps)
            if self.steps >= 100 and not self.losses_seen:
                self._warn(
                    "no losses",
                    "the objective needs losses and step() was given none: it acts as "
                    "objective='time'",
                )
        for target in self.targets:
            if self._known_rates:
                rate = self._known_rates[target.number]
            else:
                rate = self.hazard.rate(target.number, len(self.targets))
            target.hazard = (
                self._rule.hazard(rate, self.weight, self.termination.rate) if self._rule else rate
            )
            if self._dirty_bytes is not None:
                self._reprice(target)
        self.hazard_rate = sum(self._known_rates) if self._known_rates else self.hazard.rate()

    def _overhead(self) -> float:
        priced = [target for target in self.targets if target.price == target.price]
        return sum(math.sqrt(2.0 * target.hazard * target.price) for target in priced)

    def _expose(self, now: float) -> None:
        seconds = now - self._exposed_at
        self._exposed_at = now
        if 0.0 < seconds <= self._longest:
            self.elapsed_seconds += seconds
            self.hazard.expose(seconds)

    def _dirty(self) -> float | None:
        return float(self._dirty_bytes()) if self._dirty_bytes is not None else None

    def _finished(self) -> bool:
        """Whether the run is at its end, as far as is known: without a number of steps no end is
        early."""
        return self.fit.total_steps is None or self.steps >= self.fit.total_steps

    def _add_loss(self, step: int, value: float) -> None:
        self.losses_seen += 1
        if not -HUGE < value < HUGE:
            self._warn("nan", f"a loss was {value}: it is left out of the loss curve")
            return
        self.fit.add(step, value)
        if self.fit.closed:
            self._refit()

    # ---- bad input

    def _odd_interval(self, dt: float) -> float:
        self._warn(
            "clock",
            f"the clock moved by {dt:g} s between two steps, which no iteration takes: counted as "
            "one of the usual length. Put `with scheduler.paused():` around what is no iteration, "
            "and use a steady clock",
        )
        return self.timer.mean

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(f"pmstore scheduler: {message}", RuntimeWarning, stacklevel=4)

    # ---- with the user's state

    def state(self) -> list[float]:
        """What a commit of the user's state has to hold for the scheduler to go on from it."""
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
            self.timer, self.fit = IterationTimer(), LossFit(self.fit.total_steps)
            for target in self.targets:
                target.reset()
                target.cost = CostModel()
                self._reprice(target)

    def _restore(self, state: list[float]) -> None:
        if not unpack(self, state):
            self._warn("state", "the stored scheduler state is of another version: it starts anew")
        for target in self.targets:
            self._reprice(target)
