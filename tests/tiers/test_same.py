"""A flush writes what is not in the tier yet, and nothing else: captures take more than changes."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tier_helpers import CHUNK, newest_file

import pmstore
from pmstore._engine.snapshot import checksum
from pmstore.errors import TierError
from pmstore.tiers._epochs.manifest import Manifest
from pmstore.tiers._flush.plan import SPACE
from pmstore.tiers._places.local import LocalPlace

Store = pmstore.Store

LARGE = 24_000_000
"""Bytes: three captures of 8 MiB."""
SMALL = 40 * CHUNK
POLYNOMIAL = 0x11EDC6F41
"""Of CRC-32C: its bits, added anywhere, leave a checksum as it is."""


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with pmstore.open(path, size="8MiB") as store:
        yield store


@pytest.fixture
def small(store: Store, url: str) -> Store:
    """With an array of 40 chunks of random bytes, which is in the tier."""
    store["a"] = np.random.default_rng(1).integers(0, 256, SMALL, np.uint8)
    store.add_tier("t", pmstore.TierConfig(url, keep=50, chunk_bytes=CHUNK))
    flush(store)
    return store


def flush(store: Store) -> int:
    """Bytes written for a commit of all that is there."""
    store.commit()
    handle = store.flush("t", wait=True)
    store.drain()
    assert handle.stats is not None
    assert handle.progress == 1.0
    assert handle.written_bytes == handle.stats.written_bytes
    return handle.stats.written_bytes


def restored(path: Path, url: str, epoch: int | None = None) -> Any:
    """The array as of an epoch."""
    target = path.with_name("back.pm")
    report = pmstore.restore(target, url, epoch)
    assert report.skipped == ()
    with pmstore.open(target, "r") as back:
        assert back.check().problems == ()
        found = back["a"].copy()
    target.unlink()
    return found


def newest_name(url: str) -> Path:
    return max(Path(url).glob("*.manifest"))


def newest(url: str) -> Manifest:
    return Manifest.unpack(newest_name(url).read_bytes())


def contents(url: str) -> set[tuple[int, bytes]]:
    """Index and content of all chunks of the newest epoch."""
    manifest = newest(url)
    files = [Path(url, name).read_bytes() for name, _ in manifest.files]
    return {
        (int(index), files[file][int(at) : int(at) + manifest.chunk_bytes])
        for index, at, file, _ in manifest.chunks
    }


def store_the_same(store: Store) -> None:
    """Captured as a whole, and as it was."""
    store["a"][:] = store["a"].copy()


def reads(monkeypatch: pytest.MonkeyPatch, error: OSError | None = None) -> list[str]:
    """Chunks files that are read from now on; error: instead of their content."""
    found: list[str] = []
    read = LocalPlace.read

    def counted(self: LocalPlace, name: str, start: int = 0, end: int | None = None) -> bytes:
        if name.endswith(".chunks"):
            found.append(name)
            if error is not None:
                raise error
        return read(self, name, start, end)

    monkeypatch.setattr(LocalPlace, "read", counted)
    return found


@pytest.mark.parametrize("place", ["local", "remote"])
def test_what_was_captured_and_not_changed_is_not_written(
    path: Path, url: str, store: Store, place: str
) -> None:
    """1 % of an array that was written whole before."""
    if place == "remote":
        pytest.importorskip("fsspec")
        url = f"memory://same-{path.parent.name}"
    a = store.zeros("a", LARGE, "uint8")
    a[:] = np.resize(np.random.default_rng(2).integers(0, 256, 1 << 20, np.uint8), LARGE)
    store.add_tier("t", pmstore.TierConfig(url, keep=20))
    flush(store)
    expected = {}
    for i in range(2):
        a[:] += 1
        assert flush(store) >= LARGE
        for _ in range(2):  # compared with the tier, then by fingerprints
            before = a.copy()
            a[i * LARGE // 2 :][: LARGE // 100] += 5
            written = flush(store)
            # the pages that differ, and their chunks, the root's and a page table's among them
            differ = np.unique(np.flatnonzero(before != a) // (256 << 10))
            assert written <= 1.1 * (len(differ) + 3) * (256 << 10)
        expected[store.epoch] = a.copy()
    for epoch, want in expected.items():
        assert np.array_equal(restored(path, url, epoch), want)


def test_no_more_is_written_than_differs(path: Path, url: str, small: Store) -> None:
    """To the chunk."""
    rng = random.Random(3)
    for _ in range(12):
        store_the_same(small)
        for _ in range(rng.randrange(4)):
            small["a"][rng.randrange(SMALL)] += 1
        before = contents(url)
        assert flush(small) == len(contents(url) - before) * CHUNK
        assert np.array_equal(restored(path, url), small["a"])


def test_a_chunk_is_read_from_the_tier_once(
    url: str, small: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = reads(monkeypatch)
    small["a"][:] ^= 0xFF
    flush(small)
    assert found == []  # no checksum was the same
    store_the_same(small)
    flush(small)
    assert len(found) == 1  # 39 neighbours at once
    store_the_same(small)
    flush(small)
    assert len(found) <= 2  # a neighbour that other bytes of the store lie in


def same_checksum(a: Any, at: int) -> None:
    """Changes 33 bits of an array, and no checksum of what they lie in."""
    bits = int(f"{POLYNOMIAL:b}"[::-1], 2)
    before = checksum(a.tobytes())
    a[at : at + 5] ^= np.frombuffer(bits.to_bytes(5, "little"), np.uint8)
    assert checksum(a.tobytes()) == before


@pytest.mark.parametrize("seen", [0, 1, 2])
def test_a_checksum_alone_proves_nothing(path: Path, url: str, small: Store, seen: int) -> None:
    """seen: so often before the chunk was found to be the same."""
    for _ in range(seen):
        store_the_same(small)
        flush(small)
    old = newest(url).chunks["crc"].tolist()
    same_checksum(small["a"], SMALL // 2)
    written = flush(small)
    assert CHUNK <= written <= 4 * CHUNK
    new = newest(url).chunks["crc"].tolist()
    assert sum(a != b for a, b in zip(old, new, strict=True)) == written // CHUNK - 1
    assert np.array_equal(restored(path, url), small["a"])
    same_checksum(small["a"], SMALL // 2)  # back again: what was seen once is not what is there
    assert flush(small) == written
    assert np.array_equal(restored(path, url), small["a"])


def test_what_was_damaged_in_the_tier_is_written_again(path: Path, url: str, small: Store) -> None:
    """Somebody changes what lies there: found, where it is compared, and never taken over."""
    file = newest_file(url, ".chunks")
    data = bytearray(file.read_bytes())
    at = data.index(small["a"][SMALL // 2 :][:64].tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(TierError, match="corrupt"):
        pmstore.restore(path.with_name("x.pm"), url)
    store_the_same(small)
    assert flush(small) <= 4 * CHUNK
    assert np.array_equal(restored(path, url), small["a"])


def test_forged_manifests_change_nothing(path: Path, url: str, small: Store) -> None:
    """An enemy who can write to the tier says of every chunk that it has the checksum which the
    store will have, and that it lies elsewhere. What a flush knows is its own."""
    rng = random.Random(4)
    for _ in range(6):
        forged = newest_name(url)
        found = Manifest.unpack(forged.read_bytes())
        a = small["a"]
        for _ in range(5):
            a[rng.randrange(SMALL)] += 1
        small.commit()
        chunks = found.chunks.copy()
        with pmstore.open(path.with_name("other.pm"), "w", size="8MiB") as other:
            other["a"] = a.copy()
            other.add_tier("o", pmstore.TierConfig(url + "-other", chunk_bytes=CHUNK))
            other.flush("o", wait=True)
        path.with_name("other.pm").unlink()
        real = newest(url + "-other").chunks
        n = min(len(real), len(chunks))
        chunks["crc"][:n] = real["crc"][:n]
        for file in range(len(found.files)):
            inside = chunks["file"] == file
            chunks["position"][inside] = chunks["position"][inside][::-1]
        forged.write_bytes(replace(found, chunks=chunks).pack())
        flush(small)
        assert np.array_equal(restored(path, url), a)


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.ENOENT])
def test_what_cannot_be_read_is_written_again(
    path: Path, url: str, small: Store, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    store_the_same(small)
    with monkeypatch.context() as patch:
        assert not reads(patch, OSError(error, "no"))
        assert flush(small) >= SMALL - 2 * CHUNK
    assert np.array_equal(restored(path, url), small["a"])


def test_a_comparison_is_cancelled(
    path: Path, url: str, small: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go = threading.Event(), threading.Event()
    read = LocalPlace.read

    def waits(self: LocalPlace, name: str, start: int = 0, end: int | None = None) -> bytes:
        if name.endswith(".chunks"):
            reading.set()
            assert go.wait(60)
        return read(self, name, start, end)

    want, epoch = small["a"].copy(), small.epoch
    store_the_same(small)
    small.commit()
    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "read", waits)
        handle = small.flush("t")
        assert reading.wait(60)
        small["a"][:] = 7  # what is compared is the snapshot's, not this
        small.commit()
        handle.cancel()
        go.set()
        with pytest.raises(TierError, match="cancelled"):
            handle.wait(60)
    assert np.array_equal(restored(path, url), want)
    assert [one.epoch for one in pmstore.epochs(url)] == [epoch]
    flush(small)
    assert set(restored(path, url).tolist()) == {7}


def test_the_snapshot_is_compared_not_what_came_after(
    path: Path, url: str, small: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores and commits while chunks are compared."""
    want, read = small["a"].copy(), LocalPlace.read

    def disturbed(self: LocalPlace, name: str, start: int = 0, end: int | None = None) -> bytes:
        if name.endswith(".chunks"):
            small["a"][:] += 1
            small.commit()
        return read(self, name, start, end)

    store_the_same(small)
    small.commit()
    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "read", disturbed)
        handle = small.flush("t", wait=True)
        small.drain()
    assert handle.stats is not None
    assert handle.stats.written_bytes <= 4 * CHUNK
    assert np.array_equal(restored(path, url), want)
    flush(small)
    assert np.array_equal(restored(path, url), small["a"])


