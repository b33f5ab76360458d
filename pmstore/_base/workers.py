"""Threads that work is left to, waiting for them, and telling how far they are: such that nobody
waits for one that could not be started, or has died.

`threading.Thread.start` waits for the new thread to say that it runs. One that finds no memory for
its first frame dies before that, and its starter waits for ever; one that dies later leaves whoever
waits for its work. So a thread is started without waiting here, and carries the only reference to
an object: when that is gone, so is the thread, however it ended. Whoever waits looks for it now and
then.
"""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar
from weakref import ref

LOOK_SECONDS = 0.05
"""So often one who waits looks whether the worker is alive."""
TELL_SECONDS = 0.1
"""So often progress is told."""

_Result = TypeVar("_Result")


class WorkerError(RuntimeError):
    """A thread could not be started, has died, or did not answer in time."""


class _Life:
    """Lives as long as one thread, which alone refers to it."""

    __slots__ = ("__weakref__", "ident")

    def __init__(self) -> None:
        self.ident = 0


class Worker:
    """Runs target(*arguments) once, in a daemon thread. What that raises goes to
    `threading.excepthook`."""

    def __init__(self, name: str, target: Callable[..., object], *arguments: object) -> None:
        self.name = name
        self._work: tuple[Callable[..., object], tuple[object, ...]] | None = (target, arguments)
        self._life: ref[_Life] | None = None
        self._process = os.getpid()
        self._ended = threading.Event()

    def start(self) -> None:
        """Starts the thread; it is called once. An interrupt in it leaves a worker that is alive or
        not, and says which.

        Raises: WorkerError: the system refuses one more thread.
        """
        assert self._work is not None, "a worker starts once"
        (target, arguments), self._work = self._work, None
        life = _Life()
        try:
            self._life = ref(life)
            _thread.start_new_thread(_run, (life, self._ended, self.name, target, arguments))
        except (RuntimeError, MemoryError) as error:
            self._life = None
            raise WorkerError(
                f"no thread could be started for {self.name!r} ({error}): end some, or raise the "
                "limit, and try again"
            ) from error
        finally:
            # otherwise the traceback of an error or interrupt would keep it
            del life

    @property
    def alive(self) -> bool:
        """Whether the thread has been started and has not ended. In a fork child no thread of the
        parent's is alive."""
        return self._life is not None and self._life() is not None and self._process == os.getpid()

    @property
    def current(self) -> bool:
        """Whether the caller is this thread."""
        life = self._life() if self._life is not None else None
        return life is not None and life.ident == _thread.get_ident()

    def join(self, timeout: float | None = None) -> bool:
        """Waits until the thread has ended. Returns False if it has not ended in that time."""
        try:
            return wait_for(self._ended, self, timeout)
        except WorkerError:
            return True


def _run(
    life: _Life,
    ended: threading.Event,
    name: str,
    target: Callable[..., object],
    arguments: tuple[object, ...],
) -> None:
    try:
        life.ident = _thread.get_ident()
        threading.current_thread().name = name
        target(*arguments)
    except BaseException:
        threading.excepthook(
            threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
        )
    finally:
        del life, target, arguments  # a traceback that somebody keeps would keep them
        ended.set()


def wait_for(
    event: threading.Event,
    worker: Worker,
    timeout: float | None,
    given_up: threading.Event | None = None,
) -> bool:
    """Waits for an event that a worker sets. Returns False if it has not been set in that time, or
    somebody gave it up.

    Raises: WorkerError: it never will be: the worker was not started, or has ended.
    """
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = LOOK_SECONDS if end is None else min(LOOK_SECONDS, max(0.0, end - time.monotonic()))
        if event.wait(left):
            return True
        if not worker.alive:
            if event.is_set():
                return True
            raise WorkerError(
                f"the thread {worker.name!r} died before its work was done, as for want of memory"
            )
        if given_up is not None and given_up.is_set():
            return False
        if end is not None and time.monotonic() >= end:
            return False


def time_left(end: float | None) -> float | None:
    """Seconds until `time.monotonic()` reaches end; None: no limit."""
    return None if end is None else max(0.0, end - time.monotonic())


# ---- results -------------------------------------------------------------------------------------


