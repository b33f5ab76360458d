"""A program may end anywhere: what the store holds then is the state after a whole number of steps,
and one line says what was taken back."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

# which the first optimizer of a process imports: here once, in the fork server
import torch._dynamo
from torch import nn
from training import BATCHES, assert_same, contents, make_job

import pmstore
from pmstore.scheduler import EveryN, PreemptionGuard
from pmstore.testing import ForkServer
from pmstore.torch import Run, UnfinishedStepError, attach

EPOCHS = 3
MODES: dict[str, dict[str, Any]] = {
    "heap": {},
    "slots": {"optimizer": "native-adamw"},
    "mirror": {"optimizer": "sgd-momentum"},
}
PLACES = ("forward", "backward", "update", "end", "tail")
WAYS = ("exit", "interrupt", "status", "error", "break", "marked break")
DONE, RUNNING, EXITED, RAISED, LEFT = 4, 0, 1, 2, 3
ENDS = dict(zip(WAYS, (EXITED, RAISED, RAISED, RAISED, RAISED, LEFT), strict=True))
"""How a life ends, by the way of its end."""


class Boom(Exception):
    pass


class Left(Exception):
    """Caught outside of the loops, before the store is left: to the run it is a `break`."""


def disturb(way: str) -> None:
    if way in ("exit", "interrupt", "guard"):
        os.kill(os.getpid(), signal.SIGTERM)  # the handler does the rest
    elif way == "status":
        sys.exit(3)
    else:
        raise Boom if way == "error" else Left


def on_signal(way: str) -> Callable[..., object]:
    def handle(*_: object) -> None:
        if way == "interrupt":
            raise KeyboardInterrupt
        sys.exit(0)

    return handle


def crc(model: nn.Module) -> int:
    return zlib.crc32(b"".join(one.numpy().tobytes() for one in model.state_dict().values()))


def train(store: pmstore.Store, mode: str, how: dict[str, Any], **more: Any) -> None:
    """Trains to the end, or until it is disturbed: at a place, `after` some steps."""
    job = make_job(**MODES[mode])
    policy = EveryN(how["every"]) if how["every"] else None
    run = job.attach(store, mirror=mode == "mirror", policy=policy, **more)
    log = store.list("log")
    whole = run.step + how.get("after", 0)

    def at(place: str) -> None:
        if how.get("place") == place and run.step >= whole:
            if how["way"] == "marked break":
                run.end_step()
            disturb(how["way"])

    for epoch in run.epochs(EPOCHS):
        for features, labels, _ in epoch:
            loss = nn.functional.cross_entropy(job.model(features), labels)
            at("forward")
            job.optimizer.zero_grad()
            loss.backward()
            at("backward")
            job.optimizer.step()
            at("update")
            log.append([loss.item(), crc(job.model)])
            at("end")
        log.append([-random.random(), crc(job.model)])
        at("tail")


def work(ack: Callable[[int], None], path: str, mode: str, how: dict[str, Any]) -> None:
    """One process's life. Runs in a child of the fork server."""
    torch.set_num_threads(1)
    ack(RUNNING)
    guard: dict[str, Any] = {}
    if how.get("way") == "guard":
        guard["guard"] = PreemptionGuard()
    else:
        signal.signal(signal.SIGTERM, on_signal(how.get("way", "")))
    timer = threading.Timer(how.get("delay", 0.0), disturb, [how.get("way", "")])
    timer.daemon = True
    ended = DONE
    try:
        if "delay" in how:
            timer.start()  # which waits: the signal may come before it returns
        with pmstore.open(path, size="8MiB") as store:
            try:
                train(store, mode, how, **guard)
            except Left:
                ended = LEFT
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except SystemExit as end:
        ended = EXITED if end.code == 0 else RAISED
    except (KeyboardInterrupt, Boom, UnfinishedStepError):
        ended = RAISED
    timer.cancel()
    ack(ended)


class Lives:
    """Of one training; and what it is if it is left alone."""

    def __init__(self, folder: Path, server: ForkServer, mode: str, every: int) -> None:
        self.path, self.server = folder / "run.pm", server
        self.mode, self.every = mode, every
        assert self.live(folder / "whole.pm").acknowledged == DONE
        with pmstore.open(folder / "whole.pm", mode="r") as store:
            self.whole, self.log = contents(store["run"]), list(store["log"])
        assert len(self.log) == EPOCHS * (BATCHES + 1)

    def live(self, path: Path | None = None, **how: Any) -> Any:
        given = [str(path or self.path), self.mode, {"every": self.every, **how}]
        return self.server.run("test_exits:work", given)

    def check(self) -> int:
        """The store holds what the training was after some steps. Returns how many."""
        with pmstore.open(self.path) as store:
            job = make_job(**MODES[self.mode])
            run = job.attach(store, mirror=self.mode == "mirror", policy=None)
            log = list(store.get("log", []))
            assert log == self.log[: len(log)]
            assert run.step == sum(loss >= 0 for loss, _ in log)
            assert not log or log[-1][1] == crc(job.model)
            return run.step

    def go_to_the_end(self) -> None:
        assert self.live().acknowledged == DONE
        with pmstore.open(self.path, mode="r") as store:
            assert list(store["log"]) == self.log
            assert_same(self.whole, contents(store["run"]))


@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("mode", MODES)
def test_ends_at_every_place(tmp_path: Path, server: ForkServer, mode: str, every: int) -> None:
    """One training, ended in many ways and places: bit for bit the one that was left alone."""
    chance = random.Random(f"{mode} {every}")  # some of the ends each, all in all
    lives = Lives(tmp_path, server, mode, every)
    whole = ("end", "tail")  # a step that is said to be complete at another place is kept half
    ends = [(way, place) for way in WAYS for place in (whole if "marked" in way else PLACES)]
    for way, place in chance.sample(ends, 10):
        life = lives.live(way=way, place=place, after=chance.randrange(3 if every else 2))
        assert life.acknowledged in (ENDS[way], DONE), (way, place)
        assert life.exit_code == 0
        lives.check()
    lives.go_to_the_end()


