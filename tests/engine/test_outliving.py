"""What a program keeps of a store that it has closed, and what it costs: native/commit/outlive.c.
The stories of single pages are in native/tests/test_outlive.c."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pmstore

BYTES = 24 << 20


def private_bytes() -> int:
    """Memory of this process alone."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("smaps_rollup has no Anonymous")


def becomes(so: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not so():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_a_notebook_that_opens_again_and_again_keeps_one_copy(shm: Path, domain: str) -> None:
    """A cell that is run ten times: the variables of the last time live until it is over."""
    before = private_bytes()
    stores = []  # Out[n] of a notebook
    for n in range(10):
        store = pmstore.open(shm / "run.pm", domain=domain)  # type: ignore[arg-type]
        w = store["w"] if "w" in store else store.zeros("w", BYTES // 4, "float32")
        assert w[0] == n
        w += 1
        store.commit()
        store.close()
        stores.append(store)
        assert w[-1] == n + 1
    assert becomes(lambda: private_bytes() < before + 2 * BYTES)
    del w, store
    assert becomes(lambda: private_bytes() < before + BYTES / 4)  # though the stores are there
    assert all(store.closed for store in stores)


def test_a_close_inside_an_exception(shm: Path, domain: str) -> None:
    store = pmstore.open(shm / "run.pm", domain=domain)  # type: ignore[arg-type]
    w = store.zeros("w", BYTES // 4, "float32")
    store.commit()
    try:
        w += 1
        raise KeyError("a program's own")
    except KeyError:
        store.close()
    w += 5
    with pmstore.open(shm / "run.pm") as again:
        assert again["w"].sum() == 0
        again["w"][:] = 7
    assert (w == 5).all()


def test_a_held_version_is_there_after_it(shm: Path, domain: str) -> None:
    store = pmstore.open(shm / "run.pm", domain=domain, hold=True)  # type: ignore[arg-type]
    w = store.zeros("w", BYTES // 4, "float32")
    store.commit()
    for n in (1, 2):
        w[:] = n
        store.commit()
    store.close()
    w[:] = 9
    with pmstore.open(shm / "run.pm", hold=True) as again:
        assert (again["w"] == 2).all()
        again.rewind()
        assert (again["w"] == 1).all()
    assert (w == 9).all()


@pytest.mark.parametrize("pending", [False, True])
def test_a_store_of_a_job_is_in_doubt_after_it(shm: Path, domain: str, pending: bool) -> None:
    store = pmstore.open(shm / "run.pm", domain=domain)  # type: ignore[arg-type]
    w = store.zeros("w", BYTES // 4, "float32")
    w[:] = 1
    store.commit()
    store._core.pool.hold_for_job()
    w[:] = 2
    store.commit()
    if pending:
        w[::1000] = 3
    store.close()  # what is pending cannot be committed: another rank may have to go back
    pages = w.reshape(-1, 1024)
    assert (pages == 2).all()
    pages[::2] = 9
    with pmstore.open(shm / "run.pm") as again:
        assert again._core.pool.in_doubt
        assert (again["w"] == 2).all()
        again["w"][:] = 4
        again.rollback()
        again._core.pool.back()
        assert (again["w"] == 1).all()
        again["w"][:] = 5
        again.commit()
    assert (pages[::2] == 9).all()
    assert (pages[1::2] == 2).all()


WRITES_AT_EXIT = """
import sys, threading, time
import pmstore
store = pmstore.open(sys.argv[1], domain=sys.argv[2])
w = store["w"]
w[:] = 3
store.commit()
begun = threading.Event()
def write():
    while True:
        w[:] = 4
        begun.set()
threading.Thread(target=write, daemon=True).start()
begun.wait()
if sys.argv[3] == "close":
    store.close()
"""


@pytest.mark.parametrize("how", ["close", "exit"])
def test_a_daemon_thread_that_writes_at_the_exit(shm: Path, domain: str, how: str) -> None:
    path = shm / "run.pm"
    with pmstore.open(path, domain=domain) as store:  # type: ignore[arg-type]
        store["w"] = np.zeros(BYTES // 4, "float32")
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", WRITES_AT_EXIT, str(path), domain, how], check=True, timeout=120
        )
        with pmstore.open(path) as store:  # at once
            assert store.recovery.clean
            assert (store["w"] == 3).all()
            assert not store.check().problems


KEEPS = """
import sys
import pmstore
store = pmstore.open(sys.argv[1])
w = store["w"]
store.close()
print("closed", flush=True)
sys.stdin.read()
assert (w == 1).all()
"""


def test_another_process_opens_it_at_once(shm: Path) -> None:
    path = shm / "run.pm"
    with pmstore.open(path) as store:
        store["w"] = np.ones(BYTES // 4, "float32")
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with keeper:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"closed\n"
        with pmstore.open(path) as store:  # whatever is copied there still
            store["w"][:] = 2
        keeper.communicate(timeout=120)
    assert keeper.returncode == 0
