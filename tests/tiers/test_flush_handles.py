"""A flush from the outside: errors, callbacks, threads that cannot be started, cancelling, memory,
a full disk."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tier_helpers import CHUNK, no_flush_begins, restored, wait_until

import pmstore
from pmstore._base.workers import Worker, WorkerError
from pmstore.errors import TierError
from pmstore.tiers._flush.flusher import Flusher

Step = Callable[[float], int]


def test_errors_are_told_at_the_handle_and_once_at_the_next_flush(
    filled: pmstore.Store, url: str
) -> None:
    Path(url).write_text("not a directory")
    handle = filled.flush("t")
    with pytest.raises(OSError):
        handle.wait()
    with pytest.raises(OSError):
        handle.wait()
    Path(url).unlink()
    filled.flush("t", wait=True)
    filled.drain()
    os.rename(url, url + ".moved")
    Path(url).write_text("not a directory")
    filled["a"][0] = 9
    filled.commit()
    failed = filled.flush("t")
    failed._done.wait()
    with pytest.raises(OSError):
        filled.flush("t")
    Path(url).unlink()
    os.rename(url + ".moved", url)
    filled.flush("t", wait=True)
    with pytest.raises(TierError, match="no tier 'u'"):
        filled.flush("u")


def test_a_failure_may_be_a_warning_at_the_next_flush(
    filled: pmstore.Store, path: Path, url: str
) -> None:
    filled.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK, on_error="warn"))
    Path(url).write_text("not a directory")
    failed = filled.flush("t")
    assert failed.wait_over(60)
    Path(url).unlink()
    with pytest.warns(UserWarning, match=rf"the flush of epoch {failed.epoch} to 't' failed"):
        handle = filled.flush("t")
    handle.wait(60)
    filled.flush("t", wait=True)  # told once
    assert restored(path, url)["a"][5] == 5


def test_two_tiers_at_once(filled: pmstore.Store, path: Path, url: str) -> None:
    """Each has its own epoch, whatever is committed meanwhile."""
    handles = {}
    for i, name in enumerate(("u", "v", "t")):
        filled.add_tier(name, pmstore.TierConfig(url + name, chunk_bytes=CHUNK, max_rate="20MB"))
        filled["a"][:] = i
        filled.commit()
        handles[name] = filled.flush(name)
    filled["a"][:] = -1
    filled.commit()
    assert len({handle.wait(60).epoch for handle in handles.values()}) == 3
    for i, (name, handle) in enumerate(handles.items()):
        found = restored(path, url + name)
        assert (found["epoch"], set(found["a"].tolist())) == (handle.epoch, {float(i)})


def test_callbacks(filled: pmstore.Store, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress comes in order and ends at all of it; a callback that raises is told, and harms no
    flush."""
    told: list[tuple[int, int]] = []
    raised: list[type[BaseException]] = []
    ended: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_type))
    with no_flush_begins():  # a callback of one that is over would be called here
        handle = filled.flush("t", progress=lambda done, total: told.append((done, total)))
        handle.add_done_callback(lambda handle: ended.append(1 / 0))
        handle.add_done_callback(ended.append)
    handle.wait(60)
    filled.drain(60)
    assert ended == [handle]
    assert told == sorted(told)
    assert told[-1] == (handle.stats.written_bytes, handle.total_bytes)  # type: ignore[union-attr]
    assert told[-1][0] == told[-1][1] > 1 << 20
    filled["a"][0] = 1
    filled.commit()
    filled.flush("t", progress=lambda done, total: ended.append(1 / 0)).wait(60)
    assert raised == [ZeroDivisionError] * 2


