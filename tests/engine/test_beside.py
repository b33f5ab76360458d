"""Readers beside a writer: whole commits, whatever happens on either side."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore

VERSIONS = 100

WRITER = """
import os, random, sys, threading
import numpy as np, pmstore
path, domain, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
rng = random.Random(seed)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
with pmstore.open(path, domain=domain, size="1MiB") as store:
    n = store.get("n", 0)
    slots = store.slots("slots", 3000, "i8") if "slots" not in store else store.slots("slots")
    while True:
        n += 1
        with store.transaction():
            store["n"] = n
            if "a" not in store or rng.random() < 0.02:
                store["a"] = np.full(rng.randrange(1, 40_000), n)  # growth, and another block
            store["a"][:] = n
            store[f"group/b{n % 7}"] = np.full(50, n)
            if n % 7 == 3:
                del store[f"group/b{n % 7}"]
            numbers = store.list("list")
            numbers.append(n)
            if len(numbers) > 40:
                del numbers[:30]
            slots.next[:] = n
            slots.flip()
        if rng.random() < 0.1:  # never seen
            store["a"][:] = -1
            store["n"] = -1
            slots.next[:] = -1
            store.rollback()
        if n == 1:
            print("ready", flush=True)
"""


def check(store: pmstore.Store) -> int:
    """What the writer commits belongs together, in one commit."""
    n = store["n"]
    a = store["a"]
    assert (a == n).all(), (n, a.min(), a.max())
    assert (store.slots("slots").current == n).all()
    assert store.list("list")[-1] == n
    for i in range(7):
        last = n - (n - i) % 7
        if last > 0 and last % 7 != 3:
            assert (store[f"group/b{i}"] == last).all()
    assert (a == n).all()  # and stays as it is
    return int(n)


class Writer:
    def __init__(self, path: Path, domain: str, seed: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), domain, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None

    def ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def writer(shm: Path, domain: str) -> Iterator[Writer]:
    made = Writer(shm / "run.pm", domain, 1)
    made.ready()
    yield made
    made.kill()


def test_each_version_is_whole(shm: Path, writer: Writer) -> None:
    seen: list[int] = []
    with pmstore.open(shm / "run.pm", "r", lock_timeout=60) as store:
        for _ in store.follow(timeout=60):
            with suppress(pmstore.SnapshotLostError):
                seen.append(check(store))
            if len(seen) == VERSIONS:
                break
    assert len(set(seen)) == VERSIONS
    assert seen == sorted(seen)


def test_the_writer_is_killed_again_and_again(shm: Path, domain: str) -> None:
    """Readers that outlive their writers, and writers that begin beside readers."""
    path = shm / "run.pm"
    seen: list[int] = []
    store = None
    for seed in range(4):
        process = Writer(path, domain, seed)
        if seed == 0:
            process.ready()
        if store is None:
            store = pmstore.open(path, "r", lock_timeout=60)
        for _ in range(10):
            with suppress(pmstore.SnapshotLostError):
                seen.append(check(store))
            store.refresh()
            time.sleep(0.01)
        process.kill()
        store.refresh()
        seen.append(check(store))
    assert store is not None
    store.close()
    assert seen == sorted(seen)


READER = """
import sys, pmstore
sys.path.insert(0, sys.argv[2])
from test_beside import check
with pmstore.open(sys.argv[1], "r", lock_timeout=60) as store:
    print("ready", flush=True)
    while True:
        try:
            check(store)
        except pmstore.SnapshotLostError:
            pass
        store.refresh()
