"""Tiers beyond local directories: memory, S3 (moto's server), and backends that hang or fail."""

from __future__ import annotations

import errno
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tier_helpers import CHUNK, restored

import pmstore
from pmstore.errors import TierError
from pmstore.tiers._flush.flusher import Flusher
from pmstore.tiers.tiers import Tiers

fsspec = pytest.importorskip("fsspec")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402


class Faulty(MemoryFileSystem):
    """A network file system that can be told to hang or to fail, at calls of some kinds: "write"
    and "read" (of chunks), "publish", "list", "manifest"."""

    protocol = "faulty"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    cachable = False
    where = {"write"}
    hang = threading.Event()  # set: calls go through
    hung = threading.Event()  # one of them waits
    error: OSError | None = None
    delete = threading.Event()  # set: deletions go through
    refuse = False

    @classmethod
    def call(cls, kind: str) -> None:
        if kind in cls.where:
            if not cls.hang.is_set():
                cls.hung.set()
            cls.hang.wait()
            if cls.error is not None:
                raise cls.error

    def rm_file(self, path: str) -> None:
        Faulty.delete.wait()
        if Faulty.refuse:
            raise PermissionError(13, "may not delete", path)
        super().rm_file(path)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("faulty://", "memory://"))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        Faulty.call("list")
        return super().ls(path, detail, **kwargs)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> Any:
        Faulty.call(
            "manifest"
            if path.endswith(".manifest")
            else "read"
            if path.endswith(".chunks")
            else "mark"
        )
        return super().cat_file(path, start, end, **kwargs)

    def pipe_file(self, path: str, value: Any, *arguments: Any, **kwargs: Any) -> Any:
        Faulty.call("publish" if path.endswith(".manifest") else "mark")
        return super().pipe_file(path, value, *arguments, **kwargs)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        file = super()._open(path, mode, **kwargs)
        if mode == "wb":
            write = file.write

            def slow(data: Any) -> int:
                Faulty.call("write")
                return int(write(bytes(data)))

            file.write = slow
        return file


@pytest.fixture
def faulty() -> Iterator[type[Faulty]]:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    Faulty.store.clear()
    Faulty.hang.set()
    Faulty.hung.clear()
    Faulty.delete.set()
    Faulty.where, Faulty.error, Faulty.refuse = {"write"}, None, False
    yield Faulty
    Faulty.hang.set()
    Faulty.delete.set()


def lifecycle(path: Path, url: str, options: dict[str, Any] | None) -> None:
    with pmstore.open(path, size="8MiB") as store:
        store["a"] = np.arange(131072.0)
        store.add_tier(
            "t", pmstore.TierConfig(url, keep=2, chunk_bytes=CHUNK, storage_options=options)
        )
        store.commit()
        for i in range(4):
            store["a"][i] = -i
            store.commit()
            handle = store.flush("t")
            store["a"][:] += 1
            handle.wait(60)
            store.rollback()
        want = store["a"].copy()
        assert handle.stats is not None
        assert not handle.stats.full
        assert "storage_options" not in store[".pmstore/tiers/t"]
    found = pmstore.epochs(url, storage_options=options)
    assert [one.epoch for one in found] == [handle.epoch, handle.epoch - 1]
    assert restored(path, url, storage_options=options)["a"].tolist() == want.tolist()


def test_memory(path: Path) -> None:
    lifecycle(path, "memory://tiers/run", None)


