"""Snapshots and transfers of the engine (native/flush/chunks.h), typed. Every call runs without the
interpreter's lock."""

from __future__ import annotations

import errno
import os
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pmstore._engine._native import ffi as native_ffi
from pmstore._engine._native import lib as native
from pmstore._engine.constants import DOMAINS, PAGE_BYTES
from pmstore._engine.failures import call, fail
from pmstore._engine.pool import Pool
from pmstore.errors import CorruptStoreError

Array = np.ndarray[Any, np.dtype[Any]]

LIVE: int = native.PMS_CHUNK_LIVE
CHANGED: int = native.PMS_CHUNK_CHANGED
SPARED: int = native.PMS_CHUNK_SPARED
"""Position of a chunk that was not written."""
FILLING_BLOCK: int = native.PMS_FILLING_BLOCK
"""Room of a new file in memory is made in blocks of so many bytes."""

_COPY_BYTES = 1 << 20


def _at(array: Array) -> Any:
    return native_ffi.cast("void *", array.__array_interface__["data"][0])


def _as(kind: str, array: Array) -> Any:
    return native_ffi.cast(kind, array.__array_interface__["data"][0])


def checksum(data: Any) -> int:
    """Returns the CRC-32C of bytes-like data."""
    return int(native.pms_checksum(0, native_ffi.from_buffer(data), len(data)))


class Fingerprints:
    """Makes hashes of whole pages by a key of its own (native/base/fingerprint.h). Two different
    contents have the same hash with a chance of at most 2^-126, whoever made them up. The hashes
    mean something in this process alone."""

    __slots__ = ("_key",)

    def __init__(self) -> None:
        self._key = np.frombuffer(os.urandom(8 * native.PMS_FINGERPRINT_KEY), np.uint64)

    def of(self, pages: Array) -> bytes:
        """Returns the hash of the pages. REQUIRES: whole pages, one at least."""
        made = np.empty(native.PMS_FINGERPRINT_WORDS, np.uint64)
        key = _as("uint64_t *", self._key)
        native.pms_fingerprint(key, _at(pages), pages.nbytes, _as("uint64_t *", made))
        return made.tobytes()


class Transfer:
    """Progress, rate limit and cancelling of a transfer, shared by its threads."""

    __slots__ = ("raw",)

    def __init__(self, bytes_per_second: int = 0) -> None:
        self.raw: Any = native_ffi.new(
            "struct pms_transfer *", {"bytes_per_second": bytes_per_second}
        )

    @property
    def bytes_per_second(self) -> int:
        """That are written at most; 0: no limit."""
        return int(self.raw.bytes_per_second)

    @property
    def done_bytes(self) -> int:
        return int(self.raw.done_bytes)

    @property
    def written_bytes(self) -> int:
        """The bytes that were written. They are fewer than those that are done: what a place has
        already is not written."""
        return int(self.raw.done_bytes - self.raw.spared_bytes)

    def add(self, nbytes: int, spared: bool = False) -> None:
        """Counts bytes as done. spared: they need not be written. Only one thread may call it."""
        self.raw.done_bytes += nbytes
        self.raw.spared_bytes += nbytes if spared else 0

    def cancel(self) -> None:
        """Has the threads stop at their next batch."""
        self.raw.cancel = 1

    @property
    def cancelled(self) -> bool:
        return bool(self.raw.cancel)


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """What the engine says of a snapshot: struct pms_snapshot_info.

    Attributes:
        kept_bytes: of pages kept for the store's open snapshots, now.
        waits: commits that had to wait for room, and how long.
    """

    epoch: int
    tag: int
    file_bytes: int
    kept_bytes: int
    peak_bytes: int
    bound_bytes: int
    waits: int
    wait_seconds: float
    super: bytes


def _unpin(pool: Pool, process: int, holder: Any) -> None:
    """Ends the snapshot, if it is this process's: in a fork child it is the parent's. It also runs
    when the last reference goes, in whatever thread."""
    raw, holder[0] = holder[0], native_ffi.NULL
    if raw and os.getpid() == process:
        native.pms_snapshot_end(pool.raw, raw)


