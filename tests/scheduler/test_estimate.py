"""What the rule is told: the rate of failures that is concluded from counts, the price that is
concluded from commits, and the risk from which a commit pays."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore.scheduler import Auto, CommitScheduler, CostModel, HazardModel, Known
from pmstore.scheduler._models.estimate import expected_rate, log_evidence
from pmstore.scheduler._models.losses import Losses
from pmstore.scheduler.target import due
from pmstore_lab.simulation import Clock, best_integer

HOUR = 3600.0


def mixture(failures: float, seconds: float) -> float:
    """The posterior mean by adding up over a grid of rates."""
    rate = np.geomspace(1e-12, 1e3, 400_001)
    prior = sum(
        share / 2706.0 * 1.2 * 10.0**k * np.exp(-1.2 * 10.0**k * rate)
        for k, share in enumerate((1, 1, 4, 900, 600, 600, 600))
    )
    weight = prior * rate**failures * np.exp(-rate * seconds) * rate  # the last: of the grid
    return float((weight * rate).sum() / weight.sum())


@pytest.mark.parametrize("failures", [0.0, 1.0, 2.5, 30.0])
@pytest.mark.parametrize("hours", [0.0, 0.2, 5.0, 1000.0])
def test_the_rate_is_the_mean_of_the_posterior(failures: float, hours: float) -> None:
    seconds = hours * HOUR
    assert expected_rate(failures, seconds) == pytest.approx(mixture(failures, seconds), rel=1e-4)
    assert log_evidence(0.0, 0.0) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("mtbf", [2.0, 0.2 * HOUR, 6 * HOUR, 24 * 30 * HOUR])
def test_a_few_failures_outweigh_the_prior(mtbf: float) -> None:
    """Half a failure in four hours was 2.5 failures in 4.4 hours after two at 12 minutes."""
    hazard = HazardModel()
    for _ in range(2):
        hazard.expose(mtbf)
        hazard.failed()
    assert 0.5 < hazard.rate() * mtbf < 2.0


def test_quiet_hours_are_believed() -> None:
    """The prior of before still had one failure in 56 h after a day without one."""
    hazard = HazardModel()
    assert 2 / HOUR < hazard.rate() < 3 / HOUR
    hazard.expose(24 * HOUR)
    assert hazard.rate() < 1 / (80 * HOUR)


@pytest.mark.parametrize(("old", "new", "told"), [(720.0, 1.0, 3), (1.0, 100.0, 1)])
def test_old_counts_fade_where_new_ones_contradict_them(old: float, new: float, told: int) -> None:
    """Another cluster: eight failures at the old rate are given up after a few at the new one."""
    hazard = HazardModel()
    for _ in range(8):
        hazard.expose(old * HOUR)
        hazard.failed()
    assert hazard.rate() * old * HOUR == pytest.approx(1.0, rel=0.25) or old > new
    for _ in range(told):
        hazard.expose(new * HOUR)
        hazard.failed()
    assert 0.4 < hazard.rate() * new * HOUR < 2.5


def test_a_rate_that_stays_is_averaged_over_many_failures() -> None:
    hazard = HazardModel()
    rng = np.random.default_rng(0)
    for gap in rng.exponential(2 * HOUR, 400):
        hazard.expose(gap)
        hazard.failed()
    assert hazard.rate() * 2 * HOUR == pytest.approx(1.0, rel=0.15)


def test_what_fades_is_kept_in_the_store(shm: Path) -> None:
    path = shm / "run.pm"
    for hours in (100.0, 5.0, 300.0):
        with pmstore.open(path) as store:
            hazard = HazardModel(store)
            hazard.expose(hours * HOUR)
            for _ in range(6):
                hazard.failed()
            hazard.save(now=True)
            told = hazard.rate()
        with pmstore.open(path) as store:
            again = HazardModel(store)
            assert again.rate() == told
            assert again.failures == hazard.failures
    assert sum(again.failures) == 18.0  # what is counted stays as it is


# ---- what a commit costs


@pytest.mark.parametrize("seed", range(5))
def test_a_price_is_a_mean_where_one_commit_in_ten_is_dear(seed: int) -> None:
    """The price of before was that of an ordinary commit, or of a dear one: 1 or 10.5, never 2.9.
    That cost 17 % more than Young's rule with the mean."""
    rng = np.random.default_rng(seed)
    cost = CostModel()
    prices = []
    for number, dear in enumerate(rng.random(600) < 0.1):
        cost.add((20.0 if dear else 1.0) * math.exp(0.1 * rng.standard_normal()))
        if number >= 100:
            prices.append(cost.price())
    # what too long or too short intervals cost, (x + 1/x) / 2 with x = sqrt(price / mean)
    ratio = np.sqrt(np.array(prices) / 2.9)
    assert np.mean(ratio + 1.0 / ratio) / 2.0 < 1.04


def test_one_suspended_machine_is_no_habit() -> None:
    cost = CostModel()
    for _ in range(50):
        cost.add(1.0)
    cost.add(7200.0)
    cost.add(1.0)
    assert cost.price() < 2.0
    assert cost.largest == 7200.0  # what a notice has to reckon with


def test_a_first_commit_that_was_dear_is_soon_forgotten() -> None:
    """It allocates, and fills caches."""
    cost = CostModel()
    cost.add(30.0)
    for _ in range(2):
        cost.add(1.0)
    assert cost.price() == pytest.approx(1.0, rel=0.1)


