"""Preemption notices: signals, deadline files, callables; what is committed when."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import pmstore
from pmstore._engine.history import Announced
from pmstore.scheduler import CommitScheduler, EveryN, HazardModel, Known, PreemptionGuard
from pmstore_lab.simulation import Clock
from pmstore_lab.simulation.notices import notice_trials

NEVER = 1 << 40


class Loop:
    """Iterations of 1 s and targets in simulated time."""

    def __init__(self, guard: PreemptionGuard | None = None, **costs: float) -> None:
        self.clock = Clock()
        self.commits: list[tuple[float, str]] = []
        targets = {
            name: self._target(name, seconds) for name, seconds in (costs or {"disk": 0.5}).items()
        }
        self.scheduler = CommitScheduler(
            EveryN(NEVER),
            targets=targets,
            clock=self.clock,
            known=Known(failure_rate_per_second=0.0),
            guard=guard,
        )
        for _ in range(20):
            self.step()
        for name in targets:
            self.scheduler.commit(name)
        self.commits.clear()

    def _target(self, name: str, seconds: float):  # type: ignore[no-untyped-def]
        def commit() -> None:
            self.clock.now += seconds
            self.commits.append((self.clock.now, name))

        return commit

    def step(self) -> None:
        self.clock.now += 1.0
        self.scheduler.step()


def notice(loop: Loop, seconds: float = 30.0, target: str | None = None) -> PreemptionGuard:
    return PreemptionGuard(notice_seconds=seconds, signals=(), target=target, clock=loop.clock)


def test_commit_now_go_on_commit_in_time() -> None:
    loop = Loop()
    guard = loop.scheduler.guard = PreemptionGuard(
        notice_seconds=30.0, signals=(), clock=loop.clock
    )
    loop.step()
    assert not loop.commits
    began = loop.clock.now
    guard.notify()
    guard.notify(1.0)  # a second notice changes nothing
    steps = 0
    while not loop.scheduler.stopping:
        loop.step()
        steps += 1
        assert steps < 40
    assert len(loop.commits) == 2
    assert loop.commits[0][0] == pytest.approx(began + 1.5)
    assert began + 27.0 <= loop.commits[1][0] <= began + 30.0
    assert [d.reason for d in list(loop.scheduler.decisions)[-2:]] == [
        "preemption notice",
        "last commit before preemption",
    ]
    for _ in range(5):
        loop.step()
    assert len(loop.commits) == 2


def test_no_iteration_is_begun_that_could_not_be_committed() -> None:
    loop = Loop(disk=10.0)
    guard = loop.scheduler.guard = PreemptionGuard(
        notice_seconds=20.0, signals=(), clock=loop.clock
    )
    guard.notify()
    loop.step()
    assert loop.scheduler.stopping
    assert len(loop.commits) == 1


@pytest.mark.parametrize(("seconds", "target"), [(300.0, "remote"), (20.0, "disk"), (1.2, "disk")])
def test_the_highest_target_that_fits(seconds: float, target: str) -> None:
    loop = Loop(disk=0.5, remote=60.0)
    guard = loop.scheduler.guard = notice(loop)
    guard.notify(seconds + 1.0)
    loop.step()
    assert loop.commits[0][1] == target


def test_a_named_target() -> None:
    loop = Loop(disk=0.5, remote=6.0)
    loop.scheduler.guard = PreemptionGuard(
        notice_seconds=60.0, signals=(), target="disk", clock=loop.clock
    )
    loop.scheduler.guard.notify()
    loop.step()
    assert loop.commits[0][1] == "disk"


def test_the_policy_goes_on_in_the_grace_time() -> None:
    loop = Loop()
    loop.scheduler.policy = EveryN(5)
    loop.scheduler.guard = notice(loop, 30.0)
    loop.scheduler.guard.notify()
    while not loop.scheduler.stopping:
        loop.step()
    assert len(loop.commits) >= 6
    assert loop.commits[-1][0] <= 20 + 0.5 * 2 + 30


def test_sigterm_only_sets_a_flag_and_handlers_come_back(shm: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pmstore.open(shm / "run.pm") as store, PreemptionGuard(notice_seconds=0.3) as guard:
        data = store.zeros("data", 1)
        scheduler = CommitScheduler(EveryN(NEVER), store=store, guard=guard)
        for _ in range(20):
            data[0] += 1
            time.sleep(0.001)
            scheduler.step()
        epoch = store.epoch
        os.kill(os.getpid(), signal.SIGTERM)
        assert store.epoch == epoch  # nothing happens in the handler
        while not scheduler.stopping:
            data[0] += 1
            time.sleep(0.001)
            scheduler.step()
        assert store.epoch >= epoch + 1
        done = float(data[0])
        store.rollback()
        assert data[0] >= done - 1
        assert HazardModel(store).announced is Announced.PREEMPTION
    assert signal.getsignal(signal.SIGTERM) is before
    with pmstore.open(shm / "run.pm") as store:
        hazard = HazardModel(store)
        assert (hazard.preemptions, sum(hazard.failures)) == (1, 0)


def test_deadline_files(tmp_path: Path) -> None:
    for text, left in ((f"{time.time() + 100}", 100.0), ("", 7.0), ("soon", 7.0), ("inf", 7.0)):
        path = tmp_path / "deadline"
        clock = Clock()
        guard = PreemptionGuard(f"file:{path}", notice_seconds=7.0, signals=(), clock=clock)
        clock.now = 10.0
        assert not guard.noticed()
        path.write_text(text)
        assert not guard.noticed()  # looked at once a second
        clock.now = 12.0
        assert guard.noticed()
        assert guard.time_left(12.0) == pytest.approx(left, abs=1.0)
        path.unlink()


def test_a_callable_deadline() -> None:
    clock = Clock()
    answers: list[float | None] = [None, 30.0]
    guard = PreemptionGuard(lambda: answers.pop(0), signals=(), clock=clock)
    assert not guard.noticed()
    clock.now = 2.0
    assert guard.noticed()
    assert guard.time_left(2.0) == 30.0


def test_notice_seconds_is_given_by_name() -> None:
    with pytest.raises(TypeError, match="notice_seconds is given by name"):
        PreemptionGuard(30.0)  # type: ignore[arg-type]


def test_a_source_that_is_none() -> None:
    with pytest.raises(ValueError, match="use 'sigterm', 'slurm', 'aws', 'gcp'"):
        PreemptionGuard("azure")
    with pytest.raises(ValueError, match="'file:<path>'"):
        PreemptionGuard("file:")


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "2m"])
def test_a_time_that_is_none(seconds: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="notice_seconds is a number of seconds"):
        PreemptionGuard(notice_seconds=seconds)


def test_trials_can_fail() -> None:
    """Commits of a spread that nobody could foresee are missed, and counted."""
    assert notice_trials(300, iteration=1.0, commit=5.0, spread=1.2).misses > 0
