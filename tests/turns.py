"""A test that is marked `alone` runs while no other one does, in none of the processes that
pytest-xdist has: it measures the machine, or how long something takes."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Turns:
    """Locks of one run of the tests. They belong to a process, and no child has them.

    Who comes takes the gate, then the room, to share it or alone. So nobody who waits for the room
    is overtaken for ever."""

    def __init__(self, run: str) -> None:
        self._file = Path(tempfile.gettempdir()) / f"pmstore-turns-{run}"
        self._open = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)

    @contextmanager
    def taken(self, alone: bool) -> Iterator[None]:
        gate, room = 0, 1
        fcntl.lockf(self._open, fcntl.LOCK_EX, 1, gate)
        fcntl.lockf(self._open, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, 1, room)
        fcntl.lockf(self._open, fcntl.LOCK_UN, 1, gate)
        try:
            yield
        finally:
            fcntl.lockf(self._open, fcntl.LOCK_UN, 1, room)

    def close(self) -> None:
        os.close(self._open)
        self._file.unlink(missing_ok=True)
