"""Reading what strangers made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pmstore.errors import CorruptStoreError, PmstoreError

__all__ = ["sound"]


@contextlib.contextmanager
def sound(place: str) -> Iterator[None]:
    """Makes what a library raises about a file's bytes our own error. place: the file, and where in it.

    Libraries raise what comes: a decoder's errors are no promise of theirs. What the operating system refuses, and what is
    missing (a package), stays what it is.
    """
    try:
        yield
    except MemoryError as error:
        raise PmstoreError(f"{place}: there is not enough memory for it") from error
    except CorruptStoreError as error:
        raise CorruptStoreError(f"{place}: {error}") from error
    except (PmstoreError, OSError, ImportError):
        raise
    except Exception as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise CorruptStoreError(f"{place}: {kind}{error}") from error
