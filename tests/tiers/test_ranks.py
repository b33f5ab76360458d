"""Several ranks: each flushes its share of what is replicated, and what only it holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tier_helpers import CHUNK

import pmstore
from pmstore._base.workers import Patience
from pmstore.errors import TierError
from pmstore.objects.generations import NO_RUN, Key, Record, encode
from pmstore.tiers._epochs import sharding
from pmstore.tiers._epochs.content import verify
from pmstore.tiers._epochs.manifest import Shared
from pmstore.tiers._places.url import open_places

RANK = """
import sys, numpy as np, pmstore
rank, path, url = int(sys.argv[1]), sys.argv[2], sys.argv[3]
with pmstore.open(path, size="16MiB") as store:
    store["only"] = np.full(20_000 * (rank + 1), rank)      # other offsets at each rank
    rng = np.random.default_rng(7)
    store["model/w"] = rng.random(200_000)
    store["model/b"] = rng.random(30_011)
    store["model/small"] = rng.random(10)
    store.commit()
    ranks = {"rank": rank, "world_size": 2, "run": "job", "replicated": ["model/*"]}
    store.add_tier("t", pmstore.TierConfig(url, chunk_bytes=16384, **ranks))
    handle = store.flush("t", wait=True)
    store["model/w"][:1000] = 5
    store["only"] += 10
    store.commit()
    print(handle.stats.written_bytes, store.flush("t", wait=True).stats.written_bytes)
"""


@pytest.mark.parametrize("place", ["tier", "node{rank}/tier"])
def test_two_processes(shm: Path, place: str) -> None:
    url = str(shm / place)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(shm / f"{rank}.pm"), url],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=300)[0].split() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    first, later = zip(*((int(a), int(b)) for a, b in told), strict=True)
    replicated = 8 * 230_011
    # not all of it
    assert all(written < 0.5 * replicated + 8 * 40_000 + 30 * CHUNK for written in first)
    assert sum(first) >= replicated
    assert all(one < 1_000_000 for one in later)
    assert [(one.ranks, one.problem) for one in pmstore.epochs(url)] == [((0, 1), None)] * 2
    for epoch, first_value, added in [(1, None, 0), (2, 5, 10)]:
        for rank in range(2):
            target = shm / "restored.pm"
            report = pmstore.restore(target, url, epoch, rank=rank)
            assert report.epoch == epoch
            with pmstore.open(target) as store:
                assert store.check().problems == ()
                rng = np.random.default_rng(7)
                w, b = rng.random(200_000), rng.random(30_011)
                if first_value is not None:
                    w[:1000] = first_value
                np.testing.assert_array_equal(store["model/w"], w)
                np.testing.assert_array_equal(store["model/b"], b)
                np.testing.assert_array_equal(store["model/small"], rng.random(10))
                assert set(store["only"].tolist()) == {rank + added}
                # its epochs would not be that run's
                with pytest.raises(TierError, match="no tier"):
                    store.flush("t")
            target.unlink()
    damage(Path(url.replace("{rank}", "1")), "job.1-2.")
    report = pmstore.restore(shm / "restored.pm", url, rank=1)
    assert report.epoch == 1
    assert report.skipped[0][1].startswith("corrupt")
    damage(Path(url.replace("{rank}", "0")), "job.0-2.", first=True)  # what rank 1 borrows
    with pytest.raises(TierError, match="corrupt"):
        pmstore.restore(shm / "again.pm", url, rank=1)


def damage(folder: Path, prefix: str, first: bool = False) -> None:
    """A byte in every chunk of a rank's last (or first) file."""
    file = sorted(folder.glob(f"{prefix}*.chunks"))[0 if first else -1]
    data = bytearray(file.read_bytes())
    for at in range(0, len(data), CHUNK):
        data[at + 9] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("place", ["tier", "node{rank}/tier"])
