"""Forks and threads: a child never writes the parent's store or keeps its lock; many threads may
write."""

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
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._engine import failures, snapshot
from pmstore._engine.constants import PAGE_BYTES
from pmstore.objects import core


def in_child(work: Callable[[], str]) -> tuple[str, int]:
    """Runs work in a fork; what it returned, and its wait status."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12+: fork with threads; that is what is tested
        warnings.simplefilter("ignore", DeprecationWarning)
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


def test_what_things_say_of_themselves_in_a_child(path: Path) -> None:
    with pmstore.open(path, size="1MiB") as store:
        things: list[Any] = [store, store.group("g"), store.list("l"), store.slots("s", 3)]
        store.commit()

        def child() -> str:
            told = [call() for thing in things for call in (thing.__repr__, thing._repr_html_)]
            return str(sum("of the parent process" in one for one in told))

        assert in_child(child) == ("8", 0)


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


def _meanwhile(monkeypatch: pytest.MonkeyPatch, other: Callable[[], None]) -> threading.Thread:
    """Runs other in a thread between the moment at which this thread has found an array and that at
    which it has pinned it."""
    from pmstore.objects import array

    thread = threading.Thread(target=other)
    check = array.check_bytes

    def between(*args: Any) -> None:
        monkeypatch.undo()
        thread.start()
        thread.join(0.3)  # it has to wait for this look-up, or else be harmless
        check(*args)

    monkeypatch.setattr(array, "check_bytes", between)
    return thread


def _block_that_rolls_back(
    store: pmstore.Store, change: Callable[[], object]
) -> Callable[[], None]:
    """Another thread has made a change in a block; what is returned lets it roll back, and waits
    until it did."""
    made, end = threading.Event(), threading.Event()

    def work() -> None:
        with pytest.raises(ZeroDivisionError):
            with store.transaction():
                change()
                made.set()
                end.wait()
                1 / 0

    thread = threading.Thread(target=work)
    thread.start()
    made.wait()

    def roll_back() -> None:
        end.set()
        thread.join()

    return roll_back


def test_roll_back_between_finding_and_pinning(
    store: pmstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store["w"] = np.zeros(50_000)
    store.commit()
    thread = _meanwhile(
        monkeypatch, _block_that_rolls_back(store, lambda: store.update(w=np.ones(50_000)))
    )
    found = store["w"]
    thread.join()
    assert store["w"] is not found
    store["other"] = np.full(50_000, 7.0)  # not in the block that is still held
    store.commit()
    assert not (found == 7).any()
    assert (store["w"] == 0).all()
    assert store.check().problems == ()


def test_roll_back_before_opening_the_idle_slot(
    store: pmstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = store.slots("w", 50_000)
    slots.next[:] = 1
    slots.flip()
    store.commit()
    ended = threading.Thread(
        target=_block_that_rolls_back(store, lambda: (slots.next.fill(2), slots.flip()))
    )
    flipped = type(slots)._flipped

    def then_roll_back(self: pmstore.Slots, turn: Any) -> bool:
        was = flipped(self, turn)
        monkeypatch.undo()
        ended.start()
        ended.join(0.3)
        return was

    monkeypatch.setattr(type(slots), "_flipped", then_roll_back)
    with suppress(pmstore.TransactionError):  # it was found flipped, which was true then
        slots.next[:] = 3
    ended.join()
    assert (slots.current == 1).all()
    store.rollback()
    assert (slots.current == 1).all()


def test_close_between_finding_and_pinning(
    store: pmstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store["w"] = np.arange(50_000)
    store.commit()
    thread = _meanwhile(monkeypatch, store.close)
    found = store["w"]
    thread.join()
    assert store.closed
    assert (found == np.arange(50_000)).all()


def test_stores_opened_while_is_captured_looks(shm: Path) -> None:
    """As another thread may, at any line: the trace function stands for it, as a race in a test
    would be won sometimes only."""
    opened: list[pmstore.Store] = []

    def between_lines(frame: Any, event: str, argument: Any) -> Any:
        if event == "line" and len(opened) < 50:
            opened.append(pmstore.open(shm / f"{len(opened)}.pm", size="1MiB"))
        return between_lines

    traced = sys.gettrace()
    with pmstore.open(shm / "first.pm", size="1MiB") as store:
        array = store.zeros("a", 3)
        sys.settrace(between_lines)
        try:
            found = core.is_captured(array.ctypes.data), core.is_captured(1)
        finally:
            sys.settrace(traced)
        assert found == (True, False)
    assert opened
    for each in opened:
        each.close()


def test_a_child_never_holds_the_lock_of_a_killed_parent(path: Path, domain: Any) -> None:
    """Not even one that was not given a processor yet: here it is stopped before it can do
    anything."""
    code = f"""
import ctypes, os, signal, pmstore
store = pmstore.open({str(path)!r}, size="1MiB", domain={domain!r})
store["x"] = 1
store.commit()
number = 57 if os.uname().machine == "x86_64" else 220
child = ctypes.CDLL(None).syscall(number, signal.SIGCHLD, 0, 0, 0, 0)  # no fork handler runs
if child == 0:
    while True:
        signal.pause()
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    child = int(trainer.stdout.readline())
    try:
        assert trainer.wait() == -signal.SIGKILL
        with pmstore.open(path, domain=domain) as store:
            assert store["x"] == 1
    finally:
        os.kill(child, signal.SIGKILL)
        trainer.stdout.close()


def test_a_child_closes_what_a_thread_of_the_parent_copies_from(
    store: pmstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned, inside, leave = store._pin_committed(), threading.Event(), threading.Event()
    assert pinned is not None

    def held(*arguments: Any) -> None:
        inside.set()
        leave.wait()
        failures.call(*arguments)

    monkeypatch.setattr(snapshot, "call", held)
    page = np.empty(PAGE_BYTES, np.uint8)
    thread = threading.Thread(target=pinned.take, args=(0, page))
    thread.start()
    inside.wait()

    def child() -> str:
        signal.alarm(60)
        pinned.close()
        return str(pinned.busy)

    said = in_child(child)
    leave.set()
    thread.join()
    assert said == ("False", 0)
    pinned.close()
    assert pinned.closed
