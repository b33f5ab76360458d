"""What a run tells of itself: `run.metrics()`, and the course in its store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pmstore
from pmstore.course import Told, read
from pmstore.scheduler import Auto, CommitScheduler, EveryN
from pmstore.torch import RolledBackError, Run, attach

torch.set_num_threads(1)


@pytest.fixture
def store(path: Path) -> Any:
    with pmstore.open(path, size="8MiB") as store:
        yield store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.pm"


def begin(store: pmstore.Store, **more: Any) -> tuple[Run, Any]:
    """A run, and what trains it in a step and returns the loss."""
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = attach(store, model=model, optimizer=optimizer, **{"policy": None} | more)

    def step(*, log: bool = True) -> float:
        optimizer.zero_grad()
        loss = (model(torch.ones(4)) ** 2).mean()
        loss.backward()
        optimizer.step()
        if log:
            run.log(loss=loss)
        return float(loss.item())

    return run, step


def told(store: pmstore.Store) -> Told:
    found = read(store, "run")
    assert found is not None
    return found


def test_numbers_of_a_run(store: pmstore.Store) -> None:
    run, step = begin(store, loader=[1.0, 2.0, 3.0])
    assert run.metrics()["step"] == 0
    losses = [step() for _ in run.batches(epochs=2)]
    found = run.metrics()
    assert all(type(value) in (int, float) for value in found.values())
    stats = store.stats()
    assert found["loss"] == losses[-1]
    assert (found["step"], found["committed_step"]) == (6, 6)
    assert found["commits"] == 8  # with the beginning of the loop, and its end
    assert (found["epoch"], found["used_bytes"]) == (stats.epoch, stats.used_bytes)
    assert (found["data_epoch"], found["batch"]) == (run.data_epoch, run.batch)
    assert found["commit_seconds"] > 0
    assert found["commit_seconds_mean"] > 0
    assert 0 < found["commit_share"] <= 1
    assert found["written_bytes"] > 0
    assert found["process_bytes"] > 1 << 20
    assert found["steps_per_second"] > 0
    run.detach()
    with pytest.raises(pmstore.torch.AttachError):
        run.metrics()


def test_the_last_step_of_the_loop_is_in_the_store(store: pmstore.Store, path: Path) -> None:
    """Whatever a batch of rows waits for."""
    run, step = begin(store, loader=[torch.ones(1)] * 50)
    losses = [step() for _ in run.batches(epochs=4)]
    store.close()
    with pmstore.open(path, mode="r") as closed:
        stretches = list(told(closed).whole())
    assert [one.last for one in stretches] == list(range(1, 201))
    assert [one.loss for one in stretches] == losses
    assert sum(one.commits for one in stretches) == 199  # how long the last one took is not known


def test_decisions_and_why(store: pmstore.Store) -> None:
    run, step = begin(store, policy=EveryN(5), loader=[1.0] * 23)
    for _ in run.batches():
        step()
    of = told(store)
    assert [(one.step, one.target, one.reason) for one in of.decisions] == [
        (0, "store", "asked for"),  # the beginning of the loop
        *((at, "store", "every 5 steps") for at in (5, 10, 15, 20)),
    ]
    assert [one.step for one in of.decisions[1:]] == [
        one.last for one in of.whole() if one.commits and one.first == one.last
    ]
    assert [one.loss for one in of.whole() if one.loss == one.loss]
    assert run.metrics()["target/store/risk_seconds"] >= 0


def test_decisions_of_a_scheduler_that_learns(store: pmstore.Store) -> None:
    now = [100.0]
    scheduler = CommitScheduler(Auto("time"), store=store, clock=lambda: now[0])
    run, step = begin(store, policy=scheduler)
    for _ in run.steps(31):
        now[0] += 60
        step()
    made, kept = (
        [(one.step, one.target, one.reason, one.risk, one.hazard) for one in decisions]
        for decisions in (scheduler.decisions, told(store).decisions)
    )
    assert kept == made[: len(kept)]
    assert any(reason != "asked for" for _, _, reason, *_ in kept)


def test_a_roll_back_and_a_rewind_take_the_course_along(store: pmstore.Store) -> None:
    run, step = begin(store)
    for _ in run.steps(40):
        step()
    run.keep("here").wait()
    for _ in run.steps(70):
        step()
    with run.next_step():
        step()
    run.rollback()
    assert 70 - 12 <= max(one.last for one in told(store).whole()) <= 70
    with pytest.raises(RolledBackError):
        run.rewind(to="here")
    assert max(one.last for one in told(store).whole()) <= 40
    for _ in run.steps(50):
        step()
    assert 40 < max(one.last for one in told(store).whole()) <= 50


def test_a_commit_that_asks_no_policy_is_in_the_course(
    store: pmstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit, and that a roll back after it takes nothing of that away."""
    monkeypatch.setattr("pmstore.course.recorder.FRESH_SECONDS", 0.0)  # each step's row at once
    run, step = begin(store, policy=EveryN(4))
    for number in run.steps(7):
        step()
        if number == 4:
            run.commit()
        if number == 5 and run.stats().rollbacks == 0:
            run.rollback()
    of = told(store)
    whole = list(of.whole())
    assert [one.last for one in whole] == [1, 2, 3, 4, 5, 6, 7]
    assert [one.commits for one in whole] == [0, 0, 0, 1, 1, 0, 0]
    assert [(one.step, one.reason) for one in of.decisions] == [
        (0, "asked for"),
        (4, "every 4 steps"),
        (5, "asked for"),
    ]


