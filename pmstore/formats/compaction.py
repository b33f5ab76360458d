"""Gives space back: writes a store that has shrunk anew into a file as small as it can be."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pmstore._base.newfile import rename
from pmstore._engine.constants import (
    FILL_COPY,
    FILL_OF_SLOT,
    GROUP,
    LIST,
    MIN_SIZE_BYTES,
    PAGE_BYTES,
    ROOT,
    VALUE,
)
from pmstore._engine.failures import damaged
from pmstore._engine.pool import Pool
from pmstore._engine.store_info import CheckReport
from pmstore.errors import CorruptStoreError, TransactionError
from pmstore.objects.core import Payload
from pmstore.opening import open as open_store
from pmstore.store import Store

_ROOM = ((1.02, 64), (1.1, 256), (1.3, 1024))
"""Tried in turn: a multiple of the bytes in use, and pages on top. What size classes and alignment
cost shows only then."""
_BATCH_BYTES = 64 << 20
_BATCH_ITEMS = 1000


@dataclass(frozen=True)
class Compaction:
    """The outcome of `compact`. Equal sizes: there was nothing to gain, and the file is as it
    was."""

    before_bytes: int
    after_bytes: int

    def __str__(self) -> str:
        if self.after_bytes == self.before_bytes:
            return f"{self.before_bytes:,} bytes, nothing to give back"
        return f"{self.before_bytes:,} bytes, now {self.after_bytes:,}"


def compact(
    path: str | os.PathLike[str],
    *,
    lock_timeout: float | None = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> Compaction:
    """Rewrites a store into a new file without its free space, and puts that in the old one's place
    by one rename.

    A crash at any point leaves the old or the new file at the path, whole; at worst a file
    `.<name>.<pid>.<...>.compact` stays beside it, which can be removed. Needs room for both files.
    Permissions, `max_size` and domain stay; owner, where allowed. The new store is another store to
    its tiers and readers: it has a new uuid, its epochs start again, and a reader opens it anew.

    lock_timeout: as of `pmstore.open`. progress: called with bytes done and bytes in all.

    Raises: what `open` with mode "r+" raises; CorruptStoreError if the store's check finds a
        problem (nothing was changed); TransactionError: the version before the last commit is held;
        StoreFullError, OSError.

    >>> import numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with open_store(f"{folder}/run.pm", size="8MiB") as store:
    ...         store["a"] = np.ones(1000)
    ...     done = compact(f"{folder}/run.pm")
    ...     done.before_bytes > 4 * done.after_bytes
    True
    """
    with open_store(path, "r+", lock_timeout=lock_timeout, hot=False) as old:
        report = old.check()
        if report.problems:
            raise damaged(old.path, f"not compacted, because the check finds: {report.problems[0]}")
        if old.holds:
            raise TransactionError(
                f"{old.path}: the version before the last commit is held, and would be lost: "
                f"pmstore resolve {old.path} --keep, or --back, first"
            )
        real = Path(os.path.realpath(old.path))
        before = old.stats().file_bytes
        for room in _ROOM:
            new_path = real.with_name(
                f".{real.name[:200]}.{os.getpid()}.{secrets.token_hex(4)}.compact"
            )
            try:
                after = _rewrite(old, report, new_path, room, progress)
                if after is not None:
                    if after < before:
                        _replace(real, new_path)
                    return Compaction(before, min(before, after))
            finally:
                new_path.unlink(missing_ok=True)
    raise AssertionError("the last room is always taken")


def _file_bytes_for(data_bytes: int) -> int:
    """Returns the bytes of a file that holds about so many bytes of data: fixed pages, and for each
    data page itself, its log and its entry in the page table."""
    pages = data_bytes // PAGE_BYTES + 1
    return (
        pages * (PAGE_BYTES + PAGE_BYTES + 64 + 3 * 16)
        + 84 * PAGE_BYTES
        + (2 << 20 if pages * PAGE_BYTES >= 32 << 20 else 0)
    )


def _rewrite(
    old: Store,
    was: CheckReport,
    new_path: Path,
    room: tuple[float, int],
    progress: Callable[[int, int], None] | None,
) -> int | None:
    """Writes the new file and returns its bytes. Returns None if the file would have to grow, and
    there is another room to try. Everything is durable on return."""
    info, stats = old._core.pool.info, old.stats()
    size = max(
        MIN_SIZE_BYTES, _file_bytes_for(round(stats.used_bytes * room[0]) + room[1] * PAGE_BYTES)
    )
    with open_store(
        new_path,
        "x",
        size=size,
        max_size=max(size, info.max_bytes) if info.max_bytes else None,
        domain=info.asked_domain,  # type: ignore[arg-type]
        hot=False,
    ) as new:
        begun = new.stats().file_bytes
        for done in _copy(old, new):
            if new.stats().file_bytes > begun and room != _ROOM[-1]:
                return None
            if progress is not None:
                progress(min(done, stats.used_bytes), stats.used_bytes)
        old._hand_over(new)
        now = new.check()
        if now.problems or (was.names, was.groups, was.lists) != (now.names, now.groups, now.lists):
            raise CorruptStoreError(
                f"{old.path}: not compacted, because the copy is not whole: {now}"
            )
        after = new.stats().file_bytes
    if progress is not None:
        progress(stats.used_bytes, stats.used_bytes)
    return after if after == begun or room == _ROOM[-1] else None


def _replace(real: Path, new_path: Path) -> None:
    status = real.stat()
    os.chmod(new_path, status.st_mode & 0o777)
    if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(PermissionError):
            os.chown(new_path, status.st_uid, status.st_gid)
    # The old file's lock is held: who waits for it finds that the path names another file now.
    rename(new_path, real)


# ---- copying, without decoding anything ----------------------------------------------------------


def _copy(old: Store, new: Store) -> Iterator[int]:
    """Yields bytes done after each commit; all is committed at its end."""
    done, pending = 0, 0
    for bytes_ in _copied(old._core.pool, new._core.pool):
        pending += bytes_
        if pending >= _BATCH_BYTES:
            new.commit()
            done, pending = done + pending, 0
            yield done
    new.commit()
    yield done + pending


def _copied(old: Pool, new: Pool) -> Iterator[int]:
    """Copies object after object; yields the bytes of each."""
    directories = [(ROOT, ROOT, FILL_COPY)]
    base = old.info.base
    while directories:
        source, target, fill = directories.pop()
        for name, found in old.scan(source):
            if found.kind == GROUP:
                group = new.group(target, name, create=True)
                assert group is not None
                inside = FILL_COPY
                if found.meta:  # slots
                    new.describe_group(target, name, found.meta)
                    pair = old.slot_find(source, name)
                    assert pair is not None  # the store was checked
                    inside |= 0 if pair.in_place else FILL_OF_SLOT
                directories.append((found.data, group, inside))
            elif found.kind == LIST:
                items = new.open_list(target, name, create=True)
                assert items is not None
                yield from _copied_items(old, found.data, new, items)
            elif found.kind == VALUE:
                new.put_value(target, name, found.meta)
            else:
                new.put_array(
                    target,
                    name,
                    found.meta,
                    found.data_bytes,
                    fill=fill,
                    source=base + found.data,
                    source_bytes=found.data_bytes,
                )
            yield 64 + len(name) + len(found.meta) + found.data_bytes


def _copied_items(old: Pool, source: int, new: Pool, target: int) -> Iterator[int]:
    count = old.list_count(source)
    for first in range(0, count, _BATCH_ITEMS):
        batch = []
        for at in range(first, min(count, first + _BATCH_ITEMS)):
            found = old.item(source, b"", at, True)
            assert found is not None  # the store was checked, and is ours alone
            batch.append(
                Payload(found.kind, found.meta, found.data_bytes, old.info.base + found.data)
            )
        new.splice(target, b"", first, 0, 1, batch)
        yield sum(64 + len(item.meta) + item.data_bytes for item in batch)
