"""The end of a step: what it refuses, when it commits, what a kill takes back, what an interrupt
leaves, and what exits make of steps whose commits are under way, alone and in a job."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest
import torch

# which the first optimizer of a process imports: here once, in the fork server
import torch._dynamo
from interrupter import LineInterrupter
from ranks import launch  # type: ignore[import-not-found, unused-ignore]
from torch import nn
from training import FOLLOWING

import pmstore
import pmstore.torch.optim
from pmstore.course import read
from pmstore.scheduler import Auto, CommitScheduler, EveryN
from pmstore.testing import ForkServer, kill_at_primitive
from pmstore.torch import Job, Run, attach, load


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def weights(model: nn.Module) -> list[float]:
    return [number for one in model.parameters() for number in one.flatten().tolist()]


class Training:
    """A run of a small model."""

    def __init__(self, store: pmstore.Store, slots: bool = False, **given: Any) -> None:
        torch.manual_seed(1)
        self.model = layers()
        kind: Any = pmstore.torch.optim.AdamW if slots else torch.optim.AdamW
        self.optimizer: Any = kind(self.model.parameters(), lr=1e-2)
        self.run: Run = attach(store, model=self.model, optimizer=self.optimizer, **given)

    def update(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(torch.full((3, 4), 1.0 + self.run.step)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def weights(self) -> list[float]:
        return weights(self.model)


# ---- what is refused


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (None, TypeError),
        ("x", TypeError),
        ("0.5", TypeError),
        ([0.5], TypeError),
        (1j, TypeError),
        (np.complex64(1), TypeError),
        (torch.tensor(1j), TypeError),
        (torch.zeros(3), ValueError),
        (torch.zeros(0), ValueError),
        (np.zeros(3), ValueError),
        (np.zeros(1), ValueError),  # numpy makes no number of it
    ],
)
def test_what_is_no_number_is_refused_where_it_is_logged(
    store: pmstore.Store, value: Any, error: type[Exception]
) -> None:
    training = Training(store)
    with training.run.next_step():
        training.update()
        with pytest.raises(error, match=r"run\.log\(loss=\.\.\.\): "):
            training.run.log(accuracy=1, loss=value)
        training.run.log(loss=0.5)
    training.run.commit()
    assert training.run.step == 1
    assert training.run.history("loss")[1].tolist() == [0.5]
    with pytest.raises(KeyError) as caught:
        training.run.history("accuracy")
    assert str(caught.value) == "the run has logged no 'accuracy'; it has logged 'loss'"


@pytest.mark.parametrize(
    "value", [1, True, 0.5, np.float32(0.5), np.zeros(()), torch.ones(1, 1), torch.tensor(2)]
)
def test_what_is_one_number_is_logged(store: pmstore.Store, value: Any) -> None:
    training = Training(store)
    with training.run.next_step():
        training.update()
        training.run.log(loss=value)
    training.run.commit()
    assert training.run.committed == 1
    assert training.run.metrics()["loss"] == float(value)
    assert [one.tolist() for one in training.run.history("loss")] == [[1], [float(value)]]


def test_arrays_of_other_libraries(store: pmstore.Store) -> None:
    small: Any = pytest.importorskip("ml_dtypes").bfloat16
    numpy = pytest.importorskip("jax.numpy")
    training = Training(store)
    given: list[Any] = [small(0.5), np.array(0.25, small), numpy.asarray(0.75, small)]
    for number in training.run.steps(3):
        training.update()
        training.run.log(loss=given[number])
        for several in (np.array([1, 2], small), numpy.ones(3)):
            with pytest.raises(ValueError, match="one number"):
                training.run.log(loss=several)
        training.run.commit()
        assert training.run.metrics()["loss"] == float(given[number])


def test_a_bool_is_no_number_of_seconds() -> None:
    for value in (True, False):
        with pytest.raises(TypeError, match=f"max_loss={value}"):
            Auto(max_loss=value)
    with pytest.raises(TypeError, match="max_loss"):
        Auto(max_loss="1 s")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_loss=-1"):
        Auto(max_loss=-1)
    with pytest.raises(ValueError, match="loss_budget"):
        Auto(max_loss=1.0, max_overhead=0.1)


# ---- when steps are committed, and what that puts at stake


class Timed(Training):
    """Steps that take as long as it says, and commits of 10 ms, by the scheduler's clock."""

    def __init__(self, store: pmstore.Store, seconds: float = 0.3, **given: Any) -> None:
        super().__init__(store, **given)
        self.now, self.seconds = 100.0, seconds
        scheduler: Any = self.run.scheduler
        scheduler._clock = scheduler.uptime._clock = lambda: self.now
        scheduler._mark = self.now
        commit = scheduler.targets[0].commit

        def slow() -> object:
            self.now += 0.01
            return commit()

        scheduler.targets[0].commit = slow

    def update(self) -> torch.Tensor:
        loss = super().update()
        self.now += self.seconds
        return loss