@pytest.mark.parametrize("ending", ["drain", "close"])
def test_a_callback_drains_or_closes_the_store(
    filled: pmstore.Store, url: str, ending: str
) -> None:
    """Also with flushes after its own that have yet to run, and their callbacks."""
    filled.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK, keep=1))
    begun, ended = threading.Event(), threading.Event()
    called: list[int] = []

    def end(handle: pmstore.tiers.Flush) -> None:
        assert begun.wait(60)
        if ending == "drain":
            filled.drain(60)
        else:
            filled.close()
        called.append(handle.epoch)
        ended.set()

    with no_flush_begins():  # a callback of one that is over would be called here
        handles = [filled.flush("t")]
        handles[0].add_done_callback(end)
        for i in range(3):
            filled["a"][:] = i
            filled.commit()
            handles.append(filled.flush("t"))
            handles[-1].add_done_callback(lambda handle: called.append(handle.epoch))
    begun.set()
    assert ended.wait(60)
    assert all(handle.over for handle in handles)
    if ending == "drain":
        filled.drain(60)
    else:
        assert filled.closed
        assert handles[-1].wait_called(60)
    assert called == [handle.epoch for handle in handles]


@pytest.mark.parametrize("ending", ["wait", "drain", "flush", "close", "close elsewhere"])
def test_a_progress_callback_waits_for_its_flush(filled: pmstore.Store, ending: str) -> None:
    """Which must not wait for the callback then."""
    handles: list[pmstore.tiers.Flush] = []
    known, closing = threading.Event(), threading.Event()
    ended: list[str] = []
    errors: list[BaseException] = []

    def close() -> None:
        closing.set()
        filled.close()
        ended.append("closed")

    closer = threading.Thread(target=close, daemon=True)

    def tell(done: int, total: int) -> None:
        if ended or errors:
            return
        try:
            assert known.wait(60)
            if ending == "wait":
                handles[0].wait(60)
            elif ending == "drain":
                filled.drain(60)
            elif ending == "flush":
                filled.flush("t").wait(60)
            elif ending == "close":
                filled.close()
            else:
                closer.start()
                assert closing.wait(60)
                with pytest.raises((TierError, pmstore.ClosedStoreError)):
                    while True:
                        filled.flush("t").wait(60)
            ended.append(ending)
        except BaseException as error:
            errors.append(error)

    handles.append(filled.flush("t", progress=tell))
    known.set()
    assert handles[0].wait_over(60)
    assert handles[0].wait_called(60)
    assert not errors
    assert ending in ended
    if ending == "close elsewhere":
        closer.join(60)
        assert not closer.is_alive()
    if "close" in ending:
        assert filled.closed