"""


def test_readers_that_are_killed_or_stopped(shm: Path, writer: Writer) -> None:
    """The writer goes on, and so do other readers."""
    path = shm / "run.pm"

    def reader() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", READER, str(path), str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    stopped = reader()
    stopped.send_signal(signal.SIGSTOP)
    killed = reader()
    with pmstore.open(path, "r", lock_timeout=60) as store:
        before = store.epoch
        killed.kill()
        killed.communicate()
        for _, epoch in zip(range(8), store.follow(timeout=60), strict=False):
            assert epoch > before
            before = epoch
    assert stopped.poll() is None
    stopped.kill()
    stopped.communicate()


# ---- what is seen ----


def test_nothing_uncommitted_and_nothing_later(path: Path, domain: Any) -> None:
    with pmstore.open(path, "w", domain=domain) as store:
        a = store.zeros("a", 100_000)
        store["x"] = 1
        store.commit()
        with pmstore.open(path, "r") as reader:
            assert reader.mode == "r"
            a[:] = 2
            store["x"] = 2
            assert not reader.refresh()
            first = reader["a"]
            assert reader["x"] == 1
            assert not first.any()
            store.commit()
            assert reader["x"] == 1
            assert reader["a"] is first
            assert not first.any()
            assert reader.refresh()
            assert not reader.refresh()
            assert reader["x"] == 2
            assert (reader["a"] == 2).all()
            assert not first.any()
            assert not first.flags.writeable
            with pytest.raises(pmstore.ReadOnlyStoreError):
                reader["x"] = 3
        assert not first.any()


def test_readers_of_a_store_at_rest_and_of_one_that_is_opened(path: Path, domain: Any) -> None:
    with pmstore.open(path, "w", domain=domain) as store:
        store["a"] = np.ones(5000)
        store["b"] = np.ones(5000)
    with pmstore.open(path, "r") as reader:
        a = reader["a"]
        with pmstore.open(path) as store:
            store["a"][:] = 2
            store["b"][:] = 2
            store.commit()
            with pytest.raises(pmstore.SnapshotLostError, match="refresh"):
                reader["b"]
            assert (a == 1).all()
            assert reader.refresh()
            assert (reader["b"] == 2).all()
            store["b"][:] = 3
        # the writer is gone
        assert (reader["b"] == 2).all()
        with pytest.raises(pmstore.SnapshotLostError):
            reader["a"]
        assert reader.refresh()
        assert (reader["b"] == 3).all()


def test_it_is_kept_on_demand(path: Path) -> None:
    """The writer rewrites more than it keeps for a reader, unless it is asked to."""
    items = 5 << 20  # together 80 MiB: more than is kept
    with pmstore.open(path, "w", size="256MiB", domain="process") as store:
        a, b = store.zeros("a", items), store.zeros("b", items)
        store.commit()
        with pmstore.open(path, "r") as reader:
            a[:] = 1
            b[:] = 1
            store.commit()
            with pytest.raises(pmstore.SnapshotLostError, match="keep=True"):
                reader["a"]
            reader.refresh(keep=True)
            a[:] = 2
            b[:] = 2
            store.commit()
            assert (reader["a"] == 1).all()
            b[:] = 3
            store.commit()
            assert (reader["b"] == 1).all()


def test_it_follows(path: Path, domain: Any) -> None:
    with pmstore.open(path, "w", domain=domain) as store:
        store["x"] = 0
        store.commit()
        with pmstore.open(path, "r") as reader:
            assert list(reader.follow(timeout=0.05)) == []

            def write() -> None:
                for x in range(1, 30):
                    store["x"] = x
                    store.commit()

            thread = threading.Thread(target=write)
            thread.start()
            for epoch in reader.follow(timeout=60):
                assert reader.epoch == epoch
                if reader["x"] == 29:
                    break
            thread.join()


def test_it_follows_in_an_event_loop(path: Path, domain: Any) -> None:
    """Other tasks go on meanwhile; the writer is one of them."""

    async def write() -> None:
        for x in range(1, 30):
            store["x"] = x
            store.commit()
            await asyncio.sleep(0.001)

    async def follow() -> list[int]:
        assert [epoch async for epoch in reader.follow(timeout=0.05)] == []
        writer = asyncio.create_task(write())
        seen = []
        async for epoch in reader.follow(timeout=60):
            assert reader.epoch == epoch
            seen.append(reader["x"])
            if seen[-1] == 29:
                break
        await writer
        store["x"] = 30
        store.commit()
        assert await asyncio.to_thread(reader.refresh)
        return [*seen, reader["x"]]

    with pmstore.open(path, "w", domain=domain) as store:
        store["x"] = 0
        store.commit()
        with pmstore.open(path, "r") as reader:
            seen = asyncio.run(asyncio.wait_for(follow(), 60))
    assert seen == sorted(set(seen))
    assert seen[-1] == 30


def test_following_is_closed(path: Path) -> None:
    """As a generator is; by another thread, it ends a wait. The reader stays open."""
    with pmstore.open(path, "w", domain="process") as store:
        store["x"] = 1
        store.commit()
        with pmstore.open(path, "r") as reader:
            with contextlib.closing(reader.follow()) as following:
                store["x"] = 2
                store.commit()
                assert next(following) == reader.epoch
                thread = threading.Timer(0.05, following.close)
                thread.start()
                assert list(following) == []
                thread.join()
            store["x"] = 3
            store.commit()
            assert list(following) == []

            async def follow() -> list[int]:
                async with contextlib.aclosing(reader.follow()) as other:
                    seen = [await anext(other)]
                return [*seen, *[epoch async for epoch in other]]

            assert asyncio.run(asyncio.wait_for(follow(), 60)) == [reader.epoch]
            assert reader["x"] == 3


LARGE_READER = """
import sys, pmstore
with pmstore.open(sys.argv[1], "r") as reader:
    print(reader["small"])
    try:
        reader["large"]
    except OSError as error:
        print(error)
