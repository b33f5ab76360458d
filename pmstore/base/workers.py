"""Threads that work is left to, such that nobody waits for one that could not be started, or has
died.

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
from collections.abc import Callable
from weakref import ref

LOOK_SECONDS = 0.05
"""So often one who waits looks whether the worker is alive."""


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

        Raises: RuntimeError: the system refuses one more thread.
        """
        assert self._work is not None, "a worker starts once"
        (target, arguments), self._work = self._work, None
        life = _Life()
        try:
            self._life = ref(life)
            _thread.start_new_thread(_run, (life, self._ended, self.name, target, arguments))
        except RuntimeError:
            self._life = None
            raise
        except MemoryError as error:
            self._life = None
            raise RuntimeError(f"can't start new thread: {error}") from error
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
        except RuntimeError:
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


def wait_for(event: threading.Event, worker: Worker, timeout: float | None) -> bool:
    """Waits for an event that a worker sets. Returns False if it has not been set in that time.

    Raises: RuntimeError: it never will be: the worker was not started, or has ended.
    """
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = LOOK_SECONDS if end is None else min(LOOK_SECONDS, max(0.0, end - time.monotonic()))
        if event.wait(left):
            return True
        if not worker.alive:
            if event.is_set():
                return True
            raise RuntimeError(
                f"the thread {worker.name!r} died before its work was done, as for want of memory"
            )
        if end is not None and time.monotonic() >= end:
            return False
