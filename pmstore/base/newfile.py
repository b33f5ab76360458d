"""A file that comes into being at its path whole and durable, or not at all; its owner's alone,
unless asked otherwise."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PRIVATE = 0o600
"""What the files have that hold a store's content, as the store itself: only their owner reads
them."""


def absent(path: str | os.PathLike[str]) -> Path:
    """The path, where nothing may be.

    Raises: FileExistsError.
    """
    if os.path.lexists(path):
        raise FileExistsError(
            errno.EEXIST, "the file exists: give another path, or remove it first", os.fspath(path)
        )
    return Path(path)


def part_of(target: Path) -> Path:
    """Where the file is made: beside its path, under a name that nobody has."""
    return target.with_name(f".{target.name[:200]}.{os.getpid()}.{secrets.token_hex(4)}.part")


def publish(part: Path, target: Path) -> None:
    """Gives the file, which is durable, its name; the name is durable on return.

    Raises: FileExistsError if somebody else was faster.
    """
    absent(target)
    os.rename(part, target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems have no directories to sync
            raise
    finally:
        os.close(folder)


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str], mode: int = PRIVATE) -> Iterator[BinaryIO]:
    """The file, for writing; it has the path when the block ends without an exception. mode: its
    permissions.

    Raises: FileExistsError if there is something at the path; OSError.
    """
    target = absent(path)
    part = part_of(target)
    try:
        with open(
            str(part), "xb", opener=lambda name, flags: os.open(name, flags, PRIVATE)
        ) as file:
            yield file
        # a library may have put a file of its own in the place of the first
        with open(part, "rb") as whole:
            os.fchmod(whole.fileno(), mode)
            os.fsync(whole.fileno())
        publish(part, target)
    finally:
        part.unlink(missing_ok=True)
