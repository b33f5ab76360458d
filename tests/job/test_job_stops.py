"""Ranks that are stopped, cut off, told to end; jobs that torchrun starts again."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import pythons

pytest.importorskip("torch", reason="needs torch: pip install 'pmstore[torch]'")

from jobs.evidence import read_notes
from jobs.server import JobServer, free_port
from jobs.trying import Outcome, Try
from programs.bits import Bits, differences

import pmstore
from pmstore.torch._job.process_group import restarts_will_fail

STEPS = 40


@pytest.fixture(scope="module")
def server() -> JobServer:
    return JobServer(forks=pythons.server())


@pytest.fixture
def job(server: JobServer, shm: Path) -> Try:
    return Try(server, shm, timeout=4)


def lost(outcome: Outcome | None, rank: int) -> None:
    assert outcome is not None
    assert "PeerLostError" in outcome.kinds, outcome
    assert f"rank {rank}" in outcome.said


@pytest.fixture(scope="module")
def whole(server: JobServer, tmp_path_factory: pytest.TempPathFactory) -> list[Bits]:
    """What the job trains, if nothing happens."""
    job = Try(server, tmp_path_factory.mktemp("whole"))
    job.right(f"trains:{STEPS}")
    return job.trained()


def goes_on(job: Try, committed: int, whole: list[Bits]) -> None:
    """Started again, it loses one generation at most, and comes to the right end."""
    joined = job.right(f"trains:{STEPS}")
    assert joined[0] == joined[1] >= committed - 1
    assert job.trained() == whole


# ---- SIGSTOP


def test_a_rank_that_is_stopped_for_long(server: JobServer, shm: Path, whole: list[Bits]) -> None:
    """The others stay at their last commit, which they hold; nobody waits for ever. Four jobs wait
    at once."""
    stopped = [
        (Try(server, shm / f"{case}{rank}", timeout=4), case, rank)
        for case in ("trains_held", "trains_together")
        for rank in range(2)
    ]
    under_way, held = [], []
    try:
        for job, case, _ in stopped:
            job.folder.mkdir()
            under_way.append(job.start(f"{case}:{STEPS}"))
        for (job, _, rank), ranks in zip(stopped, under_way, strict=True):
            job.until(rank, 5)
            ranks.signal(rank, signal.SIGSTOP)
            job.go()
        for (job, case, rank), ranks in zip(stopped, under_way, strict=True):
            other = 1 - rank
            outcome = job.raised(other)
            if case == "trains_held":  # else gloo itself may have been first
                lost(outcome, rank)
            held.append(committed := job.steps(other)[-1])
            with pmstore.open(job.store(other), mode="r") as store:
                assert int(store["run/progress"][0]) in (committed, committed + 1)
                assert store.info().in_doubt
            ranks.signal(rank, signal.SIGCONT)
            assert job.raised(rank).kinds
            assert ranks.wait(60)
    finally:
        for ranks in under_way:
            ranks.end()
    for (job, _, _), committed in zip(stopped, held, strict=True):
        goes_on(job, committed, whole)


def test_a_rank_that_is_stopped_for_short(job: Try, whole: list[Bits]) -> None:
    """Nobody notices."""
    job.timeout = 60
    ranks = job.start(f"trains_held:{STEPS}")
    try:
        for step in (5, 10):
            job.until(1, step)
            ranks.signal(1, signal.SIGSTOP)
            time.sleep(0.5)
            ranks.signal(1, signal.SIGCONT)
        job.go()
        assert ranks.wait(60), job.said()
    finally:
        ranks.end()
    for rank in range(2):
        outcome = job.outcome(rank)
        assert outcome is not None
        assert not outcome.kinds, job.said()
    assert job.trained() == whole


def test_one_rank_is_told_to_end(job: Try, whole: list[Bits]) -> None:
    """All finish the same step, commit it, and end with status 0."""
    job.timeout = 60
    ranks = job.start(f"trains_guarded:{STEPS}")
    try:
        job.until(1, 5)
        ranks.signal(1, signal.SIGTERM)
        job.go()
        assert ranks.wait(60), job.said()
    finally:
        ranks.end()
    for rank in range(2):
        outcome = job.outcome(rank)
        assert outcome is not None
        assert outcome.kinds[0] == "SystemExit", job.said()
        assert outcome.said == "0"
    reached = []
    for rank in range(2):
        with pmstore.open(job.store(rank), mode="r") as store:
            reached.append(int(store["run/progress"][0]))
            assert not store.info().in_doubt
    assert 5 < reached[0] == reached[1] < STEPS
    assert job.right(f"trains_guarded:{STEPS}") == reached
    assert job.trained() == whole


# ---- a partition


class Net:
    """Two network namespaces and a wire between them."""

    def __init__(self) -> None:
        self.names = [f"pms{os.getpid()}{side}" for side in "ab"]
        self.wires = [f"pms{os.getpid() % 100_000}{side}" for side in "ab"]

    @property
    def files(self) -> list[str]:
        return [f"/run/netns/{name}" for name in self.names]

    def make(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        first, second = self.wires
        _ip("-n", self.names[0], "link", "add", first, "type", "veth", "peer", "name", second)
        _ip("-n", self.names[0], "link", "set", second, "netns", self.names[1])
        for number, (name, wire) in enumerate(zip(self.names, self.wires, strict=True), 1):
            # one name in both, as GLOO_SOCKET_IFNAME names it
            _ip("-n", name, "link", "set", wire, "name", "wire")
            _ip("-n", name, "addr", "add", f"10.99.0.{number}/24", "dev", "wire")
            _ip("-n", name, "link", "set", "wire", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def cut(self) -> None:
        """What is under way is lost, and nobody is told."""
        _ip("-n", self.names[1], "link", "set", "wire", "down")

    def remove(self) -> None:
        for name in self.names:
            if Path("/run/netns", name).exists():
                _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def net() -> Iterator[Net]:
    made = Net()
    try:
        try:
            made.make()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made
    finally:
        if shutil.which("ip"):
            made.remove()


def test_a_partition(job: Try, net: Net, whole: list[Bits]) -> None:
    """Both sides raise, and nothing is lost."""
    ranks = job.start(
        f"trains_held:{STEPS}",
        namespaces=net.files,
        environment={"MASTER_ADDR": "10.99.0.1", "GLOO_SOCKET_IFNAME": "wire"},
    )
    try:
        job.until(0, 5)
        job.until(1, 5)
        net.cut()
        job.go()
        lost(job.raised(0), 1)
        lost(job.raised(1), 0)
        assert ranks.wait(60)
    finally:
        ranks.end()
    committed = max(job.steps(0)[-1], job.steps(1)[-1])
    assert abs(job.steps(0)[-1] - job.steps(1)[-1]) <= 1
    goes_on(job, committed, whole)


# ---- torchrun

NAME = "data-parallel-adamw-2"


@pytest.fixture(scope="module")
def results(server: JobServer, tmp_path_factory: pytest.TempPathFactory) -> list[Bits]:
    """What each rank of the job returns if nobody is killed."""
    folder = tmp_path_factory.mktemp("results")
    given = [[NAME, str(folder), {"domain": "process"}]] * 2
    ranks = server.start("life:live", folder, given)
    assert ranks.wait(120)
    return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(2)]


@pytest.mark.parametrize(
    ("shared", "restarts", "fail"),
    [("True", "3", True), ("False", "3", False), ("True", "0", False)],
)
def test_torchrun_whose_restarts_will_fail(shared: str, restarts: str, fail: bool) -> None:
    told = {"TORCHELASTIC_USE_AGENT_STORE": shared, "TORCHELASTIC_MAX_RESTARTS": restarts}
    assert restarts_will_fail(told) is fail
    assert not restarts_will_fail({})


def torchrun(folder: Path, *words: str) -> pythons.Python:
    """One agent, for the ranks of one node. It is a fork, and so are its ranks: none imports torch
    again."""
    (folder / "rank.py").write_text("from jobs.life import main\n\nmain()\n")
    agent = ["-c", "from torch.distributed.run import main; main()", *words]
    # else a restarted job meets addresses of processes that are gone
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    started = [*("--max-restarts", "4", "--start-method", "fork", "--run-path"), "rank.py"]
    return pythons.start([*agent, *started, NAME, str(folder)], cwd=folder, env=environment)


# By rank and start: in a step, then in attach.
KILLS = {
    "1.0": {"domain": "process", "unit": "moment", "at": 75},
    "0.1": {"domain": "process", "unit": "joining", "at": 900},
}


def plan(folder: Path, kills: dict[str, object]) -> None:
    (folder / "plans").write_text(json.dumps({"any": {"domain": "process"}, **kills}))


def wait_for(agents: list[pythons.Python]) -> None:
    try:
        said = [agent.communicate(240)[1][-3000:] for agent in agents]
    finally:
        for agent in agents:
            agent.send_signal(signal.SIGTERM)  # it ends its ranks
            agent.communicate(60)
    assert [agent.returncode for agent in agents] == [0] * len(agents), "\n".join(said)


def check_lives(folder: Path, results: list[Bits], kills: int) -> None:
    notes = [read_notes(folder, rank, 0) for rank in range(2)]
    by_term: dict[int, set[object]] = {}
    for one in notes:
        for joined in one.joined:
            by_term.setdefault(joined.term, set()).add(joined)
    assert len(by_term) >= 2
    assert all(len(places) == 1 for places in by_term.values()), by_term
    # the agent may start the others a second time: one that failed as its peer did, a little later
    assert kills + 1 <= notes[0].joining <= 2 * kills + 1
    for rank, one in enumerate(notes):
        assert one.result is not None
        assert not differences(results[rank], one.result)


def test_torchrun_starts_the_ranks_again(shm: Path, results: list[Bits]) -> None:
    plan(shm, KILLS)
    wait_for([torchrun(shm, "--standalone", "--nproc-per-node", "2")])
    check_lives(shm, results, 2)


def test_two_nodes(shm: Path, results: list[Bits]) -> None:
    """An agent for each, on one machine: a rank's death restarts the ranks of both."""
    plan(shm, {"1.0": KILLS["1.0"]})
    node = [
        *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "job", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
    ]
    wait_for([torchrun(shm, *node) for _ in range(2)])
    check_lives(shm, results, 1)
