"""Holds what a scheduler is told in advance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pmstore.scheduler._models.hazard import HazardModel, default_shares
from pmstore.scheduler._models.termination import TerminationModel


@dataclass(frozen=True, slots=True)
class Known:
    """Says what is known of a job before it runs. The rest is learned.

    Bad numbers are taken for unknown, with a warning.

    Attributes:
        total_steps: of the job. Used by the loss curve alone.
        failure_rate_per_second: one rate, split over the targets by `HazardModel.share`, or one for
            each name.
        hazard: to use in place of the one made from the store.
        termination: to use in place of the one made from the store's earlier runs.
    """

    total_steps: int | None = None
    failure_rate_per_second: float | Mapping[str, float] | None = None
    hazard: HazardModel | None = None
    termination: TerminationModel | None = None

    def rates(self, names: Sequence[str], warn: Callable[[str, str], None]) -> list[float]:
        """Returns one rate for each target; none if they are learned. warn: (about what,
        message)."""
        value = self.failure_rate_per_second
        if value is None:
            return []
        if isinstance(value, Mapping):
            rates = [float(value.get(name, math.nan)) for name in names]
        else:
            rates = [float(value) * share for share in default_shares(len(names))]
        if all(0.0 <= rate < math.inf for rate in rates):
            return rates
        warn(
            "rate",
            f"failure_rate_per_second={value!r} is no rate (one for each target, not negative): "
            "it is learned",
        )
        return []


def sane_total(value: int | None, warn: Callable[[str, str], None]) -> int | None:
    """Returns a number of steps, checked; None: not known."""
    if value is None or value > 0:
        return value
    warn("total_steps", f"total_steps={value!r} is not positive: taken for unknown")
    return None
