"""Domain `file`: what a fork child reads is the state of the fork, whole, whatever the parent
commits and writes home later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import pmstore

PAGE_ITEMS = 512


class Child:
    """A fork that looks, and tells, each time it is asked."""

    def __init__(self, look: Callable[[], object]) -> None:
        asked, ask = os.pipe()
        told, tell = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12+: fork with threads; that is what is tested
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            os.close(ask)
            os.close(told)
            while os.read(asked, 1) == b"?":
                os.write(tell, repr(look()).encode())
            os._exit(0)
        os.close(asked)
        os.close(tell)
        self._ask, self._told = ask, told

    def look(self) -> str:
        os.write(self._ask, b"?")
        return os.read(self._told, 10_000).decode()

    def end(self) -> int:
        with suppress(BrokenPipeError):  # it was killed
            os.write(self._ask, b".")
        os.close(self._ask)
        os.close(self._told)
        return os.waitpid(self.pid, 0)[1]


def wait_until_home(store: pmstore.Store) -> None:
    """All that was committed is written to its place in the file: as soon as nothing is committed
    for a moment."""
    for beat in range(2):  # the first may have begun before the call
        before = store.stats().home_bytes
        store["beat"] = np.full(PAGE_ITEMS, beat)
        store.commit()
        while store.stats().home_bytes == before:
            time.sleep(0.01)


def opened(path: Path, **arrays: np.ndarray) -> pmstore.Store:  # type: ignore[type-arg]
    """A store of these arrays, none of whose pages was stored to since its open."""
    with pmstore.open(path, "w", size="64MiB", domain="file") as store:
        for name, array in arrays.items():
            store[name] = array
    return pmstore.open(path, "r+", domain="file")


@pytest.mark.parametrize("pages", [1, 16, 700])
@pytest.mark.parametrize("declared", [False, True])
def test_a_child_never_sees_a_later_commit(path: Path, pages: int, declared: bool) -> None:
    with opened(path, a=np.ones(pages * PAGE_ITEMS)) as store:
        a = store["a"]
        with store.transaction():
            a[: len(a) // 2] = 1  # half of it is private memory before the fork
            a[0] = 1
        child = Child(lambda: (set(a.tolist()), float(a[0]), float(a[-1])))
        if pages == 16:
            assert child.look() == "({1.0}, 1.0, 1.0)"  # pages that were read are mapped
        for value in (2, 3):
            with store.transaction(writes=[a] if declared else []):
                a[:] = value
            wait_until_home(store)
            assert child.look() == "({1.0}, 1.0, 1.0)"
        later = Child(lambda: set(a.tolist()))
        with store.transaction():
            a[:] = 4
        wait_until_home(store)
        assert later.look() == "{3.0}"
        assert child.look() == "({1.0}, 1.0, 1.0)"
        assert (child.end(), later.end()) == (0, 0)
    with pmstore.open(path, "r") as store:
        assert (store["a"] == 4).all()


def test_a_fork_inside_a_block(path: Path) -> None:
    """Declared, not yet written: the pages are writable, and the file's."""
    with opened(path, a=np.ones(100 * PAGE_ITEMS), b=np.ones(PAGE_ITEMS)) as store:
        a, b = store["a"], store["b"]
        with store.transaction(writes=[a]):
            b[:] = 5
            child = Child(lambda: (set(a.tolist()), set(b.tolist())))
            a[:] = 2
        wait_until_home(store)
        assert child.look() == "({1.0}, {5.0})"
        assert child.end() == 0


def test_space_that_is_used_again(path: Path) -> None:
    """A block that the parent removes and fills with another array is written straight home, at the
    commit."""
    with opened(path, a=np.ones(1000 * PAGE_ITEMS)) as store:
        child = Child(lambda a=store["a"]: set(a.tolist()))  # type: ignore[misc]
        del store["a"]
        store.commit()
        straight = store.stats().straight_bytes
        for i in range(12):
            store[f"new{i}"] = np.full(1000 * PAGE_ITEMS, 7.0)
            store.commit()
        assert store.stats().straight_bytes > straight
        wait_until_home(store)
        assert child.look() == "{1.0}"
        assert child.end() == 0


def test_many_children_and_many_commits(path: Path) -> None:
    with opened(path, a=np.zeros(64 * PAGE_ITEMS)) as store:
        a = store["a"]
        children = []
        for value in range(1, 9):
            children.append((value - 1.0, Child(lambda: set(a.tolist()))))
            with store.transaction():
                a[:] = value
            if value % 3 == 0:
                wait_until_home(store)
        wait_until_home(store)
        for value, child in children:
            assert child.look() == repr({value})
            assert child.end() == 0


def test_children_that_are_gone_cost_nothing(path: Path) -> None:
    """Killed, ended at once, or become another program."""
    with opened(path, a=np.ones(64 * PAGE_ITEMS)) as store:
        a = store["a"]
        before = len(os.listdir("/proc/self/fd"))
        for i in range(30):
            child = Child(lambda: set(a.tolist()))
            if i % 3 == 0:
                os.kill(child.pid, signal.SIGKILL)
            child.end()
            subprocess.run(["true"], check=True)
            if i % 10 == 0:
                with store.transaction():
                    a[:] = i
                wait_until_home(store)
        with store.transaction():
            a[:] = 1
        wait_until_home(store)
        # of the last ones, until the next fork or home write
        assert len(os.listdir("/proc/self/fd")) <= before + 6


def test_a_child_of_a_child_is_told(path: Path) -> None:
    code = f"""
import os, sys
import numpy as np, pmstore
store = pmstore.open({str(path)!r}, "w", size="4MiB", domain="file")
a = store["a"] = np.ones(100000)
store.commit()
a = store["a"]
if os.fork() == 0:
    assert a.sum() == 100000
    child = os.fork()
    if child == 0:
        repr(store)
        a.sum()
        os._exit(0)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 127)
status = os.waitstatus_to_exitcode(os.wait()[1])
store.close()
sys.exit(status)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGSEGV & 127
    assert "only its own fork children may read it" in done.stderr


def test_in_shared_domains_a_child_sees_what_the_parent_writes(path: Path) -> None:
    """As in any memory that two processes share."""
    with pmstore.open(path, size="1MiB", domain="process") as store:
        store["a"] = np.ones(PAGE_ITEMS)
        store.commit()
        a = store["a"]
        child = Child(lambda: set(a.tolist()))
        a[:] = 2  # not committed
        assert child.look() == "{2.0}"
        assert child.end() == 0
        store.rollback()
