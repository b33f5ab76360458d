"""The scheduler's own rule: commit when the risk reaches the price."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Final, Literal

from pmstore.scheduler._models.termination import TerminationModel
from pmstore.scheduler._models.worth import ProgressWorth, Worth
from pmstore.scheduler._rules.outlook import NEVER, Outlook
from pmstore.scheduler.target import Target

AUTO: Final = "auto"
Objective = Literal["time", "balanced", "progress", "explore"]
_SHARES = {"balanced": (0.5, 0.5), "progress": (0.0, 1.0), "explore": (1.0, 0.0)}
"""The shares of the rate of failures that count for each second of work, and for its progress."""


def seconds_of_loss(value: float) -> float:
    """Checks a bound on lost work, and returns it in seconds. Raises: TypeError, ValueError."""
    number = not isinstance(value, bool)  # True is no number of seconds
    try:
        if number and 0.0 <= value < math.inf:
            return float(value)
    except TypeError:
        number = False
    told = f"max_loss={value!r}: seconds of work that may be lost, 0 or more"
    raise (ValueError if number else TypeError)(told)


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

    def worth(
        self,
        termination: Callable[[], TerminationModel],
        total_steps: int | None,
        warn: Callable[[str, str], None],
    ) -> Worth:
        """Returns a new model of what the objective thinks that work is worth. termination: makes
        the model of early ends, for the objective that asks for it."""
        if self.objective == "time":
            return Worth()
        base, density = _SHARES[self.objective]
        early = termination() if self.objective == "explore" else None
        return ProgressWorth(base, density, early, total_steps, warn)

    def reprice(self, target: Target) -> None:
        """Sets the bounds on work that follow from a target's new price."""
        target.most_work = self.bound(target.price) if target.number == 0 else math.inf
        if target.price == target.price:
            free = target.price / self.free_budget if self.free_budget else math.inf
            target.free_work = min(free, target.most_work)
            target.least_work = target.price / self.max_overhead if self.max_overhead else 0.0

    def bound(self, price: float) -> float:
        """Returns the seconds of work at stake at which it commits the first target, where a commit
        costs so much (NaN: not known yet)."""
        if self.max_loss is None:
            return math.inf
        if self.loss_budget is None or price != price:
            return self.max_loss
        return max(self.max_loss, price / self.loss_budget)

    def decide(self, outlook: Outlook, /) -> int:
        for target in outlook.targets_down:
            # In nearly every step neither holds: the rest may take its time.
            if target.risk >= target.due or target.work >= target.free_work:
                reason = self._reason(target, outlook.timer.warm)
                if reason:
                    self.reason = reason
                    return target.number
        return NEVER

    @staticmethod
    def _reason(target: Target, warm: bool) -> str:
        """Says why it commits now; "" if it does not."""
        if target.handle is not None or target.work < target.retry_work:
            return ""
        if target.work >= target.most_work:
            return "bound on lost work"
        if target.price != target.price:
            return "to measure its cost" if warm else ""
        if target.work < target.least_work:
            return ""
        return "risk reached the price" if target.risk >= target.due else "free budget"
