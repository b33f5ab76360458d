"""A tier in a local directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from pmstore._base.newfile import sync_names
from pmstore._base.weak_registry import alive
from pmstore._engine import snapshot
from pmstore._engine.constants import PAGE_BYTES
from pmstore._engine.snapshot import SPARED, Snapshot, Transfer, UnreadableError
from pmstore.errors import StoreFullError, TierError
from pmstore.objects.array import Array
from pmstore.tiers._places.place import BrokenEpochError, Lock, NewFile, NewStore


@dataclass(frozen=True, slots=True)
class Access:
    """Permissions of what is made."""

    mode: int = 0o600
    """Permissions of files."""
    exact: bool = False
    """Whatever the umask, and directories are as open. Else the umask takes from it what others
    may, and directories are the owner's alone."""

    def create(self, path: Path, flags: int) -> int:
        """Makes a file that was not there. Raises: OSError."""
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self.mode)
        try:
            os.fchmod(fd, self.mode if self.exact else _owners(os.fstat(fd)))
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        return fd

    def open(self, path: Path, flags: int) -> int:
        """Opens a file, which may be there: neither a link that points elsewhere, nor a pipe that
        waits for somebody. Raises: OSError."""
        flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path, flags, self.mode)
        status = os.fstat(fd)
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != _owners(status):
            os.fchmod(fd, _owners(status))
        return fd

    def make_directory(self, path: Path) -> None:
        """Makes a directory, and those above it. Raises: OSError."""
        mode = self.mode | (self.mode & 0o444) >> 2 if self.exact else 0o700
        missing = [one for one in (path, *path.parents) if not one.exists()]
        for one in reversed(missing):
            with contextlib.suppress(FileExistsError):
                one.mkdir(mode)
                one.chmod(mode)


def _owners(status: os.stat_result) -> int:
    """The permissions, with those that its owner needs."""
    return stat.S_IMODE(status.st_mode) | 0o600


_file_locks: WeakValueDictionary[int, _FileLock] = WeakValueDictionary()


class _FileLock:
    def __init__(self, path: Path, access: Access) -> None:
        """Takes the lock.

        Raises: TierError, OSError.
        """
        self.place = path.parent
        try:
            self.fd = access.open(path, os.O_RDWR)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise
            raise _no_lock(path) from None
        _file_locks[id(self)] = self
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise _no_lock(path)
        if (
            access.exact
            and status.st_uid == os.geteuid()
            and stat.S_IMODE(status.st_mode) != access.mode
        ):
            os.fchmod(self.fd, access.mode)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise TierError(
                f"{path.parent}: another store or process writes this run's epochs here. Give this "
                "one another run= or URL"
            ) from None

    def check(self) -> None:
        """The kernel keeps the lock, as long as its file has a name."""
        if os.fstat(self.fd).st_nlink == 0:
            raise TierError(
                f"{self.place}: the directory was removed, or emptied, while epochs were written "
                "to it: remove_tier and add_tier make it anew"
            )

    def release(self) -> None:
        """Gives the lock up explicitly: a child forked a moment ago, which has not run yet, has the
        descriptor too."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(self.fd, fcntl.LOCK_UN)
            self.close()

    def close(self) -> None:
        fd, self.fd = self.fd, -1  # before: a child may be forked as soon as it is closed
        if fd >= 0:
            os.close(fd)


def _no_lock(path: Path) -> TierError:
    return TierError(f"{path}: the lock of a tier is a file, and this is none: remove it")


def _close_in_child() -> None:
    """Closes the locks in a child: one that outlives its parent must not hold what the parent's
    successor needs."""
    for lock in alive(_file_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


def open_file(path: Path, flags: int, direct: bool) -> int:
    """A descriptor of a file that is there: neither of what a link leads to, nor of a pipe, which
    waits for somebody. direct: with O_DIRECT, where the file system can."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags)


_RESERVE_LEAST = 16 << 20
"""Bytes. Writes into room that was set aside take half as long again as those that make a file
longer (5 MB on ext4: 3.1 ms, 2.1); large files have it for fewer extents, writes side by side, and
because a full disk shows before they are written."""


_LISTINGS = 5
"""So often a directory is listed whose files go meanwhile."""


class _Listed(Mapping[str, int]):
    """The files of a directory, as names; each size is asked for when somebody wants it."""

    def __init__(self, path: Path, names: set[str]) -> None:
        self._path, self._names = path, names

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> int:
        if name not in self._names:
            raise KeyError(name)
        try:
            return os.stat(self._path / name, follow_symlinks=False).st_size
        except FileNotFoundError:
            return -1


