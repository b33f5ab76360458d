"""Restoring: makes a store that can be opened of an epoch of a tier."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pmstore._base.newfile import create, sync_names
from pmstore._base.workers import Patience, Tasks, WorkerError
from pmstore._base.workers import progress as telling
from pmstore._engine import snapshot
from pmstore._engine.constants import DOMAINS, ROOT
from pmstore._engine.pool import Pool
from pmstore._engine.snapshot import Fill, Transfer
from pmstore.errors import (
    CorruptStoreError,
    FormatVersionError,
    PmstoreError,
    StoreFullError,
    TierError,
)
from pmstore.objects.array import span
from pmstore.tiers._epochs.content import EpochBytes
from pmstore.tiers._epochs.listing import EpochInfo
from pmstore.tiers._epochs.manifest import Manifest
from pmstore.tiers._places.place import BrokenEpochError, NewStore
from pmstore.tiers._places.url import STALL_SECONDS, open_places
from pmstore.tiers._restore.choose import Wanted, read_first

MAP_MEMORY = True
"""A store in memory is filled through a mapping. Tests that record what is done to a disk, in
memory, say no."""


@dataclass(frozen=True)
class RestoreReport:
    """What was restored. `print` says it in words.

    Attributes:
        skipped: newer epochs that could not be, and what is wrong with each: "corrupt: ..." or
            "missing: ...".
    """

    path: str
    epoch: int
    run: str
    nbytes: int
    skipped: tuple[tuple[int, str], ...]

    def __str__(self) -> str:
        lines = [f"epoch {epoch} passed over, {why}" for epoch, why in self.skipped]
        return "\n".join(
            [*lines, f"epoch {self.epoch} restored to {self.path} ({self.nbytes:,} bytes)"]
        )


def restore(
    path: str | os.PathLike[str],
    url: str | os.PathLike[str],
    epoch: int | None = None,
    *,
    run: str | None = None,
    kept: str | int | None = None,
    rank: int = 0,
    domain: str = "auto",
    storage_options: dict[str, Any] | None = None,
    stall_seconds: float | None = STALL_SECONDS,
    progress: Callable[[int, int], Any] | None = None,
) -> RestoreReport:
    """Makes a store at path of an epoch in a tier: the newest that is whole, or the one asked for.

    Every byte is checked. An epoch that is damaged is passed over for the one before it, and the
    report says why; one that was asked for is not replaced by another. Beside a writer that lets
    epochs go, what is read is held by a lease, and where this process may not write there, the next
    newest is taken. The store is there, whole,
    or not at all, durable on return; it has a uuid of its own, so that what it is trained to and
    flushed does not mix with the run it came from.

    path: where nothing is, or a store to which nothing was ever committed, which is replaced: a
        start of a job that lacks a store leaves one. run: of those in the tier (its beginning will
        do); needed where several have that epoch. kept: the newest that a training run kept under
        this name, or at this step (`run.keep`). rank: whose store. domain: what `pmstore.open` will
        use by default. stall_seconds: a remote place that leaves a request (of 8 MiB or a chunk)
        unanswered for so long is an error, and no reason to take an older epoch; None: waits for
        ever. progress: called with (bytes done, bytes of all), on some thread.

    Raises: TierError: no epoch could be restored, with the reason for each, or the place does not
        answer; FileExistsError; StoreFullError, OSError; ValueError for arguments.
    """
    target = Path(os.path.abspath(os.fspath(path)))
    if domain not in DOMAINS:
        raise ValueError(f"domain={domain!r}: use one of {', '.join(map(repr, DOMAINS))}")
    if not target.parent.is_dir():
        raise FileNotFoundError(
            errno.ENOENT, "there is no such directory: make it first", str(target.parent)
        )
    patience = Patience(stall_seconds)
    place = open_places(url, storage_options, patience)
    with _vacant(target) as publish:
        _clear_leavings(target)

        def read(info: EpochInfo) -> int:
            source = EpochBytes(place, info, rank)
            try:
                return _restore_one(source, target, publish, domain, progress, patience)
            except WorkerError as error:
                raise TierError(f"{place.url}: {error}") from error

        size, info, skipped = read_first(place, Wanted(epoch, run, kept), "restored", read)
    return RestoreReport(str(target), info.epoch, info.run, size, tuple(skipped))


@contextlib.contextmanager
def _vacant(target: Path) -> Iterator[Callable[[Path, Path], None]]:
    """Yields what puts the store there: it fails if somebody made a file there meanwhile, or
    replaces a store to which nothing was ever committed. That is locked until then.

    Raises: FileExistsError: there is something else.
    """
    if not os.path.lexists(target):
        yield _link
        return
    pool = _never_committed(target)
    if pool is None:
        raise FileExistsError(
            errno.EEXIST,
            "restore makes a new store: give a path where nothing is, or remove it first",
            str(target),
        )
    try:
        yield os.replace
    finally:
        pool.handle.close(False, 0.0, lambda: False, lambda: None)


def _never_committed(target: Path) -> Pool | None:
    """Opens a store to which nothing was ever committed, and that nobody has open, locked; None: it
    is something else."""
    if target.is_symlink():
        return None
    with contextlib.suppress(PmstoreError, OSError):
        pool = Pool(str(target), "r", hot=False, ranges=span)
        if pool.epoch() == pool.count(ROOT) == 0:
            return pool
        pool.handle.close(False, 0.0, lambda: False, lambda: None)
    return None


def _link(new: Path, target: Path) -> None:
    os.link(new, target)
    os.unlink(new)


def _clear_leavings(target: Path) -> None:
    """Removes what killed restores left. One that runs holds its file's lock."""
    for old in target.parent.glob(f".{glob.escape(target.name)}.*.restoring"):
        with contextlib.suppress(OSError):
            fd = os.open(old, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(old)
            finally:
                os.close(fd)


def _restore_one(
    source: EpochBytes,
    target: Path,
    publish: Callable[[Path, Path], None],
    domain: str,
    progress: Callable[[int, int], Any] | None,
    patience: Patience,
) -> int:
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.restoring"
    # A file object, which closes its descriptor, and so gives the lock back, wherever an interrupt
    # comes.
    with open(temporary, "x+b", buffering=0, opener=create) as file:
        fd = file.fileno()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                size = source.store_bytes
                _fill(fd, temporary, source, size, str(target), progress, patience)
                snapshot.seal_store(fd, source.manifest.head, domain, str(target))
            except (CorruptStoreError, FormatVersionError) as error:
                raise BrokenEpochError("corrupt", str(error)) from error
            publish(temporary, target)
            with contextlib.suppress(OSError):
                sync_names(target.parent)
            with contextlib.suppress(OSError):
                # explicitly: a child forked meanwhile has the descriptor too
                fcntl.flock(fd, fcntl.LOCK_UN)
            return size
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def _make_room(
    fd: int, fill: Fill, manifest: Manifest, size: int, room: Transfer, path: str
) -> bool:
    """Makes the room that a new store has, beside the copying: an open for writing makes that of
    logs, as far as it needs any. False: it cannot, and nothing was done. In memory what nothing is
    copied to comes first: that may take as long as a disk needs for the rest. Those who copy make
    room for it themselves."""
    if not fill.mapped:
        return snapshot.reserve_store(fd, manifest.head, room, path)
    block, offsets = (
        snapshot.FILLING_BLOCK,
        manifest.chunks["index"].astype(np.int64) * manifest.chunk_bytes,
    )
    ends = np.zeros(
        -(-size // block) + 1, np.int64
    )  # of stretches of blocks that chunks touch: +1 where one begins, -1 after it
    np.add.at(ends, offsets // block, 1)
    np.add.at(ends, (np.minimum(offsets + manifest.chunk_bytes, size) - 1) // block + 1, -1)
    filled = np.cumsum(ends[:-1]) > 0
    space = np.zeros(len(filled), bool)
    for offset, nbytes in snapshot.store_space(manifest.head):
        space[offset // block : (offset + nbytes - 1) // block + 1] = True
    for now in (False, True):
        for number in np.flatnonzero(space & (filled == now)):
            offset = int(number) * block
            fill.reserve(offset, min(block, size - offset), now, room, path)
    return True


def _fill(
    fd: int,
    temporary: Path,
    source: EpochBytes,
    size: int,
    path: str,
    progress: Callable[[int, int], Any] | None,
    patience: Patience,
) -> None:
    """Copies the epoch. Room for the store is made beside that: where the file system zeroes it,
    that takes as long. Where it cannot make any, the C library writes to each block that nobody
    has written to: only afterwards. This thread waits for both: an interrupt finds it at once, and
    ends them."""
    room, transfer, tasks, place = Transfer(), Transfer(), Tasks(), source.place
    with closing(Fill(fd, size if place.maps and MAP_MEMORY else 0, path)) as fill:
        store = NewStore(fd, temporary, size, fill)
        try:
            allocated = tasks.start(_make_room, fd, fill, source.manifest, size, room, path)
            tasks.start(_copy, source, store, transfer, progress).ask()
            _fill_borrowed(fd, source, size)
            if not allocated.ask():
                snapshot.allocate_store(fd, size, room, path)
        except StoreFullError:
            allocated.ask()  # says how much it needs
            raise
        except BaseException as error:
            room.cancel()
            transfer.cancel()
            if not isinstance(error, Exception):  # an interrupt, while threads may wait for answers
                patience.end()
            raise
        finally:
            tasks.end()


def _copy(
    source: EpochBytes,
    store: NewStore,
    transfer: Transfer,
    progress: Callable[[int, int], Any] | None,
) -> None:
    """Copies what this rank flushed."""
    manifest = source.manifest
    files = []
    for number, (name, _) in enumerate(manifest.files):
        part = manifest.chunks[manifest.chunks["file"] == number]
        files.append((name, part[np.argsort(part["position"])]))
    total = len(manifest.chunks) * manifest.chunk_bytes
    with telling(lambda: (transfer.done_bytes, total), progress):
        source.place.copy(files, manifest.chunk_bytes, store, transfer)


def _fill_borrowed(fd: int, source: EpochBytes, size: int) -> None:
    """Writes what other ranks flushed."""
    manifest = source.manifest
    for index in manifest.borrowed:
        data = source.borrowed_chunk(int(index))
        offset = int(index) * manifest.chunk_bytes
        snapshot.write_all(fd, data[: max(0, size - offset)], offset)
