"""Work on other threads that one waits for, and that has ended before what it works on is taken away."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["Jobs"]

_Result = TypeVar("_Result")


class Jobs:
    """An executor forgets a thread if an interrupt comes while it starts it, and does not wait for any after a second one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._ended = False

    def start(self, work: Callable[..., _Result], *arguments: object) -> Future[_Result]:
        """Raises: RuntimeError: no thread could be started."""
        future: Future[_Result] = Future()

        def run() -> None:
            with self._changed:
                if self._ended:
                    return
                self._running += 1
            try:
                future.set_result(work(*arguments))
            except BaseException as error:
                future.set_exception(error)
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

        threading.Thread(target=run, name="pmstore job", daemon=True).start()
        return future

    def end(self) -> None:
        """No more begin, and those that run have ended on return: tell them to, first. Interrupts come through afterwards."""
        interrupt: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._ended = True
                    while self._running:
                        self._changed.wait()
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
