"""Refuses what a thread must not begin while it is in the middle of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pmstore.errors import TransactionError


class Once:
    """Lets a thread into `with once:` once at a time. A second entry raises: only a signal handler
    or a finalizer comes there. Threads do not keep each other out."""

    def __init__(self) -> None:
        self._inside: set[int] = set()

    @contextmanager
    def entered(self, what: str) -> Iterator[None]:
        """Enters the block for this thread. Raises: TransactionError."""
        thread = threading.get_ident()
        if thread in self._inside:
            raise TransactionError(
                f"{what}: this thread is in the middle of another save, which a signal handler or "
                "a finalizer interrupted: note there that one is wanted, and save at the end of "
                "the step"
            )
        try:
            self._inside.add(thread)
            yield
        finally:
            self._inside.discard(thread)