def test_numbers_of_steps_that_are_not_committed(
    store: pmstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss now and then, a commit now and then: the newest are told at every step."""
    monkeypatch.setattr("pmstore.course.recorder.FRESH_SECONDS", 0.0)
    run, step = begin(store, policy=EveryN(4))
    for number in run.steps(10):
        found = run.metrics()
        assert ("loss" in found, "commit_seconds" in found) == (number >= 5, number >= 4)
        assert found["stake_steps_most"] == min(number, 4)
        loss = step(log=number % 5 == 4)
        if number == 4:
            logged = loss
        elif number == 9:
            assert found["loss"] == logged
            assert run.stats().stake_steps == 4
            run.rollback()
            assert "loss" not in run.metrics()  # it was that of a step that is taken back
            break


def test_a_resumed_run_has_one_curve(store: pmstore.Store, path: Path) -> None:
    run, step = begin(store, loader=[1.0] * 20)
    for _ in run.batches():
        step()
    store.close()
    with pmstore.open(path) as again:
        run, step = begin(again, loader=[1.0] * 20)
        for _ in run.batches(epochs=2):
            step()
        of = told(again)
    assert [one.last for one in of.whole()] == list(range(1, 41))
    assert [one.step for one in of.starts] == [0, 20]


def test_tiers_and_how_far_they_are(store: pmstore.Store, tmp_path: Path) -> None:
    store.add_tier("disk", tmp_path / "tier")
    run, step = begin(store, tiers=["disk"], loader=[1.0] * 12)
    assert "tier/disk/epoch" not in run.metrics()
    for _ in run.batches():
        step()
    store.drain()
    found = run.metrics()
    newest = pmstore.epochs(str(tmp_path / "tier"))[0].epoch
    assert found["tier/disk/epoch"] == newest
    assert found["tier/disk/behind"] == store.epoch - newest
    assert found["tier/disk/written_share"] == 1.0
    tier = told(store).tiers[0]
    assert (tier.name, tier.failed) == ("disk", False)
    assert tier.epoch <= newest


def test_steps_that_are_not_waited_for(store: pmstore.Store) -> None:
    run, step = begin(store, loader=[1.0] * 9, mirror=True)
    losses = [step() for _ in run.batches()]
    assert [one.loss for one in told(store).whole()] == losses
