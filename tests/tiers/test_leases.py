"""Readers beside a writer that lets epochs go: they hold what they read, or take the next newest
one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tier_helpers import CHUNK, restored

import pmstore
from pmstore.errors import TierError
from pmstore.tiers._epochs import leases
from pmstore.tiers._epochs.content import verify
from pmstore.tiers._epochs.leases import LEASE_SECONDS, Lease, LeaseName, Leases
from pmstore.tiers._epochs.listing import list_epochs
from pmstore.tiers._epochs.manifest import ManifestName
from pmstore.tiers._places.local import Access, LocalPlace
from pmstore.tiers._places.url import open_place, open_places
from pmstore.tiers._restore import choose as choosing

Step = Callable[[float], int]

WRITER = f"""
import sys, pmstore
path, url = sys.argv[1:]
with pmstore.open(path, size="8MiB") as store:
    a = store.zeros("a", 131072)
    store.add_tier("t", pmstore.TierConfig(url, keep=1, chunk_bytes={CHUNK}))
    number = 0
    while True:
        number += 1
        with store.transaction():
            a[:] = number
        store.flush("t", wait=True)
        if number == 3:
            print("ready", flush=True)
"""

READER = """
import secrets, sys
import pmstore
url, folder, times = sys.argv[1:]
for _ in range(int(times)):
    target = f"{folder}/{secrets.token_hex(4)}.pm"
    report = pmstore.restore(target, url)
    with pmstore.open(target, "r") as store:
        values = set(store["a"].tolist())
        assert len(values) == 1, values
    assert report.skipped == (), report
"""


@contextmanager
def fast_writer(path: Path, url: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that commits and flushes as fast as it can, and keeps one epoch."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), url], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        yield writer
        assert writer.poll() is None  # it did not fail
    finally:
        writer.kill()
        writer.wait()
        assert writer.stdout is not None
        writer.stdout.close()


def lease_files(url: str) -> list[str]:
    return [one for one in os.listdir(url) if one.endswith(".lease")]


def test_restores_beside_a_fast_writer(path: Path, url: str, shm: Path) -> None:
    with fast_writer(path, url):
        command = [sys.executable, "-c", READER, url, str(shm), "15"]
        readers = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(3)]
        for one in readers:
            _, told = one.communicate(timeout=300)
            assert one.returncode == 0, told.decode()
    assert lease_files(url) == []


def test_other_readers_beside_a_fast_writer(path: Path, url: str) -> None:
    with fast_writer(path, url):
        for _ in range(10):
            found = pmstore.epochs(url)
            assert found
            assert [one.problem for one in found] == [None] * len(found)
            place = open_places(url)
            assert verify(place, found[0]) in (None, "missing: its writer let it go meanwhile")


def test_readers_that_are_killed(
    path: Path, url: str, shm: Path, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they held stays for a while; then it goes, and the lease with it."""
    with fast_writer(shm / "other.pm", url) as writer:
        command = [sys.executable, "-c", READER, url, str(shm), "1000"]
        for delay in (0.4, 0.45, 0.5):
            reader = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            time.sleep(delay)
            while not lease_files(url) and reader.poll() is None:
                time.sleep(0.0005)
            reader.kill()
            reader.wait()
        assert writer.poll() is None
        os.kill(writer.pid, signal.SIGSTOP)
        for lease in lease_files(url):
            _make_older(Path(url) / lease, LEASE_SECONDS + 1)
        os.kill(writer.pid, signal.SIGCONT)
        deadline = time.monotonic() + 60
        while lease_files(url) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lease_files(url) == []
    assert all(one.problem is None for one in pmstore.epochs(url))


def _make_older(file: Path, seconds: float) -> None:
    then = file.stat().st_mtime - seconds
    os.utime(file, (then, then))


def test_what_is_held_stays(filled: pmstore.Store, url: str, path: Path, step: Step) -> None:
    filled.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK, keep=1))
    first = step(1)
    place = open_places(url)
    with Lease(place, first, filled.info().uuid, 1):
        for number in range(2, 6):
            last = step(number)
            filled.drain()
        assert [one.epoch for one in pmstore.epochs(url)] == [last, first]
        assert restored(path, url, first)["a"][7] == 1
    last = step(6)
    filled.drain()
    assert [one.epoch for one in pmstore.epochs(url)] == [last]
    assert lease_files(url) == []


def test_an_epoch_that_is_published_again_beside_its_reader(
    path: Path, url: str, shm: Path
) -> None:
    """The files of the first time stay while somebody reads them, and go later, without `keep`
    too."""
    with pmstore.open(path, size="8MiB") as store:
        store["a"] = np.arange(131072.0)
        store.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK))
        store.commit()
        epoch, uuid = store.flush("t", wait=True).epoch, store.info().uuid
    before = set(os.listdir(url))
    with Lease(open_places(url), epoch, uuid, 1), pmstore.open(path) as store:
        store.flush("t", wait=True)
        store.drain()
        assert before <= set(os.listdir(url))
    with pmstore.open(path) as store:
        store.flush("t", wait=True)
        store.drain()
    assert len([one for one in os.listdir(url) if one.endswith(".manifest")]) == 1
    assert len([one for one in os.listdir(url) if one.endswith(".chunks")]) == 1


