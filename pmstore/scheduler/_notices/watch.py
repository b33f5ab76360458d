"""Notices that come while the program is at something else than a step."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from pmstore.scheduler.warning import tell

if TYPE_CHECKING:
    from pmstore.scheduler._notices.guard import PreemptionGuard  # upward: it is asked to look

_FAILURES = 3  # in a row, that are told


class Watch:
    """Of a guard that is entered: a thread asks its source, if that can be asked."""

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

    def _ask(self) -> None:
        while True:
            guard = self._guard()
            if guard is None:
                return
            every = guard.source.every_seconds
            try:
                guard.look()
                self._failures = 0
            except Exception as error:  # the source can be anything
                self._failures += 1
                if self._failures == _FAILURES:
                    tell(f"a source of notices fails ({guard.source.name}): {error!r}")
            del guard
            if self._closed.wait(every):
                return
