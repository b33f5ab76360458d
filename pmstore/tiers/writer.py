"""Flushing one store to one tier: what to write, writing it, publishing the epoch."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from weakref import finalize, ref

import numpy as np

from pmstore.base.workers import Worker
from pmstore.engine.pool import Pool
from pmstore.engine.snapshot import CHANGED, LIVE, Snapshot, SnapshotInfo, Transfer, checksum
from pmstore.errors import PmstoreError, StoreFullError, TierError
from pmstore.objects.array import Array
from pmstore.tiers import sharding
from pmstore.tiers.backend import (
    RANK,
    Access,
    Backend,
    FsspecBackend,
    LocalBackend,
    Lock,
    open_backend,
)
from pmstore.tiers.config import TierConfig
from pmstore.tiers.forgetting import Retention
from pmstore.tiers.handle import Flush, FlushStats
from pmstore.tiers.image import Image
from pmstore.tiers.manifest import CHUNK, Manifest, ManifestName, Shared

__all__ = ["Writer", "start_thread"]

SPACE = 2.0
"""Files may hold so many times the state before chunks of the emptiest ones are written anew."""
FLUSHING, CALLING = "pmstore flush", "pmstore callbacks"
"""Threads of a tier."""
PENDING_MOST = 8
"""Flushes of one tier that may wait for each other; the next call waits for the first of them."""


@dataclass(slots=True)
class _Base:
    """The epoch this process flushed last: what a later one may build on. Only ever this process's
    own, so that no epoch rests on a file that another writer may take away."""

    tag: int
    name: str
    nbytes: int
    """Of the manifest, as it was published."""
    manifest: Manifest

    def intact(self, names: dict[str, int]) -> bool:
        """Nothing may rest on files that somebody took away."""
        return names.get(self.name) == self.nbytes and all(
            names.get(file, -1) >= size for file, size in self.manifest.files
        )


@dataclass(slots=True, eq=False)
class _Job:
    flush: Flush
    snapshot: Snapshot
    transfer: Transfer
    full: bool
    began: float
    blocked: float = 0.0
    replaced: list[ManifestName] | None = None
    """Manifests of the same commit, once the new one is there."""


class Writer:
    """One tier of one open store. Flushes run one after another, on a thread of the writer's."""

    def __init__(self, name: str, config: TierConfig, pool: Pool) -> None:
        self.name, self.config, self.pool = name, config, pool
        private = Access((pool.info.permissions & 0o666) | 0o600)
        access = private if config.mode is None else Access(config.mode, exact=True)
        self.backend: Backend = open_backend(
            config.url.replace(RANK, str(config.rank)), config.storage_options, None, access
        )
        self.session = secrets.token_hex(4)
        self.last: Flush | None = None
        self._base: _Base | None = None
        self._lock: Lock | None = None
        self._count = 0
        # the last one given: a name stands for one manifest, even if somebody empties the tier
        self._generation = 0
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: dict[str, Worker] = {}
        self._closed = threading.Event()
        self._pending: list[_Job] = []
        finalize(self, self._jobs.put, None)
        finalize(self, self._calls.put, None)
        self._retention = Retention(self.backend, config, self._name(0, 0))
        # why old epochs are still there, if nobody has been told
        self._leavings: BaseException | None = None

    # ---- starting ----

    def flush(self, full: bool, progress: Callable[[int, int], object] | None = None) -> Flush:
        """Pins the last commit and returns; the rest happens on a thread. A flush still under way
        goes first.

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
        job = _Job(handle, snapshot, transfer, full, began)
        try:
            self._pending.append(job)
            self.last = handle
            job.blocked = time.perf_counter() - began
            self._jobs.put(partial(self._run, job))
        except BaseException:
            # an interrupt, after the put too: whoever waits for the last flush is to wait for one
            # that ends
            handle.cancel()
            self._jobs.put(partial(self._run, job))
            raise
        return handle

    def _start(self) -> None:
        """The threads are there before they are needed: starting one takes as long as the machine
        is busy."""
        if self._closed.is_set():
            raise TierError(f"tier {self.name!r} is being closed")
        self._start_one(FLUSHING, _work, self._jobs)
        self._start_one(CALLING, _work, self._calls)
        if self.config.stall_seconds is not None and isinstance(self.backend, FsspecBackend):
            self._start_one(
                "pmstore watch", _watch, ref(self), self._closed, self.config.stall_seconds
            )

    def _start_one(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        """Unless it is there: those that could be started before one was refused wait for their
        work. One that died, as for want of memory, is followed by another."""
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
        """The handle is done when the epoch counts; old ones go afterwards, before the next
        flush."""
        if job.flush.over:  # it was put twice, or given up as stalled before its turn
            return
        error: BaseException | None = None
        stats = None
        try:
            stats = self._flush(job)
        except BaseException as raised:
            error = raised
            if isinstance(raised, PmstoreError) and not isinstance(raised, TierError):
                error = self._explain(job.flush, raised)
        finally:
            job.snapshot.close()
            job.flush.finish(error, stats)
            try:
                if job.replaced is not None and self._lock is not None:
                    self._retention.forget(self._lock, job.replaced)
            except (
                Exception
            ) as raised:  # an epoch too many does no harm; the next flush tries again
                self._leavings = raised
            finally:
                job.flush.finish_over()

    def _explain(self, flush: Flush, error: PmstoreError) -> TierError:
        if flush.cancelled:
            made = TierError(f"the flush of epoch {flush.epoch} to {self.name!r} was cancelled")
        elif isinstance(error, StoreFullError):
            made = TierError(
                f"the flush of epoch {flush.epoch} to {self.name!r} failed: no room at "
                f"{self.backend.url}, or a limit was reached. Earlier epochs are as they were: "
                "free space there, or keep fewer epochs (keep=)"
            )
            made.errno = error.errno
        else:
            made = TierError(
                f"the flush of epoch {flush.epoch} to {self.name!r} failed: {error}. If commits "
                "come faster than the tier takes them in: flush less often, or give it more "
                "memory_bytes or max_wait_seconds"
            )
        made.__cause__ = error
        return made

    # ---- one flush ----

    def _flush(self, job: _Job) -> FlushStats:
        flush, snapshot, transfer = job.flush, job.snapshot, job.transfer
        if transfer.cancelled:  # before its turn came
            raise TierError(f"the flush of epoch {flush.epoch} to {self.name!r} was cancelled")
        if self._lock is None:
            self._retention.refuse_another_lineage(self.pool.info.uuid.hex())
            self._lock = self.backend.lock(self._name(0, 0).data_prefix, self.session)
            self._retention.clean(self._lock)
        self._lock.check()
        names = self.backend.names()
        base = None if job.full else self._base
        if base is not None and not base.intact(names):
            base = None
        if base is not None and base.tag == snapshot.tag:
            return _stats(snapshot.info(), job, 0, base.manifest, False)
        manifest, write = self._plan(snapshot, base)
        taken = list(filter(None, map(ManifestName.parse, names)))
        name = self._next_name(flush.epoch, taken)
        flush.total_bytes = len(write) * self.config.chunk_bytes
        chunks = manifest.chunks.copy()
        files = list(manifest.files)
        data = name.chunks_name(self.session, self._count)
        if len(write):
            self._count += 1
            position = np.arange(len(write), dtype=np.uint64) * np.uint64(self.config.chunk_bytes)
            flush.tell()
            crc = self._write(data, snapshot, write, transfer)
            at = np.searchsorted(chunks["index"], write)
            chunks["position"][at], chunks["file"][at], chunks["crc"][at] = (
                position,
                len(files),
                crc,
            )
            files.append((data, len(write) * self.config.chunk_bytes))
        info = snapshot.info()
        snapshot.close()  # commits wait no longer than this
        manifest = replace(manifest, chunks=chunks, files=tuple(files))
        if transfer.cancelled:
            raise TierError(f"the flush of epoch {flush.epoch} to {self.name!r} was cancelled")
        self._lock.check()
        self._retention.published(str(name), manifest)
        packed = manifest.pack()
        self.backend.publish(str(name), packed)
        self._read_back(name, packed, manifest)
        self._base = _Base(snapshot.tag, str(name), len(packed), manifest)
        job.replaced = [found for found in taken if found[1:] == name[1:]]
        return _stats(info, job, flush.total_bytes, manifest, base is None)

    def _read_back(self, name: ManifestName, packed: bytes, manifest: Manifest) -> None:
        """The epoch is as whoever restores will find it; before that, nothing older is let go.

        Raises: TierError, OSError.
        """
        names, epoch = self.backend.names(), name.epoch
        if any(names.get(file, -1) < size for file, size in manifest.files):
            raise TierError(
                f"{self.backend.url}: files of epoch {epoch} disappeared after they were written"
            )
        try:
            found = self.backend.read(str(name)) if str(name) in names else None
        except FileNotFoundError:
            found = None
        if found != packed:
            how = "is not there" if found is None else "is another one"
            raise TierError(
                f"{self.backend.url}: epoch {epoch} was published, and its manifest {how} when it "
                "is read back"
            )

    def _next_name(self, epoch: int, taken: list[ManifestName]) -> ManifestName:
        """Raises: TierError."""
        newest = max(taken, default=None)
        generation = max(self._generation, newest.generation if newest else 0) + 1
        name = self._name(generation, epoch)
        if ManifestName.parse(str(name)) != name:
            raise TierError(
                f"{self.backend.url}: no epoch can follow {str(newest)!r}, whose generation is the "
                "last one there is: remove that file, which no flush wrote"
            )
        self._generation = generation
        return name

    def _name(self, generation: int, epoch: int) -> ManifestName:
        run = self.config.run or self.pool.info.uuid.hex()
        return ManifestName(generation, epoch, run, self.config.rank, self.config.world_size)

    def _plan(self, snapshot: Snapshot, base: _Base | None) -> tuple[Manifest, Array]:
        """The new manifest, with the places of chunks that stay where they are, and the indices of
        those to write."""
        config = self.config
        found = snapshot.chunks(config.chunk_bytes, base.tag if base else 0)
        shared: tuple[Shared, ...] = ()
        borrowed = np.zeros(0, np.uint64)
        if config.world_size > 1 and config.replicated:
            shared = self._shared(snapshot)
            borrowed = sharding.borrowed(
                shared, config.rank, config.world_size, config.chunk_bytes, len(found)
            )
            found[borrowed] = 0
        live = np.flatnonzero(found & LIVE).astype(np.uint64)
        chunks = np.zeros(len(live), CHUNK)
        chunks["index"] = live
        keep = np.zeros(len(live), bool)
        files: list[tuple[str, int]] = []
        if base is not None:
            keep = (found[live] & CHANGED) == 0
            files = self._carry_over(base.manifest, chunks, keep)
        manifest = Manifest(
            epoch=snapshot.epoch,
            run=self._name(0, 0).run,
            rank=config.rank,
            world_size=config.world_size,
            chunk_bytes=config.chunk_bytes,
            head=snapshot.super,
            files=tuple(files),
            chunks=chunks,
            time=time.time(),
            shared=shared,
            borrowed=borrowed,
        )
        return manifest, live[~keep]

    def _carry_over(self, old: Manifest, chunks: Array, keep: Array) -> list[tuple[str, int]]:
        """Takes the places of unchanged chunks over; leaves out the emptiest files while all of
        them are too large. Clears `keep` for what has to be written after all. Returns the files
        that are still named."""
        at = np.searchsorted(old.chunks["index"], chunks["index"])
        at = np.minimum(at, max(len(old.chunks) - 1, 0))
        if not len(old.chunks):
            keep[:] = False
            return []
        keep &= old.chunks["index"][at] == chunks["index"]
        number = old.chunks["file"][at]
        live = np.bincount(number[keep], minlength=len(old.files)) * self.config.chunk_bytes
        sizes = np.array([size for _, size in old.files], np.int64)
        used = live > 0
        state = len(chunks) * self.config.chunk_bytes
        for file in np.argsort(live / np.maximum(sizes, 1)):
            fresh = state - int(live[used].sum())
            if int(sizes[used].sum()) + fresh <= SPACE * state:
                break
            used[file] = False
        keep &= used[number]
        renumbered = np.cumsum(used) - 1
        chunks["file"][keep] = renumbered[number[keep]]
        chunks["position"][keep] = old.chunks["position"][at][keep]
        chunks["crc"][keep] = old.chunks["crc"][at][keep]
        return [one for one, still in zip(old.files, used, strict=True) if still]

    def _shared(self, snapshot: Snapshot) -> tuple[Shared, ...]:
        """Replicated arrays of at least a chunk, in order of name, as of the snapshot."""
        image = Image(snapshot.peek, snapshot.file_bytes)
        found = [
            Shared(one.name, one.offset, one.nbytes)
            for one in image.arrays()
            if one.nbytes >= self.config.chunk_bytes
            and sharding.matches(one.name, self.config.replicated)
        ]
        return tuple(sorted(found))

    # ---- writing chunks ----

    def _write(self, name: str, snapshot: Snapshot, chunks: Array, transfer: Transfer) -> Array:
        if isinstance(self.backend, LocalBackend):
            with self.backend.create(name, len(chunks) * self.config.chunk_bytes) as fd:
                return snapshot.write(fd, self.config.chunk_bytes, chunks, 0, transfer)
        assert isinstance(self.backend, FsspecBackend)
        return self._write_stream(self.backend, name, snapshot, chunks, transfer)

    def _write_stream(
        self,
        backend: FsspecBackend,
        name: str,
        snapshot: Snapshot,
        chunks: Array,
        transfer: Transfer,
    ) -> Array:
        size = self.config.chunk_bytes
        crc = np.zeros(len(chunks), np.uint32)
        buffer = np.empty(size, np.uint8)
        start = time.monotonic()
        with backend.create(name) as file:
            for i, index in enumerate(chunks):
                snapshot.take(int(index) * size, buffer)
                crc[i] = checksum(buffer)
                file.write(buffer.data)
                transfer.raw.done_bytes += size
                while not transfer.cancelled and self.config.max_bytes_per_second:
                    due = start + transfer.done_bytes / self.config.max_bytes_per_second
                    if time.monotonic() >= due:
                        break
                    time.sleep(min(0.05, due - time.monotonic()))
                if transfer.cancelled:
                    raise TierError(f"the flush to {self.name!r} was cancelled")
        return crc

    # ---- ending ----

    def drain(self, timeout: float | None) -> bool:
        """Waits for the last flush, and for what it deletes. False: it is still under way."""
        return self.last is None or self.last.wait_over(timeout)

    def drain_callbacks(self, timeout: float | None) -> bool:
        """Waits until the last flush's callbacks have returned: all of them, as they are called in
        turn. In one: at once."""
        return self.last is None or self.last.wait_called(timeout)

    def warn_untold(self) -> None:
        """A failed flush that nobody was told of, and that nobody will ask for any more."""
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
        """Instead of `drain` and `close`: what is under way is cancelled, and the thread that
        flushes closes after it. Nothing happens if it is closed."""
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
        """After `drain`."""
        self._closed.set()
        self._jobs.put(None)
        self._calls.put(None)
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._lock.release()
            self._lock = None


def start_thread(name: str, target: Callable[..., None], *arguments: object) -> Worker:
    """Raises: TierError: the system refuses one more."""
    worker = Worker(name, target, *arguments)
    try:
        worker.start()
    except RuntimeError as error:
        raise TierError(
            f"no thread could be started for {name!r} ({error}): end some, or raise the limit, and "
            "try again"
        ) from error
    return worker


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    """The thread that flushes, or calls callbacks. It keeps nothing alive while it waits."""
    while True:
        job = jobs.get()
        if job is None:
            return
        job()
        del job


def _watch(writer: ref[Writer], closed: threading.Event, limit: float) -> None:
    """A backend that hangs cannot be interrupted; but the store must not wait for it for ever."""
    state: tuple[_Job | None, int] = (None, 0)
    since = time.monotonic()
    while not closed.wait(min(0.5, limit / 4)):
        alive = writer()
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


def _stats(
    info: SnapshotInfo, job: _Job, written: int, manifest: Manifest, full: bool
) -> FlushStats:
    return FlushStats(
        blocked_seconds=job.blocked,
        seconds=time.perf_counter() - job.began,
        written_bytes=written,
        state_bytes=manifest.state_bytes,
        full=full,
        commit_waits=info.waits,
        commit_wait_seconds=info.wait_seconds,
        peak_kept_bytes=info.peak_bytes,
    )
