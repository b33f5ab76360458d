"""SIGKILL inside the kernels of native optimizers, whose parameters and moments are slots: a committed step is there."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo  # which the first optimizer of a process imports: here once, in the fork server
from torch import nn
from training import assert_same, contents

import pmstore
import pmstore.torch.optim
from pmstore.testing import ForkServer

STEPS = 5
ELEMENTS = 300_000  # large enough for worker threads and stores past the caches
KILLS = 10


def work(ack: Callable[[int], None], path: str, domain: str, limit: int, kill_in_step: int, delay_seconds: float) -> None:
    """Steps up to limit; while the kernel of one of them runs, or soon after, another thread ends the process."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = nn.Linear(100, ELEMENTS // 100)
    optimizer = pmstore.torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pmstore.open(path, domain=domain, size="24MiB") as store:  # type: ignore[arg-type]
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer)
        ack(run.step)
        while run.step < limit:
            for parameter in model.parameters():
                generator = torch.Generator().manual_seed(run.step)
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            if run.step == kill_in_step:
                threading.Thread(target=end_soon, args=(delay_seconds,)).start()
            optimizer.step()
            run.commit()
            ack(run.step)
        if kill_in_step < limit:  # a step that was faster than the other thread
            time.sleep(60)


def end_soon(delay_seconds: float) -> None:
    time.sleep(delay_seconds)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer([str(Path(__file__).parent)]) as server:
        yield server


@pytest.mark.parametrize("domain", ["process", "emulated", "file"])
def test_kills_in_the_kernel(shm: Path, server: ForkServer, domain: str) -> None:
    chance = random.Random(domain)
    whole = []
    for steps in range(STEPS + 1):
        path = shm / f"whole{steps}.pm"
        assert server.run("test_optim_kills:work", [str(path), domain, steps, STEPS + 1, 0.0]).exit_code == 0
        with pmstore.open(path, "r") as store:
            whole.append(contents(store))
        path.unlink()
    path = shm / "killed.pm"
    for _ in range(KILLS):
        step = chance.randrange(STEPS)
        run = server.run("test_optim_kills:work", [str(path), domain, STEPS, step, chance.uniform(0, 0.003)])
        assert run.killed, run
        assert run.acknowledged >= step
        with pmstore.open(path, "r") as store:
            assert store.check().problems == ()
            reached = int(store["run/progress"][0])
            assert_same(whole[reached], contents(store))
        assert run.acknowledged <= reached <= run.acknowledged + 1
        assert (
            server.run("test_optim_kills:work", [str(path), domain, STEPS, STEPS, 0.0]).exit_code == 0
        )  # goes on to the same end
        with pmstore.open(path, "r") as store:
            assert_same(whole[STEPS], contents(store))
        path.unlink()
