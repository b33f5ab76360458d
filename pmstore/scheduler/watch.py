"""Notices that come while the program is at something else than a step."""

from __future__ import annotations

import _thread
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from pmstore.scheduler.warned import tell

if TYPE_CHECKING:
    from pmstore.scheduler.preemption import PreemptionGuard  # upward: it is asked to look

_FAILURES = 3  # in a row, that are told
_FIRST_SECONDS, _LONGEST_SECONDS = 0.02, 1.0


class Watch:
    """Of a guard that is entered: a thread asks its source, if that can be asked.

    A thread cannot commit: the main thread may begin a step meanwhile, and half of it would be
    committed. So it sends the main thread a signal that the guard takes (`wake`), whose handler
    runs between two of the program's own instructions.
    """

    def __init__(self, guard: PreemptionGuard, *, told: bool = False) -> None:
        """told: it is known, and was said, that the source does not answer now."""
        self._guard = weakref.ref(guard)
        self._failures = _FAILURES if told else 0  # in a row
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if guard.source.look is not None:
            self._thread = threading.Thread(target=self._ask, name="pmstore-notices", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(10.0)

    def insist(self, settled: Callable[[], bool], wake: Callable[[], bool]) -> None:
        """Wakes the main thread again and again until it is settled. For a signal handler: it takes
        no lock that the interrupted code may hold."""

        def until() -> None:
            seconds = _FIRST_SECONDS
            while not (settled() or self._closed.is_set()):
                time.sleep(seconds)
                seconds = min(2.0 * seconds, _LONGEST_SECONDS)
                if not settled() and not self._closed.is_set() and not wake():
                    return

        _thread.start_new_thread(until, ())

    def _ask(self) -> None:
        while True:
            guard = self._guard()
            if guard is None:
                return
            every = guard.source.every_seconds
            try:
                if guard.look():
                    guard.wake()
                self._failures = 0
            except Exception as error:  # the source can be anything
                self._failures += 1
                if self._failures == _FAILURES:
                    tell(f"a source of notices fails ({guard.source.name}): {error!r}")
            del guard
            if self._closed.wait(every):
                return


def send(number: int) -> None:
    """A signal, to the main thread."""
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, number)
