"""Writes which processes trained a run, and when it was rewound: beside the steps, but not taken
back with them, as it tells of the machine's time and not of the state."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pmstore.course.process import this_process
from pmstore.course.records import LIVES, REWINDS, STARTS

Kept = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], list[Any]]


class Lives:
    """Keeps the `starts`, `lives` and `rewinds` of a run in the process that trains it. It writes
    them again where the store has gone back to a state that lacks them.

    Attributes:
        told: what the life's record has beside what the process is: plain data.
    """

    def __init__(self, store: Any, place: str) -> None:
        info = store._core.pool.info
        self.told: dict[str, Any] = {}
        self._store = store
        self._lives = f"{place}/{LIVES}"
        self._began = (time.time(), os.getpid(), info.opens, info.unclean_opens)
        self._kept: Kept | None = None

    def write(self, array: Callable[[Any], Any], step: int, after: float | None) -> None:
        """Writes what the store lacks; pending until the next commit. array: finds or makes one of
        the course's. step: the newest that was committed when the process began; after: when that
        was."""
        starts, rewinds = array(STARTS), array(REWINDS)
        stored: Any = self._store.get(self._lives)
        if self._kept is None:
            lives = copy.deepcopy(stored) if isinstance(stored, list) else []
            self._kept = np.array(starts), np.array(rewinds), lives
            number = append(self._kept[0], [(step, *self._began)])
            life = {"number": number, "after": after, **this_process(), **self.told}
            lives.append(life)
            del lives[: -len(starts)]
        for ours, theirs in zip(self._kept[:2], (starts, rewinds), strict=True):
            if not np.array_equal(ours, theirs, equal_nan=True):
                theirs[:] = ours
        if stored != self._kept[2]:
            self._store[self._lives] = self._kept[2]

    def rewound(self, before: int, after: int) -> None:
        """Notes that the run went from a step back to an earlier one."""
        if self._kept is not None:
            append(self._kept[1], [(before, after, time.time())])


def append(ring: Any, rows: Iterable[tuple[float, ...]]) -> int:
    """Appends rows to a ring whose rows begin with numbers. Returns the last number."""
    number = int(np.nan_to_num(ring[:, 0]).max())
    for row in rows:
        number += 1
        ring[number % len(ring)] = (number, *row)
    return number