@pytest.mark.filterwarnings("default")  # of botocore and moto
def test_s3(path: Path, s3: dict[str, Any]) -> None:
    lifecycle(path, "s3://bucket/run", s3)
    fs = fsspec.filesystem("s3", **s3)
    files = sorted(
        (
            one
            for one in fs.ls("bucket/run", detail=True, refresh=True)
            if one["name"].endswith(".chunks")
        ),
        key=lambda one: one["name"],
    )
    data = bytearray(fs.cat_file(files[-1]["name"]))
    data[7] ^= 1
    fs.pipe_file(files[-1]["name"], bytes(data))
    report = restored(path, "s3://bucket/run", storage_options=s3)["report"]
    assert [why.split(":")[0] for _, why in report.skipped] == ["corrupt"]
    fs.rm_file(files[-1]["name"])
    report = restored(path, "s3://bucket/run", storage_options=s3)["report"]
    assert [why.split(":")[0] for _, why in report.skipped] == ["missing"]
    newest = max(
        one["name"]
        for one in fs.ls("bucket/run", detail=True, refresh=True)
        if one["name"].endswith(".manifest")
    )
    fs.pipe_file(newest, b"")
    report = restored(path, "s3://bucket/run", storage_options=s3)["report"]
    assert [why.split(":")[0] for _, why in report.skipped] == ["corrupt"]


def test_a_writer_that_was_replaced_stops(shm: Path) -> None:
    """Where there are no locks, the later of two writers of one run goes on."""
    with pmstore.open(shm / "0.pm") as store:
        store["x"] = 0
        store.add_tier("t", pmstore.TierConfig("memory://replaced", run="same"))
    shutil.copy(shm / "0.pm", shm / "1.pm")
    stores = [pmstore.open(shm / f"{i}.pm") for i in range(2)]
    stores[0].flush("t", wait=True)
    stores[1]["x"] = 5
    stores[1].commit()
    with pytest.warns(UserWarning, match="did not have it added here"):
        stores[1].flush("t", wait=True)
    stores[0]["x"] = 7
    stores[0].commit()
    with pytest.raises(TierError, match="taken over"):
        stores[0].flush("t", wait=True)
    for store in stores:
        store.close()
    assert [one.problem for one in pmstore.epochs("memory://replaced")] == [None] * len(
        pmstore.epochs("memory://replaced")
    )


DROPPED = ConnectionResetError(104, "the network dropped")


@pytest.mark.parametrize("where", ["write", "publish", "list"])
def test_a_backend_that_hangs(path: Path, faulty: type[Faulty], where: str) -> None:
    with pmstore.open(path, size="8MiB") as store:
        store["a"] = np.ones(131072)
        store.add_tier("t", pmstore.TierConfig("faulty://run", chunk_bytes=CHUNK))
        store.commit()
        store.flush("t", wait=True)
        store.drain()
        store.add_tier(
            "t", pmstore.TierConfig("faulty://run", chunk_bytes=CHUNK, stall_seconds=0.3)
        )
        faulty.where = {where}
        faulty.hang.clear()
        store["a"] += 1
        store.commit()
        handle = store.flush("t")
        store["a"] += 1
        store.commit()  # training goes on
        with pytest.raises(TierError, match="no progress"):
            handle.wait(60)
        store["a"] += 1
        store.commit()
        faulty.hang.set()
        # it waits for what hung; on a busy machine it may be told as stalled itself
        store.flush("t").wait_over(60)
        store["a"] += 1
        store.commit()
        store.add_tier("t", pmstore.TierConfig("faulty://run", chunk_bytes=CHUNK))
        assert store.flush("t", wait=True).epoch == store.epoch
    assert restored(path, "faulty://run")["a"][0] == 5
    assert {one.problem for one in pmstore.epochs("faulty://run")} == {None}


@pytest.mark.parametrize("where", ["write", "publish", "list"])
def test_a_network_that_drops(path: Path, faulty: type[Faulty], where: str) -> None:
    with pmstore.open(path, size="8MiB") as store:
        store["a"] = np.ones(131072)
        store.add_tier("t", pmstore.TierConfig("faulty://run", chunk_bytes=CHUNK))
        store.commit()
        store.flush("t", wait=True)
        store.drain()  # else what lets old epochs go meets it too, and warns
        faulty.where, faulty.error = {where}, DROPPED
        store["a"] += 1
        store.commit()
        with pytest.raises(ConnectionResetError):
            store.flush("t", wait=True)
        faulty.error = None
        assert restored(path, "faulty://run")["a"][0] == 1
        store.flush("t", wait=True)
        assert restored(path, "faulty://run")["a"][0] == 2


