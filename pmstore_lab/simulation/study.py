"""The figures that the scheduler has to reach, computed.

`benchmarks/scheduler.py` prints them at full size, `tests/scheduler/test_simulation.py` asserts
them on a reduced one. The yardstick is always exact: a policy runs a job in simulated time, and
the schedule it made is priced by `Segments`, as the optimum is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pmstore.scheduler import Auto, CommitPolicy, HazardModel, TerminationModel
from pmstore_lab.simulation.baselines import COCI, CheckFreq, Young
from pmstore_lab.simulation.cells import COSTS, HOUR, MTBF_HOURS, Cell, cells
from pmstore_lab.simulation.curves import CURVES
from pmstore_lab.simulation.driver import Clock, Job, Make
from pmstore_lab.simulation.figure import Figure, Size, geometric_mean, known, scheduler
from pmstore_lab.simulation.notices import notice_trials
from pmstore_lab.simulation.optimum import EARLY, Metric, Segments, best_integer, optimum
from pmstore_lab.simulation.walls import walls


def ruled(cell: Cell, policy: CommitPolicy) -> Make:
    return scheduler(policy, cell.rate)


def policies(cell: Cell) -> dict[str, Make]:
    """What `pmstore schedule simulate` compares."""
    decay = -6.0 / cell.cost.job
    return {
        "time": known(cell, "time"),
        "balanced": known(cell, "balanced"),
        "progress": known(cell, "progress"),
        "Young": ruled(cell, Young(cell.rate)),
        "CheckFreq": ruled(cell, CheckFreq()),
        "COCI (minutes)": ruled(
            cell, COCI(decay_per_second=decay, failure_rate_per_second=cell.rate, unit_seconds=60.0)
        ),
    }


# ---- figures 1 to 3: known rate


def convergence(size: Size) -> Iterator[Figure]:
    """`time`, `progress` and `balanced` against the optimum of wall time and of value, over the 36
    cells."""
    ratio: dict[tuple[str, Metric], dict[Cell, float]] = {}
    least_time: dict[tuple[str, float], float] = {}
    made: dict[tuple[str, int, str, float], list[int]] = {}
    for cell in cells(size.job):
        segments = {metric: Segments(cell, metric) for metric in ("time", "value")}
        same = (cell.cost.name, cell.mtbf)  # the curve plays no part in it
        if same not in least_time:
            least_time[same] = optimum(segments["time"])[0]
        least = {"time": least_time[same], "value": optimum(segments["value"])[0]}
        chosen = policies(cell)
        for seed in range(size.seeds):
            job = Job(cell, seed)
            for name in ("time", "balanced", "progress", "Young", "CheckFreq"):
                key = (name, seed, *same)
                if name in ("balanced", "progress") or key not in made:
                    made[key] = job.run(chosen[name]).commits
                commits = made[key]
                for metric, each in segments.items():
                    values = ratio.setdefault((name, metric), {})  # type: ignore[arg-type]
                    values[cell] = (
                        values.get(cell, 0.0) + each.total(commits) / least[metric] / size.seeds
                    )

    def mean(name: str, metric: Metric, cost: str | None = None) -> float:
        return geometric_mean(
            v for cell, v in ratio[name, metric].items() if cost in (None, cell.cost.name)
        )

    time = Figure(1, "time, known rate: wall overhead / optimum")
    time.add("geometric mean", mean("time", "time"), "<=", 1.01)
    time.add("worst cell", max(ratio["time", "time"].values()), "<=", 1.03)
    time.add("Young, geometric mean", mean("Young", "time"))
    yield time
    progress = Figure(2, "progress, fit while it runs: value lost / optimum")
    progress.add("geometric mean", mean("progress", "value"), "<=", 1.15)
    progress.add("worst of all 36", max(ratio["progress", "value"].values()), "<=", 1.15)
    claimed = {
        cell: value / ratio["Young", "value"][cell]
        for cell, value in ratio["progress", "value"].items()
    }
    progress.add(
        "/ Young, worst where a commit costs at most a 200th of the MTBF",
        max(one for cell, one in claimed.items() if cell.cost.price * 200.0 <= cell.mtbf),
        "<=",
        0.85,
    )
    progress.add("/ Young, worst of all 36", max(claimed.values()))
    for cost in COSTS:
        progress.add(
            f"{cost}: / Young",
            mean("progress", "value", cost) / mean("Young", "value", cost),
            "<=",
            0.85,
        )
        bound = {"disk": 0.25, "big": 0.65}.get(cost)
        progress.add(
            f"{cost}: / CheckFreq",
            mean("progress", "value", cost) / mean("CheckFreq", "value", cost),
            "<=",
            bound,
        )
    progress.add("its wall overhead / optimum", mean("progress", "time"))
    yield progress
    balanced = Figure(3, "balanced: / optimum")
    balanced.add("wall overhead, geometric mean", mean("balanced", "time"), "<=", 1.05)
    balanced.add("value lost, geometric mean", mean("balanced", "value"), "<=", 1.25)
    balanced.add("value lost, worst cell", max(ratio["balanced", "value"].values()))
    yield balanced


# ---- figure 4: exploration


def exploration(size: Size) -> Iterator[Figure]:
    """Short jobs of which 60 % are ended early, at a uniform time; mu is learned from 20 earlier
    ones."""
    own: list[float] = []
    young: dict[float, list[float]] = {}
    for cell in cells():
        cell = replace(cell, cost=replace(cell.cost, job=2.0 * HOUR * max(size.job, 0.25)))
        segments = Segments(cell, "termination")
        least, _ = optimum(segments)
        for seed in range(size.seeds):
            rng = np.random.default_rng(1000 + seed)
            lengths = [
                cell.cost.job * (rng.random() if early else 1.0) for early in rng.random(20) < EARLY
            ]
            runs = TerminationModel((length, length == cell.cost.job) for length in lengths)
            job = Job(cell, seed)
            explore = segments.total(job.run(known(cell, "explore", termination=runs)).commits)
            plain = segments.total(job.run(ruled(cell, Young(cell.rate))).commits)
            own.append(explore / least)
            young.setdefault(cell.mtbf, []).append(explore / plain)
    figure = Figure(4, "explore, mu from 20 stored runs: early-termination cost")
    figure.add("/ optimum, geometric mean", geometric_mean(own), "<=", 1.15)
    figure.add(
        "/ Young, geometric mean",
        geometric_mean(v for values in young.values() for v in values),
        "<=",
        0.85,
    )
    for mtbf, values in young.items():
        figure.add(f"/ Young, MTBF {mtbf / HOUR:g} h", geometric_mean(values))
    yield figure


# ---- figure 6: drifting costs


def drift(size: Size) -> Iterator[Figure]:
    """Commits cost ten times as much in the middle third of the job."""
    figure = Figure(
        6, "cost x 10 for a third of the run: wall overhead / Young with the initial cost"
    )
    ratios = []
    for cell in cells(size.job):
        if cell.curve.name != "exponential":
            continue
        n = cell.iterations
        factor = np.ones(n + 1)
        factor[n // 3 : 2 * n // 3] = 10.0
        segments = Segments(cell, "time", price=cell.cost.price * factor)
        job = Job(cell, 0, factor=factor[1:].tolist())
        own = segments.total(job.run(known(cell, "time")).commits)
        young = segments.total(
            job.run(ruled(cell, Young(cell.rate, cost_seconds=cell.cost.price))).commits
        )
        ratios.append(own / young)
        figure.add(f"{cell.cost.name}, {cell.mtbf / HOUR:g} h", own / young)
    figure.add("geometric mean", geometric_mean(ratios), "<=", 0.80)
    yield figure


def dear(size: Size) -> Iterator[Figure]:
    """One commit in ten costs 20 times as much."""
    figure = Figure(11, "one commit in ten 20 x dearer: wall overhead / Young told the mean cost")
    ratios = []
    for cell in cells(size.job):
        if cell.curve.name != "exponential":
            continue
        # its background part alone would then take longer than an interval
        cell = replace(cell, cost=replace(cell.cost, background=0.0))
        mean = 2.9 * cell.cost.price
        segments = Segments(cell, "time", price=np.full(cell.iterations + 1, mean))
        found = []
        for seed in range(4 * size.seeds):
            rng = np.random.default_rng(9000 + seed)
            factor = np.where(rng.random(cell.iterations) < 0.1, 20.0, 1.0)
            job = Job(cell, seed, factor=factor.tolist())
            own = segments.total(job.run(known(cell, "time")).commits)
            young = ruled(cell, Young(cell.rate, cost_seconds=mean))
            found.append(own / segments.total(job.run(young).commits))
        ratios.append(float(np.mean(found)))
        figure.add(f"{cell.cost.name}, {cell.mtbf / HOUR:g} h", ratios[-1])
    figure.add("geometric mean", geometric_mean(ratios), "<=", 1.06)
    figure.add("worst", max(ratios), "<=", 1.10)
    yield figure


# ---- figure 7: several targets


def tiers(size: Size) -> Iterator[Figure]:
    """Heap, disk and remote storage, with the default shares of failures that need each."""
    costs = {"pmem": 0.0025, "disk": COSTS["disk"].price, "remote": COSTS["big"].price}
    figure = Figure(7, "three tiers")
    above: list[float] = []
    below: list[float] = []
    for hours in MTBF_HOURS:
        rate = 1.0 / (hours * HOUR)
        hazard = HazardModel()
        rates = [rate * hazard.share(i, 3) for i in range(3)]
        three = _tier_overhead(costs, rates, size.job)
        one = _tier_overhead({"remote": costs["remote"]}, [rate], size.job)
        bound = sum(math.sqrt(2.0 * r * c) for r, c in zip(rates, costs.values(), strict=True))
        above.append(three / bound)
        below.append(one / three)
    figure.add("/ sum of sqrt(2 lambda C), geometric mean", geometric_mean(above), "<=", 1.05)
    figure.add("/ sum of sqrt(2 lambda C), worst", max(above), "<=", 1.05)
    figure.add("single remote tier / three tiers", geometric_mean(below), ">=", 4.0)
    yield figure


def _tier_overhead(
    costs: dict[str, float], rates: Sequence[float], job: float, iteration: float = 0.25
) -> float:
    """Seconds spent on commits, and expected to be lost to failures, for each second of work, over
    whole remote intervals."""
    clock = Clock()
    spent = dict.fromkeys(costs, 0.0)

    def commit(name: str) -> Callable[[], None]:
        def run() -> None:
            clock.now += costs[name]
            spent[name] += costs[name]

        return run

    names = list(costs)
    rule = Auto(free_budget=0.0)
    chosen = scheduler(rule, dict(zip(names, rates, strict=True)))(
        {name: commit(name) for name in names}, clock
    )
    since = [0.0] * len(names)
    lost = started = 0.0
    rounds = 0
    while rounds < max(2, round(40 * job)):
        clock.now += iteration
        for i, rate in enumerate(rates):
            lost += rate * iteration * (since[i] + iteration / 2.0)
            since[i] += iteration
        decision = chosen.step()
        if decision.target is None:
            continue
        number = names.index(decision.target)
        for i in range(number + 1):
            since[i] = 0.0
        if number == len(names) - 1:
            if decision.cost != decision.cost:  # the measuring ones come before the count
                spent = dict.fromkeys(spent, 0.0)
                lost, started = 0.0, chosen.work_seconds
            else:
                rounds += 1
    return (sum(spent.values()) + lost) / (chosen.work_seconds - started)


# ---- figure 8: the integer rule


def integer_rule(size: Size) -> Iterator[Figure]:
    """Interval of the scheduler against trying all integers, for C/d from 2e-5 to 0.05 and three
    failure rates."""
    wrong = cases = 0
    for hours in MTBF_HOURS:
        for ratio in np.geomspace(2e-5, 0.05, 24 if size.job >= 1 else 8):
            clock = Clock()
            price = 0.25 * float(ratio)
            at: list[int] = []

            def commit(clock: Clock = clock, price: float = price, at: list[int] = at) -> None:
                clock.now += price
                at.append(own.steps)  # noqa: B023

            rule = Auto(free_budget=0.0)
            own = scheduler(rule, 1.0 / (hours * HOUR))({"disk": commit}, clock)
            best = best_integer(price, 1.0 / (hours * HOUR), 0.25)
            while len(at) < 5:
                clock.now += 0.25
                own.step()
            cases += 1
            wrong += set(np.diff(at[1:]).tolist()) != {best}
    figure = Figure(8, "integer rule: intervals unlike brute force")
    figure.add(f"of {cases} cases", wrong, "<=", 0.0)
    yield figure


# ---- figure 9: COCI as published


def coci(size: Size) -> Iterator[Figure]:
    """COCI in its own metric and others, at the planned failure rate and at one 20 times higher, in
    three units of time."""
    figure = Figure(
        9, "COCI as published / Young, both planned for MTBF 24 h (disk, exponential curve)"
    )
    plan = next(
        cell
        for cell in cells(size.job)
        if cell.cost.name == "disk"
        and cell.curve is CURVES["exponential"]
        and cell.mtbf == 24 * HOUR
    )
    decay = -6.0 / plan.cost.job
    for label, mtbf in (("planned rate", plan.mtbf), ("20 x the planned rate", plan.mtbf / 20.0)):
        cell = replace(plan, mtbf=mtbf)
        young = _totals(cell, Young(plan.rate))
        for metric, total in _totals(cell, None).items():
            figure.add(
                f"{label}, not COCI but objective='progress' with the true rate, {metric}",
                total / young[metric],
            )
        for unit, seconds in (("s", 1.0), ("min", 60.0), ("h", HOUR)):
            policy = COCI(
                decay_per_second=decay, failure_rate_per_second=plan.rate, unit_seconds=seconds
            )
            for metric, total in _totals(cell, policy).items():
                figure.add(f"{label}, unit 1 {unit}, {metric}", total / young[metric])
    yield figure


def _totals(cell: Cell, policy: Any) -> dict[Metric, float]:
    """policy: None: the scheduler's own."""
    commits = (
        Job(cell, 0)
        .run(ruled(cell, policy) if policy is not None else known(cell, "progress"))
        .commits
    )
    metrics: tuple[Metric, ...] = ("progress", "value", "time")
    return {metric: Segments(cell, metric).total(commits) for metric in metrics}


# ---- figure 10: notices


def notices(size: Size) -> Iterator[Figure]:
    """Notices of 30 s for each class of cost."""
    figure = Figure(10, "notice of 30 s")
    misses = 0
    for name, share in (("disk", 0.4), ("big", 0.4), ("pmem", 0.2)):
        cost = COSTS[name]
        trials = notice_trials(
            round(size.trials * share), iteration=cost.iteration, commit=cost.blocking
        )
        misses += trials.misses
        figure.add(
            f"{name}: most seconds lost / (2 iterations + commit at p99)",
            trials.worst_lost / trials.allowed,
            "<=",
            1.0,
        )
        figure.add(f"{name}: mean seconds lost", trials.mean_lost)
    figure.add(f"misses in {size.trials:,} trials", misses, "<=", 0.0)
    yield figure


FIGURES: dict[str, Callable[[Size], Iterator[Figure]]] = {
    "convergence": convergence,
    "exploration": exploration,
    "walls": walls,
    "drift": drift,
    "dear": dear,
    "tiers": tiers,
    "integer_rule": integer_rule,
    "coci": coci,
    "notices": notices,
}
"""Each gives one figure or more."""
