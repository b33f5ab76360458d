"""Wall time over that of the exact optimum, from failures every 8 minutes to every 30 days, and for
commits from 5 us to 60 s: with a known rate, in a first job, and in a tenth.

All iterations and commits have 10 % jitter. Expected wall time of the known rate is exact: the
schedule is priced. What learners do depends on the failures that come: there the mean of simulated
jobs is taken, of what was at stake in them (`Outcome.at_stake`), / the same of the known rate under
the same failures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pmstore.scheduler import Auto, HazardModel
from pmstore_lab.simulation.cells import HOUR, Cell, CostClass
from pmstore_lab.simulation.curves import CURVES
from pmstore_lab.simulation.driver import Job
from pmstore_lab.simulation.failures import poisson
from pmstore_lab.simulation.figure import Figure, Size, known, scheduler
from pmstore_lab.simulation.optimum import Segments, optimum

MTBF = {
    "8 min": 480.0,
    "30 min": 0.5 * HOUR,
    "2 h": 2 * HOUR,
    "8 h": 8 * HOUR,
    "1 d": 24 * HOUR,
    "5 d": 120 * HOUR,
    "30 d": 720 * HOUR,
}
COSTS = {
    cost.name: cost
    for cost in (
        CostClass("5 us", 0.5, 5e-6, 0.0, 0.0, 1 * HOUR),
        CostClass("1 ms", 0.5, 1e-3, 0.0, 0.0, 1 * HOUR),
        CostClass("0.1 s", 1.0, 0.1, 0.0, 0.0, 8 * HOUR),
        CostClass("1 s", 2.0, 1.0, 0.0, 0.0, 8 * HOUR),
        CostClass("10 s", 5.0, 10.0, 0.0, 0.0, 8 * HOUR),
        CostClass("10 s + 60 s behind", 5.0, 10.0, 60.0, 0.1, 8 * HOUR),
        CostClass("60 s", 5.0, 60.0, 0.0, 0.0, 8 * HOUR),
    )
}


@dataclass(frozen=True, slots=True)
class Walls:
    """Expected wall time over the optimum's."""

    known: float
    first: float
    tenth: float


def jobs() -> Iterator[tuple[str, Cell]]:
    """All 49, and their names."""
    for name, cost in COSTS.items():
        for every, mtbf in MTBF.items():
            yield f"{name}, a failure every {every}", Cell(cost, CURVES["exponential"], mtbf)


def walls(size: Size) -> Iterator[Figure]:
    """All jobs; those where most is at stake where little time is given."""
    figure = Figure(5, "wall time / optimum, with 10 % jitter")
    found = {
        name: walls_of(cell, size.rate_seeds)
        for name, cell in jobs()
        if size.job >= 1.0 or ("60 s" in name and cell.mtbf in (480.0, 2 * HOUR, 720 * HOUR))
    }
    for name, one in found.items():
        figure.add(f"known rate, {name}", one.known)
        figure.add(f"first job, {name}", one.first)
        figure.add(f"tenth job, {name}", one.tenth)
    figure.add("known rate, worst", max(one.known for one in found.values()), "<=", 1.01)
    figure.add("first job, worst", max(one.first for one in found.values()), "<=", 1.03)
    figure.add("tenth job, worst", max(one.tenth for one in found.values()), "<=", 1.01)
    yield figure


def walls_of(cell: Cell, seeds: int) -> Walls:
    """Of one job."""
    segments = Segments(cell, "time")
    work = cell.cost.job
    exact = work + segments.total(Job(cell, 0).run(known(cell, "time")).commits)
    best = work + optimum(segments)[0]
    spent = dict.fromkeys((None, 0, 9), 0.0)
    for seed in range(seeds):
        job = Job(cell, seed)
        failures = poisson(np.random.default_rng(7000 + seed), cell.mtbf, 20.0 * best)
        for earlier in spent:
            if earlier is None:
                outcome = job.run(known(cell, "time"), failures)
            else:
                hazard = learned(cell, earlier, best, seed)
                learner = scheduler(Auto(free_budget=0.0), None, hazard=hazard)
                outcome = job.run(learner, failures, hazard=hazard)
            spent[earlier] += work + outcome.at_stake
    ratio = exact / best
    return Walls(ratio, ratio * spent[0] / spent[None], ratio * spent[9] / spent[None])


def learned(cell: Cell, earlier: int, wall: float, seed: int) -> HazardModel:
    """What so many earlier jobs have told."""
    hazard = HazardModel()
    rng = np.random.default_rng(5000 + seed)
    for _ in range(earlier):
        before = 0.0
        for at in poisson(rng, cell.mtbf, wall):
            hazard.expose(at - before)
            hazard.failed()
            before = at
        hazard.expose(wall - before)
        hazard.begin_run()
    return hazard
