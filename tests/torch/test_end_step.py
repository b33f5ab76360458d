"""`run.end_step` and `run.commit`: two words for two things, and what attach's default policy does
with the first."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch

import pmstore
from pmstore.course import read
from pmstore.errors import TransactionError
from pmstore.scheduler import Auto, CommitScheduler, EveryN
from pmstore.testing import kill_at_primitive
from pmstore.testing.forkserver import ForkServer
from pmstore.torch import Run, attach


class Clock:
    """Of a scheduler: so many seconds later each time it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Training:
    """A run whose steps take as long as it says."""

    def __init__(self, store: pmstore.Store, seconds: float = 0.1, **given: Any) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.run: Run = attach(store, model=self.model, optimizer=self.optimizer, **given)
        self.clock, self.seconds = Clock(), seconds
        if self.run.scheduler is not None:
            set_clock(self.run.scheduler, self.clock)
            self.run.scheduler.targets[0].commit = self._commit(
                self.run.scheduler.targets[0].commit
            )

    def _commit(self, commit: Callable[[], object]) -> Callable[[], object]:
        """As on a disk that takes 10 ms."""

        def slow() -> object:
            self.clock.now += 0.01
            return commit()

        return slow

    def update(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(torch.full((3, 4), 1.0 + self.run.step)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.clock.now += self.seconds
        return loss.detach()

    def weights(self) -> list[torch.Tensor]:
        return [one.detach().clone() for one in self.model.parameters()]


def set_clock(scheduler: CommitScheduler, clock: Clock) -> None:
    scheduler._clock = scheduler.life._clock = clock
    scheduler._mark = clock.now


def test_in_memory_every_step_commits(shm: Path) -> None:
    with pmstore.open(shm / "run.pm") as store:
        training = Training(store)
        assert training.run.scheduler is None
        for number in range(1, 5):
            assert training.run.end_step(training.update())
            assert training.run.committed == number


def test_on_a_disk_at_most_a_second_is_at_stake(disk: Path) -> None:
    """By the scheduler's clock. What is lost is what the program made since the last commit."""
    with pmstore.open(disk / "run.pm", domain="file") as store:
        training = Training(store, seconds=0.3)
        since, commits = 0.0, 0
        for _ in range(40):
            since += 0.3
            if training.run.end_step(training.update()):
                since, commits = 0.0, commits + 1
            assert since < 1.0
        assert 9 <= commits <= 11
        assert training.run.stats().commits == commits


def test_commit_asks_nobody(disk: Path) -> None:
    with pmstore.open(disk / "run.pm", domain="file") as store:
        training = Training(store, seconds=0.001)
        for number in range(1, 5):
            training.run.commit(training.update())
            assert training.run.committed == number
        assert not training.run.end_step(training.update())
        assert training.run.committed == 4
        training.run.commit(training.update())
        assert training.run.committed == 6


@pytest.mark.parametrize("max_loss", [0.0, 0.5, 4.0])
def test_the_bound_can_be_set(shm: Path, max_loss: float) -> None:
    """Also in memory, where a commit of a very large model is not free."""
    with pmstore.open(shm / "run.pm") as store:
        training = Training(store, seconds=0.3, max_loss=max_loss)
        since = 0.0
        for _ in range(40):
            since += 0.3
            if training.run.end_step(training.update()):
                since = 0.0
            assert since < max(max_loss, 0.01)


def test_the_bound_is_of_auto(store: pmstore.Store) -> None:
    with pytest.raises(TypeError, match="EverySeconds"):
        Training(store, policy=EveryN(3), max_loss=1.0)
    with pytest.raises(TypeError, match="max_loss"):
        Training(store, max_loss="1 s")
    with pytest.raises(ValueError, match="max_loss=-1"):
        Training(store, max_loss=-1)
    with pytest.raises(ValueError, match="loss_budget"):
        Auto(max_loss=1.0, max_overhead=0.1)
    assert "run" not in store


def test_a_dear_commit_stretches_the_default_and_no_bound_that_was_given() -> None:
    clock = Clock()

    def commit() -> None:
        clock.now += 0.6

    def commits(rule: Auto) -> int:
        made = []
        scheduler = CommitScheduler(rule, targets={"disk": commit}, clock=clock)
        for _ in range(1000):
            clock.now += 0.1
            made.append(bool(scheduler.step()))
        return sum(made)

    assert 90 <= commits(Auto(max_loss=1.0)) <= 100
    # 0.6 s are 3 % of 20 s; the first ones, of unknown cost, by the bound
    assert 4 <= commits(Auto(max_loss=1.0, loss_budget=0.03, free_budget=0.0)) <= 7


def test_a_policy_that_is_never_asked_is_told_of(shm: Path) -> None:
    with pmstore.open(shm / "run.pm") as store:
        training = Training(store, policy=EveryN(3))
        training.run.commit(training.update())
        with pytest.warns(RuntimeWarning, match="end_step"):
            training.run.commit(training.update())
        training.run.commit(training.update())  # once


def test_not_inside_a_block(store: pmstore.Store) -> None:
    training = Training(store)
    with pytest.raises(TransactionError, match=r"end_step\(\) inside"), training.run.transaction():
        training.run.end_step()


def test_what_is_left_in_a_step_that_has_not_written(disk: Path) -> None:
    """A loop that is left in its middle loses that step, and not those before it."""
    with pmstore.open(disk / "run.pm", domain="file") as store:
        training = Training(store, policy=EveryN(100))
        for _ in range(5):
            training.run.end_step(training.update())
        training.model(torch.ones(3, 4))
        assert training.run.committed == 0
        with pytest.warns(RuntimeWarning, match="step 5; what was written"):
            store.__exit__(None, None, None)
    with pmstore.open(disk / "run.pm") as store:
        training = Training(store)
        assert training.run.step == 5
        training.run.end_step(training.update())
        training.update()
        with pytest.warns(RuntimeWarning, match="1 finished step among it"):
            store.__exit__(None, None, None)
    with pmstore.open(disk / "run.pm") as store:
        assert Training(store).run.step == 5


def test_what_it_cost_is_said_at_the_end(
    disk: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "pmstore"):
        with pmstore.open(disk / "run.pm", domain="file") as store:
            training = Training(store, policy=EveryN(4))
            for _ in range(10):
                training.run.end_step(training.update())
            stats = training.run.stats()
            assert (stats.steps, stats.commits, stats.stake_steps) == (10, 2, 4)
            assert 0.0 < stats.commit_seconds < stats.seconds
            assert 0.0 < stats.stake_seconds < stats.seconds
            assert re.fullmatch(
                r"10 steps in \S+ s, 2 commits, which took \S+% of the time; "
                r"at risk at most: \S+ s of work, 4 steps",
                str(stats),
            )
            metrics = training.run.metrics()
            assert metrics["stake_steps_most"] == 4
        assert "run 'run': 10 steps in" in caplog.text
        caplog.clear()
        with pmstore.open(disk / "run.pm") as store:
            Training(store)
        assert not caplog.text  # nothing was trained
    assert capsys.readouterr() == ("", "")
    with pmstore.open(disk / "run.pm", mode="r") as store:
        told = read(store, "run")
    assert told is not None
    assert told.stake_steps == 4
    assert told.seconds > told.stake_seconds > 0.0


def test_a_transaction_always_commits(disk: Path) -> None:
    with pmstore.open(disk / "run.pm", domain="file") as store:
        training = Training(store, seconds=0.001)
        for number in range(1, 4):
            with training.run.transaction() as step:
                step.loss = training.update()
            assert training.run.committed == number


def test_in_the_background(disk: Path) -> None:
    """`wait=False` is meant, whether or not there is a policy."""
    with pmstore.open(disk / "run.pm", domain="file") as store:
        training = Training(store, seconds=0.3, mirror=True)
        for number in range(1, 9):
            training.run.commit(training.update(), wait=False)
            assert training.run.pending is not None
            training.run.pending.wait()
            assert training.run.committed == number
        began = 0
        for _ in range(20):
            if training.run.end_step(training.update(), wait=False):
                assert training.run.pending is not None
                began += 1
            else:
                assert training.run.pending is None
        assert 5 <= began <= 6
        want = training.weights()
    with pmstore.open(disk / "run.pm") as store:
        again = Training(store, mirror=True)
        assert again.run.step == 28
        assert all(map(torch.equal, again.weights(), want))


# ---- what is lost

STEPS = 150


def duration(step: int) -> float:
    """Of a step, by the scheduler's clock: mostly short, some long."""
    drawn = random.Random(step).random()
    return 0.4 * drawn if drawn < 0.95 else 2.5


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer([str(Path(__file__).parent)]) as server:
        yield server


def trains(ack: Any, path: str, way: str = "", after: int = 0) -> None:
    """Acknowledges each step when its work is done, before it ends. way: in which it is killed, at
    a random moment, after so many steps: it trains until then, however fast this machine is."""
    torch.set_num_threads(1)
    drawn = random.Random(after)
    with pmstore.open(path, domain="file") as store:
        training = Training(store)
        die = training.run.step + after
        while way or training.run.step < STEPS:
            if way and training.run.step == die:
                if way == "in the engine":
                    kill_at_primitive(drawn.randint(1, 30))
                else:
                    Timer(drawn.uniform(0.0, 0.1), os.kill, (os.getpid(), signal.SIGKILL)).start()
            training.seconds = duration(training.run.step + 1)
            loss = training.update()
            ack(training.run.step + 1)
            training.run.end_step(loss)


def test_a_kill_takes_back_the_bound_and_a_step(shm: Path, server: ForkServer) -> None:
    """At random moments and at random writes of the engine; seconds are the scheduler's."""
    drawn = random.Random(26)
    path, bound = shm / "run.pm", 1.0
    most = 0.0
    for number in range(4):
        way = ("in the engine", "at any time")[number % 2]
        died = server.run("test_end_step:trains", [str(path), way, drawn.randint(10, 30)])
        assert died.killed
        with pmstore.open(path, mode="r") as store:
            kept = int(store["run/progress"][0])
        lost = sum(map(duration, range(kept + 1, died.acknowledged + 1)))
        assert lost <= bound + duration(died.acknowledged) + 1e-6, (kept, died.acknowledged)
        most = max(most, lost)
    assert most > 0.0
    assert server.run("test_end_step:trains", [str(path)]).exit_code == 0
    with pmstore.open(path) as store, pmstore.open(shm / "whole.pm", domain="emulated") as whole:
        resumed, undisturbed = Training(store), Training(whole)
        while undisturbed.run.step < resumed.run.step:
            undisturbed.run.end_step(undisturbed.update())
        assert resumed.run.step >= STEPS
        assert all(map(torch.equal, resumed.weights(), undisturbed.weights()))
