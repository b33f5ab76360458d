"""Makes files that come into being at their path whole and durable, or not at all. They are their
owner's alone, unless asked otherwise."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PRIVATE = 0o600
"""What the files have that hold a store's content, as the store itself: only their owner reads
them."""


def create(path: str | os.PathLike[str], flags: int, mode: int = PRIVATE) -> int:
    """Makes a file that was not there, and returns its descriptor. The file has exactly these
    permissions, whatever the umask: whoever makes it may have to open it again. Use it as an
    `opener` for `open(..., "x")`.

    Raises: OSError.
    """
    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.fchmod(fd, mode)
    except BaseException:
        os.close(fd)
        os.unlink(path)
        raise
    return fd


def absent(path: str | os.PathLike[str]) -> Path:
    """Returns the path, where nothing may be.

    Raises: FileExistsError.
    """
    if os.path.lexists(path):
        raise FileExistsError(
            errno.EEXIST, "the file exists: give another path, or remove it first", os.fspath(path)
        )
    return Path(path)


@contextlib.contextmanager
def part_of(target: Path, name: str | None = None) -> Iterator[Path]:
    """Yields the path where the file is made: beside its own path, under a name that nobody has.
    The part is gone afterwards if it was not published, and no error names it. name: what its name
    begins with, instead of the target's.

    Raises: FileNotFoundError: there is no such directory.
    """
    if not target.parent.is_dir():
        raise FileNotFoundError(
            errno.ENOENT, "there is no such directory: make it first", str(target.parent)
        )
    begins = (name or target.name)[:200]
    part = target.with_name(f".{begins}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        yield part
    except Exception as error:
        if isinstance(error, OSError) and str(error.filename) == str(part):
            error.filename = str(target)
        if getattr(error, "path", None) == str(part):  # an error of a store names its file so
            error.path = str(target)  # type: ignore[attr-defined]
        error.args = tuple(
            one.replace(str(part), str(target)) if isinstance(one, str) else one
            for one in error.args
        )
        raise
    finally:
        part.unlink(missing_ok=True)


def publish(part: Path, target: Path) -> None:
    """Gives the file, which is durable already, its name. The name is durable on return.

    Raises: FileExistsError if somebody else was faster.
    """
    _rename_new(part, target)
    sync_names(target.parent)


_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


def _rename_new(part: Path, target: Path) -> None:
    """Renames in one step, which fails if there is something at the target."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = errno.ENOSYS
    if hasattr(libc, "renameat2"):
        names = _AT_FDCWD, os.fsencode(part), _AT_FDCWD, os.fsencode(target)
        if libc.renameat2(*names, _RENAME_NOREPLACE) == 0:
            return
        code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code), str(target))
    os.link(part, target)  # the file system does not know the flag
    os.unlink(part)


def rename(part: Path, target: Path) -> None:
    """Gives the file its name as `publish` does, and replaces what was at the path."""
    os.replace(part, target)
    sync_names(target.parent)


def sync_names(directory: Path) -> None:
    """Makes the names in a directory durable."""
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems have no directories to sync
            raise
    finally:
        os.close(folder)


def write_over(path: str | os.PathLike[str], content: bytes, mode: int = PRIVATE) -> None:
    """Writes a file, and replaces what was at the path by one rename. mode: permissions of the
    file.

    Raises: OSError, and then it is as it was; FileExistsError: what is there is no plain file.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        absent(target)
    with part_of(target) as part:
        with open(str(part), "xb", opener=create) as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
        os.replace(part, target)


@contextlib.contextmanager
def new_file(
    path: str | os.PathLike[str], mode: int = PRIVATE, *, part_name: str | None = None
) -> Iterator[BinaryIO]:
    """Opens a new file for writing. It has the path when the block ends without an exception. mode:
    its permissions. part_name: what it is called until then, where somebody looks for files by
    their names.

    Raises: FileExistsError if there is something at the path; OSError.
    """
    target = absent(path)
    with part_of(target, part_name) as part:
        with open(str(part), "xb", opener=create) as file:
            yield file
        # a library may have put a file of its own in the place of the first
        with open(part, "rb") as whole:
            os.fchmod(whole.fileno(), mode)
            os.fsync(whole.fileno())
        publish(part, target)