@pytest.mark.parametrize("policy", ["auto", Auto(max_loss=0.0), None])
def test_in_memory_every_step_commits(shm: Path, policy: Any) -> None:
    with pmstore.open(shm / "run.pm") as store:
        training = Training(store, policy=policy)
        assert training.run.scheduler is None
        for number in training.run.steps(4):
            assert training.run.committed == number
            training.update()
        assert training.run.committed == 4


@pytest.mark.parametrize(
    ("domain", "given", "bound"),
    [
        ("file", {}, 1.0),
        ("process", {"policy": Auto(max_loss=0.5)}, 0.5),
        ("process", {"policy": Auto(max_loss=4.0)}, 4.0),
    ],
)
def test_no_more_is_at_stake_than_the_bound(
    tmp_path: Path, shm: Path, domain: Any, given: dict[str, Any], bound: float
) -> None:
    """On a disk a second, if nothing else was said; in memory, where a commit of a very large model
    is not free, what was said."""
    folder = tmp_path if domain == "file" else shm
    with pmstore.open(folder / "run.pm", domain=domain) as store:
        training = Timed(store, **given)
        since, commits = 0.0, 0
        for number in training.run.steps(40):
            if training.run.committed == number:
                since, commits = 0.0, commits + 1
            assert since < bound
            training.update()
            since += training.seconds
        rarely = 40 // (int(bound / training.seconds) + 1)
        assert rarely <= commits <= rarely + 2  # with the beginning of the loop


def test_a_dear_commit_stretches_the_default_and_no_bound_that_was_given() -> None:
    now = 0.0

    def commit() -> None:
        nonlocal now
        now += 0.6

    def commits(rule: Auto) -> int:
        nonlocal now
        made = 0
        scheduler = CommitScheduler(rule, targets={"disk": commit}, clock=lambda: now)
        for _ in range(1000):
            now += 0.1
            made += bool(scheduler.step())
        return made

    assert 90 <= commits(Auto(max_loss=1.0)) <= 100
    # 0.6 s are 3 % of 20 s; the first ones, of unknown cost, by the bound
    assert 4 <= commits(Auto(max_loss=1.0, loss_budget=0.03, free_budget=0.0)) <= 7


def test_what_it_cost_is_said_at_the_end(
    disk: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "pmstore"):
        with pmstore.open(disk / "run.pm", domain="file") as store:
            training = Training(store, policy=EveryN(4))
            for _ in training.run.steps(10):
                training.update()
            stats = training.run.stats()
            # with the beginning and the end of the loop
            assert (stats.steps, stats.commits, stats.stake_steps) == (10, 4, 4)
            assert 0.0 < stats.commit_seconds < stats.seconds
            assert 0.0 < stats.stake_seconds < stats.seconds
            assert re.fullmatch(
                r"10 steps in \S+ s, 4 commits, which took \S+% of the time; "
                r"at risk at most: \S+ s of work, 4 steps",
                str(stats),
            )
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


STEPS = 150


def duration(step: int) -> float:
    """Of a step, by the scheduler's clock: mostly short, some long."""
    drawn = random.Random(step).random()
    return 0.4 * drawn if drawn < 0.95 else 2.5


def trains(ack: Callable[[int], None], path: str, way: str = "", after: int = 0) -> None:
    """Acknowledges each step when its work is done, before it ends. way: in which it is killed, at
    a random moment, after so many steps: it trains until then, however fast this machine is."""
    torch.set_num_threads(1)
    drawn = random.Random(after)
    with pmstore.open(path, domain="file") as store:
        training = Timed(store)
        die = training.run.step + after
        for number in training.run.steps(1_000_000 if way else STEPS):
            if way and number == die:
                if way == "in the engine":
                    kill_at_primitive(drawn.randint(1, 30))
                else:
                    Timer(drawn.uniform(0.0, 0.1), os.kill, (os.getpid(), signal.SIGKILL)).start()
            training.seconds = duration(number + 1)
            training.update()
            ack(number + 1)


