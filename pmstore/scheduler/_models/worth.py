"""Says what a lost second of work is worth, as an objective has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from pmstore.scheduler._models.loss_fit import FIT_STATE, LossFit
from pmstore.scheduler._models.losses import Losses
from pmstore.scheduler._models.termination import TerminationModel

HUGE = 1e50
"""No loss is as large; its square would overflow."""
STATE = 1 + FIT_STATE
"""Numbers in the largest `Worth.state`."""
_ENOUGH_STEPS = 100  # steps in which a run that gives losses has given one


class Worth:
    """Says that every second of work is worth the same: the objective "time". It learns nothing.

    Attributes:
        learns: `step` wants to see each step.
        weight: w, the density of progress at the present step, relative to its mean over the job.
    """

    learns: bool = False
    weight: float = 1.0

    def step(self, step: int, loss: Any) -> bool:
        """Takes in the loss of a step. Returns whether `weight` has to be computed anew."""
        return False

    def learning_rate(self, step: int, value: float) -> None:
        """Takes in the learning rate of the steps that follow."""

    def refresh(self, step: int, total_steps: int | None) -> None:
        """Computes `weight` anew. total_steps: of the job; None: not known."""

    def hazard(self, rate: float) -> float:
        """Returns h, the failures per second that come at `rate`, weighed by what they take."""
        return rate

    def reset(self) -> None:
        """Forgets what it has learned."""

    def state(self) -> list[float]:
        """Returns what `restore` goes on from: no more than `STATE` numbers."""
        return []

    def restore(self, state: Sequence[float], step: int) -> None:
        """Goes on from a state of any objective.

        Raises: ValueError, OverflowError, IndexError: numbers that `state` never gives.
        """


class ProgressWorth(Worth):
    """Says that work is worth the progress that it made: the objectives "balanced", "progress",
    "explore".

    Args:
        termination: of early ends by the user, which lose what was not committed for good; for
            "explore". None: nobody ends a run early.
        warn: (about what, message).

    Source: progress as what a commit protects: COCI, FGCS 2025.
    """

    learns = True

    def __init__(
        self,
        base: float,
        density: float,
        termination: TerminationModel | None,
        total_steps: int | None,
        warn: Callable[[str, str], None],
    ) -> None:
        """Makes a model with h = rate (base + density w) + (rate of early ends) w."""
        self._base, self._density, self._total = base, density, total_steps
        self.termination: TerminationModel = termination or TerminationModel()
        self._warn = warn
        self.reset()

    def reset(self) -> None:
        self.weight = 1.0
        self.fit: LossFit = LossFit(self._total)
        self.losses_seen: int = 0
        self._losses = Losses(self._warn)
        self._rate: float | None = None

    def step(self, step: int, loss: Any) -> bool:
        if loss.__class__ is float and -HUGE < loss < HUGE:
            self._add(step, loss)
        elif step >= self._losses.due:
            for at, value in self._losses.read(step, loss):
                self._add(at, value)
        return self.fit.closed

    def _add(self, step: int, value: float) -> None:
        self.losses_seen += 1
        if -HUGE < value < HUGE:
            self.fit.add(step, value)
        else:
            self._warn("nan", f"a loss was {value}: it is left out of the loss curve")

    def learning_rate(self, step: int, value: float) -> None:
        """Takes in the learning rate. A jump by more than a third starts a new segment of the loss
        curve."""
        old, self._rate = self._rate, value
        if old is None or not (0.0 < old < math.inf and 0.0 < value < math.inf):
            return
        if not 0.75 <= value / old <= 4 / 3:
            self.fit.new_segment(step)

    def refresh(self, step: int, total_steps: int | None) -> None:
        self._total = self.fit.total_steps = total_steps
        if self.fit.closed:
            self.fit.refit(step)
        self.weight = self.fit.weight(step)
        if step >= _ENOUGH_STEPS and not self.losses_seen:
            self._warn(
                "no losses",
                "the objective needs losses and step() was given none: it acts as objective='time'",
            )

    def hazard(self, rate: float) -> float:
        return rate * (self._base + self._density * self.weight) + (
            self.termination.rate * self.weight
        )

    def state(self) -> list[float]:
        return [float(self.losses_seen), *self.fit.state()]

    def restore(self, state: Sequence[float], step: int) -> None:
        if len(state) > 1:
            self.losses_seen = int(state[0])
            self.fit.restore(state[1:], step)