@pytest.mark.parametrize("refused", [1, 2])
def test_threads_that_cannot_be_started(
    filled: pmstore.Store, path: Path, url: str, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """The flush says so, at once, and the next one tries again."""
    start = Worker.start
    names: list[str] = []

    def refuse(thread: Worker) -> None:
        names.append(thread.name)
        if len(names) == refused:
            raise WorkerError("no thread could be started (can't start new thread)")
        start(thread)

    monkeypatch.setattr(Worker, "start", refuse)
    with pytest.raises(TierError, match="no thread could be started") as caught:
        filled.flush("t")
    assert "can't start new thread" in str(caught.value)
    handle = filled.flush("t", progress=lambda done, total: None)
    handle.wait(60)
    filled.drain(60)
    assert len(names) == len(set(names)) + 1  # those that are there are not started twice
    assert restored(path, url)["epoch"] == handle.epoch


def test_a_thread_that_tells_progress_cannot_be_started(
    filled: pmstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.flush("t", wait=True)
    start = Worker.start

    def refuse(thread: Worker) -> None:
        if thread.name == "pmstore progress":
            raise WorkerError("no thread could be started (can't start new thread)")
        start(thread)

    monkeypatch.setattr(Worker, "start", refuse)
    filled["a"] += 1
    filled.commit()
    failed = filled.flush("t", progress=lambda done, total: None)
    with pytest.raises(TierError, match="can't start new thread"):
        failed.wait(60)
    assert failed.wait_called(60)
    filled.flush("t").wait(60)


def test_a_store_whose_regular_flushing_cannot_be_started(
    path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: Worker) -> None:
        raise WorkerError("no thread could be started (can't start new thread)")

    with pmstore.open(path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "start", refuse)
            with pytest.raises(TierError, match="no thread could be started"):
                store.add_tier("t", pmstore.TierConfig(url, every=1))
        store.add_tier("t", pmstore.TierConfig(url, every=1))
        store["a"] = 1
        store.commit()
        wait_until(lambda: bool(pmstore.tiers.epochs(url)))
    assert pmstore.tiers.epochs(url)


def test_a_callback_flushes_while_the_store_is_closed(
    filled: pmstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[BaseException | None] = []
    closing, called = threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_value))
    close = Flusher.close
    monkeypatch.setattr(Flusher, "close", lambda flusher: (close(flusher), closing.set()))

    def again(handle: pmstore.tiers.Flush) -> None:
        assert closing.wait(60)
        called.set()
        filled.flush("t")

    with no_flush_begins():  # a callback of one that is over would be called here
        filled.flush("t").add_done_callback(again)
    closer = threading.Thread(target=filled.close, daemon=True)
    closer.start()
    closer.join(60)
    assert not closer.is_alive()
    assert called.is_set()
    assert [str(one) for one in raised] == ["tier 't' is being closed"]


def test_a_flush_is_cancelled(filled: pmstore.Store, path: Path, url: str) -> None:
    filled.flush("t", wait=True)
    filled["a"] += 1
    filled.commit()
    filled.add_tier("t", pmstore.TierConfig(url, max_rate=1, chunk_bytes=CHUNK))
    handle = filled.flush("t", full=True)  # for hours
    handle.cancel()
    with pytest.raises(TierError, match="cancelled"):
        handle.wait(60)
    assert not any(state.failed for state in filled.tier_states())
    assert len(pmstore.epochs(url)) == 1
    assert len(list(Path(url).glob("*.chunks"))) == 1


def test_memory_is_bounded_and_a_commit_waits(filled: pmstore.Store, path: Path, url: str) -> None:
    filled.add_tier(
        "t", pmstore.TierConfig(url, memory="128KiB", max_rate="500KB", chunk_bytes=CHUNK)
    )
    handle = filled.flush("t")
    filled["a"][:] = -1
    filled.commit()
    stats = handle.wait(60).stats
    assert stats is not None
    assert stats.commit_waits >= 1
    assert stats.commit_wait_seconds > 0
    assert stats.peak_kept_bytes <= 128 << 10
    assert restored(path, url)["a"][5] == 5


def test_a_flush_that_keeps_commits_waiting_too_long_fails_and_they_go_on(
    filled: pmstore.Store, url: str
) -> None:
    filled.add_tier(
        "t",
        pmstore.TierConfig(
            url, memory="64KiB", max_rate="50KB", max_wait_seconds=0.05, chunk_bytes=CHUNK
        ),
    )
    handle = filled.flush("t")
    filled["a"][:] = -1
    filled.commit()
    with pytest.raises(TierError, match="flush less often"):
        handle.wait(60)
    filled["a"][:] = -2
    filled.commit()


@pytest.mark.parametrize("mib", [1, 20])
def test_a_disk_that_is_full(shm: Path, mib: int) -> None:
    """mib: of state; from 16 on room is set aside before anything is written."""
    script = f"""
import pmstore, resource, signal, numpy as np
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = pmstore.open({str(shm / "s.pm")!r}, size="{4 * mib}MiB")
store["a"] = np.ones({mib << 17})
store.add_tier("t", {str(shm / "tier")!r})
store.commit()
store.flush("t", wait=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, {resource.RLIM_INFINITY}))
store["a"] += 1
store.commit()
try:
    store.flush("t", wait=True)
except OSError as error:
    print(type(error).__name__, error)
resource.setrlimit(resource.RLIMIT_FSIZE, ({resource.RLIM_INFINITY}, {resource.RLIM_INFINITY}))
print(len(pmstore.epochs({str(shm / "tier")!r})))
store.flush("t", wait=True)
print([one.problem for one in pmstore.epochs({str(shm / "tier")!r})])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("TierError")
    assert rest == ["1", "[None, None]"]
