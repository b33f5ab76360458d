"""How flushing ends: interrupts, stores that nobody holds, threads that come at once, fork
children, signals, the end of the program."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from interrupter import Interrupter
from tier_helpers import CHUNK, restored

import pmstore
from pmstore._engine.snapshot import Snapshot
from pmstore.errors import ClosedStoreError, ForkedStoreError, ReadOnlyStoreError, StoreFullError
from pmstore.tiers._flush.flusher import Flusher
from pmstore.tiers.tiers import Tiers

STEP = int(os.environ.get("PMSTORE_TEST_INTERRUPT_STEP", "25"))
"""Of so many bytecodes one is tried."""


class InPmstore(Interrupter):
    """In code of pmstore's own: the standard library's locks are not whole at every bytecode."""

    def trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if f"{os.sep}pmstore{os.sep}" not in code.co_filename or code.co_name == "_unpin":
            return None
        return super().trace(frame, event, _)


def test_an_interrupt_anywhere_in_flush(
    filled: pmstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that flushes is late: `drain` waits for it all the same."""
    flushes = Flusher._run

    def late(self: Flusher, job: Any) -> None:
        time.sleep(0.01)
        flushes(self, job)

    monkeypatch.setattr(Flusher, "_run", late)
    filled.flush("t", wait=True)
    at = 1
    while True:
        filled["a"] += 1
        filled.commit()
        interrupted = InPmstore(at).run(lambda: filled.flush("t") and None)
        filled.drain(60)  # what is under way ends; one that was cancelled is no error
        gc.collect()
        filled["a"] += 1
        filled.commit()
        with Snapshot(filled._core.pool) as snapshot:
            assert snapshot.info().kept_bytes == 0  # nothing stays pinned
        if not interrupted:
            break
        at += min(STEP, 4)
    assert at > 100
    assert filled.flush("t", wait=True).epoch == filled.epoch


def test_an_interrupt_anywhere_in_close(path: Path, url: str) -> None:
    """The store is closed, and another one can flush to the tier."""
    at = 1
    while True:
        store = pmstore.open(path, size="1MiB")
        store["a"] = at
        store.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK, run="r"))
        store.commit()
        store.flush("t", wait=at % 2 == 0)
        interrupted = InPmstore(at).run(store.close)
        store.close()
        threads = store._open_tiers()._flushers["t"]._threads
        # of one that was abandoned: it closes when it has stopped
        threads["pmstore flush"].join(60)
        if not interrupted:
            break
        at += STEP
    assert at > 50
    with pmstore.open(path) as store:
        store.flush("t", wait=True) if "t" in store.tiers else None
        store.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK, run="r"))
        assert store.flush("t", wait=True).epoch == store.epoch


def test_a_store_that_nobody_holds_is_closed_though_it_flushes_by_itself(
    path: Path, url: str
) -> None:
    store = pmstore.open(path)
    store.add_tier("t", pmstore.TierConfig(url, every=1))
    store["a"] = 1
    store.commit()
    store.drain(60)
    watcher = store._open_tiers()._watcher
    assert watcher is not None
    with pytest.warns(ResourceWarning, match="never closed"):  # noqa: PT031
        del store
        gc.collect()
    watcher.join(60)
    assert not watcher.alive
    gc.collect()
    with pmstore.open(path, lock_timeout=60) as store:
        assert store.recovery.clean