class Task(Worker, Generic[_Result]):
    """A worker whose result somebody asks for. What its work raises is raised there."""

    def __init__(
        self, name: str, given_up: threading.Event, work: Callable[..., _Result], *arguments: object
    ) -> None:
        """given_up: set by somebody who needs no result any more: work that has not begun is not
        done, and nobody waits for it."""
        super().__init__(name, self._keep, work, *arguments)
        self._given_up = given_up
        self._done = threading.Event()
        self._found: list[_Result] = []
        self._error: BaseException | None = None

    def _keep(self, work: Callable[..., _Result], *arguments: object) -> None:
        try:
            if not self._given_up.is_set():
                self._found.append(work(*arguments))
        except BaseException as error:
            self._error = error
        self._done.set()

    def ask(self, seconds: float | None = None) -> _Result:
        """Waits for the result. None: for as long as it takes.

        Raises: what the work raised; WorkerError: its thread died, or nothing was found after so
            many seconds, or before it was given up.
        """
        if not wait_for(self._done, self, seconds, self._given_up):
            if not self._given_up.is_set():
                raise WorkerError(f"no answer for {seconds:g} seconds")
        elif self._error is not None:
            raise self._error
        if not self._found:
            raise WorkerError("given up")
        return self._found[0]


class Tasks:
    """Work on other threads that has ended before what it works on is taken away.

    An executor forgets a thread if an interrupt comes while it starts it, does not wait for any
    after a second one, and waits for ever for one that died.
    """

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._ended = threading.Event()

    def start(self, work: Callable[..., _Result], *arguments: object) -> Task[_Result]:
        """Raises: WorkerError: no thread could be started."""
        task = Task("pmstore job", self._ended, work, *arguments)
        self._workers.append(task)  # first: an interrupt may come when the thread is there
        task.start()
        return task

    def end(self) -> None:
        """Waits until those that run have ended: tell them to, first. No more begin. Interrupts
        come through afterwards."""
        interrupt: BaseException | None = None
        while True:
            try:
                self._ended.set()
                for worker in self._workers:
                    worker.join()
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


class Patience:
    """Asks on threads of its own, and gives each question up after so many seconds: a call that
    hangs cannot be interrupted, but it can be left alone. What is answered later is thrown away."""

    def __init__(self, seconds: float | None) -> None:
        """seconds: None: for ever. Raises: ValueError."""
        if seconds is not None and not seconds > 0:
            raise ValueError(f"stall_seconds={seconds!r}: a number above 0, or None for no limit")
        self._seconds = seconds
        self._ended = threading.Event()

    def ask(self, question: Callable[[], _Result]) -> _Result:
        """Returns the answer. Any thread may ask, several at once.

        Raises: WorkerError: no answer, no thread, or `end` was called; what question raises.
        """
        task = Task("pmstore question", self._ended, question)
        task.start()
        try:
            return task.ask(self._seconds)
        finally:
            del task._error  # whose traceback refers to the task

    def end(self) -> None:
        """Gives up: whoever waits, or asks from now on, and has no answer yet, gets none."""
        self._ended.set()


# ---- progress ------------------------------------------------------------------------------------

_calling = threading.local()


def call_back() -> None:
    """Says that this thread calls somebody's callbacks from now on: it must not wait for callbacks
    to return."""
    _calling.on = True


def in_callback() -> bool:
    """Whether this thread calls somebody's callbacks."""
    return getattr(_calling, "on", False)


class Progress:
    """Tells somebody how far work is, on a thread, every now and then, and once more when it is
    stopped. What waits for a flush in such a call is not waited for by the flush. What such a call
    raises goes to `threading.excepthook`, and ends the calls."""

    def __init__(
        self, how_far: Callable[[], tuple[int, int]], tell: Callable[[int, int], object]
    ) -> None:
        """how_far: (done, of all), asked on that thread. Raises: WorkerError: no thread could be
        started."""
        self._how_far, self._told = how_far, tell
        self._stop = threading.Event()
        self._worker = Worker("pmstore progress", self._tell)
        self._worker.start()

    def _tell(self) -> None:
        call_back()
        while not self._stop.wait(TELL_SECONDS):
            self._told(*self._how_far())
        self._told(*self._how_far())

    def stop(self) -> None:
        """Has it tell for the last time."""
        self._stop.set()

    def join(self, timeout: float | None = None) -> bool:
        """Waits until the last call has returned; False: it has not yet."""
        return self._worker.join(timeout)


@contextmanager
def progress(
    how_far: Callable[[], tuple[int, int]], tell: Callable[[int, int], object] | None
) -> Iterator[None]:
    """Tells how far the block is, as `Progress`; the last call has returned on leaving. tell: None:
    nobody wants to know.

    Raises: WorkerError: no thread could be started.
    """
    if tell is None:
        yield
        return
    telling = Progress(how_far, tell)
    try:
        yield
    finally:
        telling.stop()
        telling.join()
