"""A notice to stop, at a drawn moment: the open step is committed at its end, and the program
leaves with status 0, with nothing lost. What guards do besides, and which are refused."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

# which the first optimizer of a process imports: here once, in the fork server
import torch._dynamo
from torch import nn
from training import assert_same, contents, make_job, mlp, train, undisturbed

import pmstore
from pmstore.scheduler import CommitScheduler, EveryN, PreemptionGuard
from pmstore.testing import ForkServer
from pmstore.torch import AttachError, Run, attach

STEPS = 20


def work(ack: Callable[[int], None], path: str, kinds: dict[str, Any], seconds: float) -> None:
    """One life, told to stop after so long. Acknowledges each update."""
    torch.set_num_threads(1)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    try:
        with PreemptionGuard() as guard, pmstore.open(path, size="8MiB") as store:
            done = count(int(store["run/progress"][0]) + 1 if "run" in store else 1)
            ack(next(done) - 1)
            job = make_job(**kinds)
            job.optimizer.register_step_post_hook(lambda *_: ack(next(done) - 1))
            timer.start()
            try:
                train(store, job, STEPS, STEPS, policy=EveryN(1000), guard=guard)
            finally:  # no notice comes when the guard has gone
                timer.cancel()
                timer.join()
    except SystemExit as end:
        if end.code != 0:
            raise


@pytest.mark.parametrize(
    "kinds",
    [{}, {"optimizer": "native-adamw"}, {"num_workers": 1}],
    ids=["heap", "slots", "workers"],
)
def test_a_notice_at_a_drawn_moment(
    tmp_path: Path, server: ForkServer, kinds: dict[str, Any]
) -> None:
    """Lives go on from each other, bit for bit as one that was left alone: no step is done twice,
    although no policy commits."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # shown if it fails
    chance = random.Random(seed)
    path = tmp_path / "run.pm"
    whole = undisturbed(tmp_path / "whole.pm", STEPS, **kinds)
    lives = reached = 0
    while reached < STEPS:
        seconds = chance.uniform(0.0, 0.3) if lives < 8 else 600.0
        life = server.run("test_notices_in_steps:work", [str(path), kinds, seconds])
        lives += 1
        assert life.exit_code == 0
        with pmstore.open(path, mode="r") as store:
            reached = int(store["run/progress"][0]) if "run" in store else 0
        assert reached == life.acknowledged
    with pmstore.open(path, mode="r") as store:
        assert_same(whole, contents(store))


# ---- in one process


class Notice(PreemptionGuard):
    """A guard without signals."""

    def __init__(self) -> None:
        super().__init__(signals=())


def begin(store: pmstore.Store, **given: Any) -> tuple[Run, Callable[[], None]]:
    """A run that commits every 100 steps, and its update."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    run = attach(store, **{"model": model, "optimizer": optimizer, "policy": EveryN(100)} | given)

    def update() -> None:
        optimizer.zero_grad()
        model(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()

    return run, update


@pytest.mark.parametrize("within", [False, True])
def test_a_loop_of_ones_own_is_told(path: Path, within: bool) -> None:
    """Where it asks for the next step, also if it was told between two."""
    guard = Notice()
    given = 0
    with pytest.raises(SystemExit) as ended, pmstore.open(path) as store:
        run, update = begin(store, guard=guard)
        while True:
            with run.next_step():
                given += 1
                update()
                if within and given == 4:
                    guard.notify()
            if given == 4:
                guard.notify()
                assert (run.stopping, run.committed) == (False, 0)
    assert ended.value.code == 0
    assert (given, run.stopping) == (4, True)
    with pmstore.open(path) as store:
        assert begin(store)[0].step == 4


def test_a_loop_of_ones_own_that_asks(path: Path) -> None:
    guard = Notice()
    with pmstore.open(path) as store:
        run, update = begin(store, guard=guard)
        while not run.stopping:
            with run.next_step():
                update()
                if run.step == 3:
                    guard.notify()
            run.commit()
        assert (run.step, run.committed) == (4, 4)


def test_a_step_of_several_batches_is_finished(path: Path) -> None:
    guard = Notice()
    with pytest.raises(SystemExit), pmstore.open(path) as store:
        job = make_job()
        run = job.attach(store, policy=EveryN(100), guard=guard)
        for number, (features, labels, _) in enumerate(run.batches(every=3)):
            nn.functional.cross_entropy(job.model(features), labels).backward()
            if number == 3:  # the first of three
                guard.notify()
            if run.last_in_step:
                job.optimizer.step()
                job.optimizer.zero_grad()
    assert number == 5
    with pmstore.open(path) as store:
        run = make_job().attach(store)
        assert (run.step, run.batch) == (2, 5)


def test_a_guard_that_was_told_before_the_first_batch(path: Path) -> None:
    guard = Notice()
    guard.notify()
    with pytest.raises(SystemExit), pmstore.open(path) as store:
        next(make_job().attach(store, guard=guard).batches())


def test_signal_handlers_come_back(path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pmstore.open(path) as store:
        run, _ = begin(store, guard=PreemptionGuard())
        assert signal.getsignal(signal.SIGTERM) != before
        run.detach()
        assert signal.getsignal(signal.SIGTERM) == before
        begin(store, name="second", guard=PreemptionGuard())
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    with PreemptionGuard() as guard:
        held = signal.getsignal(signal.SIGTERM)
        with pmstore.open(path) as store:
            begin(store, guard=guard)
        assert signal.getsignal(signal.SIGTERM) == held
    assert signal.getsignal(signal.SIGTERM) == before


def test_which_guards_are_refused(store: pmstore.Store) -> None:
    """Before anything is done."""
    handler = signal.getsignal(signal.SIGTERM)
    own = CommitScheduler(EveryN(2), store=store, guard=Notice())
    store.commit()
    before = store.epoch
    model = mlp()
    memory = [one.data_ptr() for one in model.parameters()]
    for _ in range(2):
        with pytest.raises(AttachError, match="the scheduler has a guard already"):
            begin(store, model=model, policy=own, guard=PreemptionGuard())
        with pytest.raises(TypeError, match="guard is a PreemptionGuard"):
            begin(store, model=model, guard=30.0)
    assert "run" not in store
    assert store.epoch == before
    assert [one.data_ptr() for one in model.parameters()] == memory
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_scheduler_of_ones_own_gets_the_guard(store: pmstore.Store) -> None:
    guard = Notice()
    scheduler = CommitScheduler(EveryN(100), store=store)
    run, update = begin(store, policy=scheduler, guard=guard)
    with pytest.raises(SystemExit):
        for _ in run.steps(3):
            update()
            guard.notify()
    assert (run.committed, scheduler.stopping, run.stopping) == (1, True, True)


def test_the_last_commit_is_flushed(tmp_path: Path, path: Path) -> None:
    guard = Notice()
    with pytest.raises(SystemExit), pmstore.open(path) as store:
        store.add_tier("disk", tmp_path / "tier")
        run, update = begin(store, tiers=["disk"], guard=guard)
        for _ in run.steps(9):
            update()
            if run.step == 2:
                guard.notify()
    pmstore.restore(tmp_path / "again.pm", tmp_path / "tier")
    with pmstore.open(tmp_path / "again.pm") as store:
        assert begin(store)[0].step == 3
