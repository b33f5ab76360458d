"""Does the scheduler reach the exact optimum? Figures of jobs in simulated time; and what
a step of it costs.

Figures are ratios of exact expected costs, not times of this machine
(pmstore_lab/simulation/study.py computes them; docs/SCHEDULER.md says what they mean). The times
are those of `CommitScheduler.step` when it does not commit.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.harness import LIMIT, NONE, Budget, Row, Target, TimeUp, report, summarize
from pmstore.scheduler import Auto, CommitPolicy, CommitScheduler, Known, LossFit
from pmstore_lab.simulation.baselines import Young
from pmstore_lab.simulation.curves import CURVES, noisy
from pmstore_lab.simulation.figure import Figure, Size
from pmstore_lab.simulation.study import FIGURES

STEPS = 200_000
TENSORS = "step, progress, losses as tensors"
# More than half of the time: begun first, so that all cores end together.
SLOW = ("convergence", "walls", "notices")
QUICK = ("drift", "tiers", "integer_rule", "coci")  # the figures that take seconds


def main(quick: bool, budget: Budget) -> None:
    rows = _step_costs(1 if quick else 9)
    size = (
        Size(job=0.3, seeds=1, rate_seeds=8, trials=10_000)
        if quick
        else Size(seeds=1, rate_seeds=4)
    )  # `Size()`: minutes more
    figures: list[Figure] = []
    names = list(QUICK if quick else sorted(FIGURES, key=lambda name: name not in SLOW))
    late = set(names)
    try:
        # simulated time: no one disturbs another
        with multiprocessing.get_context("spawn").Pool() as pool:
            for name, found, seconds in pool.imap_unordered(
                _compute, [(name, size) for name in names]
            ):
                figures += found
                late.remove(name)
                print(f"  {name}: {seconds:.0f} s ({budget.left:.0f} s left)", flush=True)
    except TimeUp:
        print(f"  no time for {', '.join(sorted(late))}", flush=True)
    figures.sort(key=lambda figure: figure.number)
    targets = [
        Target(f"{f.number}. {f.title}: {name}", f.values[name], bound, at_least=sense == ">=")
        for f in figures
        for name, (sense, bound) in f.bounds.items()
    ]
    targets.insert(
        0,
        Target(
            "step without a commit, microseconds, worst objective",
            max(r.median_us for r in rows if r.method.startswith("step, ")),
            2.0,
        ),
    )
    targets.insert(
        1, Target("refit of the loss curve, milliseconds", rows[-1].median_us / 1e3, 2.0)
    )
    notes = [
        f"{f.number}. {f.title}: {name} = {value:.3f}"
        for f in figures
        for name, value in f.values.items()
        if name not in f.bounds
    ]
    notes += [f"{name}: {LIMIT}" for name in sorted(late)]
    report(
        "scheduler",
        "When to commit: the scheduler against the exact optimum",
        rows,
        targets=targets,
        notes=notes,
        quick=quick,
    )


def _compute(task: tuple[str, Size]) -> tuple[str, list[Figure], float]:
    name, size = task
    start = time.monotonic()
    return name, list(FIGURES[name](size)), time.monotonic() - start


def _step_costs(rounds: int) -> list[Row]:
    """Interleaved rounds of many steps; everything a step does is in it, refits and refreshes
    included."""
    losses: list[float] = noisy(
        CURVES["power law"].loss(np.linspace(0.0, 1.0, STEPS)), np.random.default_rng(0)
    ).tolist()
    ways: dict[str, Callable[[], CommitScheduler]] = {
        "step, time": lambda: _idle(Auto("time", free_budget=0.0)),
        "step, progress": lambda: _idle(Auto("progress", free_budget=0.0)),
        "step, Young": lambda: _idle(Young(1e-9)),
    }
    given: dict[str, Sequence[Any]] = dict.fromkeys(ways, losses)
    if importlib.util.find_spec("torch"):
        ways[f"{TENSORS} of torch"] = ways["step, progress"]
        given[f"{TENSORS} of torch"] = _tensors(losses)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, make in ways.items():
            step = make().step
            start = time.perf_counter()
            for loss in given[name]:
                step(loss)
            times[name].append((time.perf_counter() - start) / STEPS * 1e6)
    case = "CommitScheduler, no commit"
    rows = [summarize(name, case, NONE, values) for name, values in times.items()]
    fit = LossFit(STEPS)
    for step, loss in enumerate(losses, start=1):
        fit.add(step, loss)
    refits = []
    for _ in range(20 * rounds):
        start = time.perf_counter()
        fit.refit(STEPS)
        refits.append((time.perf_counter() - start) * 1e6)
    return [*rows, summarize("refit of the loss curve, at the job's end", case, NONE, refits)]


def _tensors(losses: Sequence[float]) -> list[Any]:
    import torch

    torch.set_num_threads(1)
    return list(torch.tensor(losses).unbind())


def _idle(policy: CommitPolicy) -> CommitScheduler:
    """A scheduler that has measured its commit and will not make another."""
    scheduler = CommitScheduler(policy, targets={"disk": lambda: None}, known=Known(STEPS, 1e-9))
    for _ in range(20):
        scheduler.step(10.0)
    scheduler.targets[0].cost.add(1e9)
    scheduler.targets[0].cost.add(1e9)
    scheduler.targets[0].price = scheduler.targets[0].due = 1e9
    return scheduler
