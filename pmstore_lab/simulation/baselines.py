"""Published rules for the interval of checkpoints, to compare with."""

from __future__ import annotations

import math

from pmstore.scheduler import EveryN, OneTarget, Outlook
from pmstore.scheduler._rules.outlook import NEVER
from pmstore.scheduler._rules.rules import positive


class EveryStep(EveryN):
    """Commits every step."""

    def __init__(self) -> None:
        super().__init__(1)


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
        self.failure_rate_per_second = (
            None
            if failure_rate_per_second is None
            else positive(failure_rate_per_second, "the failure rate")
        )
        self.cost_seconds = cost_seconds

    def interval(self, cost: float, rate: float) -> float:
        raise NotImplementedError

    def decide(self, outlook: Outlook, /) -> int:
        target = outlook.targets[0]
        cost = target.price if self.cost_seconds is None else self.cost_seconds
        if cost != cost:  # nothing measured yet
            return 0 if outlook.timer.warm else NEVER
        given = self.failure_rate_per_second
        rate = outlook.hazard_rate if given is None else given
        if rate <= 0.0:
            return NEVER
        # To the nearest whole iteration: half of one early is as good as half of one late.
        return 0 if target.work + outlook.timer.mean / 2.0 >= self.interval(cost, rate) else NEVER


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
        self.overhead = positive(overhead, "overhead")

    def decide(self, outlook: Outlook, /) -> int:
        target, mean = outlook.targets[0], outlook.timer.mean
        if target.price != target.price:
            return 0 if outlook.timer.warm else NEVER
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
        self.unit = positive(unit_seconds, "unit_seconds")
        self.level = positive(level, "level")
        self.failure_rate_per_second = failure_rate_per_second

    def drop(self, cost_seconds: float, rate_per_second: float) -> float:
        """P_e, in the formula's unit."""
        a, rate, cost = (
            self.decay * self.unit,
            rate_per_second * self.unit,
            cost_seconds / self.unit,
        )
        return (1.0 - math.exp(a * cost)) * (1.0 / (2.0 * rate) - 1.0 / (2.0 * a))

    def decide(self, outlook: Outlook, /) -> int:
        target = outlook.targets[0]
        if target.price != target.price:
            return 0 if outlook.timer.warm else NEVER
        given = self.failure_rate_per_second
        rate = outlook.hazard_rate if given is None else given
        if rate <= 0.0:
            return NEVER
        now = outlook.work_seconds
        fallen = self.level * (
            math.exp(self.decay * (now - target.work)) - math.exp(self.decay * now)
        )
        return 0 if fallen >= self.drop(target.price, rate) else NEVER