class _File:
    """A file of a directory that native threads write chunks to."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.end: int = 0

    def write(
        self,
        snapshot: Snapshot,
        chunk_bytes: int,
        indices: Array,
        transfer: Transfer,
        known: Array | None = None,
    ) -> tuple[Array, Array]:
        crc, position = snapshot.write(self._fd, chunk_bytes, indices, self.end, transfer, known)
        self.end += int((position != SPARED).sum()) * chunk_bytes
        return crc, position


class LocalPlace:
    """A directory. Files are written with O_DIRECT where the file system can, and synced before
    they are named."""

    def __init__(self, path: Path, access: Access) -> None:
        self.path: Path = path
        self.root: str = str(path)
        self._access = access
        self.url: str = f"file://{path}"
        self.maps: bool = True
        self.may_hang: bool = False

    def of(self, name: str) -> LocalPlace:
        return self

    def find(self, pattern: str) -> list[str]:
        return glob.glob(pattern)

    def names(self) -> dict[str, int]:
        """Looks again if a file went while they were listed: what was written before it went, as
        its epoch published anew, may not have been there yet."""
        for _ in range(_LISTINGS):
            found, gone = self._names()
            if not gone:
                break
        return found

    def _names(self) -> tuple[dict[str, int], bool]:
        found: dict[str, int] = {}
        gone = False
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                try:
                    if entry.is_file(follow_symlinks=False):
                        found[entry.name] = entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    gone = True
        return found, gone

    def listed(self) -> Mapping[str, int]:
        """Lists names alone. The system is asked for a size when somebody wants it: of thousands of
        epochs a flush looks at the files of one."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as entries:
            return _Listed(self.path, {e.name for e in entries if e.is_file(follow_symlinks=False)})
        return {}

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        path = self.path / name
        with os.fdopen(open_file(path, os.O_RDONLY, direct=False), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            # no more than is there, whatever somebody declared
            nbytes = (size if end is None else min(end, size)) - start
            file.seek(start)
            return file.read(max(0, nbytes))

    def publish(self, name: str, data: bytes) -> None:
        temporary = self.path / f".{name}.{secrets.token_hex(4)}.new"
        fd = self._access.create(temporary, os.O_WRONLY)
        try:
            snapshot.write_all(fd, data, 0)
            snapshot.sync(fd, str(temporary))
            os.close(fd)
            fd = -1
            os.rename(temporary, self.path / name)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_names(self.path)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / name)

    def touch(self, name: str) -> None:
        fd = self._access.open(self.path / name, os.O_WRONLY)
        try:
            os.utime(fd)  # by the clock of whoever serves the directory
        finally:
            os.close(fd)

    def modified(self, name: str) -> float | None:
        return os.stat(self.path / name, follow_symlinks=False).st_mtime

    def lock(self, prefix: str, session: str) -> Lock:
        """Takes the lock. Makes the directory, too, and its name durable: whoever made it may have
        died before that."""
        self._access.make_directory(self.path)
        device = self.path.stat().st_dev
        for above in self.path.parents:
            with contextlib.suppress(PermissionError):
                sync_names(above)
            if above.stat().st_dev != device:
                break
        return _FileLock(self.path / f".{prefix}lock", self._access)

    @contextlib.contextmanager
    def create(self, name: str, nbytes: int, fewer: bool) -> Iterator[NewFile]:
        """A new file of chunks, with room for them unless they are few. Synced, with its name, on
        leaving; gone if that fails."""
        path = self.path / name
        try:
            fd = self._access.create(path, os.O_WRONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.delete(name)  # the file may have been made before the flag was refused
            fd = self._access.create(path, os.O_WRONLY)
        try:
            if nbytes >= _RESERVE_LEAST:
                try:
                    snapshot.reserve(fd, nbytes, str(path))
                except StoreFullError:
                    if not fewer:
                        raise
            file = _File(fd)
            yield file
            if fewer:
                os.ftruncate(fd, file.end)  # room that was set aside
            snapshot.sync(fd, str(path))
        except BaseException:
            self.delete(name)
            raise
        finally:
            os.close(fd)
        sync_names(self.path)

    def open(self, name: str, direct: bool) -> int:
        """A descriptor for reading. direct: whole pages will be read, past the page cache where the
        file system can."""
        return open_file(self.path / name, os.O_RDONLY, direct)

    def copy(
        self,
        files: Sequence[tuple[str, Array]],
        chunk_bytes: int,
        store: NewStore,
        transfer: Transfer,
    ) -> None:
        """Native threads copy past the page cache: a tier's files are read once, and a disk takes
        the store in at its own pace. Memory takes it in where it stays."""
        target = open_file(store.path, os.O_WRONLY, direct=True)
        try:
            for name, chunks in files:
                self._copy_file(name, chunks, chunk_bytes, store, target, transfer)
        finally:
            os.close(target)

    def _copy_file(
        self,
        name: str,
        chunks: Array,
        chunk_bytes: int,
        store: NewStore,
        target: int,
        transfer: Transfer,
    ) -> None:
        try:
            opened = self.open(name, direct=not np.any(chunks["position"] % np.uint64(PAGE_BYTES)))
        except FileNotFoundError:
            raise BrokenEpochError("missing", f"file {name}") from None
        try:
            bad = snapshot.copy_pieces(
                opened,
                np.ascontiguousarray(chunks["position"]),
                target,
                store.fill,
                chunks["index"] * np.uint64(chunk_bytes),
                np.ascontiguousarray(chunks["crc"]),
                chunk_bytes,
                store.nbytes,
                transfer,
            )
        except UnreadableError as error:
            raise BrokenEpochError("corrupt", f"file {name} cannot be read: {error}") from error
        finally:
            os.close(opened)
        if bad is not None:
            index = int(chunks["index"][bad])
            raise BrokenEpochError(
                "corrupt", f"chunk {index} in {name}: its checksum is wrong, or it is cut off"
            )