def test_strays_do_not_bend_the_line_over_bytes() -> None:
    cost = CostModel()
    rng = np.random.default_rng(1)
    for number, dirty in enumerate(rng.uniform(1e6, 1e9, 60)):
        cost.add((0.3 + 2e-9 * dirty) * (10.0 if number == 40 else 1.0), dirty)
    assert cost._line() == pytest.approx((0.3, 2e-9), rel=1e-6)


def test_a_cost_goes_on_from_its_state() -> None:
    cost = CostModel()
    rng = np.random.default_rng(2)
    for dear in rng.random(200) < 0.1:
        cost.add(20.0 if dear else 1.0)
    again = CostModel()
    again.restore(cost.state())
    if not cost._odd:
        assert again.price() == cost.price()
    for _ in range(5):
        cost.add(1.0)
        again.add(1.0)
    assert again.price() == pytest.approx(cost.price(), rel=0.1)


# ---- the risk from which a commit pays


@pytest.mark.parametrize("mtbf", [480.0, 1800.0])
@pytest.mark.parametrize("cost", [15.0, 60.0, 400.0])
def test_intervals_of_commits_that_are_dear_against_the_mtbf(cost: float, mtbf: float) -> None:
    """The rule of before took sqrt(2 C M): at 60 s and 8 minutes 240 s, where 203 s are best."""
    clock = Clock()
    at: list[int] = []

    def commit() -> None:
        clock.now += cost
        at.append(scheduler.steps)

    scheduler = CommitScheduler(
        Auto(free_budget=0.0),
        targets={"store": commit},
        clock=clock,
        known=Known(failure_rate_per_second=1 / mtbf),
    )
    while len(at) < 5:
        clock.now += 1.0
        scheduler.step()
    assert set(np.diff(at[1:])) == {best_integer(cost, 1 / mtbf, 1.0)}


@pytest.mark.parametrize("cost", [1e-6, 1.0, 60.0, 1e4])
@pytest.mark.parametrize("mtbf", [100.0, 1e5, 1e9])
def test_what_is_due_is_the_least_of_the_expected_time(cost: float, mtbf: float) -> None:
    tau = math.sqrt(2.0 * due(cost, 1 / mtbf, 1 / mtbf) * mtbf)

    def log_time(tau: float) -> float:
        total = (tau + cost) / mtbf
        return total + math.log(-math.expm1(-total) / tau)

    for other in (0.99 * tau, 1.01 * tau):
        assert log_time(other) >= log_time(tau)


def test_due_has_limits() -> None:
    assert due(5.0, 0.0, 0.0) == 5.0
    assert due(5.0, 0.0, 0.1) == 5.0  # of early ends alone
    assert due(0.0, 1.0, 1.0) == 0.0
    assert math.isnan(due(math.nan, 1.0, 1.0))
    assert due(1e12, 1.0, 1.0) == 0.5  # every MTBF, though that is hopeless


def test_the_overhead_that_is_told_has_the_time_until_a_commit_counts() -> None:
    """A commit that goes on in the background for P saves what came before it P later: h P."""
    clock = Clock()

    class Written:
        def __init__(self) -> None:
            self.ends = clock.now + 60.0

        def done(self) -> bool:
            return clock.now >= self.ends

    scheduler = CommitScheduler(
        Auto(free_budget=0.0),
        targets={"disk": Written},
        clock=clock,
        known=Known(failure_rate_per_second=1 / 1800),
    )
    for _ in range(2000):
        clock.now += 1.0
        scheduler.step()
    target = scheduler.targets[0]
    told = scheduler.decisions[-1].predicted_overhead
    assert target.cost.background == pytest.approx(60.0, abs=2.0)
    assert told == pytest.approx(math.sqrt(2 * target.price / 1800) + 60.0 / 1800, rel=0.1)


# ---- losses


def test_tensors_are_read_less_often_the_more_there_are() -> None:
    """To read one takes longer than the rest of a step."""
    reads = []

    class Tensor:
        def item(self) -> float:
            reads.append(scheduler.steps)
            return 2.0 + math.exp(-scheduler.steps / 1000)

    clock = Clock()
    scheduler = CommitScheduler(
        Auto("progress"),
        targets={"store": lambda: None},
        clock=clock,
        known=Known(10_000, failure_rate_per_second=1e-4),
    )
    for _ in range(10_000):
        clock.now += 1.0
        scheduler.step(Tensor())
    assert reads[:200] == list(range(1, 201))
    assert len([step for step in reads if step > 5000]) == pytest.approx(5000 / 16, abs=2)
    true = 10.0 * math.exp(-5.0) / -math.expm1(-10.0)
    assert scheduler.worth.fit.weight(5000) == pytest.approx(max(true, 0.2), rel=0.3)


def test_after_a_roll_back_losses_are_read_again() -> None:
    losses = Losses(lambda about, message: None)
    assert list(losses.read(5000, 1.5)) == [(5000, 1.5)]
    assert losses.due == 5016
    scheduler = CommitScheduler(Auto("progress"), targets={"store": lambda: None})
    scheduler.steps = 5000
    list(scheduler.worth._losses.read(5000, 1.5))
    scheduler.rolled_back()
    assert scheduler.worth._losses.due == 0