with pmstore.open(sys.argv[1], "r", lock=True) as reader:
    print(reader["large"][-1])
"""


@pytest.mark.parametrize("of", ["machine", "container"])
def test_a_copy_that_memory_does_not_hold_is_refused(tmp_path: Path, of: str) -> None:
    """Before it is begun: the system would end the process in the middle."""
    path, told = tmp_path / "run.pm", tmp_path / "told"
    with pmstore.open(path, size="600MiB") as store:
        store.zeros("large", 260 << 20, "u1")[-1] = 7
        store["small"] = 1
    told.mkdir()
    place = "/proc/meminfo" if of == "machine" else "/sys/fs/cgroup"
    if of == "machine":
        told = told / "meminfo"
        told.write_text("MemTotal: 4096 kB\nMemAvailable: 2048 kB\n")
    else:
        (told / "memory.max").write_text(f"{10 << 20}\n")
        (told / "memory.current").write_text(f"{9 << 20}\n")
        (told / "memory.stat").write_text(f"anon 4096\ninactive_file {1 << 20}\nslab 1\n")
    inside = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    bind = [*inside, f'mount --bind "$0" {place} && exec "$@"', str(told)]
    with suppress(FileNotFoundError):
        if subprocess.run([*bind, "true"], check=False, capture_output=True).returncode == 0:
            said = subprocess.run(
                [*bind, sys.executable, "-c", LARGE_READER, str(path)],
                check=True,
                capture_output=True,
                text=True,
                timeout=120,
            )
            small, error, last = said.stdout.splitlines()
            assert (small, last) == ("1", "7")
            assert "no memory for it: with lock=True nothing is copied" in error
            assert "(272,629,760 bytes needed, 2,097,152 to be had)" in error
            return
    pytest.skip("no mount namespaces here")


def test_another_store_takes_the_place(path: Path) -> None:
    """A reader shows its own store, or says that it is not there."""
    with pmstore.open(path, "w") as store:
        store["x"] = 1
        store["a"] = np.arange(5)
    with pmstore.open(path, "r") as reader:
        a = reader["a"]
        with pmstore.open(path, "w") as store:
            store["y"] = 1
            store.commit()
            assert reader["x"] == 1
            for keep in (False, True):
                with pytest.raises(pmstore.SnapshotLostError, match="another store lies there"):
                    reader.refresh(keep)
            with pytest.raises(pmstore.SnapshotLostError, match="another store lies there"):
                next(reader.follow(timeout=60))
            assert sorted(reader) == ["a", "x"]
            assert a.tolist() == list(range(5))
        path.unlink()
        with pytest.raises(FileNotFoundError):
            reader.refresh()
        assert reader["x"] == 1


def test_only_readers_refresh(path: Path) -> None:
    with pmstore.open(path, "w") as store:
        store["x"] = 1
        with pytest.raises(pmstore.TransactionError, match="mode='r'"):
            store.refresh()
    with pmstore.open(path, "r", lock=True) as reader:
        with pytest.raises(pmstore.TransactionError, match="lock=True"):
            reader.refresh()
        with pytest.raises(pmstore.StoreLockedError):
            pmstore.open(path)
    with pytest.raises(ValueError, match="lock=True"):
        pmstore.open(path, lock=True)


def test_a_fork_child_of_a_reader(path: Path) -> None:
    with pmstore.open(path, "w") as store:
        store["a"] = np.arange(1000)
        store.commit()
        with pmstore.open(path, "r") as reader:
            a = reader["a"]
            child = os.fork()
            if child == 0:
                status = 1
                with suppress(BaseException):
                    try:
                        reader["a"]
                    except pmstore.ForkedStoreError:
                        status = 0 if a.sum() == 499_500 else 2
                os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            store["a"][:] = 0
            store.commit()
            assert reader.refresh()
            assert reader["a"].sum() == 0


def test_a_writer_whose_children_live_on(path: Path) -> None:
    """They keep neither the lock nor the readers' door."""
    code = f"""
import os, time, pmstore
store = pmstore.open({str(path)!r}, "w")
store["x"] = 1
store.commit()
if os.fork() == 0:
    time.sleep(600)
    os._exit(0)
print("ready", flush=True)
os.kill(os.getpid(), 9)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        process.wait()
        with pmstore.open(path, "r", lock_timeout=60) as reader:
            assert reader["x"] == 1
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_writer_that_is_stopped(path: Path) -> None:
    code = f"""
