"""When to commit, and to which tier."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pmstore.scheduler.cost import CostModel
from pmstore.scheduler.device_loss import DeviceLoss
from pmstore.scheduler.hazard import TIERS_MAX, HazardModel, default_shares
from pmstore.scheduler.loss_fit import LossFit
from pmstore.scheduler.memory import Memory
from pmstore.scheduler.policies import CommitPolicy, ConvergenceAware, Objective
from pmstore.scheduler.preemption import PreemptionGuard
from pmstore.scheduler.target import NOTHING, Decision, Target, error_of, is_done
from pmstore.scheduler.termination import TerminationModel
from pmstore.scheduler.timer import IterationTimer

if TYPE_CHECKING:
    from pmstore import Store

__all__ = ["CommitScheduler"]

_LONG_SECONDS = 3600.0  # an interval of more than this and of a thousand iterations is no iteration
_HUGE = 1e50  # no loss; its square would overflow
_FORMAT = 1.0


class CommitScheduler:
    """Decides at the end of every training step whether to commit now, to which tier, and does it.

        scheduler = CommitScheduler({"store": store.commit}, store=store)
        for batch in batches:
            loss = train(batch)
            scheduler.step(loss)

    It learns iteration times, commit costs, the failure rate (with a store: across restarts) and,
    if the objective asks for it, the loss curve. `ConvergenceAware` tells the rule; any other
    `CommitPolicy` takes its place through `policy`.

    Args:
        tiers: name to a callable that commits to it and returns when the training may go on;
            fastest first. If it returns something with `done` (a method or property) the commit is
            written in the background until that is true.
        objective: "time" (default), "balanced", "progress" or "explore": see `ConvergenceAware` and
            docs/SCHEDULER.md.
        total_steps: of the job; None: not known. Used by the loss curve alone.
        failure_rate_per_second: None: learned. One rate, split over the tiers by
            `HazardModel.share`, or one for each name.
        free_budget: also commit when that costs at most this share of the work since the last
            commit; 0: never.
        clock: seconds, steady. Everything the scheduler knows about time comes from it.
        store: open for writing: keeps the scheduler's own state (committed with the user's), the
            lengths of runs, and the failure history (in the record that no roll back touches).
        max_overhead: no commit while it costs more than this share of the work since the last one;
            None: no cap.
        policy: another rule; objective, free_budget and max_overhead are then without meaning.
        run: name of this run in the store: state is kept by run, and earlier runs tell how runs
            end.
        guard: of preemption notices.
        hazard, termination: models to use in place of those made from the store.
        dirty_bytes: bytes that a commit now would write; None: not known.

    Raises:
        ValueError: no tier, more than 8, or an objective that is none. Bad values of the other
            arguments are replaced by sane ones with a warning, as bad losses and clocks are in
            `step`.
    """

    def __init__(
        self,
        tiers: Mapping[str, Callable[[], object]],
        objective: Objective = "time",
        total_steps: int | None = None,
        failure_rate_per_second: float | Mapping[str, float] | None = None,
        free_budget: float = 0.001,
        clock: Callable[[], float] = time.monotonic,
        store: Store | None = None,
        *,
        max_overhead: float | None = None,
        policy: CommitPolicy | None = None,
        run: str = "run",
        guard: PreemptionGuard | None = None,
        hazard: HazardModel | None = None,
        termination: TerminationModel | None = None,
        dirty_bytes: Callable[[], float] | None = None,
    ) -> None:
        if not 1 <= len(tiers) <= TIERS_MAX:
            raise ValueError(
                f"tiers: from 1 to {TIERS_MAX} of them, fastest first, not {len(tiers)}"
            )
        self._warned: set[str] = set()
        self._clock = clock
        self._dirty_bytes = dirty_bytes
        self.policy: CommitPolicy = policy or ConvergenceAware(
            objective, free_budget=self._sane_budget(free_budget), max_overhead=max_overhead
        )
        self._rule = self.policy if isinstance(self.policy, ConvergenceAware) else None
        self._wants_loss = self._rule is not None and self._rule.wants_loss
        self.guard = guard
        self.hazard = hazard or HazardModel(store)
        self.timer = IterationTimer()
        self.fit = LossFit(self._sane_total(total_steps))
        self.tiers = [Target(i, name, commit) for i, (name, commit) in enumerate(tiers.items())]
        self.tiers_down = self.tiers[::-1]
        self._known_rates = self._sane_rates(failure_rate_per_second)
        self.decisions: deque[Decision] = deque(maxlen=4096)
        self._device_loss: DeviceLoss | None = None
        self._memory = Memory(store, run, len(self.tiers)) if store is not None else None
        if self._memory is not None and not self.hazard.found:
            self.hazard.adopt(self._memory.counts())
        self.termination = termination or TerminationModel(
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
        self._losses = 0
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
        for tier in self.tiers:
            work = tier.work = tier.work + dt
            tier.risk += tier.hazard * dt * work
            tier.steps += 1
        steps = self.steps = self.steps + 1
        self.loss = loss
        if self._wants_loss:
            if loss.__class__ is float and -_HUGE < loss < _HUGE:
                self._losses += 1
                self.fit.add(steps, loss)
                if self.fit.closed:
                    self._refit()
            else:
                self._take_loss(loss)
        if steps >= self._refresh_at:
            self._refresh()
        if self.guard is not None and self.guard.noticed():
            return self._wind_up(now)
        number = self.policy.decide(self)
        if number < 0:
            return NOTHING
        return self._commit(self.tiers[number], self.policy.reason)

    def commit(self, tier: str | None = None, reason: str = "asked for") -> Decision:
        """Commits now, whatever the rule says, and accounts for it. tier: None: the first.

        Raises: KeyError for a tier that is none; what the commit raises.
        """
        chosen = self.tiers[0] if tier is None else {t.name: t for t in self.tiers}[tier]
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
                for tier in self.tiers:
                    tier.risk += tier.hazard * seconds * tier.work

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
        total = self._sane_total(total_steps)
        if total != self.fit.total_steps:
            self.fit.total_steps = total
            self._refresh()

    def rolled_back(self) -> None:
        """The user's state went back to the last commit: so does the scheduler's."""
        flying, costs = self._flying, [tier.cost for tier in self.tiers]
        self._begin()
        self.fit = LossFit(self.fit.total_steps)
        for tier in self.tiers:
            tier.reset()
        self._recall()
        self._flying = flying
        for tier, cost in zip(self.tiers, costs, strict=True):  # what was measured stays measured
            tier.cost = cost
            self._reprice(tier)
        self._refresh()

    @property
    def stopping(self) -> bool:
        """A preemption notice came and the last commit has been made: more work would be lost."""
        return self.guard is not None and self.guard.finished

    # ---- committing

    def _commit(self, tier: Target, reason: str) -> Decision:
        if tier.handle is not None:  # one at a time is in the background
            return NOTHING
        decision = Decision(
            tier.name,
            reason,
            tier.risk,
            tier.price,
            tier.hazard,
            self.weight,
            self._overhead(),
            self.steps,
            self.work_seconds,
        )
        saved = self.tiers[: tier.number + 1]
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
            handle = tier.commit()
        except BaseException:
            for each, values in zip(saved, before, strict=True):
                each.work, each.risk, each.steps = values  # nothing is safer than it was
            self._mark = self._clock()
            raise
        ended = self._clock()
        tier.cost.add(ended - began, dirty)
        if handle is not None and hasattr(handle, "done"):
            tier.handle, tier.launched, tier.stake = handle, ended, before[-1]
            self._flying += 1
            self._look_at_handle(tier, ended)
        self._reprice(tier)
        self._expose(ended)
        self.hazard.save()
        self._mark = ended
        self.decisions.append(decision)
        return decision

    def _reprice(self, tier: Target) -> None:
        tier.price = tier.cost.price(self._dirty()) if tier.cost.count else math.nan
        rule = self._rule
        if rule is not None and tier.price == tier.price:
            tier.free_work = tier.price / rule.free_budget if rule.free_budget else math.inf
            tier.least_work = tier.price / rule.max_overhead if rule.max_overhead else 0.0

    def _look_at_flying(self, now: float, dt: float) -> None:
        self.timer.add_busy(dt)
        for tier in self.tiers:
            if tier.handle is not None:
                self._look_at_handle(tier, now)

    def _look_at_handle(self, tier: Target, now: float) -> None:
        """Whether the commit in the background has ended, and how."""
        if not is_done(tier.handle):
            return
        handle, tier.handle = tier.handle, None
        self._flying -= 1
        error = error_of(handle)
        if error is None:
            if now > tier.launched:
                tier.cost.add_background(now - tier.launched, self.timer.slowdown)
            self._warned.discard(f"flush {tier.name}")
        self._reprice(tier)
        if error is not None:
            tier.put_back()
            self._warn(
                f"flush {tier.name}",
                f"a commit to {tier.name!r} failed in the background and is tried again: {error}",
            )

    def _wind_up(self, now: float) -> Decision:
        """After a preemption notice: commit now, go on while there is time, commit a last time."""
        guard = self.guard
        assert guard is not None
        if guard.finished:
            return NOTHING
        tier = guard.tier_for(self.tiers, now)
        if guard.first:
            guard.first = False
            self.hazard.preempted()
            decision = self._commit(tier, "preemption notice")
        elif guard.time_left(now) < guard.needed(self.timer, tier.cost):
            guard.finished = True
            return self._commit(tier, "last commit before preemption")
        else:
            number = self.policy.decide(self)
            if number < 0:
                return NOTHING
            decision = self._commit(self.tiers[number], self.policy.reason)
        # Work that could not be committed any more is not begun.
        guard.finished = guard.time_left(self._clock()) < guard.needed(self.timer, tier.cost)
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
            self._memory.write(
                self.state(), self.work_seconds, True, self.hazard.counts()
            )  # the run reached its end, whoever commits that
        self._longest = max(_LONG_SECONDS, 1000.0 * self.timer.mean)
        self._expose(self._mark)
        self.hazard.save()
        if self._wants_loss:
            self.weight = self.fit.weight(self.steps)
            if self.steps >= 100 and not self._losses:
                self._warn(
                    "no losses",
                    "the objective needs losses and step() was given none: it acts as "
                    "objective='time'",
                )
        count = len(self.tiers)
        for tier in self.tiers:
            rate = (
                self._known_rates[tier.number]
                if self._known_rates
                else self.hazard.rate(tier.number, count)
            )
            tier.hazard = (
                self._rule.hazard(rate, self.weight, self.termination.rate) if self._rule else rate
            )
            if self._dirty_bytes is not None:
                self._reprice(tier)
        self.hazard_rate = sum(self._known_rates) if self._known_rates else self.hazard.rate()

    def _overhead(self) -> float:
        prices = [(tier.hazard, tier.price) for tier in self.tiers if tier.price == tier.price]
        return sum(math.sqrt(2.0 * hazard * price) for hazard, price in prices)

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

    def _take_loss(self, loss: Any) -> None:
        """All losses but finite Python floats."""
        if self._device_loss is not None and (arrived := self._device_loss.poll()) is not None:
            self._add_loss(*arrived)
        if loss is None:
            return
        try:
            device = getattr(getattr(loss, "device", None), "type", "cpu")
            if device == "cpu":
                self._add_loss(
                    self.steps, float(loss.detach() if hasattr(loss, "detach") else loss)
                )
            elif device == "cuda":
                self._device_loss = self._device_loss or DeviceLoss()
                self._device_loss.offer(self.steps, loss)
            else:
                self._warn(
                    "device",
                    f"a loss on {device} cannot be read without waiting for it: give step() a "
                    "float now and then",
                )
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            self._warn("loss", f"a loss is a number, or a tensor with one element: {error}")

    def _add_loss(self, step: int, value: float) -> None:
        self._losses += 1
        if not -_HUGE < value < _HUGE:
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

    def _sane_budget(self, value: float) -> float:
        if 0.0 <= value < math.inf:
            return value
        self._warn("free_budget", f"free_budget={value!r} is no share: 0 is used")
        return 0.0

    def _sane_total(self, value: int | None) -> int | None:
        if value is None or value > 0:
            return value
        self._warn("total_steps", f"total_steps={value!r} is not positive: taken for unknown")
        return None

    def _sane_rates(self, value: float | Mapping[str, float] | None) -> list[float]:
        """Known rates, one for each tier; empty: they are learned."""
        if value is None:
            return []
        if isinstance(value, Mapping):
            rates = [float(value.get(tier.name, math.nan)) for tier in self.tiers]
        else:
            rates = [float(value) * share for share in default_shares(len(self.tiers))]
        if all(0.0 <= rate < math.inf for rate in rates):
            return rates
        self._warn(
            "rate",
            f"failure_rate_per_second={value!r} is no rate (one for each tier, not negative): it "
            "is learned",
        )
        return []

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(f"pmstore scheduler: {message}", RuntimeWarning, stacklevel=4)

    # ---- with the user's state

    def state(self) -> list[float]:
        """What a commit of the user's state has to hold for the scheduler to go on from it."""
        head = [_FORMAT, float(self.steps), self.work_seconds, float(self._losses)]
        tiers = [
            v
            for tier in self.tiers
            for v in (tier.work, tier.risk, float(tier.steps), *tier.cost.state())
        ]
        return [*head, *tiers, *self.timer.state(), *self.fit.state()]

    def restore(self, state: list[float]) -> None:
        """Goes on from a `state()`, of this or another scheduler with the same number of tiers."""
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
        except (
            ValueError,
            OverflowError,
            IndexError,
        ) as error:  # the store's checks do not know what these numbers mean
            self._warn("state", f"the stored scheduler state is damaged, it starts anew: {error}")
            self._begin()
            self.timer, self.fit = IterationTimer(), LossFit(self.fit.total_steps)
            for tier in self.tiers:
                tier.reset()
                tier.cost = CostModel()
                self._reprice(tier)

    def _restore(self, state: list[float]) -> None:
        if state[0] != _FORMAT:
            self._warn("state", "the stored scheduler state is of another version: it starts anew")
            return
        if (
            not all(-_HUGE < value < _HUGE for value in state if value == value)
            or not state[1] >= 0.0
        ):
            raise ValueError("numbers that no scheduler writes")
        self.steps, self.work_seconds, self._losses = int(state[1]), state[2], int(state[3])
        at = 4
        for tier in self.tiers:
            tier.work, tier.risk, tier.steps = state[at], state[at + 1], int(state[at + 2])
            tier.cost.restore(state[at + 3 : at + 13])
            self._reprice(tier)
            at += 13
        self.timer.restore(state[at : at + 4])
        self.fit.restore(state[at + 4 :], self.steps)
