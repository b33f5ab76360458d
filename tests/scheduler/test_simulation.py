"""The simulator, its exact optimum, and the scheduler's ten figures on a reduced Monte Carlo.

PMSTORE_SCHEDULER_FULL=1 takes whole jobs, three seeds and 100,000 trials (minutes), as
`python -m benchmarks scheduler` does.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pmstore.scheduler import EverySeconds
from pmstore_lab.simulation import (
    COSTS,
    CURVES,
    Cell,
    Job,
    Metric,
    Segments,
    best_integer,
    noisy,
    optimum,
)
from pmstore_lab.simulation.baselines import Young
from pmstore_lab.simulation.failures import (
    PUBLIC_MTBF_HOURS,
    poisson,
    read_trace,
    spot,
    trace,
    weibull,
)
from pmstore_lab.simulation.figure import Size, scheduler
from pmstore_lab.simulation.study import FIGURES

METRICS: tuple[Metric, ...] = ("time", "value", "progress", "termination")
SIZE = (
    Size()
    if os.environ.get("PMSTORE_SCHEDULER_FULL")
    else Size(job=0.3, seeds=1, rate_seeds=4, trials=3000)
)


def small(
    curve: str = "exponential", iterations: int = 14, mtbf: float = 40.0, blocking: float = 1.5
) -> Cell:
    cost = replace(COSTS["disk"], iteration=2.0, blocking=blocking, job=2.0 * iterations)
    return Cell(cost, CURVES[curve], mtbf)


# ---- the optimum


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("curve", CURVES)
def test_the_optimum_is_that_of_all_schedules(metric: Metric, curve: str) -> None:
    for mtbf, blocking in ((40.0, 1.5), (400.0, 1.5), (15.0, 5.0)):
        segments = Segments(small(curve, mtbf=mtbf, blocking=blocking), metric)
        inner = range(1, 14)
        least = min(
            segments.total(chosen) for k in range(14) for chosen in itertools.combinations(inner, k)
        )
        value, schedule = optimum(segments)
        assert value == pytest.approx(least, rel=1e-12)
        assert segments.total(schedule) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("curve", CURVES)
def test_the_search_may_start_where_the_last_one_ended(metric: Metric, curve: str) -> None:
    segments = Segments(small(curve, iterations=400, mtbf=100.0), metric)
    best = np.zeros(401)
    for b in range(1, 401):
        best[b] = (best[:b] + segments.cost(np.arange(b), b)).min()
    assert optimum(segments)[0] == pytest.approx(best[400], rel=1e-12)


@pytest.mark.parametrize("metric", ["time", "value"])
@pytest.mark.parametrize("background", [0.0, 6.0])
def test_the_price_of_a_schedule_is_the_mean_of_simulated_jobs(
    metric: Metric, background: float
) -> None:
    """Independent of the scheduler: a segment is tried until no failure comes; one that comes while
    its commit is written in the background begins it anew."""
    cell = small(iterations=60, mtbf=50.0)
    cell = replace(cell, cost=replace(cell.cost, background=background, slowdown=0.0))
    ends = [0, 7, 20, 35, 60]
    rng = np.random.default_rng(7)
    value = cell.value()
    d, price = cell.cost.iteration, cell.cost.price
    trials = 40_000
    total = np.zeros(trials)
    at = np.zeros(trials, int)  # ends[at] is durable; the commit before `launched` seconds
    pending = np.zeros(trials, bool)  # the segment that ends at ends[at + 1] is being written
    while (left := np.flatnonzero(at + pending < 4)).size:
        here = at[left] + pending[left]
        a, b = np.array(ends)[here], np.array(ends)[here + 1]
        length = (b - a) * d + price
        when = rng.exponential(cell.mtbf, left.size)
        reached = np.interp(a + np.minimum(when / d, b - a), np.arange(61), value) - value[a]
        failed = when < length
        lost = np.where(failed, when if metric == "time" else reached, 0.0)
        paid = np.where(failed, 0.0, price)
        early = failed & pending[left] & (when < background)  # the one before is lost with it
        first = np.array(ends)[np.maximum(here - 1, 0)]
        again = (a - first) * d if metric == "time" else value[a] - value[first]
        total[left] += lost + paid + np.where(early, again, 0.0)
        pending_now = pending[left] & ~early
        at[left] += pending_now
        pending[left] = ~failed & (background > 0)
        at[left] += ~failed & (background == 0)
    expected = Segments(cell, metric).total(ends[1:])
    if background:  # nothing comes after the last commit that could be lost with it
        last = Segments(replace(cell, cost=replace(cell.cost, background=0.0)), metric)
        expected += float(last.cost(35, 60) - Segments(cell, metric).cost(35, 60))
    assert expected == pytest.approx(
        total.mean(), abs=4 * total.std() / math.sqrt(trials) + 0.002 * expected
    )


@pytest.mark.parametrize("background", [0.0, 5.0])
def test_the_driver_agrees_with_the_exact_price(background: float) -> None:
    """Jobs under simulated failures, run by the scheduler, cost on average what its schedule
    should; and so does what was at stake in them, which scatters less."""
    cell = replace(
        Cell(COSTS["disk"], CURVES["exponential"], 400.0),
        cost=replace(COSTS["disk"], job=1800.0, background=background, slowdown=0.0),
    )
    job = Job(cell, 0, noise=(0.0, 0.0))

    run = scheduler(EverySeconds(20.0), cell.rate)
    expected = Segments(cell, "time").total(job.run(run).commits)
    outcomes = [
        job.run(run, poisson(np.random.default_rng(s), cell.mtbf, 20000.0)) for s in range(150)
    ]
    found = [outcome.overhead for outcome in outcomes]
    at_stake = [outcome.at_stake for outcome in outcomes]
    assert expected == pytest.approx(np.mean(found), abs=4 * np.std(found) / math.sqrt(len(found)))
    assert expected == pytest.approx(np.mean(at_stake), rel=0.03)
    assert np.std(at_stake) < 0.5 * np.std(found)


def test_long_jobs_with_many_failures_stay_exact() -> None:
    cell = Cell(COSTS["big"], CURVES["power law"], 1800.0)  # e^-48 of them have no failure
    total = Segments(cell, "value").total(range(50, cell.iterations, 50))
    late = Segments(cell, "value").cost(17_000, 17_050)
    assert 10.0 < float(late) < 20.0
    assert 5000.0 < total < 20000.0


def test_best_integer_is_a_minimum() -> None:
    for ratio in (2e-5, 1e-3, 0.05):
        n = best_integer(ratio, 1e-4, 1.0)
        cost = [ratio / k + 1e-4 * k / 2 for k in range(1, 2000)]
        assert cost[n - 1] == min(cost)


# ---- what jobs are made of


@pytest.mark.parametrize("curve", CURVES.values(), ids=lambda c: c.name)
def test_progress_runs_from_0_to_1(curve: object) -> None:
    u = np.linspace(0, 1, 1001)
    progress = curve.progress(u)  # type: ignore[attr-defined]
    assert (progress[0], progress[-1]) == (0, 1)
    assert (np.diff(progress) >= 0).all()


def test_noise_is_what_it_says() -> None:
    ratio = noisy(np.full(200_000, 2.0), np.random.default_rng(1)) / 2.0 - 1.0
    assert ratio.std() == pytest.approx(math.hypot(0.08, 0.03), rel=0.02)
    assert np.corrcoef(ratio[1:], ratio[:-1])[0, 1] == pytest.approx(
        0.9 * 0.03**2 / (0.08**2 + 0.03**2), rel=0.1
    )


@pytest.mark.parametrize("kind", [poisson, weibull, spot])
def test_failures_have_the_mean_time_between_them(kind: object) -> None:
    counts = [len(kind(np.random.default_rng(s), 3600.0, 5e6)) for s in range(40)]  # type: ignore[operator]
    assert np.mean(counts) == pytest.approx(5e6 / 3600, rel=0.03)


def test_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_text("# seconds\n10\n\n30\n100\n")
    times = trace(read_trace(path), np.random.default_rng(0), 1000.0)
    assert len(times) == pytest.approx(30, abs=1)
    assert times == sorted(times)
    for bad in ("ten\n", "5\n", "0\n0\n", "1\nnan\n"):
        path.write_text(bad)
        with pytest.raises(ValueError, match=r"."):
            read_trace(path)
    assert PUBLIC_MTBF_HOURS["llama3"] == pytest.approx(3.09, abs=0.01)


def test_a_failing_job_ends_and_repeats_itself() -> None:
    cell = Cell(replace(COSTS["disk"], job=1800.0), CURVES["staircase"], 300.0)
    failures = poisson(np.random.default_rng(3), cell.mtbf, 36000.0)

    run = scheduler(Young(cell.rate), None)
    first, second = (Job(cell, 1).run(run, failures) for _ in range(2))
    assert first.failures > 2
    assert first.commits == second.commits
    assert first.wall == second.wall > 1800.0


# ---- the figures


LONG = ("convergence",)
"""As long as all others together. test_simulate and test_the_optimum_is_... ask a part of it."""


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.nightly if one in LONG else ()) for one in FIGURES]
)
def test_figures(name: str) -> None:
    failures = [failure for figure in FIGURES[name](SIZE) for failure in figure.failures]
    assert not failures


# ---- the command


def test_simulate(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from pmstore.commands.application import app

    def run(*args: str) -> object:
        return CliRunner().invoke(app, ["schedule", "simulate", *args])

    picture = tmp_path / "plot.png"
    job = ("--iteration", "5", "--hours", "1", "--seeds", "1")
    result = run(
        *job, "--curve", "staircase", "--failures", "weibull", "--plot", str(picture), "--json"
    )
    assert result.exit_code == 0, result.output  # type: ignore[attr-defined]
    report = json.loads(result.stdout)  # type: ignore[attr-defined]
    rows = {row["policy"]: row for row in report["policies"]}
    assert rows["optimum, time"]["over_optimum"] == 1.0
    assert 1.0 <= rows["time"]["over_optimum"] < 1.1
    assert rows["progress"]["value_over_optimum"] < rows["Young"]["value_over_optimum"]
    assert rows["optimum, value"]["simulated"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")
    table = run(*job, "--mtbf", "llama3")
    assert "CheckFreq" in table.output  # type: ignore[attr-defined]
    assert "a failure every 3.09 h" in table.output  # type: ignore[attr-defined]
    for bad in (
        ("--cost", "gold"),
        ("--curve", "flat"),
        ("--mtbf", "soon"),
        ("--mtbf", "0"),
        ("--failures", str(tmp_path / "none")),
        ("--hours", "1e9"),
        ("--slowdown", "1.5"),
        ("--mtbf", "0.001"),
        ("--hours", "0.01", "--plot", str(tmp_path / "x.nonsense")),
    ):
        result = run(*bad)
        assert result.exit_code == 2, bad  # type: ignore[attr-defined]
        assert "Traceback" not in result.output  # type: ignore[attr-defined]
