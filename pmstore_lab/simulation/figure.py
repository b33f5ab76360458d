"""What a figure of the study is, and the schedulers that it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pmstore.scheduler import Auto, CommitPolicy, CommitScheduler, Known, Objective
from pmstore_lab.simulation.cells import Cell
from pmstore_lab.simulation.driver import Clock, Make


@dataclass(frozen=True, slots=True)
class Size:
    """How much is simulated: length of the jobs (1: as in `COSTS`), seeds for each cell, trials."""

    job: float = 1.0
    seeds: int = 3
    rate_seeds: int = 40
    trials: int = 100_000


@dataclass(slots=True)
class Figure:
    """One result and its bound. `values` and the bounds are ratios unless the title says
    otherwise."""

    number: int
    title: str
    values: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, tuple[str, float]] = field(default_factory=dict)

    def add(self, name: str, value: float, sense: str = "<=", bound: float | None = None) -> None:
        self.values[name] = float(value)
        if bound is not None:
            self.bounds[name] = (sense, bound)

    @property
    def failures(self) -> list[str]:
        """Those that are out of bounds."""
        return [
            f"{self.number}. {self.title}: {name} = {self.values[name]:.4g}, not {sense} {bound:g}"
            for name, (sense, bound) in self.bounds.items()
            if not (self.values[name] <= bound if sense == "<=" else self.values[name] >= bound)
        ]


def geometric_mean(values: Iterable[float]) -> float:
    return float(np.exp(np.mean(np.log(list(values)))))


def scheduler(policy: CommitPolicy, rate: float | Mapping[str, float] | None, **known: Any) -> Make:
    """Makes one that knows the rate of failures, and the length of the job if that is told."""

    def make(
        targets: Mapping[str, Callable[[], object]], clock: Clock, total_steps: int | None = None
    ) -> CommitScheduler:
        return CommitScheduler(
            policy, targets=targets, clock=clock, known=Known(total_steps, rate, **known)
        )

    return make


def known(cell: Cell, objective: Objective, **options: Any) -> Make:
    """The scheduler with the true failure rate. Without a free budget: that spends wall time on
    purpose."""
    return scheduler(Auto(objective, free_budget=0.0), cell.rate, **options)
