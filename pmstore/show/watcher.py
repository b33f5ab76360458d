"""A store that is looked at again and again while a program trains in it."""

from __future__ import annotations

import time
from collections import deque
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from pmstore._engine.failures import lock_holders
from pmstore.errors import PmstoreError, SnapshotLostError, StoreLockedError
from pmstore.opening import open as open_store
from pmstore.show.snapshot_of_runs import Gathered, RunState, gather
from pmstore.store import Store

_RATE_SECONDS = 10.0
_TRIES = 3


class Watched:
    """One store that is looked at again and again.

    Attributes:
        told: what it said when it could last be read; None: it could not yet.
        problem: why it cannot be read now; "": it can.
        writers: processes that have it open for writing.
        lived: whether it was open for writing at any look.
        clean: whether the last writer closed it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told: Gathered | None = None
        self.problem: str = ""
        self.writers: list[int] = []
        self.lived: bool = False
        self.clean: bool = True
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def look(self) -> None:
        """Reads the store. Errors of the store and of the system are not raised but kept as
        `problem`: a later look may not meet them."""
        self.writers = lock_holders(str(self.path), writing=True)
        self.lived |= bool(self.writers)
        try:
            with closing(open_store(self.path, "r")) as store:
                self.told = _gathered(store)
                self.clean = store.recovery.clean
            self.problem = ""
        except StoreLockedError as error:  # by a writer that cannot be read beside
            self.problem = error.problem or str(error)
            self.lived = True
            self.writers = self.writers or [error.pid or 0]
        except PmstoreError as error:
            self.problem = error.problem or str(error)
        except OSError as error:
            self.problem = error.strerror or str(error)
        now = time.monotonic()
        for run in self.told.runs if self.told else ():
            self._seen.setdefault(run.name, deque()).append((now, run.step))

    @property
    def live(self) -> bool:
        return bool(self.writers)

    @property
    def bad_news(self) -> bool:
        """Whether the store cannot be read at all, or a process that wrote to it died."""
        unreadable = bool(self.problem) and self.told is None
        return unreadable or (self.lived and not self.live and not self.clean)

    def as_dict(self) -> dict[str, Any]:
        """What JSON has of the look: the runs as `pmstore info` tells them."""
        told = self.told
        runs = [run.as_dict() for run in told.runs] if told else []
        info = told.info if told else None
        return {
            "path": str(self.path),
            "live": self.live,
            "writers": self.writers,
            "died": self.lived and not self.live and not self.clean,
            "problem": self.problem or None,
            "runs": runs,
            "epoch": info.epoch if info else None,
            "used_bytes": info.used_bytes if info else None,
            "file_bytes": info.file_bytes if info else None,
        }

    def rate(self, run: RunState) -> float:
        """Returns the run's steps a second: as the looks saw them, or as the course has them before
        there were enough looks."""
        seen = self._seen[run.name]
        while len(seen) > 2 and seen[-1][0] - seen[0][0] > _RATE_SECONDS:
            seen.popleft()
        (then, first), (now, last) = seen[0], seen[-1]
        if last > first and now > then:
            return (last - first) / (now - then)
        return run.course.rate() if run.course else float("nan")


def _gathered(store: Store) -> Gathered:
    """Gathers what the store tells of the newest commit that can be read whole."""
    for _ in range(_TRIES):
        with suppress(SnapshotLostError):
            return gather(store)
        store.refresh()
    return gather(store)


def resident_bytes(pid: int) -> int | None:
    """Returns the memory of a process in bytes; None if the system does not tell it."""
    try:
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
        return int(fields["VmRSS"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return None
