"""Policies side by side on one job: what each costs in expectation, and what became of it under
simulated failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pmstore_lab.simulation.cells import Cell
from pmstore_lab.simulation.driver import Job
from pmstore_lab.simulation.failures import poisson
from pmstore_lab.simulation.optimum import Segments, optimum
from pmstore_lab.simulation.study import policies

Failures = Callable[[np.random.Generator, float, float], list[float]]
"""Times of failures, from a generator, the MTBF, and until when; in seconds."""
OPTIMA = {"optimum, time": "time", "optimum, value": "value"}


@dataclass(frozen=True, slots=True)
class Row:
    """One policy. Seconds, for one job.

    Attributes:
        commits: in a job without failures; at: the iterations after which it made them.
        overhead, value: expected wall time beyond the work, and value lost; over_optimum,
            value_over_optimum: / the least.
        simulated, failures: mean overhead and failures of the simulated jobs; NaN and 0 for the
            optima, which are not run.
    """

    policy: str
    commits: int
    overhead: float
    over_optimum: float
    value: float
    value_over_optimum: float
    simulated: float
    failures: float
    at: tuple[int, ...]


def compare(
    cell: Cell,
    seeds: int,
    failures: Failures = poisson,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Row]:
    """All policies of `study.policies` and the two optima. Failures and noise are the same for
    every policy."""
    time, value = Segments(cell, "time"), Segments(cell, "value")
    least, best_time = optimum(time)
    least_value, best_value = optimum(value)

    def row(name: str, commits: list[int], simulated: float, count: float) -> Row:
        wall, lost = time.total(commits), value.total(commits)
        return Row(
            name,
            len(commits),
            wall,
            wall / least,
            lost,
            lost / least_value,
            simulated,
            count,
            tuple(commits),
        )

    rows = [
        row(name, best, float("nan"), 0.0)
        for name, best in zip(OPTIMA, (best_time, best_value), strict=True)
    ]
    for name, make in policies(cell).items():
        progress(name)
        overhead, count = [], []
        for seed in range(seeds):
            times = failures(np.random.default_rng(seed), cell.mtbf, 20.0 * cell.cost.job)
            outcome = Job(cell, seed).run(make, times)
            overhead.append(outcome.overhead)
            count.append(outcome.failures)
        commits = Job(cell, 0).run(make).commits
        rows.append(row(name, commits, float(np.mean(overhead)), float(np.mean(count))))
    return rows
