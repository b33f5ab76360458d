"""The jobs that policies are compared on: three classes of commit cost, four loss curves, three
failure rates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pmstore_lab.simulation.curves import CURVES, Curve, Floats

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class CostClass:
    """Seconds of an iteration, of a commit's two parts, and of the job; share of time lost beside
    the background part."""

    name: str
    iteration: float
    blocking: float
    background: float
    slowdown: float
    job: float

    @property
    def price(self) -> float:
        """C_eff."""
        return self.blocking + self.slowdown * self.background


COSTS: dict[str, CostClass] = {
    cost.name: cost
    for cost in (
        CostClass("disk", 0.5, 0.27, 1.5, 0.1, 8 * HOUR),
        CostClass("big", 5.0, 10.0, 60.0, 0.1, 24 * HOUR),
        CostClass("pmem", 0.25, 0.0025, 0.0, 0.0, 4 * HOUR),
    )
}
MTBF_HOURS = (0.5, 2.0, 24.0)


@dataclass(frozen=True, slots=True)
class Cell:
    cost: CostClass
    curve: Curve
    mtbf: float
    """Seconds."""

    @property
    def rate(self) -> float:
        """Failures per second."""
        return 1.0 / self.mtbf

    @property
    def iterations(self) -> int:
        return round(self.cost.job / self.cost.iteration)

    def losses(self) -> Floats:
        """Without noise, after each iteration."""
        return self.curve.loss(np.arange(1, self.iterations + 1) / self.iterations)

    def value(self) -> Floats:
        """Progress made after 0, 1, ... iterations, in seconds: from 0 to the length of the job."""
        return self.cost.job * self.curve.progress(np.arange(self.iterations + 1) / self.iterations)

    @property
    def name(self) -> str:
        return f"{self.cost.name}, {self.curve.name}, {self.mtbf / HOUR:g} h"


def cells(job_share: float = 1.0) -> Iterator[Cell]:
    """All 36. job_share: shortens jobs of more than 20,000 iterations, for tests."""
    for cost in COSTS.values():
        short = (
            cost if cost.job / cost.iteration < 20_000 else replace(cost, job=cost.job * job_share)
        )
        for curve in CURVES.values():
            for hours in MTBF_HOURS:
                yield Cell(short, curve, hours * HOUR)
