"""Forks and threads: a child never writes the parent's store or keeps its lock; many threads may write."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore


def in_child(work: Callable[[], str]) -> tuple[str, int]:
    """Runs work in a fork; what it returned, and its wait status."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+: fork with threads; that is what is tested
        child = os.fork()
    if child == 0:
        os.close(read)
        try:
            result = work()
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        os.write(write, result.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    return said, os.waitpid(child, 0)[1]


def test_a_fork_inside_a_block(path: Path, domain: Any) -> None:
    with pmstore.open(path, domain=domain) as store:
        a = store.zeros("a", 1000)
        store.commit()
        with store.transaction(writes=[a]):
            a[:] = 1

            def child() -> str:
                errors = []
                for call in (
                    lambda: store.__setitem__("x", 1),
                    lambda: store["a"],
                    store.commit,
                    store.rollback,
                    lambda: store.will_write(a),
                    lambda: store.transaction().__enter__(),
                    lambda: store.zeros("z", 3),
                ):
                    try:
                        call()
                        errors.append("none")
                    except pmstore.ForkedStoreError:
                        errors.append("forked")
                repr(store)
                store.close()
                return f"{a.sum()} {set(errors)}"

            assert in_child(child) == ("1000.0 {'forked'}", 0)
            a[:10] = 2
        assert store["a"].sum() == 1010
        assert "x" not in store
    with pmstore.open(path) as store:
        assert store["a"].sum() == 1010


def test_a_child_that_leaves_the_blocks_normally(path: Path) -> None:
    with pmstore.open(path) as store:
        store["x"] = 1

        def child() -> str:
            store.__exit__(None, None, None)
            try:
                with store.transaction():
                    return "entered"
            except pmstore.ForkedStoreError as error:
                return str(error)

        assert "parent process" in in_child(child)[0]
        store["x"] += 1
    with pmstore.open(path) as store:
        assert store["x"] == 2


def test_a_child_that_writes_dies_and_nothing_is_changed(path: Path, domain: Any) -> None:
    with pmstore.open(path, domain=domain) as store:
        a = store.zeros("a", 1000)
        store.commit()
        a[0] = 5

        def child() -> str:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            faulthandler.disable()
            a[0] = 7
            return "written"

        said, status = in_child(child)
        assert said == ""
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) in (signal.SIGSEGV, signal.SIGBUS)
        assert a[0] == 5


def test_collecting_arrays_in_a_child(path: Path) -> None:
    with pmstore.open(path) as store:
        arrays = [store.zeros(f"a{i}", 100) for i in range(10)]
        holder = [store]

        def child() -> str:
            arrays.clear()
            holder.clear()
            gc.collect()
            return "collected"

        assert in_child(child) == ("collected", 0)
        assert sum(a.sum() for a in arrays) == 0
        store["x"] = 1


@pytest.mark.parametrize("domain", ["process", "file"])
def test_a_killed_trainer_whose_children_still_run(path: Path, domain: str) -> None:
    code = f"""
import os, pmstore, signal, time
store = pmstore.open({str(path)!r}, domain={domain!r})
a = store.zeros("a", 1000)
store.commit()
child = os.fork()
if child == 0:
    time.sleep(600)
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = _first_line([sys.executable, "-c", code])
    child = int(done)
    try:
        os.kill(child, 0)  # it runs
        with pmstore.open(path, lock_timeout=5) as store:
            assert store["a"].sum() == 0
    finally:
        os.kill(child, signal.SIGKILL)


def _first_line(command: list[str]) -> str:
    """Of a process that dies; its children keep the pipe open, so it is not read to the end."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.wait()
    return line


def test_many_threads_write_one_store(path: Path, domain: Any) -> None:
    threads, steps = 4, 50
    with pmstore.open(path, domain=domain) as store:
        arrays = [store.zeros(f"a{i}", 5000) for i in range(threads)]
        failures: list[BaseException] = []

        def work(i: int) -> None:
            try:
                for step in range(1, steps + 1):
                    with store.transaction(writes=[arrays[i]] if step % 2 else ()):
                        arrays[i] += 1
                        store[f"g{i}/step"] = step
                        store[f"g{i}/tmp"] = np.full(100, step)
                        assert store[f"g{i}/step"] == step
            except BaseException as error:
                failures.append(error)

        pool = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
        for thread in pool:
            thread.start()
        for thread in pool:
            thread.join()
        assert failures == []
        assert store.check().problems == ()
    with pmstore.open(path, domain=domain) as store:
        for i in range(threads):
            assert store[f"a{i}"].tolist() == [steps] * 5000
            assert store[f"g{i}/step"] == steps


def test_readers_beside_blocks_that_roll_back(store: pmstore.Store) -> None:
    store["x"] = 0
    store["w"] = np.zeros(100)
    store.commit()
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                assert store["x"] in (0, "a longer value than before" * 20)
                assert store["w"].shape in ((100,), (50,))
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(300):
        with pytest.raises(ZeroDivisionError):
            with store.transaction():
                store["x"] = "a longer value than before" * 20
                store["w"] = np.ones(50)
                store["other"] = 1
                1 / 0
    stop.set()
    reader.join()
    assert failures == []
    assert store.check().problems == ()
