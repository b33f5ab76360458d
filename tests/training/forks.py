"""Training programs in forked children that are killed at each step."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

# which the first optimizer of a process imports: here once, in the parent
import torch._dynamo
from torch import nn
from torch.utils.data import Dataset

import pmstore
from pmstore.torch import Run, attach

EPOCHS = 2
SAMPLES = 13
"""Of an epoch: five batches of three, the last one short. Each step is a child."""


class Steps:
    """Counts what a child has done; kills it before the step after the last it may do."""

    def __init__(self, limit: int | None) -> None:
        self._left = limit

    def before_commit(self) -> None:
        if self._left is not None:
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1


def in_child(program: Callable[[Steps], None], limit: int | None) -> bool:
    """Runs the program in a forked child. Returns whether it came to its end; else it was
    killed."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        code = 1
        try:
            gc.freeze()  # else a collection looks at all of the tests, and copies their pages
            torch.set_num_threads(1)
            program(Steps(limit))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(ProcessLookupError):  # a worker that had not seen yet whose it is stays for ever
        os.killpg(child, signal.SIGKILL)
    assert status in (0, -signal.SIGKILL), "the child failed: see its stderr"
    return status == 0


def killed_at_each_step(program: Callable[[Steps], None], each: int = 1) -> int:
    """Runs it in as many children as it takes, each of which is killed after so many commits and
    before the next. Returns how many."""
    children = 1
    while not in_child(program, each):
        children += 1
        assert children < 400
    return children


def bits(state: Any) -> Any:
    """A structure of tensors that can be compared."""
    if isinstance(state, torch.Tensor):
        return (tuple(state.shape), state.detach().contiguous().numpy().tobytes())
    if isinstance(state, dict):
        return {key: bits(part) for key, part in state.items()}
    if isinstance(state, (list, tuple)):
        return [bits(part) for part in state]
    return state


class Noisy(Dataset[torch.Tensor]):
    """Random transforms: loading a batch draws from all default generators, as training does."""

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(3) + random.random() + np.random.rand()
        return (torch.full((3,), index / SAMPLES) + 0.1 * noise).float()

    def __len__(self) -> int:
        return SAMPLES


def looking_ahead(batches: Iterator[Any], held: int) -> Iterator[Any]:
    """As prefetchers have it."""
    queue = deque(batch for _, batch in zip(range(held), batches, strict=False))
    for batch in batches:
        queue.append(batch)
        yield queue.popleft()
    yield from queue


def over_data(
    path: Path,
    make: Callable[[], Any],
    steps: Steps,
    *,
    ahead: int | None = None,
    every: int = 1,
    by_epoch: bool = False,
    skip: Callable[[Run], bool] = lambda run: False,
) -> None:
    """Trains over the data, with dropout and an optimizer with a state, and logs in the store what
    it trained on. It is killed at the end of a step.

    ahead: batches that it holds. every: see `Run.batches`. skip: batches that it passes over.
    """
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.3), nn.Linear(5, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with pmstore.open(path) as store:
        run = attach(store, model=model, optimizer=optimizer, loader=make(), policy=None)
        log = store.list("log")
        how: dict[str, Any] = {"ahead": ahead, "every": every}

        def train(batch: Any) -> None:
            given = batch[0] if isinstance(batch, list) else batch
            if not skip(run):
                model(given).square().mean().backward()
                log.append(given.tolist())
            if run.last_in_step:
                optimizer.step()
                optimizer.zero_grad()
                steps.before_commit()

        loops: Any = run.epochs(EPOCHS, **how) if by_epoch else [run.batches(EPOCHS, **how)]
        for loop in loops:
            for batch in looking_ahead(iter(loop), ahead or 0):
                with run.next_step() if ahead else nullcontext():
                    train(batch)
            if by_epoch:
                log.append(["tail", random.random()])
        state = [model.state_dict(), optimizer.state_dict(), torch.get_rng_state()]
        state += [random.getstate(), np.random.get_state()[1:3]]
        store["end"] = repr(bits([state, run.step]))


def compare(folder: Path, make: Callable[[], Any], each: int = 1, **how: Any) -> None:
    """`over_data`, undisturbed, and killed after every `each` steps: bit for bit the same."""

    def program(path: Path) -> Callable[[Steps], None]:
        return lambda steps: over_data(path, make, steps, **how)

    assert in_child(program(folder / "whole.pm"), None)
    assert killed_at_each_step(program(folder / "killed.pm"), each) > 1
    with (
        pmstore.open(folder / "whole.pm", mode="r") as whole,
        pmstore.open(folder / "killed.pm", mode="r") as killed,
    ):
        assert list(killed["log"]) == list(whole["log"])
        assert killed["end"] == whole["end"]
        if "skip" not in how:
            taken = sum(one[0] != "tail" for one in whole["log"])
            assert taken == EPOCHS * sum(1 for _ in make())
