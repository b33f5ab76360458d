"""The scheduler as users call it: its rule, its models, bad input, and what a store keeps for
it."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._engine.history import Announced
from pmstore.scheduler import (
    Auto,
    CommitPolicy,
    CommitScheduler,
    CostModel,
    EveryN,
    EverySeconds,
    HazardModel,
    IterationTimer,
    Known,
    LossFit,
    TerminationModel,
)
from pmstore_lab.simulation.baselines import COCI, CheckFreq, Daly, EveryStep, Young
from pmstore_lab.simulation.driver import Clock
from pmstore_lab.simulation.optimum import best_integer


class Bench:
    """A loop of iterations of `iteration` seconds with targets whose commits take `costs`."""

    def __init__(self, iteration: float = 1.0, **costs: float) -> None:
        self.clock = Clock()
        self.iteration = iteration
        self.costs = costs or {"store": 0.5}
        self.commits: list[tuple[int, str]] = []
        self.steps = 0

    def target(self, name: str) -> Any:
        def commit() -> None:
            self.clock.now += self.costs[name]
            self.commits.append((self.steps, name))

        return commit

    def scheduler(
        self,
        objective: Any = "time",
        total_steps: int | None = None,
        *,
        policy: CommitPolicy | None = None,
        free_budget: float = 0.001,
        max_overhead: float | None = None,
        dirty_bytes: Any = None,
        **known: Any,
    ) -> CommitScheduler:
        rule = Auto(objective, free_budget=free_budget, max_overhead=max_overhead)
        return CommitScheduler(
            policy or rule,
            targets={name: self.target(name) for name in self.costs},
            clock=self.clock,
            dirty_bytes=dirty_bytes,
            known=Known(total_steps, **known),
        )

    def run(self, scheduler: CommitScheduler, steps: int, loss: Any = None) -> list[int]:
        """Steps after which something was committed, from the first step of this call."""
        first = len(self.commits)
        for _ in range(steps):
            self.clock.now += self.iteration
            self.steps += 1
            scheduler.step(loss)
        return [step for step, _ in self.commits[first:]]


# ---- the rule


@pytest.mark.parametrize("ratio", np.geomspace(2e-5, 0.05, 12))
@pytest.mark.parametrize("mtbf", [1800.0, 86400.0])
def test_the_interval_is_the_best_integer(ratio: float, mtbf: float) -> None:
    bench = Bench(0.25, store=0.25 * ratio)
    scheduler = bench.scheduler(failure_rate_per_second=1 / mtbf, free_budget=0)
    best = best_integer(0.25 * ratio, 1 / mtbf, 0.25)
    commits = bench.run(scheduler, 10 + 4 * best)
    assert set(np.diff(commits)[1:]) == {best}


def test_the_highest_tier_that_is_due_commits_and_resets_those_below() -> None:
    bench = Bench(1.0, heap=0.1, disk=2.0)
    scheduler = bench.scheduler(failure_rate_per_second={"heap": 1e-3, "disk": 1e-4}, free_budget=0)
    bench.run(scheduler, 2000)
    disk = [step for step, name in bench.commits if name == "disk"]
    heap = [step for step, name in bench.commits if name == "heap"]
    assert set(np.diff(disk)[1:]) == {best_integer(2.0, 1e-4, 1.0)}
    after = disk[2]
    assert min(step for step in heap if step > after) == after + best_integer(0.1, 1e-3, 1.0)


def test_free_budget_and_max_overhead() -> None:
    bench = Bench(1.0, store=0.0199)
    scheduler = bench.scheduler(failure_rate_per_second=1e-9, free_budget=0.001)
    assert set(np.diff(bench.run(scheduler, 200))[1:]) == {20}
    bench = Bench(1.0, store=4.99)
    scheduler = bench.scheduler(failure_rate_per_second=0.1, max_overhead=0.05, free_budget=0)
    assert set(np.diff(bench.run(scheduler, 500))[1:]) == {100}


def test_a_decision_tells_why() -> None:
    bench = Bench(1.0, store=0.5)
    scheduler = bench.scheduler(failure_rate_per_second=0.01, free_budget=0)
    bench.run(scheduler, 100)
    nothing = scheduler.step()
    assert not nothing
    assert nothing.target is None
    first, second = list(scheduler.decisions)[:2]
    assert (first.target, first.reason) == ("store", "to measure its cost")
    assert math.isnan(first.cost)
    assert second
    assert second.reason == "risk reached the price"
    assert second.risk >= second.cost == pytest.approx(0.5)
    assert second.hazard == 0.01
    assert second.predicted_overhead == pytest.approx(math.sqrt(2 * 0.01 * 0.5))
    assert (second.step, second.seconds) == (
        bench.commits[1][0],
        pytest.approx(bench.commits[1][0]),
    )
    assert [(d.step, d.target) for d in scheduler.decisions] == bench.commits


def test_a_failing_commit_is_passed_on_and_tried_again() -> None:
    bench = Bench(1.0, store=0.5)
    scheduler = bench.scheduler(failure_rate_per_second=0.01, free_budget=0)
    bench.run(scheduler, 10)
    commit = scheduler.targets[0].commit

    def fail() -> None:
        raise OSError("disk on fire")

    scheduler.targets[0].commit = fail
    with pytest.raises(OSError, match="on fire"):
        bench.run(scheduler, 100)
    work = scheduler.targets[0].work
    assert work >= 9
    with pytest.raises(OSError, match="on fire"):
        bench.run(scheduler, 1)
    scheduler.targets[0].commit = commit
    assert bench.run(scheduler, 1) == [bench.steps]


class Background:
    """A commit that goes on for so many seconds."""

    def __init__(self, bench: Bench, seconds: float) -> None:
        self.ends = bench.clock.now + seconds
        self.bench = bench

    def done(self) -> bool:
        return self.bench.clock.now >= self.ends


def test_one_commit_at_a_time_is_in_the_background_and_its_slowdown_is_learned() -> None:
    bench = Bench(1.0)
    launched: list[float] = []

    def commit() -> Background:
        bench.clock.now += 1.0
        launched.append(bench.clock.now)
        bench.commits.append((bench.steps, "disk"))
        return Background(bench, 20.0)

    scheduler = CommitScheduler(
        Auto(free_budget=0),
        targets={"disk": commit},
        clock=bench.clock,
        known=Known(failure_rate_per_second=0.005),
    )
    for _ in range(2000):
        bench.clock.now += 1.25 if launched and bench.clock.now < launched[-1] + 20 else 1.0
        bench.steps += 1
        scheduler.step()
    assert np.diff(launched).min() >= 20.0
    cost = scheduler.targets[0].cost
    assert cost.blocking() == pytest.approx(1.0)
    assert cost.background == pytest.approx(20.0, abs=1.5)
    assert cost.slowdown == pytest.approx(0.2, abs=0.03)
    assert scheduler.targets[0].price == pytest.approx(5.0, abs=0.8)


def test_paused_time_is_at_risk_but_no_work() -> None:
    bench = Bench(1.0)
    scheduler = bench.scheduler(failure_rate_per_second=1e-3, free_budget=0)
    bench.run(scheduler, 10)
    work, risk = scheduler.targets[0].work, scheduler.targets[0].risk
    with scheduler.paused():
        bench.clock.now += 100.0
    assert scheduler.targets[0].work == work
    assert scheduler.targets[0].risk == pytest.approx(risk + 0.1 * work)
    scheduler.step()
    assert scheduler.timer.mean == pytest.approx(1.0, rel=0.2)


# ---- policies


@pytest.mark.parametrize(
    ("policy", "interval"),
    [
        (EveryStep(), 1),
        (EveryN(7), 7),
        (EverySeconds(12), 12),
        (Young(0.001), round(math.sqrt(2 * 0.5 / 0.001))),
        (Daly(0.001), round(math.sqrt(1000) * (1 + math.sqrt(0.00025) / 3 + 0.00025 / 9) - 0.5)),
        (CheckFreq(0.035), math.ceil(0.5 / 0.035)),
        (Auto(), best_integer(0.5, 0.001, 1.0)),
    ],
)
def test_policies_are_interchangeable(policy: CommitPolicy, interval: int) -> None:
    assert isinstance(policy, CommitPolicy)
    bench = Bench(1.0, store=0.5)
    scheduler = bench.scheduler(policy=policy, failure_rate_per_second=0.001, free_budget=0)
    assert set(np.diff(bench.run(scheduler, 300))[1:]) == {interval}


def test_coci_depends_on_the_unit_of_time() -> None:
    intervals = {}
    for unit in (1.0, 60.0):
        bench = Bench(1.0, store=0.5)
        policy = COCI(decay_per_second=-1e-3, failure_rate_per_second=1e-3, unit_seconds=unit)
        commits = bench.run(bench.scheduler(policy=policy), 2000)
        intervals[unit] = len(commits)
        drop = (1 - math.exp(-1e-3 * 0.5)) * (1 / (2 * 1e-3 * unit) + 1 / (2 * 1e-3 * unit))
        assert policy.drop(0.5, 1e-3) == pytest.approx(drop)
        fallen = -np.diff(np.exp(-1e-3 * np.array(commits[1:])))
        assert (fallen >= drop).all()
        assert fallen.size == 0 or fallen.max() <= drop + 1e-3
    assert intervals[60.0] > 10 * intervals[1.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: EveryN(0),
        lambda: EveryN(-1),
        lambda: EverySeconds(-1),
        lambda: Young(math.nan),
        lambda: CheckFreq(0),
        lambda: COCI(decay_per_second=1.0),
        lambda: Auto("speed"),  # type: ignore[arg-type]
        lambda: CommitScheduler(targets={}),
        lambda: CommitScheduler(),
        lambda: CommitScheduler(tiers=["disk"]),
        lambda: CommitScheduler(tiers=["disk"], targets={"a": int}),
        lambda: CommitScheduler(targets={f"{i}": int for i in range(9)}),
    ],
)
def test_arguments_that_mean_nothing_raise_at_once(make: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        make()


@pytest.mark.parametrize("steps", [1.5, math.inf, "3", None])
def test_steps_are_whole_numbers(steps: Any) -> None:
    with pytest.raises(TypeError, match="number of steps between commits, at least 1, not"):
        EveryN(steps)


def test_what_is_no_policy() -> None:
    for given in ("speed", {"store": int}):
        with pytest.raises(TypeError, match="or a rule of"):
            CommitScheduler(given, targets={"a": int})  # type: ignore[arg-type]


# ---- models


def test_the_timer_leaves_out_warm_up_and_hiccups() -> None:
    timer = IterationTimer()
    for seconds in (30.0, 5.0, 2.0, *[1.0] * 50, 60.0, *[1.0] * 5):
        timer.add(seconds)
    assert timer.mean == pytest.approx(1.0)
    assert timer.p99 == pytest.approx(1.0)
    for _ in range(60):
        timer.add(20.0)  # a new pace
    assert timer.mean == pytest.approx(20.0)


def test_cost_by_bytes() -> None:
    cost = CostModel()
    rng = np.random.default_rng(1)
    for dirty in rng.uniform(1e6, 1e9, 60):
        cost.add(0.3 + 2e-9 * dirty, dirty)
    assert cost._line() == pytest.approx((0.3, 2e-9), rel=1e-6)
    assert cost.price(2e9) == pytest.approx(4.3, rel=0.01)
    assert cost.p99 > 2.0


def test_a_cost_that_jumps_is_followed_within_two_commits() -> None:
    cost = CostModel()
    for _ in range(50):
        cost.add(1.0)
    cost.add(10.0)
    assert 4.0 < cost.price() < 7.0  # a stray, or the first of many
    cost.add(1.0)  # a stray: one in 52 is 10 times as dear
    assert 1.0 < cost.price() < 1.2
    for _ in range(100):
        cost.add(1.0)
    cost.add(10.0)
    cost.add(12.0)
    assert cost.price() == pytest.approx(11.0, rel=0.1)
    for bad in (math.nan, -1.0, math.inf):
        before = cost.price()
        cost.add(bad)
        assert cost.price() == before


def test_hazard_is_a_posterior_mean() -> None:
    hazard = HazardModel()
    for _ in range(10):
        hazard.expose(3.6 * 3600.0)
        hazard.failed()
    assert hazard.rate() == pytest.approx(10 / (36 * 3600), rel=0.1)
    assert sum(hazard.rate(i, 3) for i in range(3)) == pytest.approx(hazard.rate())
    for _ in range(30):
        hazard.failed(2)
    assert hazard.share(2, 3) == pytest.approx(30 / 42, rel=0.02)


def test_termination_rate() -> None:
    assert TerminationModel().rate == 0.0
    model = TerminationModel([(100.0, False), (300.0, True), (math.nan, False), (-5.0, False)])
    assert model.rate == pytest.approx(1 / 400)


@pytest.mark.parametrize("rate", [3.0, 8.0])
def test_the_loss_fit_finds_the_density_of_an_exponential(rate: float) -> None:
    n = 20_000
    rng = np.random.default_rng(3)
    u = np.arange(1, n + 1) / n
    losses = (0.5 + 2 * np.exp(-rate * u)) * (1 + 0.08 * rng.standard_normal(n))
    fit = LossFit(n)
    for step, loss in enumerate(losses, start=1):
        fit.add(step, float(loss))
        if fit.closed:
            fit.refit(step)
        if step in (n // 4, n // 2):
            true = max(rate * math.exp(-rate * step / n) / (1 - math.exp(-rate)), 0.2)
            assert fit.weight(step) == pytest.approx(true, rel=0.25)


def test_the_loss_fit_says_nothing_of_noise() -> None:
    rng = np.random.default_rng(4)
    fit = LossFit(10_000)
    for step, loss in enumerate(2.0 + 0.2 * rng.standard_normal(5000), start=1):
        fit.add(step, float(loss))
        if fit.closed:
            fit.refit(step)
            assert 0.5 < fit.weight(step) < 2.0


# ---- bad input


@pytest.mark.parametrize("objective", ["time", "balanced", "progress", "explore"])
@pytest.mark.parametrize(
    "losses",
    [
        [math.nan],
        [None],
        [math.inf, 1.0],
        [-math.inf],
        ["3.0", object(), [1, 2]],
        [1.0, 2.0, 4.0, 1e300],
        [0.0],
        [-1e308, 1e308],
        [np.float32(2.5), 3, np.array(1.0)],
        [10**400],
        [5e-324],
    ],
)
def test_no_loss_makes_step_raise(objective: Any, losses: list[Any]) -> None:
    bench = Bench(1.0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        scheduler = bench.scheduler(objective, 1000, failure_rate_per_second=0.01)
        for i in range(900):
            bench.run(scheduler, 1, losses[i % len(losses)])
    messages = [str(warning.message) for warning in seen]
    assert len(messages) == len(set(messages))  # each once
    assert 5 <= np.diff([step for step, _ in bench.commits])[1:].mean() <= 40  # as without: 10


def test_rising_losses_act_as_time() -> None:
    bench = Bench(1.0, store=0.5)
    scheduler = bench.scheduler("progress", 2000, failure_rate_per_second=0.001, free_budget=0)
    for i in range(1500):
        bench.run(scheduler, 1, 1.0 + i / 100)
    assert scheduler.worth.weight == 1.0
    assert np.diff([step for step, _ in bench.commits])[-1] == best_integer(0.5, 0.001, 1.0)


@pytest.mark.parametrize("jump", [-100.0, -1e9, 1e9, math.nan, math.inf])
def test_clock_steps(jump: float) -> None:
    bench = Bench(1.0, store=0.5)
    scheduler = bench.scheduler(failure_rate_per_second=0.001, free_budget=0)
    bench.run(scheduler, 200)
    before = bench.clock.now
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        bench.clock.now += jump
        bench.run(scheduler, 1)
        if not math.isfinite(jump):
            bench.clock.now = before
        bench.run(scheduler, 400)
        bench.clock.now += jump if math.isfinite(jump) else 0.0
        bench.run(scheduler, 400)
    assert "the clock moved" in str(seen[0].message)
    assert len(seen) == 1
    assert np.diff([step for step, _ in bench.commits])[-1] == best_integer(0.5, 0.001, 1.0)
    assert scheduler.work_seconds == pytest.approx(1001, rel=0.01)


def test_a_clock_that_stands_still_and_commits_that_cost_nothing() -> None:
    bench = Bench(0.0, store=0.0)
    scheduler = bench.scheduler()
    bench.run(scheduler, 100)
    bench.iteration = 1.0
    assert len(bench.run(scheduler, 100)) == 100  # what is free is done every time


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf, {"other": 1.0}, {"store": -2.0}])
def test_a_rate_that_is_none_is_learned(rate: Any) -> None:
    bench = Bench(1.0)
    with pytest.warns(RuntimeWarning, match="is no rate"):
        scheduler = bench.scheduler(failure_rate_per_second=rate)
    bench.run(scheduler, 50)
    nothing_known = HazardModel()
    nothing_known.expose(50.0)
    assert scheduler.hazard_rate == pytest.approx(nothing_known.rate(), rel=0.1)


@pytest.mark.parametrize(
    ("option", "value"),
    [("total_steps", -5), ("total_steps", 0), ("free_budget", -1.0), ("free_budget", math.nan)],
)
def test_other_bad_arguments_are_replaced_with_a_warning(option: str, value: Any) -> None:
    bench = Bench(1.0)
    with pytest.warns(RuntimeWarning, match=option):
        scheduler = bench.scheduler("progress", failure_rate_per_second=0.01, **{option: value})
    for i in range(300):
        bench.run(scheduler, 1, math.exp(-i / 100))
    assert len(bench.commits) > 3


def test_no_failures_expected_no_commits_but_the_free_ones() -> None:
    bench = Bench(1.0, store=0.5)
    assert len(bench.run(bench.scheduler(failure_rate_per_second=0.0, free_budget=0), 500)) == 1
    bench = Bench(1.0, store=0.05)
    assert len(bench.run(bench.scheduler(failure_rate_per_second=0.0), 500)) == 10


# ---- in a store


def test_state_commits_with_the_users(shm: Path) -> None:
    path = shm / "run.pm"
    bench = Bench(1.0)

    def open_and_run(steps: int) -> tuple[int, int, CommitScheduler]:
        with pmstore.open(path) as store:
            data = store.require("data", (1,), "int64")

            def commit() -> None:
                bench.clock.now += 0.5
                store.commit()

            scheduler = CommitScheduler(
                Auto("progress"),
                store=store,
                targets={"store": commit},
                clock=bench.clock,
                known=Known(400, 0.01),
            )
            found = scheduler.steps
            assert data[0] == found
            for _ in range(steps):
                bench.clock.now += 1.0
                data[0] += 1
                scheduler.step(5.0 * math.exp(-scheduler.steps / 100) + 0.1)
            uncommitted = scheduler.steps
            committed = found
            if steps:
                committed = scheduler.decisions[-1].step
                store.rollback()
                assert data[0] == committed
                scheduler.rolled_back()
                assert scheduler.steps == committed < uncommitted
            return found, committed, scheduler

    _, committed, first = open_and_run(105)
    found, _, second = open_and_run(0)
    assert found == committed
    assert second.targets[0].cost.price() == pytest.approx(0.5)
    assert second.timer.mean == pytest.approx(first.timer.mean, rel=0.01)
    assert second.worth.weight == pytest.approx(first.worth.weight, rel=0.1)
    assert second.work_seconds == pytest.approx(committed)


def test_history_of_failures_outlives_roll_backs_and_kills(shm: Path) -> None:
    from pmstore.testing import ForkServer

    path = shm / "run.pm"
    with pmstore.open(path) as store:
        hazard = HazardModel(store)
        hazard.expose(1000.0)
        hazard.save(now=True)
        store.rollback()
    with pmstore.open(path) as store:  # a clean exit: exposure only
        hazard = HazardModel(store)
        assert (sum(hazard.failures), hazard.exposure_seconds) == (0, 1000.0)
        again = HazardModel(store)  # a second one in the same opening sees no failure either
        assert sum(again.failures) == 0
    with ForkServer(
        search_path=[str(Path(__file__).parent), str(Path(__file__).parents[1])]
    ) as server:
        for kills in (1, 2, 3):
            assert server.run("test_scheduler:_dies", [str(path), kills == 3]).killed
            with pmstore.open(path) as store:
                hazard = HazardModel(store)
                assert sum(hazard.failures) == min(kills, 2)
                assert hazard.preemptions == (kills == 3)
                assert hazard.exposure_seconds == 1000.0 + 10.0 * kills


def _dies(ack: Any, path: str, noticed: bool) -> None:
    import os
    import signal

    store = pmstore.open(path)
    hazard = HazardModel(store)
    hazard.expose(10.0)
    hazard.save(now=True)
    if noticed:
        hazard.announce(Announced.PREEMPTION)
    store["uncommitted"] = 1
    os.kill(os.getpid(), signal.SIGKILL)


def test_lengths_of_earlier_runs(shm: Path) -> None:
    with pmstore.open(shm / "runs.pm") as store:
        for number, (steps, total) in enumerate(
            ((100, 1000), (300, 1000), (1000, 1000), (50, None))
        ):
            bench = Bench(1.0)
            scheduler = CommitScheduler(
                Auto("explore"),
                store=store,
                clock=bench.clock,
                known=Known(total, 0.1),
                run=f"r{number}",
            )
            bench.run(scheduler, steps, 1.0)
            if steps < 1000:
                scheduler.commit()
            else:
                store.commit()  # reached its end, and the program commits
        last = CommitScheduler(Auto("explore"), store=store, known=Known(1000), run="next")
        assert last.worth.termination.rate == pytest.approx(2 / 1450)
        other = CommitScheduler(Auto("explore"), store=store, run="r0")
        assert other.worth.termination.rate == pytest.approx(1 / 1350)


def test_another_number_of_targets_starts_anew(shm: Path) -> None:
    with pmstore.open(shm / "tiers.pm") as store:
        bench = Bench(1.0)
        bench.run(CommitScheduler(store=store, clock=bench.clock), 50)
        two = CommitScheduler(
            store=store, targets={"a": store.commit, "b": store.commit}, clock=bench.clock
        )
        assert two.steps == 0
        bench.run(two, 10)
        assert store.check().problems == ()


def test_a_loop_in_the_style_of_scikit_learn(shm: Path) -> None:
    """partial_fit, with what the estimator holds in a store; killed by an exception, gone on
    with."""
    from sklearn.cluster import MiniBatchKMeans

    data = np.random.default_rng(0).normal(size=(600, 2)) + np.repeat(
        [[0, 0], [6, 0], [0, 6]], 200, axis=0
    )
    path = shm / "kmeans.pm"

    def fit(passes: int) -> int:
        with pmstore.open(path) as store:
            centres = store.require("centres", (3, 2), "float64")
            done = store.require("done", (1,), "int64")
            scheduler = CommitScheduler(Auto("balanced"), store=store, known=Known(60, 10.0))
            assert scheduler.steps == done[0]
            start = np.array(centres) if done[0] else "k-means++"
            model = MiniBatchKMeans(3, init=start, n_init=1, random_state=0)
            for number in range(int(done[0]), passes):
                model.partial_fit(data[number % 6 :: 6])
                centres[:] = model.cluster_centers_
                done[0] = number + 1
                scheduler.step(model.inertia_)
            store.rollback()
            return int(done[0])

    reached = fit(40)
    assert 0 < reached <= 40
    assert reached <= fit(60) <= 60
    with pmstore.open(path) as store:
        assert sorted(np.round(store["centres"]).tolist()) == [[0, 0], [0, 6], [6, 0]]


@pytest.mark.parametrize("kind", ["future", "flush"])
def test_a_commit_that_failed_in_the_background_saved_nothing(kind: str) -> None:
    from concurrent.futures import Future

    bench = Bench(1.0)
    futures: list[Any] = []

    def commit() -> Any:
        futures.append(
            Future() if kind == "future" else type("Flush", (), {"done": False, "error": None})()
        )
        return futures[-1]

    scheduler = CommitScheduler(
        EveryN(10),
        targets={"disk": commit},
        clock=bench.clock,
        known=Known(failure_rate_per_second=0.01),
    )
    bench.run(scheduler, 15)
    assert scheduler.targets[0].work == 5.0
    if kind == "future":
        futures[0].set_exception(OSError("gone"))
    else:
        futures[0].error, futures[0].done = OSError("gone"), True
    with pytest.warns(RuntimeWarning, match="failed in the background and is tried again: gone"):
        bench.run(scheduler, 1)
    target = scheduler.targets[0]
    assert (target.work, target.steps) == (16.0, 16)
    assert target.risk == pytest.approx(0.01 * sum(range(1, 17)))
    bench.run(scheduler, 4)
    assert len(futures) == 2


def test_flushes_to_a_real_tier(shm: Path) -> None:
    with pmstore.open(shm / "run.pm") as store:
        store.add_tier("disk", str(shm / "tier"))
        data = store.zeros("data", 1000)
        scheduler = CommitScheduler(
            store=store, tiers=["disk"], known=Known(failure_rate_per_second=50.0)
        )
        for _ in range(400):
            data += 1
            scheduler.step()
        flushed = [decision for decision in scheduler.decisions if decision.target == "disk"]
        assert flushed
        store.commit()
        store.drain()
    pmstore.restore(shm / "copy.pm", str(shm / "tier"))
    with pmstore.open(shm / "copy.pm") as copy:
        value = copy["data"][0]
        assert (copy["data"] == value).all()
        assert (
            CommitScheduler(store=copy, targets={"store": copy.commit, "x": copy.commit}).steps
            == value
        )


@pytest.mark.parametrize("place", range(0, 60, 3))
@pytest.mark.parametrize("value", [math.nan, -1.0, 1e300, math.inf])
def test_a_damaged_state_starts_anew(shm: Path, place: int, value: float) -> None:
    with pmstore.open(shm / "damaged.pm") as store:
        bench = Bench(1.0)
        bench.run(
            CommitScheduler(Auto("progress"), store=store, clock=bench.clock, known=Known(500)),
            50,
            2.0,
        )
        store["pmstore.scheduler/run"][place] = value
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            scheduler = CommitScheduler(
                Auto("progress"), store=store, clock=bench.clock, known=Known(500)
            )
            assert scheduler.steps in (0, 1, 50) or place == 2
            bench.run(scheduler, 100, 2.0)


def test_a_roll_back_before_the_first_commit_forgets_losses(shm: Path) -> None:
    with pmstore.open(shm / "early.pm") as store:
        bench = Bench(1.0)
        scheduler = CommitScheduler(
            Auto("progress"), store=store, clock=bench.clock, known=Known(500)
        )
        for i in range(3):
            bench.run(scheduler, 1, 3.0 - i)
        store.rollback()
        scheduler.rolled_back()
        assert scheduler.worth.fit._rows == []
        assert (scheduler.steps, scheduler.targets[0].work) == (0, 0.0)
        bench.run(scheduler, 20, 1.0)
        store.rollback()
        scheduler.rolled_back()
        assert scheduler.steps == bench.commits[-1][0] if bench.commits else True


def test_neither_torch_nor_matplotlib_is_needed() -> None:
    code = (
        "import sys, pmstore.scheduler, pmstore_lab.simulation.study; sys.exit(bool({'torch', "
        "'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_compaction_keeps_the_history(shm: Path) -> None:
    path = shm / "run.pm"
    with pmstore.open(path, size="16MiB") as store:
        store["a"] = np.ones(100)
        hazard = HazardModel(store)
        hazard.expose(500.0)
        hazard.failed()
        hazard.save(now=True)
    assert pmstore.compact(path).after_bytes < 16 << 20
    with pmstore.open(path) as store:
        hazard = HazardModel(store)
        assert (sum(hazard.failures), hazard.exposure_seconds) == (1, 500.0)


def test_tiers_are_names_of_tiers(store: pmstore.Store) -> None:
    with pytest.raises(TypeError, match=r"tiers='disk': a list of names"):
        CommitScheduler(EveryN(1), store=store, tiers="disk")
    with pytest.raises(ValueError, match=r"has no tier 'disk': store.add_tier"):
        CommitScheduler(EveryN(1), store=store, tiers=["disk"])
