"""The handle of a flush under way."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from pmstore._base.workers import (
    Progress,
    Worker,
    WorkerError,
    call_back,
    in_callback,
    time_left,
    wait_for,
)
from pmstore._engine.snapshot import Transfer
from pmstore.errors import ForkedStoreError, TierError


@dataclass(frozen=True, slots=True)
class FlushStats:
    """What a flush did.

    Attributes:
        blocked_seconds: for which the caller of `Store.flush` was kept.
        seconds: from there until the epoch counted.
        state_bytes: of the epoch; the rest was in the tier already.
        commit_waits: commits that waited because as much memory was in use as the tier may take,
            and for how long.
    """

    blocked_seconds: float
    seconds: float
    written_bytes: int
    state_bytes: int
    full: bool
    commit_waits: int
    commit_wait_seconds: float
    peak_kept_bytes: int


@dataclass(frozen=True, slots=True)
class TierState:
    """How far the flushes of this process to a tier are.

    Attributes:
        epoch: the newest that counts; 0: none of this process does yet.
        seconds: that its flush took.
        under_way: the epoch that is being flushed, and the share of it that is written; None, 1.0:
            none is.
        failed: the last flush did, and was not cancelled.
    """

    name: str
    epoch: int
    seconds: float
    under_way: int | None
    share: float
    failed: bool


class Flush:
    """A flush under way: `Store.flush` returns it. `wait` says how it ended."""

    def __init__(
        self,
        tier: str,
        epoch: int,
        transfer: Transfer,
        progress: Callable[[int, int], object] | None,
        calls: SimpleQueue[Callable[[], None] | None],
        workers: tuple[Worker, Worker],
        release: Callable[[], None],
    ) -> None:
        """calls: work for the thread that calls callbacks. workers: the thread that flushes, and
        that one. release: gives up what the flush reads."""
        self.tier = tier
        self._calls = calls
        self._worker, self._caller = workers
        self._release = release
        self._process = os.getpid()
        self._progress = progress
        self._telling: Progress | None = None
        self.epoch = epoch
        """The commit that is being flushed."""
        self.error: BaseException | None = None
        self.stats: FlushStats | None = None
        """What it did; None until it is done."""
        self.total_bytes = 0
        """Bytes to look at, of which those are written that are not in the tier; 0 until that is
        known."""
        self.cancelled: bool = False
        """`cancel` was called."""
        self._transfer = transfer
        self._done = threading.Event()
        self._over = threading.Event()
        self._called = threading.Event()
        self.told: bool = False
        """Somebody has seen the error."""
        self._callbacks: list[Callable[[Flush], None]] = []
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        self._look()
        return self._done.is_set()

    @property
    def over(self) -> bool:
        """Whether it is done, and old epochs are deleted, too."""
        self._look()
        return self._over.is_set()

    def _look(self) -> None:
        """Fails it if the thread that flushes has died, as for want of memory: nobody else would. A
        fork child does nothing: the flush is the parent's."""
        if (
            self._process == os.getpid()
            and not self._over.is_set()
            and not self._worker.alive
            and not self._over.is_set()
        ):
            self.finish(
                TierError(
                    f"the flush of epoch {self.epoch} to {self.tier!r} failed: its thread died"
                ),
                None,
            )
            self.finish_over()
            self._release()

    def _wait(self, event: threading.Event, timeout: float | None) -> bool:
        try:
            return wait_for(event, self._worker, timeout)
        except WorkerError:
            self._look()
            return True

    def wait_over(self, timeout: float | None) -> bool:
        """Waits until it is over; False: it is not yet. Raises nothing."""
        return self._wait(self._over, timeout)

    def wait_called(self, timeout: float | None) -> bool:
        """Waits until its callbacks have returned; False: they have not yet. In a callback: at
        once."""
        if in_callback():
            return True
        try:
            return wait_for(self._called, self._caller, timeout)
        except WorkerError:  # that thread died; `threading.excepthook` told of it
            return True

    @property
    def written_bytes(self) -> int:
        return self._transfer.written_bytes

    @property
    def progress(self) -> float:
        """The share that is done, from 0 to 1; 1 when the epoch counts."""
        if self._done.is_set() and self.error is None:
            return 1.0
        return min(self._transfer.done_bytes / self.total_bytes, 0.999) if self.total_bytes else 0.0

    def cancel(self) -> None:
        """Stops it; `wait` then raises TierError. The epoch will not count; earlier ones stay."""
        self.cancelled = True
        self._transfer.cancel()

    def wait(self, timeout: float | None = None) -> Flush:
        """Waits until the epoch is in the tier, durable, and progress was told for the last time.

        Raises: TimeoutError after timeout seconds (it goes on); TierError, OSError: what went
        wrong; ForkedStoreError in a fork child.
        """
        if self._process != os.getpid():
            raise ForkedStoreError(
                "a fork child has none of the threads that flush: the process that opened the "
                "store waits"
            )
        end = None if timeout is None else time.monotonic() + timeout
        if not self._wait(self._done, timeout):
            raise TimeoutError(
                f"the flush of epoch {self.epoch} to {self.tier!r} is at {self.progress:.0%}"
            )
        if self._telling is not None and not in_callback():
            self._telling.join(time_left(end))
        self.raise_once(again=True)
        return self

    def add_done_callback(self, callback: Callable[[Flush], None]) -> None:
        """Calls it with this handle when it ends; at once if it has. It runs on a thread that calls
        the callbacks of the tier's flushes one after another; it may use the store, and drain or
        close it. `Store.drain` waits for it, too."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def raise_once(self, again: bool = False) -> None:
        """Raises the error, if nobody has been told yet."""
        if not (self.error is not None if again else self.untold):
            return
        assert self.error is not None
        self.told = True
        raise self.error

    @property
    def failed(self) -> bool:
        """Whether it failed, and nobody asked for that."""
        return self.error is not None and not self.cancelled

    @property
    def untold(self) -> bool:
        """Whether it failed, and nobody has been told."""
        return self.failed and not self.told

    def tell(self) -> None:
        """Begins to tell progress, until it is finished. The thread that flushes calls this when it
        knows `total_bytes`.

        Raises: WorkerError: no thread could be started.
        """
        with self._lock:
            if self._progress is not None and not self._done.is_set():
                self._telling = Progress(
                    lambda: (self._transfer.done_bytes, self.total_bytes), self._progress
                )

    def finish(self, error: BaseException | None, stats: FlushStats | None) -> None:
        """Ends it: the thread that flushes calls this when the epoch counts, or with the error."""
        if error is not None and not isinstance(error, (TierError, OSError)):
            wrapped = TierError(f"the flush of epoch {self.epoch} to {self.tier!r} failed: {error}")
            wrapped.__cause__ = error
            error = wrapped
        with self._lock:
            if self._done.is_set():  # it was given up as stalled
                return
            self.error, self.stats = error, stats
            if self._telling is not None:
                self._telling.stop()
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        # none, too: those of flushes before it go first
        self._calls.put(partial(self._call, callbacks))

    def _call(self, callbacks: list[Callable[[Flush], None]]) -> None:
        """Calls the callbacks, not on the thread that flushes: a callback may wait for what that
        has still to do."""
        call_back()
        try:
            if self._telling is not None:
                self._telling.join()
            for callback in callbacks:
                try:
                    callback(self)
                except BaseException:  # the thread has other callbacks to call
                    threading.excepthook(
                        threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
                    )
        finally:
            self._called.set()

    def finish_over(self) -> None:
        """Says that old epochs are deleted: the thread that flushes calls this last."""
        self._over.set()

    def __repr__(self) -> str:
        state = f"{self.progress:.0%}" if not self.done else "failed" if self.error else "done"
        return f"<pmstore.Flush of epoch {self.epoch} to {self.tier!r}, {state}>"
