"""Real training, killed with SIGKILL at random points, twenty times: bit for bit the run that was
left alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# which the first optimizer of a process imports: here once, in the fork server
import torch._dynamo
from training import assert_same, contents, make_job, train

import pmstore
from pmstore.testing import ForkServer

STEPS = 25
KILLS = 20
KINDS = {"model": "conv", "scheduler": "cosine"}


def work(ack: Callable[[int], None], path: str, domain: str, kinds: dict[str, Any]) -> None:
    """One process's life: goes on where the store is. Runs in a child of the fork server."""
    torch.set_num_threads(1)
    with pmstore.open(path, domain=domain, size="8MiB") as store:
        job = make_job(**kinds)
        ack(0)
        train(store, job, STEPS, STEPS)
        ack(STEPS)


@pytest.mark.parametrize("domain", ["file", "process"])
def test_twenty_kills(tmp_path: Path, server: ForkServer, domain: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # shown if it fails
    chance = random.Random(seed)
    workload = "test_kills:work"
    began = time.monotonic()
    # imports, in the server
    assert server.run(workload, [str(tmp_path / "whole.pm"), domain, KINDS]).exit_code == 0
    began = time.monotonic()
    assert server.run(workload, [str(tmp_path / "whole2.pm"), domain, KINDS]).exit_code == 0
    life = time.monotonic() - began
    with pmstore.open(tmp_path / "whole.pm", mode="r") as store:
        whole = contents(store)
    with pmstore.open(tmp_path / "whole2.pm", mode="r") as store:
        assert_same(whole, contents(store))
    kills = lives = 0
    while kills < KILLS:
        path = tmp_path / f"killed{lives}.pm"
        ended, reached = False, 0
        while not ended:
            # By the clock, at any instruction; or by the engine, at one of its writes. The last one
            # is left to finish.
            how: dict[str, Any] = {}
            if kills < KILLS or chance.random() < 0.5:
                by_clock = chance.random() < 0.5
                how = (
                    {"delay_seconds": chance.uniform(0, life)}
                    if by_clock
                    else {"kill_at": chance.randrange(1, 1500)}
                )
            run = server.run(workload, [str(path), domain, KINDS], **how)
            kills += run.killed
            ended = not run.killed
            assert ended == (run.acknowledged == STEPS and run.exit_code == 0) or run.killed
            if run.killed and path.exists() and path.stat().st_size and chance.random() < 0.3:
                # What a kill leaves is a sound store at a step's end, and no step is ever lost
                # again.
                with pmstore.open(path) as store:
                    assert store.check().problems == ()
                    if "run" in store:
                        step = int(store["run/progress"][0])
                        assert step >= reached
                        reached = step
        with pmstore.open(path, mode="r") as store:
            assert_same(whole, contents(store))
        lives += 1
