"""Says how far long work is, while it goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pmstore.base.workers import Worker

_EVERY_SECONDS = 0.2


@contextmanager
def telling(
    how_far: Callable[[], tuple[int, int]], progress: Callable[[int, int], object] | None
) -> Iterator[None]:
    """Wraps long work. Meanwhile a thread calls progress with what how_far returns, again and
    again, and a last time before the block is left. What progress raises goes to
    `threading.excepthook`, and ends the calls. If progress is None, nothing is done."""
    if progress is None:
        yield
        return
    over = threading.Event()

    def tell() -> None:
        while not over.wait(_EVERY_SECONDS):
            progress(*how_far())
        progress(*how_far())

    worker = Worker("pmstore-progress", tell)
    worker.start()
    try:
        yield
    finally:
        over.set()
        worker.join()
