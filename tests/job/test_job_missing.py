"""Ranks that do not come: the others say which, and why, as soon as it can be known."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pythons

pytest.importorskip("torch", reason="needs torch: pip install 'pmstore[torch]'")

from jobs.server import free_port

import pmstore

PROGRAM = """
import faulthandler, importlib, logging, os, signal, sys, time
said = os.open(f"{sys.argv[1]}/said{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(said, 1)
os.dup2(said, 2)
from datetime import timedelta
import torch, torch.distributed as dist
import pmstore, pmstore.torch
from pmstore.job import board, peers
peers._TELL_SECONDS, peers._LATER = 3.0, 1.0
importlib.reload(board)  # what it does at the end is of the process that imported it
folder, case, timeout = sys.argv[1], sys.argv[2], float(sys.argv[3])
torch.set_num_threads(1)
logging.basicConfig(level=logging.WARNING, format="LOG %(message)s")
faulthandler.dump_traceback_later(120, exit=True)
dist.init_process_group("gloo", timeout=timedelta(seconds=300))
faulthandler.cancel_dump_traceback_later()
rank = dist.get_rank()
torch.manual_seed(1)
net = torch.nn.Linear(4, 1)
adam = torch.optim.Adam(net.parameters())
def told(kind, error, trace):
    print("permanent", getattr(error, "permanent", None), flush=True)
    sys.__excepthook__(kind, error, trace)

sys.excepthook = told
with pmstore.open(f"{folder}/run{rank}.pm", domain="process") as store:
    if case != "opens":
        dist.barrier()  # from here on nobody is late but who is to be
    if case == "late" and rank == 2:
        time.sleep(600)
    job = pmstore.torch.Job(timeout=timeout)
    run = pmstore.torch.attach(store, model=net, optimizer=adam, job=job, policy=None)
    for step in run.steps(1000):
        open(f"{folder}/step{rank}", "w").write(str(step))
        if case == "in turn" and rank == 2 and step == 5:
            time.sleep(600)
        net(torch.ones(3, 4)).sum().backward()
        if case == "together":
            dist.all_reduce(net.weight.grad)
        adam.step()
        adam.zero_grad()
        if case == "together" and rank == 2 and step == 5:
            while not run._steps.job.peers._message.ended():
                time.sleep(0.001)  # its last ticket: without it the others do not come so far
            os.kill(os.getpid(), signal.SIGSTOP)  # before its ticket: the others wait for that
        time.sleep(0.05)
"""


class Ranks:
    def __init__(
        self, folder: Path, world: int, case: str, timeout: float, *, end: bool = False
    ) -> None:
        """end: they end as the interpreter does, which a fork of another process does not."""
        self.folder, port = folder, str(free_port())
        place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        words = ["-c", PROGRAM, str(folder), case, str(timeout)]
        self.processes: list[Any] = []
        for rank in range(world):
            env = {**os.environ, **place, "RANK": str(rank), "OMP_NUM_THREADS": "1"}
            self.processes.append(
                subprocess.Popen([sys.executable, *words], env=env)
                if end
                else pythons.start(words, env=env)
            )

    def said(self, rank: int) -> str:
        file = self.folder / f"said{rank}"
        return file.read_text() if file.exists() else ""

    def ended(self, rank: int) -> int | None:
        """Its status, soon."""
        self.processes[rank].communicate(timeout=120)
        return self.processes[rank].returncode  # type: ignore[no-any-return]

    def until(self, rank: int, word: str, seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while not re.search(word, self.said(rank)):
            assert time.monotonic() < end, (word, rank, self.said(rank))
            time.sleep(0.05)

    def trained(self, rank: int, step: int) -> None:
        end, file = time.monotonic() + 300, self.folder / f"step{rank}"
        while not (file.exists() and int(file.read_text() or 0) >= step):
            assert time.monotonic() < end, self.said(rank)
            time.sleep(0.05)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate(timeout=30)


@pytest.fixture
def started(shm: Path) -> Iterator[list[Ranks]]:
    made: list[Ranks] = []
    yield made
    for one in made:
        one.end()


def test_a_rank_that_cannot_open_its_store(shm: Path, started: list[Ranks]) -> None:
    """The other hears of it, long before the timeout, also where that rank has torch's store of
    addresses."""
    with pmstore.open(shm / "run0.pm"):
        started.append(ranks := Ranks(shm, 2, "opens", 300))
        ranks.until(1, "permanent False")
        ranks.until(1, "PeerLostError: .*: rank 0 .it has ended: StoreLockedError: ")
        assert ranks.ended(1) == 1


def test_a_rank_whose_store_will_never_open(shm: Path, started: list[Ranks]) -> None:
    (shm / "run1.pm").write_bytes(b"something else" * 1000)
    started.append(ranks := Ranks(shm, 2, "opens", 300, end=True))
    ranks.until(0, "permanent True")
    ranks.until(0, "PeerLostError: .*: rank 1 .it has ended: NotAStoreError: ")
    assert ranks.ended(0) == 1


def test_those_that_are_waited_for_are_named(shm: Path, started: list[Ranks]) -> None:
    """One that is late, one that does not commit, and one that is stopped while the others wait in
    a collective of the program's own, whose timeout is longer. Three jobs wait at once."""
    for case, timeout in (("late", 6.0), ("in turn", 6.0), ("together", 4.0)):
        (shm / case).mkdir()
        started.append(Ranks(shm / case, 3, case, timeout))
    late, in_turn, together = started
    together.trained(1, 3)
    for ranks, missed in ((late, "come"), (in_turn, "commit")):
        for rank in range(2):
            waits = rf"LOG rank {rank} of 3 has waited for 3 seconds: rank 2 did not {missed}"
            ranks.until(rank, waits)
            ranks.until(rank, r"PeerLostError: .*: .*rank.* is lost, or did not ")
        lost = f"of 3: rank 2 is lost, or did not {missed}"
        assert any(lost in ranks.said(rank) for rank in range(2))
    for rank in range(2):
        over = rf"LOG rank {rank} of 3: rank 2 is lost.* within 4 seconds. The job is over"
        together.until(rank, over)


DIFFERENT = """
import os, signal, sys, traceback
import torch, torch.distributed as dist
import pmstore, pmstore.torch

def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    open(f"{sys.argv[1]}/starts", "a").write("1")
    net = torch.nn.Linear(4 + rank, 1)
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    with pmstore.open(f"{sys.argv[1]}/run{rank}.pm", domain="process") as store:
        pmstore.torch.attach(store, model=net, optimizer=sgd, process_group="world")
"""


def test_torchrun_is_told_not_to_repeat_what_no_restart_mends(shm: Path) -> None:
    """By what docs/DISTRIBUTED.md says."""
    page = (Path(__file__).parents[2] / "docs/DISTRIBUTED.md").read_text()
    (ending,) = re.findall(r"```python\n(try:\n    main\(\).*?)```", page, re.DOTALL)
    (shm / "train.py").write_text(DIFFERENT + "\n" + ending)
    place = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "5"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *place, str(shm / "train.py"), str(shm)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "to start the job again as it is does not help" in done.stderr
    assert (shm / "starts").read_text() == "11", done.stderr