def test_a_kill_takes_back_the_bound_and_a_step(shm: Path, server: ForkServer) -> None:
    """At random moments and at random writes of the engine; seconds are the scheduler's."""
    drawn = random.Random(26)
    path, bound = shm / "run.pm", 1.0
    most = 0.0
    for number in range(4):
        way = ("in the engine", "at any time")[number % 2]
        died = server.run("test_step_ends:trains", [str(path), way, drawn.randint(10, 30)])
        assert died.killed
        with pmstore.open(path, mode="r") as store:
            kept = int(store["run/progress"][0])
        lost = sum(map(duration, range(kept + 1, died.acknowledged + 1)))
        assert lost <= bound + duration(died.acknowledged) + 1e-6, (kept, died.acknowledged)
        most = max(most, lost)
    assert most > 0.0
    assert server.run("test_step_ends:trains", [str(path)]).exit_code == 0
    with pmstore.open(path) as store, pmstore.open(shm / "whole.pm", domain="emulated") as whole:
        resumed, undisturbed = Training(store), Training(whole)
        for _ in undisturbed.run.steps(resumed.run.step):
            undisturbed.update()
        assert resumed.run.step >= STEPS
        assert resumed.weights() == undisturbed.weights()


# ---- an interrupt while parameters that are other objects are followed


def _replace(training: Training, _: int) -> None:
    state = {key: one.detach().clone() + 1 for key, one in training.model.state_dict().items()}
    training.model.load_state_dict(state, assign=True)


@pytest.mark.parametrize("slots", [False, True])
def test_an_interrupt_while_new_parameters_are_followed(shm: Path, slots: bool) -> None:
    """Wherever it comes: the step that is ended after it trains what the model computes with. One
    run goes on past all interrupts, beside one that has none."""
    path, alone = shm / "run.pm", layers()
    with (
        pmstore.open(path, size="8MiB") as store,
        pmstore.open(shm / "whole.pm", size="8MiB") as beside,
    ):
        training, whole = Training(store, slots), Training(beside, slots)
        for one in (training, whole):
            with one.run.next_step():
                one.update()
            one.run.commit()
        line, interrupted = 0, True
        while interrupted:
            line += 1
            for one in (training, whole):
                with one.run.next_step():
                    _replace(one, 0)
            whole.run.commit()
            interrupted = LineInterrupter(line, FOLLOWING).run(training.run.commit)
            if interrupted:
                training.run.commit()
            groups = training.optimizer.param_groups
            trained = {id(one) for group in groups for one in group["params"]}
            assert trained == set(map(id, training.model.parameters()))
            assert trained >= set(map(id, training.optimizer.state))
            for one in (training, whole):
                with one.run.next_step():
                    one.update()
                one.run.commit()
            assert training.weights() == whole.weights(), f"interrupted at line {line}"
            load(path, alone)
            assert weights(alone) == training.weights()
        assert training.run.step == whole.run.step == 1 + 2 * line
        held = training.weights()
    assert line > 30
    with pmstore.open(path) as store:
        again = Training(store, slots)
        assert again.run.step == 1 + 2 * line
        assert again.weights() == held


# ---- what a step writes is declared


def test_all_that_a_step_writes_is_declared(shm: Path) -> None:
    """Of small tensors, many of which share a page, and large ones: no store has to be noticed by a
    fault, whichever parameters have a gradient."""
    with pmstore.open(shm / "run.pm") as store:
        sizes = [5, 40000, 1, 700, 3, 5000, 64, 1024, 9, 30000]
        parameters = [nn.Parameter(torch.zeros(size)) for size in sizes * 20]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        run = attach(store, optimizer=optimizer)

        def give(which: range) -> None:
            for number, one in enumerate(parameters):
                one.grad = torch.ones_like(one) if number in which else None

        with run.next_step():
            give(range(len(parameters)))
            optimizer.step()  # makes the state
        run.commit()
        for which in (range(0, 200, 3), range(200), range(0), range(100, 200), range(150)):
            with run.next_step():
                give(which)
                binding = next(iter(run._steps.pieces.optimizers.values()))
                store.will_write(*binding.writes())
                before = store.stats().faults
                for number in which:
                    with torch.no_grad():
                        parameters[number].add_(1)
                        optimizer.state[parameters[number]]["momentum_buffer"].add_(1)
                assert store.stats().faults == before
            run.commit()


# ---- exits while a commit is under way

