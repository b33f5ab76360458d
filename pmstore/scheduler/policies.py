"""Rules that say when to commit: one protocol, interchangeable in a scheduler and in
`pmstore.torch.attach(policy=...)`."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pmstore.scheduler.scheduler import CommitScheduler  # upward: a rule looks at all of it

Objective = Literal["time", "balanced", "progress", "explore"]
NEVER = -1


@runtime_checkable
class CommitPolicy(Protocol):
    """A rule. The scheduler measures, accounts and calls the commits; the rule looks at it and
    chooses.

    What it may look at: `steps`, `work_seconds`, `elapsed_seconds`, `loss`, `timer`, `hazard`, and
    for each of `targets` `work` (seconds of it since that target's last commit), `risk`, `price`
    (C_eff in seconds; NaN before the first commit), `steps` (since the last commit).

    A rule keeps no state of its own that a roll back would have to undo.
    """

    reason: str
    """Of the last decision to commit, for the log."""

    def decide(self, scheduler: CommitScheduler) -> int:
        """The number of the target that commits now; -1: none. Called at the end of every step."""
        ...


def _positive(value: float, what: str) -> float:
    if not 0.0 < value < math.inf:
        raise ValueError(f"{what} must be a positive number, not {value!r}")
    return float(value)


class OneTarget:
    """A rule about the first target alone. `pmstore.torch.attach(tiers=...)` then flushes to the
    tiers beside its commits."""


class EveryN(OneTarget):
    """Commits every `steps` steps, counted from the start of the run, not of the process."""

    def __init__(self, steps: int) -> None:
        """Raises ValueError if steps is not at least 1."""
        if steps < 1:
            raise ValueError(
                f"steps is the number of steps between commits, at least 1, not {steps}"
            )
        self.interval = steps
        self.reason = f"every {steps} steps"

    def decide(self, scheduler: CommitScheduler) -> int:
        return 0 if scheduler.steps % self.interval == 0 else NEVER


class EveryStep(EveryN):
    """Commits every step."""

    def __init__(self) -> None:
        super().__init__(1)


class EverySeconds(OneTarget):
    """Commits when that much work is at stake."""

    def __init__(self, seconds: float) -> None:
        self.seconds = _positive(seconds, "seconds")
        self.reason = f"every {seconds:g} s"

    def decide(self, scheduler: CommitScheduler) -> int:
        return 0 if scheduler.targets[0].work >= self.seconds else NEVER


class _Interval(OneTarget):
    """Commits every `interval` seconds of work; the interval follows from a cost that is fixed or
    measured.

    failure_rate_per_second: None: the scheduler's, known or learned.
    cost_seconds: None: the mean of what commits have cost so far in this run. A number: stays as it
        is.
    """

    reason = "interval"

    def __init__(
        self, failure_rate_per_second: float | None = None, cost_seconds: float | None = None
    ) -> None:
        self._rate = (
            None
            if failure_rate_per_second is None
            else _positive(failure_rate_per_second, "the failure rate")
        )
        self._cost = cost_seconds

    def interval(self, cost: float, rate: float) -> float:
        raise NotImplementedError

    def decide(self, scheduler: CommitScheduler) -> int:
        target = scheduler.targets[0]
        cost = target.price if self._cost is None else self._cost
        if cost != cost:  # nothing measured yet
            return 0 if scheduler.timer.warm else NEVER
        rate = scheduler.hazard_rate if self._rate is None else self._rate
        if rate <= 0.0:
            return NEVER
        # To the nearest whole iteration: half of one early is as good as half of one late.
        return 0 if target.work + scheduler.timer.mean / 2.0 >= self.interval(cost, rate) else NEVER


class Young(_Interval):
    """tau = sqrt(2 C / lambda).

    Source: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9),
        1974.
    """

    def interval(self, cost: float, rate: float) -> float:
        return math.sqrt(2.0 * cost / rate)


class Daly(_Interval):
    """tau = sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C for C < 2M, else M.

    Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart
        dumps, FGCS 22(3), 2006.
    """

    def interval(self, cost: float, rate: float) -> float:
        mean = 1.0 / rate
        if cost >= 2.0 * mean:
            return mean
        part = cost / (2.0 * mean)
        return math.sqrt(2.0 * cost * mean) * (1.0 + math.sqrt(part) / 3.0 + part / 9.0) - cost


class CheckFreq(OneTarget):
    """Spends a fixed share of the running time on commits (3.5 % by default), whatever the failure
    rate.

    Source: Mohan, Phanishayee, Chidambaram, CheckFreq, FAST 2021: the interval is the overhead of a
        checkpoint divided by the admissible overhead, in iterations, and adapts when the measured
        overhead changes.
    """

    reason = "overhead budget"

    def __init__(self, overhead: float = 0.035) -> None:
        self.overhead = _positive(overhead, "overhead")

    def decide(self, scheduler: CommitScheduler) -> int:
        target, mean = scheduler.targets[0], scheduler.timer.mean
        if target.price != target.price:
            return 0 if scheduler.timer.warm else NEVER
        iterations = math.ceil(target.price / (self.overhead * mean)) if mean > 0.0 else 1
        return 0 if target.steps >= max(iterations, 1) else NEVER


class COCI(OneTarget):
    """Commits at equal drops of a loss curve exp(a t + b), as published. A baseline: its interval
    depends on the unit of time.

    The loss drop between commits is P_e = (1 - e^(a Ts)) (1 / (2 lambda) - 1 / (2 a)), which is a
    time, multiplied by nothing that would make it a loss. In which unit t is measured therefore
    changes what it does; `unit_seconds` makes that explicit.

    Args:
        failure_rate_per_second: the planned rate lambda; None: the scheduler's.
        decay_per_second: a < 0 of the loss curve, known beforehand (the paper fits it to an earlier
            run).
        unit_seconds: what the formula takes for one unit of time.
        level: e^b, the loss at the start of the fitted curve.

    Source: Li et al., Convergence-aware optimal checkpointing for exploratory deep learning
        training jobs, FGCS 2025.
    """

    reason = "loss drop"

    def __init__(
        self,
        *,
        decay_per_second: float,
        failure_rate_per_second: float | None = None,
        unit_seconds: float = 1.0,
        level: float = 1.0,
    ) -> None:
        if not -math.inf < decay_per_second < 0.0:
            raise ValueError(
                f"decay_per_second must be negative: the loss falls; not {decay_per_second!r}"
            )
        self.decay = decay_per_second
        self.unit = _positive(unit_seconds, "unit_seconds")
        self.level = _positive(level, "level")
        self._rate = failure_rate_per_second

    def drop(self, cost_seconds: float, rate_per_second: float) -> float:
        """P_e, in the formula's unit."""
        a, rate, cost = (
            self.decay * self.unit,
            rate_per_second * self.unit,
            cost_seconds / self.unit,
        )
        return (1.0 - math.exp(a * cost)) * (1.0 / (2.0 * rate) - 1.0 / (2.0 * a))

    def decide(self, scheduler: CommitScheduler) -> int:
        target = scheduler.targets[0]
        if target.price != target.price:
            return 0 if scheduler.timer.warm else NEVER
        rate = scheduler.hazard_rate if self._rate is None else self._rate
        if rate <= 0.0:
            return NEVER
        now = scheduler.work_seconds
        fallen = self.level * (
            math.exp(self.decay * (now - target.work)) - math.exp(self.decay * now)
        )
        return 0 if fallen >= self.drop(target.price, rate) else NEVER