def test_two_threads_that_ask_for_tiers_first(
    filled: pmstore.Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.close()
    both = threading.Barrier(2)
    load = Tiers.load

    def slowly(tiers: Tiers, store: pmstore.Store) -> None:
        with pytest.MonkeyPatch.context(), pytest.raises(threading.BrokenBarrierError):
            both.wait(0.5)  # the other one does not come: it waits for this one
        load(tiers, store)

    with pmstore.open(path) as store:
        store._tiers = None  # as of a store that was opened without
        monkeypatch.setattr(Tiers, "load", slowly)
        found: list[object] = []
        threads = [
            threading.Thread(target=lambda: found.append(store._open_tiers())) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(found) == 2
        assert found[0] is found[1]


def test_a_closed_store_says_so(filled: pmstore.Store, url: str) -> None:
    filled.flush("t", wait=True)
    filled.close()
    for call in (
        lambda: filled.flush("t"),
        lambda: filled.flush_if_idle("t"),
        lambda: filled.add_tier("t", url),
        lambda: filled.remove_tier("t"),
    ):
        with pytest.raises(ClosedStoreError):
            call()


def test_a_fork_child_is_told_even_if_a_lock_is_another_threads(
    filled: pmstore.Store, url: str
) -> None:
    tiers = filled._open_tiers()
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with tiers._lock:
            held.set()
            over.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    child = os.fork()
    if child == 0:
        told = 0
        for call in (
            lambda: filled.flush("t"),
            lambda: filled.add_tier("t", url),
            lambda: filled.remove_tier("t"),
        ):
            try:
                call()
            except ForkedStoreError:
                told += 1
        os._exit(told)
    over.set()
    holder.join()
    end = time.monotonic() + 60
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status) == 3


def test_a_tier_that_finds_no_room_for_its_change_goes_on(
    filled: pmstore.Store, path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.flush("t", wait=True)

    def full(store: pmstore.Store, name: str, value: object) -> None:
        raise StoreFullError(28, "no room in the store")

    with monkeypatch.context() as patch, pytest.raises(StoreFullError):
        patch.setattr(pmstore.Store, "__setitem__", full)
        filled.add_tier("t", pmstore.TierConfig(url, keep=3))
    filled["a"] += 1
    filled.commit()
    assert filled.flush("t", wait=True).epoch == restored(path, url)["epoch"]


def test_a_tier_that_cannot_be_removed_stays(filled: pmstore.Store, path: Path) -> None:
    filled.close()
    with pmstore.open(path, "r", lock=True) as store:
        with pytest.raises(ReadOnlyStoreError):
            store.remove_tier("t")
        store.flush("t", wait=True)


@pytest.fixture
def program(shm: Path) -> Iterator[subprocess.Popen[str]]:
    text = """
import sys, threading, time, pmstore, pmstore.tiers.tiers
pmstore.tiers.tiers.SIGTERM_SECONDS = 0.5
store = pmstore.open(sys.argv[1])
store.add_tier("t", pmstore.TierConfig(sys.argv[2], chunk_bytes=16384, max_rate="400KB"))
store["a"] = bytes(300_000)
store.commit()
handle = store.flush("t")
with handle._over._cond:            # where an interrupt finds a thread that is about to wait for it
    print("held", flush=True)
    while True:
        time.sleep(0.01)
"""
    command = [sys.executable, "-c", text, str(shm / "x.pm"), str(shm / "tier")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        yield running
        running.kill()


def test_sigterm_while_a_lock_is_held_that_the_waiting_needs(
    program: subprocess.Popen[str],
) -> None:
    """It used to wait for ever; also a second signal, which comes while the first one's time runs,
    changes nothing."""
    assert program.stdout is not None
    assert program.stdout.readline() == "held\n"
    program.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    program.send_signal(signal.SIGTERM)
    assert program.wait(120) == -signal.SIGTERM


def test_all_stores_are_closed_at_exit_whatever_one_of_them_raises(shm: Path) -> None:
    text = """
import sys, pmstore
stores = [pmstore.open(f"{sys.argv[1]}/{n}.pm", size="1MiB") for n in range(3)]
for store in stores:
    store["a"] = 1
    store.commit()
close = pmstore.Store.close
def closing(store):
    close(store)
    raise OSError("the disk is gone")
pmstore.Store.close = closing
"""
    done = subprocess.run(
        [sys.executable, "-c", text, shm], capture_output=True, text=True, timeout=60, check=False
    )
    assert "the disk is gone" in done.stderr
    for number in range(3):
        with pmstore.open(shm / f"{number}.pm") as store:
            assert store.recovery.clean


def test_a_warning_that_is_an_error_does_not_end_regular_flushing(
    filled: pmstore.Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_value))
    Path(url).write_text("a file where the directory is to be")
    filled.add_tier("t", pmstore.TierConfig(url, every=1, chunk_bytes=CHUNK))
    until(filled, lambda: len(told) >= 2)
    Path(url).unlink()
    until(filled, lambda: bool(list(Path(url).glob("*.manifest"))))
    filled.remove_tier("t")


def until(store: pmstore.Store, seen: Callable[[], bool]) -> None:
    """Commits again and again."""
    end = time.monotonic() + 60
    while not seen():
        assert time.monotonic() < end
        store["a"] += 1
        store.commit()
        time.sleep(0.01)
