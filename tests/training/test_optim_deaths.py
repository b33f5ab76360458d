"""Processes that die inside an optimizer's kernel, at a chosen page: resumed, they end in the bits
of one left alone.

A gradient lies in a mapped file. Cut off before a step, it lets the kernel run until it reads the
first page that is gone: SIGBUS, on whichever thread has that piece, while others write theirs.
"""

from __future__ import annotations

import mmap
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# which the first optimizer of a process imports: here once, in the fork server
import torch._dynamo
from torch import nn
from training import contents

import pmstore
import pmstore.torch
from pmstore.scheduler import EveryN
from pmstore.testing import ForkServer

STEPS = 7
SIZES = (70_000, 3, 300_001)  # elements; the last one's gradient is the one that is cut off
PAGES = SIZES[-1] * 4 // mmap.PAGESIZE + 1
# Of a life: at which step it dies, and after how many pages of the gradient.
DEATHS = [(0, 0), (2, PAGES // 2), (4, PAGES - 1), (4, 1), (6, PAGES // 3)]
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda parameters: pmstore.torch.optim.AdamW(parameters, lr=0.01),
    "SGD": lambda parameters: pmstore.torch.optim.SGD(
        parameters, lr=0.01, momentum=0.9, nesterov=True
    ),
}


def work(
    ack: Callable[[int], None],
    path: str,
    domain: str,
    name: str,
    every: int,
    dies_at: int,
    pages: int,
) -> None:
    """One process's life: runs in a child of the fork server."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    file = os.open(path + ".gradient", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.ftruncate(file, PAGES * mmap.PAGESIZE)
    shared = torch.frombuffer(mmap.mmap(file, PAGES * mmap.PAGESIZE), dtype=torch.float32)[
        : SIZES[-1]
    ]
    parameters = [nn.Parameter(torch.linspace(-1, 1, size)) for size in SIZES]
    optimizer = OPTIMIZERS[name](parameters)
    with pmstore.open(path, domain=domain, size="24MiB") as store:
        run = pmstore.torch.attach(store, optimizer=optimizer, policy=EveryN(every))
        for step in run.steps(STEPS):
            generator = torch.Generator().manual_seed(step)
            for parameter in parameters[:-1]:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            parameters[-1].grad = shared.copy_(torch.randn(SIZES[-1], generator=generator))
            if step == dies_at:
                os.ftruncate(file, pages * mmap.PAGESIZE)
            ack(step)
            optimizer.step()


@pytest.mark.parametrize(
    ("domain", "name", "every"),  # 3: two of three steps go in place into the new slot
    [
        ("process", "AdamW", 1),
        ("process", "SGD", 3),
        ("emulated", "AdamW", 3),
        ("file", "AdamW", 3),
        ("file", "SGD", 1),
    ],
)
def test_death_inside_a_kernel(
    shm: Path, server: ForkServer, domain: str, name: str, every: int
) -> None:
    def live(path: Path, dies_at: int = -1, pages: int = 0) -> Any:
        return server.run(
            "test_optim_deaths:work",
            [str(path), domain, name, every, dies_at, pages],
            timeout_seconds=300,
        )

    assert live(shm / "whole.pm").exit_code == 0
    with pmstore.open(shm / "whole.pm", mode="r") as store:
        whole = contents(store["run/optimizer"])
    reached = 0
    for dies_at, pages in DEATHS:
        ended = live(shm / "run.pm", dies_at, pages)
        assert (ended.exit_code, ended.acknowledged) == (-signal.SIGBUS, dies_at)
        with pmstore.open(shm / "run.pm", mode="r") as store:
            assert store.check().problems == ()
            if "run" in store:
                step = int(store["run/progress"][0])
                assert reached <= step <= dies_at
                assert step >= dies_at - every + 1
                reached = step
    assert live(shm / "run.pm").exit_code == 0
    with pmstore.open(shm / "run.pm", mode="r") as store:
        assert contents(store["run/optimizer"]) == whole