def test_an_epoch_counts_when_all_ranks_have_published(shm: Path, place: str) -> None:
    url = str(shm / place)
    stores = [pmstore.open(shm / f"{rank}.pm") for rank in range(2)]
    for rank, store in enumerate(stores):
        store["x"] = 1
        store.add_tier("t", pmstore.TierConfig(url, rank=rank, world_size=2, run="job", keep=1))
        store.commit()
    for store in stores:
        store.flush("t", wait=True)
    for store in stores:
        store["x"] = 2
        store.commit()
    stores[0].flush("t", wait=True)
    assert [one.problem for one in pmstore.epochs(url)] == [
        "missing: rank 1 of 2 has not published",
        None,
    ]
    report = pmstore.restore(shm / "a.pm", url)  # keep=1 did not take the last whole one
    assert report.epoch == 1
    assert report.skipped == ((2, "missing: rank 1 of 2 has not published"),)
    stores[1].flush("t", wait=True)
    assert pmstore.restore(shm / "b.pm", url, rank=1).epoch == 2
    stores[0]["x"] = 3
    stores[0].commit()
    stores[0].flush("t", wait=True)
    stores[0].drain()  # keep=1 lets its first epoch go, now that the second is whole
    assert [one.epoch for one in pmstore.epochs(url) if 0 in one.ranks] == [3, 2]
    for store in stores:
        store.close()


def test_an_epoch_of_two_generations_is_refused(shm: Path) -> None:
    """Each rank's store counts its own commits: the same number may be another step of a job."""
    url = str(shm / "tier")
    for rank in range(2):
        with pmstore.open(shm / f"{rank}.pm", size="16MiB") as store:
            store["model/w"] = np.full(50_000, rank)
            key = Key((1, 2), 1, 5 + rank, 5 + rank)
            store["run/job"] = np.array(encode(Record(key, rank, 2, 0, NO_RUN)))
            store.add_tier(
                "t",
                pmstore.TierConfig(
                    url,
                    rank=rank,
                    world_size=2,
                    run="job",
                    replicated=["model/*"],
                    chunk_bytes=CHUNK,
                ),
            )
            store.commit()
            store.flush("t", wait=True)
    (epoch,) = pmstore.epochs(url)
    place = open_places(url, None, Patience(None))
    assert "did not flush the same commit of 'run'" in (verify(place, epoch) or "")
    for rank in range(2):
        with pytest.raises(TierError, match=r"rank 0: generation 5 .*rank 1: generation 6"):
            pmstore.restore(shm / "restored.pm", url, rank=rank)
        assert not (shm / "restored.pm").exists()


@pytest.mark.parametrize("gone", ["*.chunks", "*.manifest"])
def test_a_shard_that_is_gone(shm: Path, gone: str) -> None:
    """The epoch is whole for no rank then."""
    url = str(shm / "tier")
    stores = [pmstore.open(shm / f"{rank}.pm") for rank in range(2)]
    for value in (1, 2):
        for rank, store in enumerate(stores):
            store["x"] = value
            store.commit()
            if value == 1:
                store.add_tier("t", pmstore.TierConfig(url, rank=rank, world_size=2, run="job"))
                store.commit()
            store.flush("t", wait=True)
    for store in stores:
        store.close()
    newest = max((shm / "tier").glob(f"*job.1-2{gone}"), key=lambda file: file.stat().st_mtime_ns)
    newest.unlink()
    for rank in range(2):
        report = pmstore.restore(shm / f"r{rank}.pm", url, rank=rank)
        assert [why.split(":")[0] for _, why in report.skipped] == ["missing"]
        with pmstore.open(shm / f"r{rank}.pm") as store:
            assert store["x"] == 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_shares_are_a_partition_and_balanced(world_size: int) -> None:
    rng = np.random.default_rng(world_size)
    shared = [Shared(f"{i:03d}", 0, int(n)) for i, n in enumerate(rng.integers(1, 1_000_000, 40))]
    total = sum(one.nbytes for one in shared)
    covered = dict.fromkeys(range(len(shared)), 0)
    shares = [0] * world_size
    for part in sharding.parts(shared, world_size):
        assert covered[part.array] == part.start  # in order, without gaps
        covered[part.array] = part.end
        shares[part.rank] += part.end - part.start
    assert [covered[i] for i in range(len(shared))] == [one.nbytes for one in shared]
    assert max(shares) - min(shares) <= 1
    assert sum(shares) == total