@pytest.mark.parametrize(  # guards, in the other modes: test_notices_in_steps.py
    ("mode", "way"), [*product(MODES, ("exit", "interrupt")), ("mirror", "guard")]
)
def test_sigterm_at_any_moment(tmp_path: Path, server: ForkServer, mode: str, way: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # shown if it fails
    chance = random.Random(seed)
    lives = Lives(tmp_path, server, mode, chance.choice([0, 3]))
    for _ in range(6):
        life = lives.live(way=way, delay=chance.uniform(0.0, 0.15))
        if life.exit_code == -signal.SIGTERM:  # the guard is not entered yet
            assert way == "guard"
            continue
        assert life.exit_code == 0
        assert life.acknowledged in (RAISED if way == "interrupt" else EXITED, DONE)
    lives.go_to_the_end()


@pytest.mark.pairwise
@pytest.mark.parametrize("every", [0, 100])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_the_guard_finishes_the_step(
    tmp_path: Path, server: ForkServer, mode: str, place: str, every: int
) -> None:
    """And the tail."""
    lives = Lives(tmp_path, server, mode, every)
    reached = (BATCHES, 2 * BATCHES) if place == "tail" else (5, 10)
    for step in reached:
        life = lives.live(way="guard", place=place, after=4)
        assert (life.acknowledged, life.exit_code) == (EXITED, 0)
        assert lives.check() == step
    lives.go_to_the_end()


# ---- what is lost, and what is said of it


def begin(store: pmstore.Store, **more: Any) -> tuple[Run, Callable[[], None]]:
    """A run whose policy commits nothing, and its update."""
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = attach(store, model=model, optimizer=optimizer, policy=EveryN(1000), **more)

    def update() -> None:
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run, update


class Data:
    """Batches, and something that happens where the one of that number is loaded."""

    def __init__(self, number: int, then: Callable[[], None]) -> None:
        self.number, self.then = number, then

    def __iter__(self) -> Iterator[float]:
        yield from [1.0] * self.number
        self.then()
        yield from [1.0] * self.number


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert all(one.levelno == logging.WARNING for one in caplog.records)
    return [one.getMessage().partition("the run 'run' goes back to ")[2] for one in caplog.records]


@pytest.mark.parametrize(
    "error", [Boom(), SystemExit(0), SystemExit(3), KeyboardInterrupt(), None], ids=repr
)
@pytest.mark.parametrize(
    ("finished", "is_open", "lost"),
    [
        (0, True, "step 2: the step that was open is taken back"),
        (1, False, "step 2: 1 finished step is taken back"),
        (2, False, "step 2: 2 finished steps are taken back"),
        (1, True, "step 2: 1 finished step and the step that was open are taken back"),
        (0, False, ""),
    ],
)
def test_what_leaving_says(
    path: Path,
    caplog: pytest.LogCaptureFixture,
    finished: int,
    is_open: bool,
    lost: str,
    error: BaseException | None,
) -> None:
    """By an error, an exit, or `store.close()`, in a step or where the next batch is loaded."""

    def leave() -> None:
        if error is not None:
            raise error
        store.close()
        raise Left

    with pytest.raises(Left if error is None else type(error)), pmstore.open(path) as store:
        loader = Data(2 + finished, (lambda: None) if is_open else leave)
        run, update = begin(store, loader=loader)
        for _ in run.batches():
            update()
            store["steps"] = run.step + 1
            if run.batch == 1:
                run.commit()
            elif run.batch == 2 + finished:
                leave()
    assert said(caplog) == [lost] * bool(lost)
    with pmstore.open(path) as store:
        assert (begin(store, loader=loader)[0].step, store["steps"]) == (2, 2)


def test_what_an_error_in_a_step_by_hand_says(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It takes back what is pending, whether the program goes on or not."""
    with pmstore.open(path) as store:
        run, update = begin(store)
        for number in range(3):
            with run.next_step():
                update()
            if number == 1:
                run.commit()
        with pytest.raises(Boom), run.next_step():
            update()
            raise Boom
        assert run.step == 2
    lost = "step 2: 1 finished step and the step that was open are taken back"
    assert said(caplog) == [lost]


@pytest.mark.parametrize("kept", [False, True])
def test_an_exit_behind_the_last_loop(path: Path, kept: bool) -> None:
    """It loses no step. What stands behind the loop is lost, if the store was not committed."""
    with pytest.raises(SystemExit), pmstore.open(path) as store:
        run, update = begin(store, loader=[1.0] * 5)
        for _ in run.batches():
            update()
        store["after"] = 1
        if kept:
            store.commit()
        sys.exit(0)
    with pmstore.open(path) as store:
        assert begin(store, loader=[1.0] * 5)[0].step == 5
        assert ("after" in store) == kept


def test_without_a_with(path: Path) -> None:
    """The interpreter closes the store at its end."""
    program = f"""
import pmstore, torch, pmstore.scheduler
from pmstore.torch import attach
store = pmstore.open({str(path)!r})
model = torch.nn.Linear(2, 2)
run = attach(store, model=model, policy=pmstore.scheduler.EveryN(9))
for _ in run.steps(2):
    model(torch.ones(1, 2))
with run.next_step():
    model(torch.ones(1, 2))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0
    assert "goes back to step 2: the step that was open is taken back" in done.stderr
    with pmstore.open(path) as store:
        assert attach(store, model=nn.Linear(2, 2)).step == 2
