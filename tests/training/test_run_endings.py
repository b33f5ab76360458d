"""How the ends of training programs are counted: what loses steps is a failure, and a notice whose
commit landed is none. Alone, and in jobs of several ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks  # type: ignore[import-not-found, unused-ignore]
import torch

# which the first optimizer of a process imports: here once, in the fork server
import torch._dynamo

import pmstore
from pmstore.scheduler import EveryN, HazardModel, PreemptionGuard
from pmstore.testing import ForkServer
from pmstore.torch import Job, Run, attach


def counted(path: Path) -> tuple[float, float]:
    """Failures and preemptions, as the next run of the store finds them."""
    with pmstore.open(path) as store:
        hazard = HazardModel(store)
        return sum(hazard.failures), hazard.preemptions


class Program:
    """A model in a store that commits every 100 steps."""

    def __init__(self, store: pmstore.Store, **given: Any) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.run: Run = attach(
            store, model=self.model, optimizer=self.optimizer, policy=EveryN(100), **given
        )

    def update(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(torch.full((3, 4), 1.0 + self.run.step)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss

    def train(self, steps: int, then: Callable[[Program], None]) -> None:
        """Makes so many steps, and in the middle of the next something else."""
        for number in self.run.steps(1_000_000):
            self.run.log(loss=self.update())
            if number == steps:
                then(self)


# ---- alone


def _exception(program: Program) -> None:
    raise KeyError("in the program")


def _interrupt(program: Program) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        pass


def _exit_1(program: Program) -> None:
    sys.exit(1)


def _exit_0(program: Program) -> None:
    sys.exit(0)


def _close(program: Program) -> None:
    program.run.store.close()


def _os_exit(program: Program) -> None:
    os._exit(1)


def _kill(program: Program) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ENDS: dict[str, Callable[[Program], None]] = {
    one.__name__: one for one in (_exception, _interrupt, _exit_1, _exit_0, _close, _os_exit, _kill)
}


@pytest.mark.parametrize("end", ENDS)
def test_an_end_in_the_middle_of_a_step_is_a_failure(
    path: Path, server: ForkServer, end: str
) -> None:
    server.run("test_run_endings:_dies", [str(path), end])
    with pmstore.open(path, mode="r") as store:
        assert store["run/progress"][0] == 100
    assert counted(path) == (1, 0)


def _dies(ack: Any, path: str, end: str) -> None:
    torch.set_num_threads(1)
    with pmstore.open(path) as store, contextlib.suppress(pmstore.ClosedStoreError):
        Program(store).train(130, ENDS[end])


def test_an_end_in_order_is_none(path: Path) -> None:
    with pmstore.open(path) as store:
        Program(store).train(130, lambda program: program.run.stop())
    assert counted(path) == (0, 0)
    with pytest.raises(KeyError), pmstore.open(path) as store:
        Program(store)
        raise KeyError("before the first step")
    assert counted(path) == (0, 0)


def test_a_job_at_its_end_is_not_interrupted(path: Path) -> None:
    with pytest.raises(KeyError), pmstore.open(path) as store:
        program = Program(store, loader=[torch.zeros(1)] * 130)
        for _ in program.run.batches(epochs=1):
            program.update()
        store.commit()
        raise KeyError("while the figures are drawn")
    assert counted(path) == (0, 0)


@pytest.mark.parametrize("landed", [False, True])
def test_a_notice_counts_when_its_commit_has_landed(
    path: Path, server: ForkServer, landed: bool
) -> None:
    server.run("test_run_endings:_noticed", [str(path), landed])
    assert counted(path) == ((0, 1) if landed else (1, 0))


def _noticed(ack: Any, path: str, landed: bool) -> None:
    torch.set_num_threads(1)

    def told(program: Program) -> None:
        assert program.run.scheduler is not None
        if not landed:
            program.run.scheduler.targets[0].commit = lambda: _kill(program)
        os.kill(os.getpid(), signal.SIGTERM)

    program = Program(pmstore.open(path), guard=PreemptionGuard())
    with contextlib.suppress(SystemExit):
        program.train(130, told)
    assert (program.run.stopping, program.run.committed) == (True, 131)
    _kill(program)


# ---- in a job


def _rank_dies(folder: Path, rank: int, results: dict[str, Any]) -> None:
    with pmstore.open(folder / f"{rank}.pm") as store:
        program = Program(store, job=Job(timeout=200.0))

        def die(_: Program) -> None:
            if rank == 1:
                raise KeyError

        program.train(130, die)


def test_an_end_of_one_rank_is_a_failure_of_all() -> None:
    with tempfile.TemporaryDirectory(prefix=f"pmstore-test-{os.getpid()}-", dir="/dev/shm") as name:
        folder = Path(name)
        started = ranks.start(__file__, "_rank_dies", folder, 2)
        try:
            told = [process.communicate(timeout=ranks.TIMEOUT)[1] for process in started]
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        assert all(process.returncode for process in started)
        assert "PeerLostError" in told[0]
        for rank in range(2):
            assert counted(folder / "_rank_dies" / f"{rank}.pm") == (1, 0)
