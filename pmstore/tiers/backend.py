"""Where a tier lies: a local directory, or whatever fsspec reaches. Names are plain: no folders in
a tier."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import io
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote
from weakref import WeakValueDictionary

from pmstore.base.alive import alive
from pmstore.engine import snapshot
from pmstore.errors import TierError
from pmstore.tiers.patience import Patience

__all__ = [
    "Access",
    "Backend",
    "FsspecBackend",
    "LocalBackend",
    "Lock",
    "Places",
    "normal_url",
    "open_backend",
    "open_places",
]


class Lock(Protocol):
    """Held while its owner writes."""

    def check(self) -> None:
        """Raises: TierError if somebody else writes now."""

    def release(self) -> None: ...


class Backend(Protocol):
    """What tiers need of a place. All methods raise OSError, or what the library of that place
    raises."""

    url: str

    def names(self) -> dict[str, int]:
        """Names and sizes of what is there; empty if the place does not exist yet."""

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Raises: FileNotFoundError."""

    def publish(self, name: str, data: bytes) -> None:
        """All of it, durable on return, or nothing."""

    def delete(self, name: str) -> None:
        """Nothing happens if it is not there."""

    def lock(self, prefix: str, session: str) -> Lock:
        """Keeps other writers of the same prefix out.

        Raises: TierError.
        """


def open_backend(
    url: str | os.PathLike[str],
    storage_options: dict[str, Any] | None = None,
    patience: Patience | None = None,
    access: Access | None = None,
) -> LocalBackend | FsspecBackend:
    """A path or file: URL is a local directory; any other URL needs `pip install 'pmstore[tiers]'`.
    patience: with a remote place; None: somebody else looks whether it answers. access: of local
    files that will be written.

    Raises: TierError, ValueError, TypeError.
    """
    text = normal_url(url)
    if text.startswith("/"):
        return LocalBackend(Path(text), access or Access())
    return FsspecBackend(text, storage_options or {}, patience)


def normal_url(url: str | os.PathLike[str]) -> str:
    """As it is remembered: of a local directory its absolute path, so that it means the same when
    the working directory is another one; else the URL.

    Raises: ValueError, TypeError.
    """
    text = os.fspath(url)
    if not isinstance(text, str):
        raise TypeError(f"the URL of a tier is a str or a path of str, not {type(text).__name__}")
    if "\0" in text:
        raise ValueError("a URL has no NUL character")
    scheme, separator, rest = text.partition("://")
    if not separator:
        if re.match(r"(file|s3|gs|gcs|az|abfs|hdfs|https?|memory):", text):
            raise ValueError(
                f"{text!r} is no URL: two slashes follow the colon, as in 's3://bucket/run' or "
                "'file:///mnt/run'"
            )
        path = text
    elif scheme in ("file", "local"):
        host, slash, rest = rest.partition("/")
        if host not in ("", "localhost"):
            raise ValueError(
                f"{text!r} names the host {host!r}: a local directory has three slashes, as in "
                "'file:///mnt/run'"
            )
        path = slash + unquote(rest)
    else:
        return text
    if not path:
        raise ValueError(
            "the URL of a tier is a str, such as 's3://bucket/run' or '/mnt/checkpoints/run'"
        )
    return os.path.join(os.getcwd(), path)


# ---- a place for each rank -----------------------------------------------------------------------

RANK = "{rank}"
"""In a URL: each rank has a place of its own, such as a disk of its node."""


