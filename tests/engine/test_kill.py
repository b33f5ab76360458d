"""SIGKILL, hundreds of times: what a commit acknowledged is never lost, and nothing is ever half
there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import workloads

import pmstore
from pmstore.testing import ForkServer

SEED = 20261121


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer([str(Path(__file__).parent), str(Path(__file__).parents[1])]) as made:
        yield made


def verify(path: Path, domain: str, acknowledged: int) -> int:
    """Opens twice: what recovery leaves behind is a store that needs none."""
    with pmstore.open(path, "r", domain=domain) as store:  # type: ignore[arg-type]
        shown = workloads.check(store, acknowledged)
        epoch = store.epoch
    with pmstore.open(path, "r+", domain=domain) as store:  # type: ignore[arg-type]
        assert workloads.check(store, acknowledged) == shown
        assert store.epoch == epoch
    with pmstore.open(path, "r+", domain=domain) as store:  # type: ignore[arg-type]
        assert store.recovery.clean
        assert workloads.check(store, acknowledged) == shown
    return shown


@pytest.mark.parametrize(("domain", "kills"), [("process", 90), ("emulated", 60), ("file", 70)])
def test_random_kills(server: ForkServer, path: Path, domain: str, kills: int) -> None:
    """The store goes on from kill to kill, so that each run also recovers what the one before
    left."""
    rng = random.Random(f"{SEED}{domain}")
    last = -1
    died = 0
    usual = longest = 0.03
    for _ in range(kills):
        run = server.run(
            "workloads:steps",
            [str(path), domain, 10**9, rng.randrange(10**9)],
            delay_seconds=rng.uniform(0.001, longest),
        )
        assert run.killed, run
        died += 1
        # however long this machine takes until the first step
        longest = max(usual, longest * (0.98 if run.acknowledged >= 0 else 1.1))
        acknowledged = max(last, run.acknowledged)
        last = (
            max(last, verify(path, domain, acknowledged))
            if rng.random() < 0.3 and path.exists()
            else acknowledged
        )
    assert died == kills
    assert verify(path, domain, last) > 0


@pytest.mark.parametrize("domain", ["process", "emulated", "file"])
def test_kills_at_primitives(server: ForkServer, shm: Path, domain: str) -> None:
    """At the n-th store, flush, fence or sync of the engine: creation, growth, commits and roll
    backs included."""
    rng = random.Random(f"{SEED}{domain}p")
    points = [*range(1, 25), *(rng.randrange(25, 3000) for _ in range(25))]
    for i, point in enumerate(points):
        path = shm / f"{i}.pm"
        run = server.run(
            "workloads:steps", [str(path), domain, 200, rng.randrange(10**9)], kill_at=point
        )
        assert run.killed or run.exit_code == 0, run
        if path.exists():
            verify(path, domain, run.acknowledged)
            again = server.run("workloads:steps", [str(path), domain, run.acknowledged + 5, 1])
            assert again.exit_code == 0
            assert not again.killed
            path.unlink()
        else:
            assert run.acknowledged == -1


def verify_slots(path: Path, domain: str, acknowledged: int) -> int:
    shown = -1
    for mode in ("r", "r+", "r+"):
        with pmstore.open(path, mode, domain=domain) as store:  # type: ignore[arg-type]
            shown = workloads.check_slots(store, acknowledged)
    return shown


@pytest.mark.parametrize("domain", ["process", "emulated", "file"])
def test_kills_of_slots(server: ForkServer, shm: Path, domain: str) -> None:
    """At primitives and at random moments, the store going on from kill to kill."""
    rng = random.Random(f"{SEED}{domain}s")
    path = shm / "slots.pm"
    last = -1
    for i in range(60):
        how = (
            {"kill_at": rng.randrange(1, 400)}
            if i % 2
            else {"delay_seconds": rng.uniform(0.001, 0.02)}
        )
        run = server.run("workloads:slots", [str(path), domain, 10**9, rng.randrange(10**9)], **how)  # type: ignore[arg-type]
        assert run.killed, run
        last = max(last, run.acknowledged)
        if path.exists():
            last = max(last, verify_slots(path, domain, last))
    assert last > 0


@pytest.mark.parametrize("domain", ["process", "file"])
def test_kills_of_first_writes(server: ForkServer, shm: Path, domain: str) -> None:
    """Of all pages of a large array, each run anew."""
    rng = random.Random(f"{SEED}{domain}l")
    path = shm / "large.pm"
    last = -1
    for i in range(50):
        how = (
            {"kill_at": rng.randrange(1, 300)}
            if i % 2
            else {"delay_seconds": rng.uniform(0.001, 0.06)}
        )
        run = server.run("workloads:large", [str(path), domain, 10**9, rng.randrange(10**9)], **how)  # type: ignore[arg-type]
        assert run.killed, run
        last = max(last, run.acknowledged)
        if path.exists():
            for mode in ("r", "r+"):
                with pmstore.open(path, mode, domain=domain) as store:  # type: ignore[arg-type]
                    last = max(last, workloads.check_large(store, last))
    assert last > 0


def test_a_store_killed_at_creation_is_whole_or_not_there(server: ForkServer, shm: Path) -> None:
    rng = random.Random(SEED)
    for i in range(20):
        path = shm / f"{i}.pm"
        server.run(
            "workloads:steps", [str(path), "auto", 1, 1], delay_seconds=rng.uniform(0, 0.004)
        )
        if path.exists():
            with pmstore.open(path) as store:
                assert store.check().problems == ()


def test_a_workload_that_fails_is_told(server: ForkServer, shm: Path) -> None:
    run = server.run("workloads:steps", [str(shm / "no" / "such.pm"), "auto", 1, 1])
    assert (run.killed, run.exit_code) == (False, 1)


def test_a_kill_never_tears_an_acknowledgement(server: ForkServer) -> None:
    """A step is acknowledged by one store: else a kill between two of them says that an earlier one
    was the last."""
    rng = random.Random(SEED)
    delay, acknowledged = 0.002, 0
    while acknowledged < 200:  # however long this machine takes until the first
        run = server.run("workloads:acknowledging", delay_seconds=rng.uniform(0, delay))
        assert run.acknowledged in (-1, 7)
        acknowledged += run.acknowledged == 7
        delay *= 0.98 if run.acknowledged == 7 else 1.1
