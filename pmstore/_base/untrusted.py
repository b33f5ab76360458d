"""Guards the code that reads what strangers made."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import NoReturn

from pmstore.errors import CorruptStoreError, PmstoreError


def refuse(place: str, error: Exception) -> NoReturn:
    """Raises our own error for what a library raised about a file's bytes. place: the file, and
    where in it.

    Libraries raise what comes: a decoder's errors are no promise of theirs. What the operating
    system refuses, and what is missing (a package), stays what it is.
    """
    if isinstance(error, MemoryError):
        raise PmstoreError(f"{place}: there is not enough memory for it") from error
    if isinstance(error, CorruptStoreError):
        raise CorruptStoreError(f"{place}: {error}") from error
    if isinstance(error, (PmstoreError, ImportError)):
        raise error
    # that is a place in the file before its beginning
    if isinstance(error, OSError) and error.errno != errno.EINVAL:
        raise error
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    raise CorruptStoreError(f"{place}: {kind}{error}") from error


@contextlib.contextmanager
def sound(place: str) -> Iterator[None]:
    """Wraps what reads a file's bytes: see `refuse`."""
    try:
        yield
    except Exception as error:
        refuse(place, error)
