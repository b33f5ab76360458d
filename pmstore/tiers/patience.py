"""Waiting for what may never answer: a call of a remote place that hangs cannot be interrupted, but
it can be left alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from pmstore.base.workers import LOOK_SECONDS, Worker
from pmstore.errors import TierError

STALL_SECONDS = 300.0
"""So long a remote place may take for one answer, unless it is said otherwise."""

_Answer = TypeVar("_Answer")


class Patience:
    """Asks on threads of its own, and gives each question up after so many seconds. What is
    answered later is thrown away."""

    def __init__(self, place: str, seconds: float | None) -> None:
        """seconds: None: for ever. Raises: ValueError."""
        if seconds is not None and not seconds > 0:
            raise ValueError(f"stall_seconds={seconds!r}: a number above 0, or None for no limit")
        self._place, self._seconds = place, seconds
        self._ended = threading.Event()

    def ask(self, question: Callable[[], _Answer]) -> _Answer:
        """Any thread, several at once.

        Raises: TierError: no answer, its thread died, or `end` was called; RuntimeError: no thread
            could be started; what question raises.
        """
        answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def find() -> None:
            try:
                answers.put((question(), None))
            except BaseException as error:
                answers.put((None, error))

        asking = Worker("pmstore question", find)
        asking.start()
        began = time.monotonic()
        while True:
            with suppress(Empty):
                dead = not asking.alive  # looked at first: what it answered before is there
                answer, error = answers.get(timeout=LOOK_SECONDS)
                break
            if dead:
                raise TierError(f"{self._place}: the thread that asked died, as for want of memory")
            if self._ended.is_set():
                raise TierError(f"{self._place}: given up")
            if self._seconds is not None and time.monotonic() - began >= self._seconds:
                raise TierError(f"{self._place}: no answer for {self._seconds:g} seconds")
        try:
            if error is not None:
                raise error
            return answer  # type: ignore[no-any-return]
        finally:
            del error  # which refers to this frame

    def end(self) -> None:
        """Whoever waits, or asks from now on, and has no answer yet, gets none."""
        self._ended.set()