def _lease(url: str, epoch: int, run: str, number: int = 0) -> Path:
    file = Path(url) / str(LeaseName(epoch, run, 1, f"{number:016x}"))
    file.touch()
    return file


@pytest.mark.parametrize("seconds", [LEASE_SECONDS + 1, -LEASE_SECONDS - 60])
def test_a_lease_that_nobody_renews_ages_out(
    filled: pmstore.Store, url: str, step: Step, seconds: float
) -> None:
    """By the place's clock, and also one whose time lies ahead."""
    filled.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK, keep=1))
    file = _lease(url, step(1), filled.info().uuid)
    _make_older(file, seconds)
    last = step(2)
    filled.drain()
    assert [one.epoch for one in pmstore.epochs(url)] == [last]
    assert not file.exists()


def test_a_lease_that_somebody_renews_for_ever_ages_out(
    filled: pmstore.Store, url: str, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK, keep=1))
    first = step(1)
    file = _lease(url, first, filled.info().uuid)
    second = step(2)
    filled.drain()
    assert [one.epoch for one in pmstore.epochs(url)] == [second, first]
    monkeypatch.setattr(leases, "WHOLE_SECONDS", 0.0)
    file.touch()
    last = step(3)
    filled.drain()
    assert [one.epoch for one in pmstore.epochs(url)] == [last]
    assert not file.exists()


def test_leases_hold_so_many_epochs(filled: pmstore.Store, url: str, step: Step) -> None:
    for number in range(30):
        _lease(url, step(number), filled.info().uuid, number)
    filled.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK, keep=1))
    step(30)
    filled.drain()
    assert len(pmstore.epochs(url)) == leases.EPOCHS_MOST + 1


def test_names_that_are_no_leases(filled: pmstore.Store, url: str, step: Step) -> None:
    """They hold nothing, and are somebody else's: they stay."""
    filled.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK, keep=1))
    first, run = step(1), filled.info().uuid
    names = [
        f"{first:013d}.{run}.1.{0:016x}.lease",
        f"{first:012d}.{run}.01.{0:016x}.lease",
        f"{first:012d}.{run}.1.{0:015x}.lease",
        f"{first:012d}.{run}.1.{0:015x}A.lease",
        f"{first:012d}.other.1.{0:016x}.lease",
        f"{first:012d}.{run}.2.{0:016x}.lease",
        f"{first:012d}.{run}.1.{0:016x}.lease.new",
        f"{(1 << 62) + 1}.{run}.1.{0:016x}.lease",
    ]
    for name in names:
        (Path(url) / name).touch()
        _make_older(Path(url) / name, 10 * LEASE_SECONDS)
    last = step(2)
    filled.drain()
    assert [one.epoch for one in pmstore.epochs(url)] == [last]
    assert set(names) <= set(os.listdir(url))


def test_a_lease_follows_no_link(url: str, shm: Path, step: Step) -> None:
    step(1)
    (shm / "elsewhere").touch()
    before = (shm / "elsewhere").stat().st_mtime_ns
    place = LocalPlace(Path(url), Access())
    name = str(LeaseName(1, "run", 1, "0" * 16))
    os.symlink(shm / "elsewhere", Path(url) / name)
    with pytest.raises(OSError, match="symbolic"):
        place.touch(name)
    os.unlink(Path(url) / name)
    os.mkfifo(Path(url) / name)
    with pytest.raises(OSError, match="No such device"):
        place.touch(name)
    assert (shm / "elsewhere").stat().st_mtime_ns == before


class ReadOnly(LocalPlace):
    """A place where this process may not write, as another user's is; root may write anywhere."""

    let_go: Callable[[], Any] | None = None

    def touch(self, name: str) -> None:
        raise PermissionError(13, "read-only", name)

    def open(self, name: str, direct: bool) -> int:
        if ReadOnly.let_go is not None:
            ReadOnly.let_go()
        return super().open(name, direct)


@pytest.fixture
def read_only(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ReadOnly]]:
    from pmstore.tiers._restore import restore as restoring

    monkeypatch.setattr(restoring, "open_places", lambda *arguments: ReadOnly(Path(url), Access()))
    yield ReadOnly
    ReadOnly.let_go = None


def _replace_all(store: pmstore.Store, value: float) -> None:
    """No file of the epoch before stays."""
    store["a"][:] = value
    store.commit()
    store.flush("t", full=True, wait=True)
    store.drain()