import os, pmstore
store = pmstore.open({str(path)!r}, "w")
store["x"] = 1
store.commit()
print("ready", flush=True)
os.kill(os.getpid(), 19)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        os.waitpid(process.pid, os.WUNTRACED)
        with pytest.raises(pmstore.StoreLockedError, match="does not answer readers now"):
            pmstore.open(path, "r")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(os.getuid() != 0, reason="takes root, to become another user")
@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_another_users_reader(path: Path, mode: int) -> None:
    """Who may read the file may read beside its writer, and nobody else."""
    path.parent.chmod(0o755)
    with pmstore.open(path, "w") as store:
        store["x"] = 1
        store.commit()
        path.chmod(mode)
        child = os.fork()
        if child == 0:
            status = 9
            with suppress(BaseException):
                os.setuid(65534)
                try:
                    with pmstore.open(path, "r") as reader:
                        status = reader["x"]
                except PermissionError:
                    status = 2
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (1 if mode == 0o644 else 2)


def test_a_dump_beside_a_writer(path: Path, tmp_path: Path) -> None:
    with pmstore.open(path, "w") as store:
        store["a"] = np.arange(10_000)
        store.list("l").append(np.arange(7))
        store.commit()
        store["a"][:] = 0
        with pmstore.open(path, "r") as reader:
            with open(tmp_path / "dump", "wb") as file:
                pmstore.portable.dump(reader, file)
    with open(tmp_path / "dump", "rb") as file:
        pmstore.portable.load(file, tmp_path / "c.pm")
    with pmstore.open(tmp_path / "c.pm") as copy:
        assert (copy["a"] == np.arange(10_000)).all()
        assert copy.list("l")[0].tolist() == list(range(7))


def test_compaction_under_a_reader(path: Path, domain: Any) -> None:
    """It puts another store in the file's place: the reader keeps what it shows."""
    with pmstore.open(path, "w", domain=domain) as store:
        store["a"] = np.ones(50_000)
        store["gone"] = np.ones(500_000)
        store.commit()
        del store["gone"]
    with pmstore.open(path, "r") as reader:
        a = reader["a"]
        pmstore.compact(path)
        with pytest.raises(pmstore.SnapshotLostError, match="another store lies there"):
            reader.refresh()
        with pmstore.open(path) as store:
            store["a"][:] = 2
        assert (a == 1).all()
    with pmstore.open(path, "r") as reader:
        assert (reader["a"] == 2).all()
