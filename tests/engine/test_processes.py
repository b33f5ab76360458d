"""Threads, forks and other processes that use one store."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore


def holder(path: Path, mode: str = "r+", lock: bool = False) -> subprocess.Popen[str]:
    """A process that has the store open until its standard input ends."""
    code = (
        f"import pmstore, sys\nwith pmstore.open({str(path)!r}, {mode!r}, lock={lock}) as s:\n"
        "    print(1, flush=True)\n    sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    return process


@pytest.fixture
def made(path: Path) -> Path:
    with pmstore.open(path, size="1MiB") as store:
        store["a"] = np.arange(100)
    return path


def test_the_second_writer_learns_who_is_the_first(made: Path) -> None:
    process = holder(made)
    for mode in ("r+", "a", "w", "r"):
        with pytest.raises(pmstore.StoreLockedError, match=f"process {process.pid}") as caught:
            pmstore.open(made, mode, lock=mode == "r")  # type: ignore[arg-type]
        assert caught.value.pid == process.pid
        assert "lock_timeout" in str(caught.value)
    begun = time.monotonic()
    with pytest.raises(pmstore.StoreLockedError):
        pmstore.open(made, lock_timeout=0.2)
    assert time.monotonic() - begun >= 0.2
    process.communicate()


def test_the_second_writer_waits(made: Path) -> None:
    process = holder(made)
    threading.Timer(0.3, process.communicate).start()
    with pmstore.open(made, lock_timeout=60) as store:
        assert store["a"].sum() == 4950


def test_a_killed_writer_holds_nothing(made: Path) -> None:
    process = holder(made)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with pmstore.open(made) as store:
        assert "killed" in str(store.recovery)


def test_readers_with_the_lock_exclude_writers(made: Path) -> None:
    process = holder(made, "r", lock=True)
    for lock in (False, True):
        with pmstore.open(made, "r", lock=lock) as store:
            assert store["a"].sum() == 4950
    with pytest.raises(pmstore.StoreLockedError, match=f"process {process.pid}"):
        pmstore.open(made)
    process.communicate()


def test_readers_without_it_exclude_nobody(made: Path) -> None:
    process = holder(made, "r")
    with pmstore.open(made, "r") as reader, pmstore.open(made) as store:
        store["b"] = 1
        store.commit()
        assert reader.refresh()
        assert reader["b"] == 1
    process.communicate()


def test_reading_a_crashed_file_changes_no_byte(made: Path, domain: Any) -> None:
    code = f"""
import os, numpy as np, pmstore
s = pmstore.open({str(made)!r}, domain={domain!r})
s["a"][:] = 1
s.commit()
s["a"][:] = 2
s["b"] = 1
s.list("l").extend(range(1000))
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    before, times = made.read_bytes(), made.stat().st_mtime_ns
    with pmstore.open(made, "r") as store:
        assert store["a"].tolist() == [1] * 100
        assert list(store) == ["a"]
        assert not store["a"].flags.writeable
        assert store.check().problems == ()
    assert made.read_bytes() == before
    assert made.stat().st_mtime_ns == times


def test_spawned_children_open_it_themselves(made: Path) -> None:
    code = f"""
import multiprocessing, pmstore
def work(path, queue):
    with pmstore.open(path, "r") as store:
        queue.put(int(store["a"].sum()))
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with pmstore.open({str(made)!r}) as store:
        a = store["a"]
        a += 1
    queue = context.Queue()
    process = context.Process(target=work, args=({str(made)!r}, queue))
    process.start()
    print(queue.get(timeout=250))
    process.join()
"""
    script = made.parent / "spawning.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == "5050", done.stderr


def test_a_store_cannot_be_pickled_but_its_arrays_can(store: pmstore.Store) -> None:
    import pickle

    a = store.full("a", 10, 3.0)
    assert pickle.loads(pickle.dumps(a)).tolist() == [3.0] * 10
    for thing in (store, store.group("g"), store.list("l"), store.slots("s", 3)):
        with pytest.raises(TypeError, match=r"cannot be pickled: give the other process the path"):
            pickle.dumps(thing)
    with pytest.raises(TypeError):
        pickle.dumps(store.transaction())