@pytest.fixture
def remote(path: Path, faulty: type[Faulty]) -> str:
    """A tier with two epochs: 1.0 and 2.0 everywhere."""
    with pmstore.open(path, size="8MiB") as store:
        store["a"] = np.zeros(131072)
        store.add_tier("t", pmstore.TierConfig("faulty://run", chunk_bytes=CHUNK))
        for _ in range(2):
            store["a"] += 1
            store.commit()
            store.flush("t", wait=True)
    return "faulty://run"


@pytest.mark.parametrize("where", ["list", "manifest", "read"])
@pytest.mark.parametrize(
    ("error", "told"),
    # the latter is s3fs's word for anything
    [(DROPPED, ConnectionResetError), (OSError(errno.EIO, "503"), TierError)],
)
def test_a_restore_while_the_network_drops(
    path: Path, remote: str, faulty: type[Faulty], where: str, error: OSError, told: type[OSError]
) -> None:
    """An error, not an older epoch: nothing is wrong with the newest one."""
    faulty.where, faulty.error = {where}, error
    with pytest.raises(told, match=str(error.strerror)):
        pmstore.restore(path.with_name("b.pm"), remote)
    assert not list(path.parent.glob("*b.pm*"))
    faulty.error = None
    found = restored(path, remote)
    assert (found["a"][0], found["report"].skipped) == (2, ())


@pytest.mark.parametrize("where", ["list", "manifest", "read"])
def test_a_restore_from_a_place_that_hangs(
    path: Path, remote: str, faulty: type[Faulty], where: str
) -> None:
    faulty.where = {where}
    faulty.hang.clear()
    with pytest.raises(TierError, match=r"no answer for 0\.2 seconds"):
        pmstore.restore(path.with_name("b.pm"), remote, stall_seconds=0.2)
    if where != "read":
        with pytest.raises(TierError, match="no answer"):
            pmstore.epochs(remote, stall_seconds=0.2)
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    faulty.hang.set()
    assert restored(path, remote)["a"][0] == 2
    with pytest.raises(ValueError, match="stall_seconds"):
        pmstore.restore(path.with_name("b.pm"), remote, stall_seconds=0)


def test_an_interrupt_ends_a_restore_that_waits_for_an_answer(
    path: Path, remote: str, faulty: type[Faulty]
) -> None:
    main = threading.get_ident()

    def interrupt() -> None:
        assert faulty.hung.wait(60)
        signal.pthread_kill(main, signal.SIGINT)

    faulty.where = {"read"}
    faulty.hang.clear()
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        pmstore.restore(path.with_name("b.pm"), remote, stall_seconds=None)
    interrupter.join()
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_what_a_killed_writer_left_is_deleted(path: Path, faulty: type[Faulty]) -> None:
    """By the next one of its run, when it begins; never what is another run's."""
    with pmstore.open(path, size="8MiB") as store:
        store["a"] = np.ones(1000)
        store.add_tier("t", pmstore.TierConfig("faulty://run", chunk_bytes=CHUNK, run="mine"))
        store.commit()
        store.flush("t", wait=True)
        fs = fsspec.filesystem("faulty")
        left, others = (
            "/run/mine.0-1.deadbeef.000003.chunks",
            "/run/other.0-1.deadbeef.000003.chunks",
        )
        for name in (left, others):
            fs.pipe_file(name, b"half")
    with pmstore.open(path) as store:
        faulty.where = {"write"}
        faulty.hang.clear()
        store.flush("t")
        assert faulty.hung.wait(60)
        there = (fs.exists(left), fs.exists(others))
        faulty.hang.set()
        assert there == (False, True)
    assert restored(path, "faulty://run")["a"][0] == 1