class Snapshot:
    """The last commit of a store, pinned until `close`. Opening copies nothing, whatever the size
    of the store."""

    __slots__ = (
        *("__weakref__", "_callers", "_closed", "_holder", "_lock", "_pool"),
        *("epoch", "file_bytes", "super", "tag"),
    )

    def __init__(
        self, pool: Pool, bound_bytes: int = 0, max_wait_seconds: float | None = None
    ) -> None:
        """Pins the last commit. bound_bytes: of pages kept for it; 0: a quarter of the state.
        max_wait_seconds: how long a commit waits at the bound before the snapshot is given up;
        None: for ever.

        Raises: ClosedStoreError, ForkedStoreError, OSError.

        Raises: ClosedStoreError, ForkedStoreError, OSError.
        """
        wait_ns = -1 if max_wait_seconds is None else round(max_wait_seconds * 1e9)
        self._pool = pool
        # taken and given back without memory: a thread that has none ends its call all the same
        self._lock = threading.RLock()
        self._callers: list[tuple[int, int]] = []  # process and thread, once for each call
        self._closed = False
        # It is there before the snapshot: an interrupt between any two bytecodes would leave that
        # pinned, and commits waiting.
        self._holder = native_ffi.gc(
            native_ffi.new("struct pms_snapshot **"), partial(_unpin, pool, os.getpid())
        )
        pool.call(native.pms_snapshot_begin, bound_bytes, wait_ns, self._holder)
        info = self.info()
        self.epoch: int = info.epoch
        self.tag: int = info.tag
        self.file_bytes: int = info.file_bytes
        self.super: bytes = info.super

    def _call(self, function: Any, *arguments: Any) -> None:
        """Calls the engine, such that `close` waits for the call: a transfer that was given up may
        still be somewhere in its thread."""
        caller = os.getpid(), threading.get_ident()
        with self._lock:
            if self._closed:
                raise ValueError("the snapshot is closed")
            self._callers.append(caller)
        try:
            call(self._pool.path, function, self._holder[0], *arguments)
        finally:
            with self._lock:
                self._callers.remove(caller)
                if self.closed:
                    _unpin(self._pool, os.getpid(), self._holder)

    def info(self) -> SnapshotInfo:
        """Returns the snapshot's sizes and counts as they are now. Raises: TransactionError if a
        commit waited too long for room and the snapshot was given up."""
        raw = native_ffi.new("struct pms_snapshot_info *")
        self._call(native.pms_snapshot_info, raw)
        return SnapshotInfo(
            epoch=raw.epoch,
            tag=raw.tag,
            file_bytes=raw.file_bytes,
            kept_bytes=raw.kept_bytes,
            peak_bytes=raw.peak_bytes,
            bound_bytes=raw.bound_bytes,
            waits=raw.waits,
            wait_seconds=raw.wait_ns / 1e9,
            super=bytes(native_ffi.buffer(raw.super)),
        )

    def chunks(self, chunk_bytes: int, since: int) -> Array:
        """Returns a uint8 for each chunk of the file: 0, LIVE, or LIVE | CHANGED since the snapshot
        with that tag. It is called once, before all else."""
        state = np.zeros(-(-self.file_bytes // chunk_bytes), np.uint8)
        self._call(
            native.pms_snapshot_chunks, since, chunk_bytes, _as("uint8_t *", state), len(state)
        )
        return state

    def take(self, offset: int, into: Array) -> None:
        """Copies whole pages from a page's offset on; they may be read again."""
        self._call(native.pms_snapshot_take, offset, into.nbytes, _at(into), 0)

    def give_up(self, offset: int, nbytes: int) -> None:
        """Says that these whole pages are not read again: commits keep no more of them for this
        snapshot."""
        self._call(native.pms_snapshot_give_up, offset, nbytes)

    def peek(self, offset: int, nbytes: int) -> bytes:
        """Returns bytes as of the snapshot, from anywhere; they may be read again."""
        first, last = offset // PAGE_BYTES, -(-(offset + nbytes) // PAGE_BYTES)
        pages = np.empty((last - first) * PAGE_BYTES, np.uint8)
        self._call(native.pms_snapshot_take, first * PAGE_BYTES, pages.nbytes, _at(pages), 0)
        start = offset - first * PAGE_BYTES
        return pages[start : start + nbytes].tobytes()

    def copy(self, offset: int, into: Array) -> None:
        """Copies bytes as of the snapshot, from anywhere, into a uint8 array; they may be read
        again. It copies by way of pages of its own: no store may be written to while another one is
        read."""
        end, at = offset + into.size, offset - offset % PAGE_BYTES
        pages = np.empty(min(_COPY_BYTES, -(-(end - at) // PAGE_BYTES) * PAGE_BYTES), np.uint8)
        while at < end:
            some = pages[: min(pages.size, -(-(end - at) // PAGE_BYTES) * PAGE_BYTES)]
            self._call(native.pms_snapshot_take, at, some.nbytes, _at(some), 0)
            first, last = max(offset - at, 0), min(end - at, some.size)
            into[at + first - offset : at + last - offset] = some[first:last]
            at += some.size

    def write(
        self,
        fd: int,
        chunk_bytes: int,
        chunks: Array,
        position: int,
        transfer: Transfer,
        known: Array | None = None,
    ) -> tuple[Array, Array]:
        """Writes chunks (uint64 indices) from position on, without gaps. known: of each chunk, a
        CRC-32C (int64), or -1; one that has it now is neither written nor given up.

        Returns: the CRC-32C of each (uint32), and its position (uint64), or SPARED.
        """
        crc = np.zeros(len(chunks), np.uint32)
        at = np.arange(len(chunks), dtype=np.uint64) * np.uint64(chunk_bytes) + np.uint64(position)
        null = native_ffi.NULL
        self._call(
            native.pms_snapshot_write,
            fd,
            chunk_bytes,
            _as("uint64_t *", chunks),
            len(chunks),
            position,
            _as("uint32_t *", crc),
            null if known is None else _as("int64_t *", known),
            null if known is None else _as("uint64_t *", at),
            transfer.raw,
        )
        return crc, at

    def close(self) -> None:
        """Unpins the commit. Idempotent. Waits for calls of other threads that are under way. A
        call of this thread, which a signal handler or a finalizer interrupted, unpins when it
        ends."""
        while True:
            with self._lock:
                self._closed = True
                if not self._callers:
                    _unpin(self._pool, os.getpid(), self._holder)
                if not self.busy:
                    return
            time.sleep(0.005)  # this happens rarely: a call of a flush that was given up

    @property
    def closed(self) -> bool:
        return self._closed and not self._callers

    @property
    def busy(self) -> bool:
        """Whether a call of another thread is under way. A fork child has none of those threads."""
        here, own = os.getpid(), threading.get_ident()
        return any(process == here and thread != own for process, thread in self._callers)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reserve(fd: int, nbytes: int, path: str) -> None:
    """Takes room for a file that is about to be written, where the file system can.

    Raises: StoreFullError, OSError.
    """
    call(path, native.pms_transfer_reserve, fd, nbytes)


def sync(fd: int, path: str) -> None:
    """Makes a file's data durable (fdatasync), such that crash tests see it."""
    call(path, native.pms_transfer_sync, fd)


def read_ahead(address: int, nbytes: int) -> None:
    """Reads a mapping's pages that are not in memory, before somebody looks at them one by one."""
    native.pms_transfer_read_ahead(native_ffi.cast("void *", address), nbytes)


class Fill:
    """Fills a new file that lies in memory, through a mapping (native/flush/filling.h). A file that
    lies elsewhere is not mapped."""

    __slots__ = ("raw",)

    def __init__(self, fd: int, nbytes: int, path: str) -> None:
        """Makes the file that long, and maps it if it lies in memory. Raises: StoreFullError,
        OSError."""
        raw = native_ffi.new("struct pms_filling **")
        call(path, native.pms_filling_open, fd, nbytes, raw)
        self.raw: Any = raw[0]

    @property
    def mapped(self) -> bool:
        return bool(self.raw)

    def reserve(
        self, offset: int, nbytes: int, filled: bool, transfer: Transfer, path: str
    ) -> None:
        """Takes room for a range while others fill the file. filled: the range will be filled; the
        memory of other ranges is not touched.

        Raises: StoreFullError, OSError; TransactionError if it was cancelled.
        """
        call(path, native.pms_filling_room, self.raw, offset, nbytes, filled, transfer.raw)

    def close(self) -> None:
        """Ends the mapping. Idempotent. REQUIRES: nobody is filling the file."""
        raw, self.raw = self.raw, native_ffi.NULL
        if raw:
            native.pms_filling_close(raw)


class UnreadableError(OSError):
    """Says that the medium does not give back what was written to it (EIO)."""


def copy_pieces(
    source: int,
    positions: Array,
    target: int,
    fill: Fill,
    offsets: Array,
    crc: Array,
    piece_bytes: int,
    end: int,
    transfer: Transfer,
) -> int | None:
    """Copies pieces between files, and checks each. Returns the index of the first bad one, or
    None. fill: of the target.

    Raises: UnreadableError: of the source; OSError.
    """
    bad = native_ffi.new("uint64_t *")
    error = native_ffi.new("struct pms_error *")
    if status := native.pms_transfer_copy(
        source,
        _as("uint64_t *", positions),
        target,
        fill.raw,
        _as("uint64_t *", offsets),
        _as("uint32_t *", crc),
        len(positions),
        piece_bytes,
        end,
        bad,
        transfer.raw,
        error,
    ):
        if status == native.PMS_E_CORRUPT:
            return int(bad[0])
        what = native_ffi.string(error.what)
        if error.sys_errno == errno.EIO and what.startswith(b"reading"):
            raise UnreadableError(errno.EIO, f"{what.decode()}: {os.strerror(errno.EIO)}")
        fail("", status, error)
    return None


def store_size(head: bytes, path: str) -> int:
    """Returns the bytes of the store whose superblock this is.

    Raises: CorruptStoreError, FormatVersionError.
    """
    if len(head) != PAGE_BYTES:
        raise CorruptStoreError(f"a superblock has {PAGE_BYTES} bytes")
    size = native_ffi.new("uint64_t *")
    call(path, native.pms_restore_begin, head, size)
    return int(size[0])


def store_space(head: bytes) -> list[tuple[int, int]]:
    """Returns the stretches (offset, bytes) of a new store that have their space from the
    beginning: all but most of its logs. REQUIRES: `store_size` took the superblock."""
    stretches = native_ffi.new("struct pms_stretch[]", native.PMS_STRETCHES_MOST)
    count = native.pms_restore_space(head, stretches)
    return [(one.off, one.bytes) for one in stretches[0:count]]


def reserve_store(fd: int, head: bytes, transfer: Transfer, path: str) -> bool:
    """Makes room for `store_space` while others write to the file. Returns False if the file system
    cannot, and nothing was done.

    Raises: StoreFullError, OSError; TransactionError if it was cancelled.
    """
    reserved = native_ffi.new("int *")
    call(path, native.pms_restore_reserve, fd, head, reserved, transfer.raw)
    return bool(reserved[0])


def allocate_store(fd: int, size: int, transfer: Transfer, path: str) -> None:
    """Makes a file of that size, with room for all of it, while nobody writes to it. What was
    written to it stays.

    Raises: StoreFullError, OSError; TransactionError if it was cancelled.
    """
    call(path, native.pms_restore_allocate, fd, size, transfer.raw)


def seal_store(fd: int, head: bytes, domain: str, path: str) -> None:
    """Makes the file a store, with a uuid of its own. Durable on return."""
    call(path, native.pms_restore_seal, fd, head, DOMAINS[domain])


def uuid_of(head: bytes) -> str:
    """Returns the store's uuid as its superblock has it (docs/FORMAT.md)."""
    return head[32:48].hex()


def file_bytes_of(head: bytes) -> int:
    """Returns the bytes of the store's file, as its superblock says."""
    return int.from_bytes(head[56:64], "little")


def write_all(fd: int, data: Any, position: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd, view, position)
        view = view[written:]
        position += written
