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
from pmstore.course.reader import array_of
from pmstore.course.records import LIVES, REWINDS, STARTS, STEPS, Step

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
        self._place = place
        self._began = (time.time(), os.getpid(), info.opens, info.unclean_opens)
        self._kept: Kept | None = None

    def keep(self, step: int) -> Kept:
        """Reads once what the store tells of earlier lives, and adds this one, which went on behind
        a step."""
        if self._kept is None:
            steps, starts, rewinds = (
                array_of(self._store, self._place, what) for what in (STEPS, STARTS, REWINDS)
            )
            after = 0.0 if steps is None else float(np.nan_to_num(steps[:, Step.TIME]).max())
            starts = np.zeros(STARTS[1]) if starts is None else starts
            stored = self._store.get(f"{self._place}/{LIVES}")
            lives = copy.deepcopy(stored) if isinstance(stored, list) else []
            number = append(starts, [(step, *self._began)])
            lives.append({"number": number, "after": after or None, **this_process(), **self.told})
            del lives[: -len(starts)]
            rewinds = np.zeros(REWINDS[1]) if rewinds is None else rewinds
            self._kept = starts, rewinds, lives
        return self._kept

    def write(self, array: Callable[[Any], Any], step: int) -> None:
        """Writes what the store lacks; pending until the next commit. array: finds or makes one of
        the course's. step: as of `keep`."""
        *rings, lives = self.keep(step)
        for ours, what in zip(rings, (STARTS, REWINDS), strict=True):
            theirs = array(what)
            if not np.array_equal(ours, theirs, equal_nan=True):
                theirs[:] = ours
        if self._store.get(f"{self._place}/{LIVES}") != lives:
            self._store[f"{self._place}/{LIVES}"] = lives

    def rewound(self, before: int, after: int) -> None:
        """Notes that the run went from a step back to an earlier one. REQUIRES: `keep` was called
        before it went."""
        assert self._kept is not None
        append(self._kept[1], [(before, after, time.time())])


def append(ring: Any, rows: Iterable[tuple[float, ...]]) -> int:
    """Appends rows to a ring whose rows begin with numbers. Returns the last number."""
    number = int(np.nan_to_num(ring[:, 0]).max())
    for row in rows:
        number += 1
        ring[number % len(ring)] = (number, *row)
    return number