def test_who_may_not_write_takes_the_next_newest(
    filled: pmstore.Store, url: str, path: Path, step: Step, read_only: type[ReadOnly]
) -> None:
    filled.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK, keep=1))
    step(1)
    left = [2.0, 3.0]

    def let_go() -> None:
        if left:
            _replace_all(filled, left.pop(0))

    read_only.let_go = let_go
    found = restored(path, url)
    assert found["a"][3] == 3.0
    assert found["report"].skipped == ()
    assert lease_files(url) == []


def test_who_may_not_write_and_is_too_slow_is_told(
    filled: pmstore.Store, url: str, path: Path, step: Step, read_only: type[ReadOnly]
) -> None:
    filled.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK, keep=1))
    first = step(1)
    numbers = iter(range(2, 1000))

    def let_go() -> None:
        _replace_all(filled, next(numbers))

    read_only.let_go = let_go
    with pytest.raises(TierError, match=f"{choosing.TRIES} times the newest epoch was let go"):
        restored(path, url)
    with pytest.raises(TierError, match="no such epoch"):  # asked for by number: no other one
        restored(path, url, first)


def test_what_is_really_missing_is_told(url: str, path: Path, step: Step) -> None:
    """A file that is gone while its manifest is there was not let go by a writer."""
    step(1)
    last = step(2)
    newest = list_epochs(open_places(url))[0]
    place = Path(url)
    chunks = {file.name for file in place.glob("*.chunks")}
    for name in chunks:
        os.rename(place / name, place / f"{name}.away")
    with pytest.raises(TierError, match="missing: file"):
        restored(path, url)
    assert newest.epoch == last


def test_a_lease_is_renewed(url: str, step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.01)
    epoch = step(1)
    with Lease(open_places(url), epoch, "run", 1):
        (name,) = lease_files(url)
        _make_older(Path(url) / name, 1000.0)
        deadline = time.monotonic() + 60
        while time.time() - (Path(url) / name).stat().st_mtime > 500:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    assert lease_files(url) == []


def test_leases_at_remote_places() -> None:
    pytest.importorskip("fsspec")
    place = open_place("memory://leases")
    newest = ManifestName(3, 3, "run", 0, 1)
    place.publish(str(newest), b"")
    writer = Leases(place, newest)
    with Lease(place, 2, "run", 1):
        assert writer.look(place.names(), str(newest)) == ({2}, [])
    assert writer.look(place.names(), str(newest)) == (set(), [])


def test_leases_where_the_place_tells_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """So long after the writer saw it first."""
    pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    def modified(self: Any, path: str) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(MemoryFileSystem, "modified", modified)
    place = open_place("memory://timeless")
    newest = ManifestName(3, 3, "run", 0, 1)
    place.publish(str(newest), b"")
    writer = Leases(place, newest)
    with Lease(place, 2, "run", 1):
        assert writer.look(place.names(), str(newest)) == ({2}, [])
        monkeypatch.setattr(leases, "LEASE_SECONDS", 0.0)
        held, over = writer.look(place.names(), str(newest))
        assert held == set()
        assert len(over) == 1


def test_leases_of_several_ranks_with_places_of_their_own(shm: Path) -> None:
    """At each place, as each rank lets its own epochs go."""
    url = str(shm / "{rank}")
    stores = []
    for rank in range(2):
        store = pmstore.open(shm / f"{rank}.pm", size="8MiB")
        store["a"] = np.arange(20000.0) + rank
        config = pmstore.TierConfig(
            url, rank=rank, world_size=2, run="job", keep=1, chunk_bytes=CHUNK
        )
        store.add_tier("t", config)
        store.commit()
        stores.append(store)

    def flush() -> int:
        for store in stores:
            store["a"][0] += 1
            store.commit()
        epochs = [store.flush("t", wait=True).epoch for store in stores]
        for store in stores:
            store.drain()
        return epochs[0]

    first = flush()
    with Lease(open_places(url), first, "job", 2):
        assert len(lease_files(str(shm / "0"))) == len(lease_files(str(shm / "1"))) == 1
        flush()
        last = flush()
        assert [one.epoch for one in pmstore.epochs(url) if one.problem is None] == [last, first]
    last = flush()
    flush()
    assert first not in [one.epoch for one in pmstore.epochs(url)]
    for store in stores:
        store.close()


def test_a_writer_of_many_threads_of_readers(filled: pmstore.Store, url: str, shm: Path) -> None:
    """Readers in the writer's own process, too."""
    filled.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK, keep=1))
    filled.flush("t", wait=True)
    errors: list[BaseException] = []

    def read(number: int) -> None:
        try:
            for turn in range(5):
                pmstore.restore(shm / f"{number}-{turn}.pm", url)
        except BaseException as error:
            errors.append(error)

    readers = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for one in readers:
        one.start()
    while any(one.is_alive() for one in readers):
        with filled.transaction():
            filled["a"][:] += 1
        filled.flush("t", wait=True)
    for one in readers:
        one.join()
    assert errors == []