def test_a_rate_holds_for_comparisons_too(path: Path, url: str, small: Store) -> None:
    small.add_tier("t", pmstore.TierConfig(url, keep=50, chunk_bytes=CHUNK, max_rate="20MB"))
    small["a"][:] += 1
    flush(small)
    store_the_same(small)
    assert flush(small) <= 4 * CHUNK
    assert np.array_equal(restored(path, url), small["a"])


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_stored_every_epoch_comes_back(
    path: Path, url: str, small: Store, seed: int
) -> None:
    """Files that hold little go: what lies in them is written again, whatever it is."""
    rng = random.Random(seed)
    expected = {small.epoch: small["a"].copy()}
    for _ in range(14):
        a = small["a"]
        for _ in range(rng.randrange(1, 4)):
            at, n = rng.randrange(SMALL), rng.choice([1, 100, CHUNK, 8 * CHUNK, SMALL])
            what = rng.choice(["same", "same", "add", "back"])
            if what == "back":  # as some epoch before had it
                a[at : at + n] = rng.choice(list(expected.values()))[at : at + n]
            else:
                a[at : at + n] = a[at : at + n] + (what == "add")
        flush(small)
        expected[small.epoch] = small["a"].copy()
        found = newest(url)
        assert sum(size for _, size in found.files) <= SPACE * found.state_bytes
    for epoch, want in expected.items():
        assert np.array_equal(restored(path, url, epoch), want)


def test_an_epoch_of_an_earlier_process_is_extended(path: Path, url: str, small: Store) -> None:
    """What another process wrote is no base: the first flush writes everything, the next ones what
    differs."""
    want = {small.epoch: small["a"].copy()}
    small.close()
    with pmstore.open(path) as store:
        store_the_same(store)
        assert flush(store) >= SMALL
        store_the_same(store)
        store["a"][5] += 1
        assert flush(store) <= 4 * CHUNK
        want[store.epoch] = store["a"].copy()
    for epoch, one in want.items():
        assert np.array_equal(restored(path, url, epoch), one)
