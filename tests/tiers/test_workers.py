"""Nobody waits for a thread that could not be started, or that has died."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from tier_helpers import restored

import pmstore
from pmstore._base import workers
from pmstore._base.workers import Patience, Tasks, Worker, WorkerError, wait_for
from pmstore.errors import TierError
from pmstore.tiers._flush import flusher


@pytest.fixture
def stillborn(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Threads of that name die as one does that finds no memory for its first frame: started, and
    nothing of it runs."""

    def die(name: str) -> None:
        start = _thread.start_new_thread

        def begin(run: Any, arguments: tuple[Any, ...]) -> int:
            return start(*(((lambda: None), ()) if arguments[2] == name else (run, arguments)))

        monkeypatch.setattr(workers._thread, "start_new_thread", begin)

    return die


def test_a_worker_and_one_who_waits_for_it() -> None:
    done, go = threading.Event(), threading.Event()

    def work(event: threading.Event) -> None:
        assert threading.current_thread().name == "a name"
        assert worker.current
        go.wait(60)
        event.set()

    worker = Worker("a name", work, done)
    assert not worker.alive
    assert worker.join()
    worker.start()
    assert worker.alive
    assert not worker.current
    assert not worker.join(0.01)
    assert not wait_for(done, worker, 0.01)
    go.set()
    assert wait_for(done, worker, None)
    assert worker.join(60)
    while worker.alive:
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="died"):
        wait_for(threading.Event(), worker, None)


def test_what_a_worker_raises_is_told_and_kept_tracebacks_keep_none_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)

    def work() -> None:
        raise MemoryError

    worker = Worker("one that fails", work)
    worker.start()
    assert worker.join(60)
    while worker.alive:
        time.sleep(0.001)
    assert told[0].exc_type is MemoryError


def test_no_memory_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: Any, arguments: Any) -> int:
        raise MemoryError("none")

    monkeypatch.setattr(workers._thread, "start_new_thread", refuse)
    with pytest.raises(WorkerError, match="no thread could be started for 'pmstore job'"):
        Tasks().start(int)
    with pytest.raises(WorkerError, match="no thread could be started for 'pmstore question'"):
        Patience(None).ask(int)


@pytest.mark.parametrize("refusal", [RuntimeError("can't start new thread"), MemoryError("none")])
def test_nobody_waits_for_a_thread_that_was_refused(
    monkeypatch: pytest.MonkeyPatch, refusal: BaseException
) -> None:
    """While the error is handled, too, whose traceback refers to the frame that tried."""

    def refuse(run: Any, arguments: Any) -> int:
        raise refusal

    monkeypatch.setattr(workers._thread, "start_new_thread", refuse)
    tasks = Tasks()
    try:
        tasks.start(int)
    except WorkerError:
        tasks.end()
        assert not tasks._workers[0].alive
    else:
        pytest.fail("it was refused")


def test_a_task_whose_thread_died(stillborn: Callable[[str], None]) -> None:
    stillborn("pmstore job")
    tasks = Tasks()
    task = tasks.start(int)
    with pytest.raises(WorkerError, match="the thread 'pmstore job' died"):
        task.ask()
    tasks.end()


def test_what_a_task_found() -> None:
    tasks, go = Tasks(), threading.Event()
    assert tasks.start(divmod, 7, 2).ask() == (3, 1)
    failed = tasks.start(divmod, 7, 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failed.ask()
    slow = tasks.start(go.wait, 60)
    with pytest.raises(WorkerError, match=r"no answer for 0\.01 seconds"):
        slow.ask(0.01)
    go.set()
    tasks.end()
    assert slow.ask()
    with pytest.raises(WorkerError, match="given up"):
        tasks.start(int).ask()
    tasks.end()


def test_questions_are_given_up() -> None:
    """One that gets no answer, all when they are ended; what is answered later is thrown away."""
    go = threading.Event()
    patience = Patience(0.01)
    assert patience.ask(lambda: 5) == 5
    with pytest.raises(KeyError):
        patience.ask(lambda: {}[1])
    with pytest.raises(WorkerError, match=r"no answer for 0\.01 seconds"):
        patience.ask(lambda: go.wait(60))
    endless = Patience(None)
    threading.Timer(0.05, endless.end).start()
    with pytest.raises(WorkerError, match="given up"):
        endless.ask(lambda: go.wait(60))
    go.set()
    with pytest.raises(ValueError, match="stall_seconds"):
        Patience(0)


def test_a_question_whose_thread_died(stillborn: Callable[[str], None]) -> None:
    stillborn("pmstore question")
    with pytest.raises(WorkerError, match="the thread 'pmstore question' died"):
        Patience(None).ask(int)


@pytest.mark.parametrize("name", ["pmstore job", "pmstore progress"])
def test_a_restore_one_of_whose_threads_died(
    filled: pmstore.Store, path: Path, url: str, stillborn: Callable[[str], None], name: str
) -> None:
    filled.flush("t", wait=True)
    filled.drain()
    stillborn(name)
    target = path.with_name("restored.pm")
    if name == "pmstore job":
        with pytest.raises(TierError, match="died"):
            pmstore.restore(target, url)
        assert not target.exists()
        assert not list(path.parent.glob(".*restoring"))
    else:  # nobody is told how far it is; what it is for happens
        pmstore.restore(target, url, progress=lambda done, total: None)
        assert target.exists()


def test_a_flush_whose_thread_died(
    filled: pmstore.Store, path: Path, url: str, stillborn: Callable[[str], None]
) -> None:
    """It fails, the next one has another thread, and closing waits for nobody."""
    stillborn("pmstore flush")
    handle = filled.flush("t")
    with pytest.raises(TierError, match="its thread died"):
        handle.wait()
    assert handle.done
    assert handle.over
    assert handle.wait_called(60)
    filled.close()


def test_a_flush_that_dies_is_followed_by_another(
    filled: pmstore.Store, path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = flusher._work

    def dies(jobs: SimpleQueue[Any]) -> None:
        """Takes one job, and is gone with it."""
        if threading.current_thread().name != flusher.FLUSHING:
            return work(jobs)
        jobs.get()
        return None

    with monkeypatch.context() as patch:
        patch.setattr(flusher, "_work", dies)
        handle = filled.flush("t")
        with pytest.raises(TierError, match="its thread died"):
            handle.wait()
    filled["a"] += 1
    filled.commit()
    filled.flush("t", wait=True)
    assert restored(path, url)["a"][0] == 1
    filled.commit()
    filled.drain(60)


def test_callbacks_whose_thread_died(
    filled: pmstore.Store, stillborn: Callable[[str], None]
) -> None:
    stillborn("pmstore callbacks")
    filled.flush("t").wait()
    filled.drain()
    filled.close()


def test_a_watcher_that_died_is_followed_by_another(
    path: Path, url: str, stillborn: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pmstore.open(path, size="4MiB") as store:
        with monkeypatch.context():
            stillborn("pmstore tiers")
            store.add_tier("t", pmstore.TierConfig(url, every=1))
        monkeypatch.undo()
        store.add_tier("t", pmstore.TierConfig(url, every=1, keep=3))
        store["a"] = 1
        store.commit()
        tiers = store._open_tiers()
        while not tiers._flushers["t"].last:
            time.sleep(0.01)
        store.drain()
    assert pmstore.tiers.epochs(url)