def test_data_loader_workers_read_the_parents_arrays(path: Path) -> None:
    pytest.importorskip("torch")
    code = f"""
import numpy as np, torch, pmstore
class Data(torch.utils.data.Dataset):
    def __init__(self, x, y): self.x, self.y = x, y
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i], torch.from_numpy(self.y[i])
with pmstore.open({str(path)!r}) as store:
    store["x"] = torch.arange(400.0).reshape(100, 4)
    store["y"] = np.arange(200).reshape(100, 2)
    w = store.tensor("w", 4)
    store.commit()
    data = Data(store["x"], store["y"])
    loader = torch.utils.data.DataLoader(
        data, batch_size=10, num_workers=2, multiprocessing_context="fork"
    )
    for epoch in range(2):
        seen = 0
        for x, y in loader:
            with store.transaction():  # while the workers live
                w += x.sum(0)
            assert (x[:, 0] * 2 == y[:, 0] * 4).all()
            seen += len(x)
        assert seen == 100
    assert store.check().problems == ()
    print(w.tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert eval(done.stdout) == (2 * np.arange(400.0).reshape(100, 4).sum(0)).tolist()


def test_a_data_loader_worker_that_writes_says_why_it_dies(path: Path) -> None:
    """Although torch puts a handler of its own over the engine's there."""
    pytest.importorskip("torch")
    code = f"""
import torch, pmstore
class Data(torch.utils.data.Dataset):
    def __len__(self): return 1
    def __getitem__(self, i):
        x[i] = 1
with pmstore.open({str(path)!r}) as store:
    x = store.zeros("x", 100)
    store.commit()
    list(torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="fork"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    assert "write to an array of a store that the parent process opened" in done.stderr


def test_threads_write_lists_and_groups(store: pmstore.Store) -> None:
    """Inside one transaction, and in blocks that take turns."""
    errors: list[BaseException] = []
    items, names = store.list("items"), store.group("names")

    def in_turn(write: Callable[[], None]) -> None:
        try:
            write()
        except pmstore.TransactionError:  # another thread is in a block: as the message says
            with store.transaction():
                write()

    def work(number: int) -> None:
        try:
            for i in range(150):
                if number % 2:
                    in_turn(lambda number=number, i=i: items.append((number, i)))
                    in_turn(
                        lambda number=number, i=i: names.update({f"{number}/{i}": np.full(10, i)})
                    )
                else:
                    with store.transaction():
                        items.append((number, i))
                        names[f"{number}/{i}"] = np.full(10, i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    store.commit()
    assert sorted(items) == [(number, i) for number in range(6) for i in range(150)]
    for number in range(6):
        assert [item[1] for item in items if item[0] == number] == list(range(150))
        assert all(names[f"{number}/{i}"][0] == i for i in range(150))
    assert store.check().problems == ()


def test_free_threaded_builds_get_their_lock_back() -> None:
    """There the extension modules ask for it: the interpreter says so with a RuntimeWarning when it
    imports them."""
    import sysconfig

    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("not a free-threaded build")
    done = subprocess.run(
        [sys.executable, "-c", "import sys, pmstore; assert sys._is_gil_enabled()"], check=False
    )
    assert done.returncode == 0


@pytest.mark.parametrize("how", ["symlink", "hard link"])
def test_links_lead_to_one_store(made: Path, how: str) -> None:
    link = made.parent / "link.pm"
    if how == "symlink":
        link.symlink_to(made)
    else:
        os.link(made, link)
    with pmstore.open(link) as store:
        with pytest.raises(pmstore.StoreLockedError):
            pmstore.open(made)
        store["a"] += 1
    with pmstore.open(made, "r") as store:
        assert store["a"].sum() == 5050
    if how == "symlink":
        assert link.is_symlink()


def test_dangling_and_circular_links(shm: Path) -> None:
    dangling, circle = shm / "dangling.pm", shm / "circle.pm"
    dangling.symlink_to(shm / "nowhere.pm")
    circle.symlink_to(circle)
    for link in (dangling, circle):
        with pytest.raises(OSError):
            pmstore.open(link)
        assert link.is_symlink()
    assert not (shm / "nowhere.pm").exists()


@pytest.mark.parametrize("umask", [0, 0o077, 0o777])
def test_a_new_store_is_its_owners_alone(path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        pmstore.open(path, size="1MiB").close()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


def test_special_files(shm: Path) -> None:
    fifo = shm / "fifo"
    os.mkfifo(fifo)
    for special in (str(fifo), "/dev/null", "/dev/zero"):
        with pytest.raises((ValueError, OSError)):
            pmstore.open(special)


def test_a_file_swapped_while_others_open_it(shm: Path) -> None:
    """Every open gets one of the two stores, whole, and the one that the path names while its lock
    is held."""
    path = shm / "store.pm"
    for name in ("one", "two"):
        with pmstore.open(shm / name, size="1MiB") as store:
            store["name"] = name
    code = f"""
import os, shutil
while True:
    for name in ("one", "two"):
        os.link({str(shm)!r} + "/" + name, {str(shm)!r} + "/next")
        os.replace({str(shm)!r} + "/next", {str(path)!r})
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        while not path.exists():
            time.sleep(0.01)
        for _ in range(60):
            # swapped a hundred times in one open
            with contextlib.suppress(pmstore.TransactionError):
                with pmstore.open(path, "r", lock_timeout=5) as store:
                    assert store["name"] in ("one", "two")
                    assert store.check().problems == ()
    finally:
        process.kill()
        process.wait()


def test_a_clean_close_frees_the_lock_though_a_forked_child_has_the_file_still(path: Path) -> None:
    store = pmstore.open(path)
    store["x"] = 1
    store.commit()
    # What a child forked just now has: descriptors of the same open file.
    fds = [
        int(fd)
        for fd in os.listdir("/proc/self/fd")
        if os.path.realpath(f"/proc/self/fd/{fd}") == str(path.resolve())
    ]
    copies = [os.dup(fd) for fd in fds]
    try:
        store.close()
        assert copies
        with pmstore.open(path) as again:
            assert again["x"] == 1
    finally:
        for fd in copies:
            os.close(fd)
