"""A notice to stop, at a drawn moment: the open step is committed at its end, and the program
leaves with status 0, with nothing lost."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

# which the first optimizer of a process imports: here once, in the fork server
import torch._dynamo
from training import assert_same, contents, make_job, train, undisturbed

import pmstore
from pmstore.scheduler import EveryN, PreemptionGuard
from pmstore.testing import ForkServer

STEPS = 20


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer([str(Path(__file__).parent)]) as server:
        yield server


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
            train(store, job, STEPS, STEPS, policy=EveryN(1000), guard=guard)
    except SystemExit as end:
        if end.code != 0:
            raise
    timer.cancel()


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
