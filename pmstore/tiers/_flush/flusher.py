"""The flusher: the threads of a tier. It says which flush runs when, who waits for it, and who is
told how it ended."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from weakref import finalize, ref

from pmstore._base.workers import Worker, WorkerError
from pmstore._engine.pool import Pool
from pmstore._engine.snapshot import Snapshot, Transfer
from pmstore.errors import PmstoreError, StoreFullError, TierError
from pmstore.tiers._epochs.kept_epochs import Keeping, KeptEpochs
from pmstore.tiers._flush.epoch_writer import Writer, Written
from pmstore.tiers._flush.flush import Flush, FlushStats, TierState
from pmstore.tiers.config import TierConfig

FLUSHING, CALLING = "pmstore flush", "pmstore callbacks"
"""Threads of a tier."""
PENDING_MOST = 8
"""Flushes of one tier that may wait for each other; the next call waits for the first of them."""


@dataclass(slots=True, eq=False)
class _Job:
    flush: Flush
    snapshot: Snapshot
    transfer: Transfer
    full: bool
    keeping: Keeping | None
    began: float
    blocked: float = 0.0


class Flusher:
    """One tier of one open store. Flushes run one after another, on a thread of their own."""

    def __init__(self, name: str, config: TierConfig, pool: Pool) -> None:
        self.name: str = name
        self.config: TierConfig = config
        self.pool: Pool = pool
        self._writer = Writer(name, config, pool.info)
        self.last: Flush | None = None
        self._durable: Flush | None = None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: dict[str, Worker] = {}
        self._closed = threading.Event()
        self._pending: list[_Job] = []
        finalize(self, self._jobs.put, None)
        finalize(self, self._calls.put, None)
        # why old epochs are still there, if nobody has been told
        self._leavings: BaseException | None = None

    # ---- starting ----

    def flush(
        self,
        full: bool,
        progress: Callable[[int, int], object] | None = None,
        keeping: Keeping | None = None,
    ) -> Flush:
        """Takes a snapshot of the last commit and returns; the rest happens on a thread. A flush
        still under way goes first. keeping: the epoch is to be kept.

        Raises: what the flush before raised, if nobody has been told.
        """
        if self.last is not None and self.last.done:
            self._tell(self.last)
        self._pending = [one for one in self._pending if not one.flush.over]
        if len(self._pending) >= PENDING_MOST:
            self._pending[0].flush.wait_over(None)
        self._start()
        began = time.perf_counter()
        snapshot = Snapshot(self.pool, self.config.memory_bytes, self.config.max_wait_seconds)
        transfer = Transfer(self.config.max_bytes_per_second)
        workers = self._threads[FLUSHING], self._threads[CALLING]
        handle = Flush(
            self.name, snapshot.epoch, transfer, progress, self._calls, workers, snapshot.close
        )
        job = _Job(handle, snapshot, transfer, full, keeping, began)
        try:
            self._pending.append(job)
            job.blocked = time.perf_counter() - began
            self._jobs.put(partial(self._run, job))
            self.last = handle
        except BaseException:
            # an interrupt, after the put too: whoever waits for the last flush is to wait for one
            # that ends
            handle.cancel()
            self._jobs.put(partial(self._run, job))
            self.last = handle  # once it will end
            raise
        return handle

    def _start(self) -> None:
        """Starts the threads before they are needed: starting one takes as long as the machine is
        busy."""
        if self._closed.is_set():
            raise TierError(f"tier {self.name!r} is being closed")
        self._start_one(FLUSHING, _work, self._jobs)
        self._start_one(CALLING, _work, self._calls)
        if self.config.stall_seconds is not None and self._writer.place.may_hang:
            self._start_one(
                "pmstore watch", _watch, ref(self), self._closed, self.config.stall_seconds
            )

    def _start_one(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        """Starts a thread, unless it is there: those that could be started before one was refused
        wait for their work. One that died, as for want of memory, is followed by another."""
        if name not in self._threads or not self._threads[name].alive:
            self._threads[name] = start_thread(name, target, *arguments)

    def _tell(self, last: Flush) -> None:
        self._warn_of_leavings()
        try:
            last.raise_once()
        except OSError as error:
            if self.config.on_error == "raise":
                raise
            warnings.warn(
                f"the flush of epoch {last.epoch} to {self.name!r} failed: {error}", stacklevel=5
            )

    def _run(self, job: _Job) -> None:
        """Runs a flush. The handle is done when the epoch counts; old ones go afterwards, before
        the next flush."""
        if job.flush.over:  # it was put twice, or given up as stalled before its turn
            return
        error: BaseException | None = None
        stats = written = None
        try:
            written = self._writer.write(
                job.flush, job.snapshot, job.transfer, job.full, job.keeping
            )
            stats = _stats(job, written)
        except BaseException as raised:
            error = raised
            if job.keeping is not None:
                self.kept.forget_known()
            if isinstance(raised, PmstoreError) and not isinstance(raised, TierError):
                error = self._explain(job.flush, raised)
        finally:
            job.snapshot.close()
            job.flush.finish(error, stats)
            if error is None:
                self._durable = job.flush
            try:
                if written is not None and job.keeping is not None:
                    self._writer.publisher.push_out(job.keeping)
                if written is not None and written.fresh is not None:
                    self._writer.publisher.forget(written.fresh)
            except Exception as raised:
                self._leavings = (
                    raised  # an epoch too many does no harm; the next flush tries again
                )
            finally:
                job.flush.finish_over()

    def state(self) -> TierState:
        """Says how far its flushes are. Waits for nothing."""
        last, durable = self.last, self._durable
        busy = last if last is not None and not last.done else None
        return TierState(
            name=self.name,
            epoch=durable.epoch if durable is not None else 0,
            seconds=durable.stats.seconds if durable is not None and durable.stats else 0.0,
            under_way=busy.epoch if busy is not None else None,
            share=busy.progress if busy is not None else 1.0,
            failed=last is not None and last.done and last.failed,
        )

    def _explain(self, flush: Flush, error: PmstoreError) -> TierError:
        if flush.cancelled:
            made = TierError(f"the flush of epoch {flush.epoch} to {self.name!r} was cancelled")
        elif isinstance(error, StoreFullError):
            made = TierError(
                f"the flush of epoch {flush.epoch} to {self.name!r} failed: no room at "
                f"{self._writer.place.url}, or a limit was reached. Earlier epochs are as they "
                "were: free space there, or keep fewer epochs (keep=)"
            )
            made.errno = error.errno
        else:
            made = TierError(
                f"the flush of epoch {flush.epoch} to {self.name!r} failed: {error}. If commits "
                "come faster than the tier takes them in: flush less often, or give it more "
                "memory or max_wait_seconds"
            )
        made.__cause__ = error
        return made

    @property
    def kept(self) -> KeptEpochs:
        """The epochs that stay in the tier."""
        return self._writer.publisher.kept

    # ---- ending ----

    def drain(self, timeout: float | None) -> bool:
        """Waits for the last flush, and for what it deletes. False: it is still under way."""
        return self.last is None or self.last.wait_over(timeout)

    def drain_callbacks(self, timeout: float | None) -> bool:
        """Waits until the last flush's callbacks have returned: all of them, as they are called in
        turn. In one: at once."""
        return self.last is None or self.last.wait_called(timeout)

    def warn_untold(self) -> None:
        """Warns of a failed flush that nobody was told of, and that nobody will ask for any
        more."""
        self._warn_of_leavings()
        if self.last is not None and self.last.done and self.last.untold:
            self.last.told = True
            warnings.warn(
                f"the flush of epoch {self.last.epoch} to {self.name!r} failed: {self.last.error}",
                stacklevel=2,
            )

    def _warn_of_leavings(self) -> None:
        error, self._leavings = self._leavings, None
        if error is not None:
            warnings.warn(
                f"old epochs in {self.name!r} could not be deleted ({error}): the next flush tries "
                "again",
                stacklevel=5,
            )

    def abandon(self) -> None:
        """Cancels what is under way, instead of `drain` and `close`; the thread that flushes closes
        after it. Nothing happens if it is closed."""
        if self._closed.is_set():
            self.close()  # which an interrupt may have ended
            return
        self._closed.set()
        for job in self._pending:
            job.flush.cancel()
        if self._threads:
            self._jobs.put(self.close)
        else:
            self.close()

    def close(self) -> None:
        """Ends the threads, and gives the lock up. `drain` comes first."""
        self._closed.set()
        self._jobs.put(None)
        self._calls.put(None)
        self._writer.publisher.release()


def start_thread(name: str, target: Callable[..., None], *arguments: object) -> Worker:
    """Starts a thread.

    Raises: TierError: the system refuses one more.
    """
    worker = Worker(name, target, *arguments)
    try:
        worker.start()
    except WorkerError as error:
        raise TierError(str(error)) from error
    return worker


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    """Does one job after another: the thread that flushes, or calls callbacks. It keeps nothing
    alive while it waits."""
    while True:
        job = jobs.get()
        if job is None:
            return
        job()
        del job


def _watch(flusher: ref[Flusher], closed: threading.Event, limit: float) -> None:
    """Gives a flush up that makes no progress: a call of a place that hangs cannot be interrupted,
    but the store must not wait for it for ever."""
    state: tuple[_Job | None, int] = (None, 0)
    since = time.monotonic()
    while not closed.wait(min(0.5, limit / 4)):
        alive = flusher()
        if alive is None:
            return
        job = next((one for one in alive._pending if not one.flush.over), None)  # whose turn it is
        now = (job, job.transfer.done_bytes if job else 0)
        if now != state:
            state, since = now, time.monotonic()
        elif job is not None and time.monotonic() - since > limit:
            job.transfer.cancel()
            what = (
                f"the flush of epoch {job.flush.epoch} to {alive.name!r} made no progress for "
                f"{limit:g} seconds"
            )
            job.flush.finish(TierError(what), None)
            job.flush.finish_over()
            job.snapshot.close()
        del alive, job, now


def _stats(job: _Job, written: Written) -> FlushStats:
    return FlushStats(
        blocked_seconds=job.blocked,
        seconds=time.perf_counter() - job.began,
        written_bytes=written.nbytes,
        state_bytes=written.state_bytes,
        full=written.full,
        commit_waits=written.info.waits,
        commit_wait_seconds=written.info.wait_seconds,
        peak_kept_bytes=written.info.peak_bytes,
    )