class Places:
    """The places of all ranks, read as one."""

    def __init__(self, url: str, places: list[Backend]) -> None:
        self.url = url
        self._places = places
        self._of: dict[str, Backend] = {}

    def names(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for place in self._places:
            for name, size in place.names().items():
                if name not in found:
                    found[name], self._of[name] = size, place
        return found

    def of(self, name: str) -> Backend:
        """Where a file lies. Raises: FileNotFoundError."""
        if name not in self._of and name not in self.names():
            raise FileNotFoundError(errno.ENOENT, "at no rank's place", name)
        return self._of[name]

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        return self.of(name).read(name, start, end)


def open_places(
    url: str | os.PathLike[str],
    storage_options: dict[str, Any] | None = None,
    patience: Patience | None = None,
) -> Backend | Places:
    """For reading: as `open_backend`, and where the URL has "{rank}" in it, all that are there.

    Raises: TierError, ValueError.
    """
    text = normal_url(url)
    if RANK not in text:
        return open_backend(text, storage_options, patience)
    there = open_backend(text, storage_options, patience)
    name = str(there.path) if isinstance(there, LocalBackend) else there.root
    pieces = name.split(RANK)
    pattern = "*".join(map(glob.escape, pieces))
    found = glob.glob(pattern) if isinstance(there, LocalBackend) else there.find(pattern)
    first, *others = map(re.escape, pieces)
    numbered = re.compile(first + r"([0-9]{1,9})" + r"\1".join(others))
    ranks = {int(match[1]) for one in found if (match := numbered.fullmatch(one))}
    return Places(
        text,
        [
            open_backend(text.replace(RANK, str(rank)), storage_options, patience)
            for rank in sorted(ranks)
        ],
    )


# ---- local directories ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Access:
    """Who may read what is made."""

    mode: int = 0o600
    """Of files."""
    exact: bool = False
    """Whatever the umask, and directories are as open. Else the umask takes from it, and
    directories are the owner's alone."""

    def create(self, path: Path, flags: int) -> int:
        """A file that was not there. Raises: OSError."""
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self.mode)
        try:
            if self.exact:
                os.fchmod(fd, self.mode)
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        return fd

    def make_directory(self, path: Path) -> None:
        """And those above it. Raises: OSError."""
        mode = self.mode | (self.mode & 0o444) >> 2 if self.exact else 0o700
        missing = [one for one in (path, *path.parents) if not one.exists()]
        for one in reversed(missing):
            with contextlib.suppress(FileExistsError):
                one.mkdir(mode)
                if self.exact:
                    one.chmod(mode)


_file_locks: WeakValueDictionary[int, _FileLock] = WeakValueDictionary()


class _FileLock:
    def __init__(self, path: Path, access: Access) -> None:
        """Raises: TierError, OSError."""
        self.place = path.parent
        try:
            # Neither a link that points elsewhere, nor a pipe that waits for somebody.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self.fd = os.open(path, flags, access.mode)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise
            raise TierError(
                f"{path}: the lock of a tier is a file, and this is none: remove it"
            ) from None
        _file_locks[id(self)] = self
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise TierError(f"{path}: the lock of a tier is a file, and this is none: remove it")
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
        """The kernel keeps it, as long as its file has a name."""
        if os.fstat(self.fd).st_nlink == 0:
            raise TierError(
                f"{self.place}: the directory was removed, or emptied, while epochs were written "
                "to it: remove_tier and add_tier make it anew"
            )

    def release(self) -> None:
        """Explicitly: a child forked a moment ago, which has not run yet, has the descriptor
        too."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(self.fd, fcntl.LOCK_UN)
            self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _close_in_child() -> None:
    """A child that outlives its parent must not hold the lock that the parent's successor needs."""
    for lock in alive(_file_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


def _sync_names(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without directories to sync
            raise
    finally:
        os.close(fd)


def open_file(path: Path, flags: int, direct: bool) -> int:
    """Of a file that is there. direct: with O_DIRECT, where the file system can."""
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags | os.O_CLOEXEC)


_RESERVE_LEAST = 16 << 20
"""Bytes. Writes into room that was set aside take half as long again as those that make a file
longer (5 MB on ext4: 3.1 ms, 2.1); large files have it for fewer extents, writes side by side, and
because a full disk shows before they are written."""


class LocalBackend:
    """A directory. Files are written with O_DIRECT where the file system can, and synced before
    they are named."""

    def __init__(self, path: Path, access: Access) -> None:
        self.path, self._access = path, access
        self.url = f"file://{path}"

    def names(self) -> dict[str, int]:
        found: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                # deleted since the directory was read: that one only is not there
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
        return found

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        with open(self.path / name, "rb") as file:
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
        _sync_names(self.path)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / name)

    def lock(self, prefix: str, session: str) -> Lock:
        """Makes the directory, too, and its name durable: whoever made it may have died before
        that."""
        self._access.make_directory(self.path)
        device = self.path.stat().st_dev
        for above in self.path.parents:
            with contextlib.suppress(PermissionError):
                _sync_names(above)
            if above.stat().st_dev != device:
                break
        return _FileLock(self.path / f".{prefix}lock", self._access)

    @contextlib.contextmanager
    def create(self, name: str, nbytes: int) -> Iterator[int]:
        """A new file, with room for nbytes of chunks unless they are few: its descriptor. Synced,
        with its name, on leaving; gone if that fails."""
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
                snapshot.reserve(fd, nbytes, str(path))
            yield fd
            snapshot.sync(fd, str(path))
        except BaseException:
            self.delete(name)
            raise
        finally:
            os.close(fd)
        _sync_names(self.path)

    def open(self, name: str, direct: bool) -> int:
        """direct: whole pages will be read, past the page cache where the file system can."""
        return open_file(self.path / name, os.O_RDONLY, direct)