class ConvergenceAware:
    """The scheduler's own rule: commit when the accumulated risk reaches the price.

    At every step, for each target, A += h dt (work since its commit, this iteration included); the
    highest target with A >= C commits, and it resets those below. For constant costs and h = lambda
    this is the best integer number of iterations; it follows costs and rates that drift.
    `objective` says what h is:

    * "time": lambda. Minimises the expected wall time, nothing else does better.
    * "balanced": lambda (1/2 + w/2); "progress": lambda w, where w is the density of progress
      (`LossFit`). They pay wall time to keep early progress, which is worth more, safer.
    * "explore": lambda + mu w, with mu the rate of early ends (`TerminationModel`), which lose what
      was not committed for good.

    Args:
        free_budget: also commits as soon as the price is at most this share of the work since the
            last commit; 0: never.
        max_overhead: no commit while its price is more than this share of that work; None: no cap.

    Raises: ValueError for an objective that is none.
    """

    def __init__(
        self,
        objective: Objective = "time",
        *,
        free_budget: float = 0.001,
        max_overhead: float | None = None,
    ) -> None:
        if objective not in ("time", "balanced", "progress", "explore"):
            raise ValueError(
                f"objective={objective!r}: use 'time', 'balanced', 'progress' or 'explore'"
            )
        self.objective: Objective = objective
        if not 0.0 <= free_budget < math.inf:
            warnings.warn(
                f"pmstore scheduler: free_budget={free_budget!r} is no share: 0 is used",
                RuntimeWarning,
                stacklevel=2,
            )
            free_budget = 0.0
        self.free_budget = free_budget
        self.max_overhead = (
            max_overhead if max_overhead is not None and max_overhead > 0.0 else None
        )
        self.reason = ""

    @property
    def wants_loss(self) -> bool:
        return self.objective != "time"

    def hazard(self, rate: float, weight: float, termination: float) -> float:
        """h per second for a target whose failures come at `rate`."""
        if self.objective == "time":
            return rate
        if self.objective == "balanced":
            return rate * (0.5 + 0.5 * weight)
        if self.objective == "progress":
            return rate * weight
        return rate + termination * weight

    def decide(self, scheduler: CommitScheduler) -> int:
        for target in scheduler.targets_down:
            price = target.price
            if target.handle is not None:
                continue
            if price != price:
                if scheduler.timer.warm:
                    self.reason = "to measure its cost"
                    return target.number
            elif target.work >= target.least_work and target.work >= target.retry_work:
                if target.risk >= price:
                    self.reason = "risk reached the price"
                    return target.number
                if target.work >= target.free_work:
                    self.reason = "free budget"
                    return target.number
        return NEVER
