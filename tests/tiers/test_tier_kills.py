"""SIGKILL at any point of a flush, of publishing, of forgetting old epochs, and of a restore."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import tier_workload

import pmstore
from pmstore.errors import TierError
from pmstore.testing import ForkServer
from pmstore.tiers._epochs.manifest import Manifest

SEED = 20261121
MORE = int(os.environ.get("PMSTORE_TIER_KILLS", "1"))


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer([str(Path(__file__).parent)]) as made:
        yield made


def verify(path: Path, url: str, acknowledged: int) -> int:
    """The newest epoch that restores is the acknowledged one or a later one, and all of it is of
    one step. Nothing in the tier is broken: what a kill leaves behind is never taken for an
    epoch."""
    target = path.with_name("restored.pm")
    try:
        report = pmstore.restore(target, url)
    except TierError:
        assert acknowledged < 0
        return -1
    assert report.skipped == ()
    assert [one.problem for one in pmstore.epochs(url) if one.problem] == []
    with pmstore.open(target) as store:
        step = tier_workload.check(store)
    target.unlink()
    assert step >= acknowledged
    return step


@pytest.mark.parametrize(("domain", "kills"), [("process", 25), ("file", 12)])
def test_random_kills_of_flushes(
    server: ForkServer, path: Path, url: str, domain: str, kills: int
) -> None:
    """From kill to kill the run goes on, with what the one before left in the tier."""
    rng = random.Random(f"{SEED}{domain}")
    last = -1
    for _ in range(kills * MORE):
        arguments = [str(path), url, domain, 10**9, rng.randrange(1, 4)]
        run = server.run("tier_workload:run", arguments, delay_seconds=rng.uniform(0.002, 0.15))
        assert run.killed, run
        last = max(last, verify(path, url, max(last, run.acknowledged)))
    assert server.run("tier_workload:run", [str(path), url, domain, 2, 1]).exit_code == 0
    assert verify(path, url, last) > max(last, 0)
    place = Path(url)
    named = {
        name
        for one in place.glob("*.manifest")
        for name, _ in Manifest.unpack(one.read_bytes()).files
    }
    # what kills left half-written is gone
    assert {one.name for one in place.glob("*.chunks")} == named
    assert not list(place.glob(".*.new"))


def test_kills_at_primitives_of_flushes(server: ForkServer, path: Path, url: str) -> None:
    """Stores, writes and syncs are counted together, those into the tier too."""
    rng = random.Random(SEED)
    last = -1
    for i in range(25 * MORE):
        point = rng.randrange(1, 60) if i % 2 else rng.randrange(60, 900)
        run = server.run("tier_workload:run", [str(path), url, "process", 12, 2], kill_at=point)
        assert run.killed or run.exit_code == 0, run
        if path.exists():
            last = max(last, verify(path, url, max(last, run.acknowledged)))


def test_kills_of_restores(server: ForkServer, path: Path, url: str) -> None:
    """The store is there, whole, or not at all; the next restore clears what the killed one
    left."""
    run = server.run("tier_workload:run", [str(path), url, "process", 5, 2])
    assert run.exit_code == 0
    target = path.with_name("target.pm")
    rng = random.Random(SEED)
    whole = 0
    for i in range(30 * MORE):
        point = rng.randrange(1, 12)
        killed = server.run(
            "tier_workload:restore",
            [str(target), url],
            kill_at=point if i % 2 else 0,
            delay_seconds=(None if i % 2 else rng.uniform(0.0005, 0.01)),
        )
        if target.exists():
            with pmstore.open(target) as store:
                assert tier_workload.check(store) >= 5
            target.unlink()
            whole += 1
        else:
            assert killed.acknowledged == -1
    done = server.run("tier_workload:restore", [str(target), url])
    assert done.exit_code == 0
    assert not list(path.parent.glob(".*.restoring"))