_EXITS: list[BaseException | None] = [
    None,
    ValueError("a bug"),
    SystemExit(0),
    SystemExit(3),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", _EXITS, ids=repr)
@pytest.mark.parametrize("kind", ["undo", "slots", "mirrored"])
@pytest.mark.parametrize("domain", ["process", "file"])
def test_an_exit_after_a_step_whose_commit_is_under_way(
    tmp_path: Path, domain: Any, kind: str, error: BaseException | None
) -> None:
    """It takes back to the last commit, also to one that was under way; leaving normally keeps what
    is complete."""
    given: dict[str, Any] = {"slots": kind == "slots", "mirror": kind == "mirrored"}
    held: list[float] = []

    def train() -> None:
        with pmstore.open(tmp_path / "run.pm", domain=domain) as store:
            training = Training(store, policy=EveryN(3), **given)
            for number in training.run.steps(9):
                if number == 3:
                    assert (training.run._steps.pending is not None) == (kind == "mirrored")
                    held[:] = training.weights()
                training.update()
                if number == 3 and error is not None:
                    raise error
                if number == 3:
                    held[:] = training.weights()
                    training.run.end_step()
                    break

    if error is None:
        train()
    else:
        with pytest.raises(type(error)):
            train()
    with pmstore.open(tmp_path / "run.pm") as store:
        again = Training(store, policy=EveryN(3), **given)
        assert again.run.step == (4 if error is None else 3)
        assert again.weights() == held


@pytest.mark.parametrize("mirror", [False, True])
def test_an_error_takes_back_what_the_policy_left_at_risk(
    disk: Path, mirror: bool, caplog: pytest.LogCaptureFixture
) -> None:
    states: list[list[float]] = []

    def train() -> None:
        with pmstore.open(disk / "run.pm", domain="file") as store:
            training = Training(store, policy=EveryN(3), mirror=mirror)
            for number in training.run.steps(9):
                states.append(training.weights())
                training.update()
                if number == 5:
                    raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        train()
    told = "goes back to step 3: 2 finished steps and the step that was open are taken back"
    assert told in caplog.text
    with pmstore.open(disk / "run.pm") as store:
        again = Training(store, policy=EveryN(3), mirror=mirror)
        assert again.run.step == 3
        assert again.weights() == states[3]


# ---- in a job


def _together(folder: Path, rank: int, results: dict[str, Any], mirror: bool) -> None:
    states: dict[int, list[float]] = {}
    for life, (leaves, at) in enumerate(((None, 4), (ValueError, 6), (SystemExit, 9), (None, 9))):
        with (
            contextlib.suppress(ValueError, SystemExit),
            pmstore.open(folder / f"{rank}.pm", size="8MiB") as store,
        ):
            job = Job(timeout=60.0)
            training = Training(store, job=job, policy=EveryN(2), mirror=mirror)
            results[f"resumed {life}"] = training.run.step
            for number in training.run.steps(at if leaves is None else 99):
                state = states.setdefault(number, training.weights())
                assert training.weights() == state
                training.update()
                if leaves is not None and number == at:
                    raise leaves(0)


def _in_the_heap(folder: Path, rank: int, results: dict[str, Any]) -> None:
    _together(folder, rank, results, mirror=False)


def _mirrored(folder: Path, rank: int, results: dict[str, Any]) -> None:
    _together(folder, rank, results, mirror=True)


def _refused(folder: Path, rank: int, results: dict[str, Any]) -> None:
    with pmstore.open(folder / f"{rank}.pm", size="8MiB") as store:
        training = Training(store, process_group="world")
        with training.run.next_step():
            training.update()
            try:
                training.run.log(loss="x" if rank else torch.ones(2))
            except (TypeError, ValueError) as error:
                results["told"] = str(error)
            training.run.log(loss=0.5)
        training.run.commit(agree=True)
        results["step"] = training.run.agreed_step


def test_ranks_that_end_steps(tmp_path_factory: pytest.TempPathFactory) -> None:
    """They commit the same ones, and go on from them bit for bit, whatever their exit."""
    with tempfile.TemporaryDirectory(prefix="pmstore-test-", dir="/dev/shm") as folder:
        found = launch([_in_the_heap, _mirrored, _refused], Path(folder), 2)
    for program in ("_in_the_heap", "_mirrored"):
        for rank in found[program]:
            assert [rank[f"resumed {life}"] for life in range(4)] == [0, 4, 6, 8]
    for rank in found["_refused"]:
        assert "run.log(loss=...): " in rank["told"]
        assert rank["step"] == 1