@pytest.mark.parametrize("where", ["faulty://run", "{shm}/tier"])
def test_the_rate_is_limited(path: Path, shm: Path, faulty: type[Faulty], where: str) -> None:
    """At a byte a second the first chunk, of each of the threads, takes hours."""
    url = where.format(shm=shm)
    with pmstore.open(path, size="8MiB") as store:
        store["a"] = np.ones(131072)
        store.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK, max_rate=1))
        store.commit()
        handle = store.flush("t")
        while not handle.written_bytes:
            time.sleep(0.01)
        time.sleep(0.2)  # as long as all of it takes without a limit, many times over
        assert handle.written_bytes <= 4 * CHUNK < handle.total_bytes
        handle.cancel()
        with pytest.raises(TierError, match="cancelled"):
            handle.wait(60)
    assert pmstore.epochs(url) == []


def test_old_epochs_that_cannot_be_deleted(path: Path, faulty: type[Faulty]) -> None:
    """The new one counts all the same; it is told once, and tried again."""
    with pmstore.open(path, size="8MiB") as store:
        store["a"] = np.ones(131072)
        config = pmstore.TierConfig("faulty://run", chunk_bytes=CHUNK, keep=1)
        store.add_tier("t", config)
        store.commit()
        store.flush("t", wait=True)
        store.drain()
        faulty.refuse = True
        store["a"] += 1
        store.commit()
        store.flush("t", wait=True)
        store.drain()
        faulty.refuse = False
        assert len(pmstore.epochs("faulty://run")) == 2
        store["a"] += 1
        store.commit()
        with pytest.warns(UserWarning, match="may not delete"):
            store.flush("t", wait=True)
        store.drain()
        assert len(pmstore.epochs("faulty://run")) == 1
        store.add_tier("t", replace(config, stall_seconds=3))
        faulty.delete.clear()  # and then it hangs
        store["a"] += 1
        store.commit()
        handle = store.flush("t")
        assert handle.wait(60).stats is not None
        store.drain(60)
        faulty.delete.set()
        store["a"] += 1
        store.commit()
        store.flush("t", wait=True)
    assert [one.problem for one in pmstore.epochs("faulty://run")] == [None]
    assert restored(path, "faulty://run")["a"][0] == 5


@pytest.mark.parametrize("every", [None, 1])
def test_no_flush_is_begun_for_a_tier_that_still_deletes(
    path: Path, faulty: type[Faulty], every: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would pin its commit, and keep later ones waiting, for as long as the deletions take."""
    looked = threading.Semaphore(0)
    flusher_of = Tiers.flusher

    def flusher(tiers: Tiers, name: str) -> Flusher:
        if threading.current_thread().name == "pmstore tiers":
            looked.release()
        return flusher_of(tiers, name)

    monkeypatch.setattr(Tiers, "flusher", flusher)
    with pmstore.open(path, size="8MiB") as store:
        store["a"] = np.ones(131072)
        store.add_tier("t", pmstore.TierConfig("faulty://run", chunk_bytes=CHUNK, keep=1))
        store.commit()
        store.flush("t", wait=True)
        store.drain()
        store["a"] += 1
        store.commit()
        faulty.delete.clear()
        try:
            handle = store.flush("t", wait=True)
            if every:
                store._open_tiers()._configs["t"] = replace(
                    store._open_tiers()._configs["t"], every=every
                )
                store._open_tiers()._watch()
            store["a"] += 1
            store.commit()
            assert handle.done
            assert not handle.over
            if every:
                for _ in range(5):
                    assert looked.acquire(timeout=60)
            else:
                assert store.flush_if_idle("t") is None
            assert store._open_tiers().flusher("t").last is handle
        finally:
            faulty.delete.set()
        store.drain(60)
        if not every:
            assert store.flush_if_idle("t") is not None


def test_a_missing_library_is_named(store: pmstore.Store) -> None:
    with pytest.raises(TierError, match=r"gcsfs|install"):
        store.add_tier("t", "gs://bucket/run")
