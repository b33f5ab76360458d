"""Rules that say when to commit: one protocol, interchangeable in a scheduler and in
`pmstore.torch.attach(policy=...)`."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal, Protocol, get_args, runtime_checkable

if TYPE_CHECKING:
    from pmstore.scheduler.scheduler import CommitScheduler  # upward: a rule looks at all of it
    from pmstore.scheduler.target import Target

AUTO: Final = "auto"
Objective = Literal["time", "balanced", "progress", "explore"]
NEVER = -1


@runtime_checkable
class CommitPolicy(Protocol):
    """A rule. The scheduler measures, accounts and calls the commits; the rule looks at it and
    chooses.

    What it may look at: `steps`, `work_seconds`, `elapsed_seconds`, `loss`, `timer`, `hazard`, and
    for each of `targets` `work` (seconds of it since that target's last commit), `risk`, `price`
    (C_eff in seconds; NaN before the first commit), `steps` (since the last commit).

    A rule keeps no state of its own that a roll back would have to undo. One that keeps none at all
    can be asked ahead (see `CommitScheduler.foresee`), as ranks of a job have to.
    """

    reason: str
    """Of the last decision to commit, for the log."""

    def decide(self, scheduler: CommitScheduler) -> int:
        """The number of the target that commits now; -1: none. Called at the end of every step."""
        ...


def positive(value: float, what: str) -> float:
    try:
        fits = 0.0 < value < math.inf
    except TypeError:
        raise TypeError(f"{what} must be a positive number, not {value!r}") from None
    if not fits:
        raise ValueError(f"{what} must be a positive number, not {value!r}")
    return float(value)


def seconds_of_loss(value: float) -> float:
    """A bound on lost work. Raises: TypeError, ValueError."""
    number = not isinstance(value, bool)  # True is no number of seconds
    try:
        if number and 0.0 <= value < math.inf:
            return float(value)
    except TypeError:
        number = False
    told = f"max_loss={value!r}: seconds of work that may be lost, 0 or more"
    raise (ValueError if number else TypeError)(told)


class OneTarget:
    """A rule about the first target alone. `pmstore.torch.attach(tiers=...)` then flushes to the
    tiers beside its commits."""


class EveryN(OneTarget):
    """Commits every `steps` steps, counted from the start of the run, not of the process."""

    def __init__(self, steps: int) -> None:
        """Raises: ValueError: steps is not at least 1; TypeError: it is no whole number."""
        told = f"steps is the number of steps between commits, at least 1, not {steps!r}"
        try:
            interval = operator.index(steps)
        except TypeError:
            raise TypeError(told) from None
        if interval < 1:
            raise ValueError(told)
        self.interval = interval
        self.reason: str = f"every {steps} steps"

    def decide(self, scheduler: CommitScheduler) -> int:
        return 0 if scheduler.steps % self.interval == 0 else NEVER


class EverySeconds(OneTarget):
    """Commits when that much work is at stake."""

    def __init__(self, seconds: float) -> None:
        self.seconds: float = positive(seconds, "seconds")
        self.reason: str = f"every {seconds:g} s"

    def decide(self, scheduler: CommitScheduler) -> int:
        return 0 if scheduler.targets[0].work >= self.seconds else NEVER


class Auto:
    """The scheduler's own rule, `policy="auto"`: commit when the accumulated risk reaches the
    price.

    At every step, for each target, A += h dt (work since its commit, this iteration included); the
    highest target with A >= C commits, and it resets those below. (A little sooner where C is not
    small against the MTBF: `pmstore.scheduler.target.due`.) For constant costs and h = lambda this
    is the best integer number of iterations; it follows costs and rates that drift.
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
        max_loss: commits the first target as soon as so many seconds of work are at stake, whatever
            that costs; 0: at every step; None: no bound. A kill then takes back no more than that
            and the step under way.
        loss_budget: in place of "whatever that costs": once a commit by `max_loss` takes at most
            this share of the work since the last one. Before a cost is known `max_loss` holds.

    Raises: ValueError for an objective that is none, a bound that is no number of seconds, and for
        max_overhead beside max_loss, which contradict each other.
    """

    def __init__(
        self,
        objective: Objective = "time",
        *,
        free_budget: float = 0.001,
        max_overhead: float | None = None,
        max_loss: float | None = None,
        loss_budget: float | None = None,
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
        self.max_overhead: float | None = (
            max_overhead if max_overhead is not None and max_overhead > 0.0 else None
        )
        if max_loss is not None:
            max_loss = seconds_of_loss(max_loss)
            if self.max_overhead is not None:
                raise ValueError(
                    "max_overhead forbids commits that max_loss demands: give one of them, or "
                    "loss_budget, the share of time that commits by max_loss may take"
                )
        self.max_loss = max_loss
        self.loss_budget: float | None = (
            loss_budget if loss_budget is not None and loss_budget > 0.0 else None
        )
        self.reason: str = ""

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

    def reprice(self, target: Target) -> None:
        """What follows from a new price."""
        target.most_work = self.bound(target.price) if target.number == 0 else math.inf
        if target.price == target.price:
            free = target.price / self.free_budget if self.free_budget else math.inf
            target.free_work = min(free, target.most_work)
            target.least_work = target.price / self.max_overhead if self.max_overhead else 0.0

    def bound(self, price: float) -> float:
        """Seconds of work at stake at which it commits the first target, where a commit costs so
        much (NaN: not known yet)."""
        if self.max_loss is None:
            return math.inf
        if self.loss_budget is None or price != price:
            return self.max_loss
        return max(self.max_loss, price / self.loss_budget)

    def decide(self, scheduler: CommitScheduler) -> int:
        for target in scheduler.targets_down:
            # In nearly every step neither holds: the rest may take its time.
            if target.risk >= target.due or target.work >= target.free_work:
                reason = self._reason(target, scheduler.timer.warm)
                if reason:
                    self.reason = reason
                    return target.number
        return NEVER

    @staticmethod
    def _reason(target: Target, warm: bool) -> str:
        """Why it commits now; empty: it does not."""
        if target.handle is not None or target.work < target.retry_work:
            return ""
        if target.work >= target.most_work:
            return "bound on lost work"
        if target.price != target.price:
            return "to measure its cost" if warm else ""
        if target.work < target.least_work:
            return ""
        return "risk reached the price" if target.risk >= target.due else "free budget"


def rule_of(policy: object) -> CommitPolicy:
    """The rule that a program means by `policy=`: "auto", or a rule.

    Raises: TypeError.
    """
    if isinstance(policy, str) and policy == AUTO:
        return Auto()
    if isinstance(policy, CommitPolicy):
        return policy
    instead = ""
    if isinstance(policy, str) and policy in get_args(Objective):
        instead = f": the objective {policy!r} is Auto({policy!r})"
    elif isinstance(policy, type):
        instead = f": make one of it, {policy.__name__}(...)"
    elif isinstance(policy, Mapping):
        instead = ": what is committed to goes into targets="
    raise TypeError(
        'policy is "auto", or a rule of pmstore.scheduler, such as EveryN(100) or '
        f"EverySeconds(60), not {policy!r}{instead}"
    )
