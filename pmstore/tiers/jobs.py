"""Work on other threads that one waits for, and that has ended before what it works on is taken
away."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from pmstore.base.workers import Worker, wait_for
from pmstore.errors import TierError

_Result = TypeVar("_Result")


class Job(Generic[_Result]):
    """Work that was started."""

    def __init__(self) -> None:
        self.worker: Worker
        self._done = threading.Event()
        self._found: list[_Result] = []
        self._error: BaseException | None = None

    def run(
        self, ended: Callable[[], bool], work: Callable[..., _Result], *arguments: object
    ) -> None:
        """On its thread."""
        try:
            if not ended():
                self._found.append(work(*arguments))
        except BaseException as error:
            self._error = error
        self._done.set()

    def error(self) -> BaseException | None:
        """Waits. What the work raised; or that its thread died."""
        try:
            wait_for(self._done, self.worker, None)
        except RuntimeError as died:
            return TierError(f"given up: {died}")
        return self._error

    def result(self) -> _Result:
        """Waits. Raises: what the work raised; TierError: its thread died."""
        error = self.error()
        if error is None and not self._found:
            error = TierError("given up before it began")
        if error is not None:
            raise error
        return self._found[0]


class Jobs:
    """An executor forgets a thread if an interrupt comes while it starts it, does not wait for any
    after a second one, and waits for ever for one that died."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._ended = False

    def start(self, work: Callable[..., _Result], *arguments: object) -> Job[_Result]:
        """Raises: TierError: no thread could be started."""
        job: Job[_Result] = Job()
        job.worker = Worker("pmstore job", job.run, lambda: self._ended, work, *arguments)
        self._workers.append(job.worker)  # first: an interrupt may come when the thread is there
        try:
            job.worker.start()
        except RuntimeError as error:
            raise TierError(
                f"no thread could be started ({error}): end some, or raise the limit, and try again"
            ) from error
        return job

    def end(self) -> None:
        """No more begin, and those that run have ended on return: tell them to, first. Interrupts
        come through afterwards."""
        interrupt: BaseException | None = None
        while True:
            try:
                self._ended = True
                for worker in self._workers:
                    worker.join()
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