# ---- everywhere else -----------------------------------------------------------------------------


class _OwnerMark:
    """A mark with the writer's session: who finds another one there has been replaced. Object
    stores have no locks."""

    def __init__(self, backend: FsspecBackend, name: str, session: str) -> None:
        self.backend, self.name, self.session = backend, name, session
        backend.publish(name, session.encode())

    def check(self) -> None:
        try:
            found = self.backend.read(self.name)
        except FileNotFoundError:
            found = b""
        if found != self.session.encode():
            raise TierError(
                f"{self.backend.url}: another writer of this run has taken over (session "
                f"{found[:16]!r}). This one stops; give it another run= or URL"
            )

    def release(self) -> None:
        """The mark stays: the next writer replaces it."""


_Answer = TypeVar("_Answer")


class FsspecBackend:
    """Any URL that fsspec knows. An epoch counts from the moment its manifest is there, which
    object stores put in one piece."""

    def __init__(
        self, url: str, storage_options: dict[str, Any], patience: Patience | None
    ) -> None:
        try:
            import fsspec
        except ImportError:
            raise TierError(
                f"{url}: tiers beyond local directories need fsspec: pip install 'pmstore[tiers]'"
            ) from None
        self.url = url
        self._patience = patience
        try:
            self.fs, self.root = fsspec.core.url_to_fs(url, **storage_options)
        except ImportError as error:
            extra = "s3" if url.startswith("s3") else "tiers"
            raise TierError(
                f"{url}: {error}. pip install 'pmstore[{extra}]' or the library that it names"
            ) from None
        except ValueError as error:
            raise TierError(f"{url}: {error}") from None
        self.root = self.root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        """Libraries of places have errors of their own, which nobody could be told to expect:
        credentials that are missing, hosts that are not there. Some call whatever a service answers
        an EIO, which says nothing of the bytes there."""
        try:
            return question() if self._patience is None else self._patience.ask(question)
        except Exception as error:
            if isinstance(error, OSError) and error.errno != errno.EIO:
                raise
            raise TierError(f"{self.url}: {type(error).__name__}: {error}") from error

    def find(self, pattern: str) -> list[str]:
        """Paths that match."""
        found: list[str] = self._ask(lambda: self.fs.glob(pattern))
        return found

    def names(self) -> dict[str, int]:
        def listing() -> list[dict[str, Any]]:
            self.fs.invalidate_cache()
            listed: list[dict[str, Any]] = self.fs.ls(self.root, detail=True)
            return listed

        try:
            listed = self._ask(listing)
        except FileNotFoundError:
            return {}
        return {
            one["name"].rsplit("/", 1)[-1]: int(one["size"] or 0)
            for one in listed
            if one["type"] == "file"
        }

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        path = self._path(name)

        def reading() -> bytes:
            try:
                data: bytes = self.fs.cat_file(path, start=start or None, end=end)
            except FileNotFoundError:
                raise
            except OSError:
                if end is None or self.fs.size(path) > start:
                    raise
                return b""  # services refuse a range past the end, as all of an empty file is
            return data

        return self._ask(reading)

    def publish(self, name: str, data: bytes) -> None:
        def writing() -> None:
            self.fs.makedirs(self.root, exist_ok=True)
            self.fs.pipe_file(self._path(name), data)

        self._ask(writing)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._ask(lambda: self.fs.rm_file(self._path(name)))

    def lock(self, prefix: str, session: str) -> Lock:
        return _OwnerMark(self, f"{prefix}owner", session)

    def create(self, name: str) -> contextlib.AbstractContextManager[io.BufferedIOBase]:
        """A new file for chunks, written from start to end. An exception on leaving means that it
        may not be there."""
        self.fs.makedirs(self.root, exist_ok=True)
        opened: contextlib.AbstractContextManager[io.BufferedIOBase] = self.fs.open(
            self._path(name), "wb", block_size=8 << 20
        )
        return opened
