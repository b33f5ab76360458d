"""Keeps a scheduler in the user's store: its state, and how long runs were."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pmstore.scheduler._models.cost import STATE as COST
from pmstore.scheduler._models.hazard import COUNTS
from pmstore.scheduler._models.timer import IterationTimer
from pmstore.scheduler._models.worth import HUGE, Worth
from pmstore.scheduler._models.worth import STATE as WORTH
from pmstore.scheduler.target import Target

if TYPE_CHECKING:
    from pmstore import Store

_GROUP = "pmstore.scheduler"
_RUNS = 256
_FORMAT = 2.0
_PER_TARGET = 3 + COST
_HEAD = 3 + 4
_OF_RUNS = ("runs of this store", (_RUNS, 3))
_OF_COUNTS = ("failures", (COUNTS,))


class Memory:
    """Keeps three arrays in the store, written in place and committed with the user's state. The
    first `write` makes them.

    `pmstore.scheduler/<run>`: count, then the numbers of `CommitScheduler.state`.
    `pmstore.scheduler/runs of this store`: for each of the last 256 runs (hash of its name, seconds
    of work, whether it reached its end). `pmstore.scheduler/failures`: a copy of
    `HazardModel.counts`, for a store restored from a tier: the history record is not part of what
    is flushed.
    """

    def __init__(self, store: Store, run: str, targets: int) -> None:
        self._store = store
        self._run = run
        self._size = 1 + _HEAD + _PER_TARGET * targets + WORTH
        self._key = float(zlib.crc32(run.encode()) + 1)
        self._made = -1  # rollbacks of the store, when its arrays were looked up to be written

    def _stored(self, name: str, shape: tuple[int, ...]) -> Any:
        """Returns the array of that name; None if there is none, or it is of another number of
        targets or another version."""
        stored = self._store.get(f"{_GROUP}/{name}")
        fits = (
            isinstance(stored, np.ndarray) and stored.shape == shape and stored.dtype == np.float64
        )
        return stored if fits else None

    def _array(self, name: str, shape: tuple[int, ...]) -> Any:
        path = f"{_GROUP}/{name}"
        if self._stored(name, shape) is None and path in self._store:
            del self._store[path]
        return self._store.require(path, shape, "float64")

    def read(self) -> list[float] | None:
        stored = self._stored(self._run, (self._size,))
        count = 0 if stored is None else int(stored[0])
        return [float(value) for value in stored[1 : 1 + count]] if 0 < count < self._size else None

    def write(
        self, state: list[float], work_seconds: float, finished: bool, counts: list[float]
    ) -> None:
        """Writes the scheduler's numbers; they are pending until the commit that follows."""
        if self._made != self._store.rollbacks:
            self._made = self._store.rollbacks
            self._state = self._array(self._run, (self._size,))
            self._runs = self._array(*_OF_RUNS)
            self._counts = self._array(*_OF_COUNTS)
        self._state[1 : 1 + len(state)] = state
        self._state[0] = len(state)
        self._runs[self._row()] = (self._key, work_seconds, finished)
        self._counts[:] = counts

    def counts(self) -> list[float]:
        """Returns the counts of the hazard model at the last commit; zeros if there was none."""
        stored = self._stored(*_OF_COUNTS)
        return [0.0] * COUNTS if stored is None else [float(value) for value in stored]

    def _row(self) -> int:
        keys = self._runs[:, 0]
        own = np.flatnonzero(keys == self._key)
        if own.size:
            return int(own[0])
        free = np.flatnonzero(keys == 0.0)
        if free.size:
            return int(free[0])
        self._runs[:-1] = self._runs[1:].copy()
        return _RUNS - 1

    def earlier_runs(self) -> list[tuple[float, bool]]:
        """Returns (seconds of work, reached its end) of the other runs in this store."""
        stored = self._stored(*_OF_RUNS)
        return [
            (float(seconds), bool(done))
            for key, seconds, done in (() if stored is None else stored)
            if key not in (0.0, self._key)
        ]


class Remembered(Protocol):
    """Has what of a scheduler survives its process."""

    steps: int
    work_seconds: float
    targets: list[Target]
    timer: IterationTimer
    worth: Worth


def pack(scheduler: Remembered) -> list[float]:
    """Returns the numbers that a commit of the user's state has to hold for the scheduler to go on
    from it."""
    seen, *worth = scheduler.worth.state() or [0.0]
    head = [_FORMAT, float(scheduler.steps), scheduler.work_seconds, seen]
    targets = [
        value
        for target in scheduler.targets
        for value in (target.work, target.risk, float(target.steps), *target.cost.state())
    ]
    return [*head, *targets, *scheduler.timer.state(), *worth]


def unpack(scheduler: Remembered, state: list[float]) -> bool:
    """Takes the scheduler to a packed state. Returns False, and does nothing, if it is of another
    version.

    Raises: ValueError, OverflowError, IndexError: numbers that `pack` never gives.
    """
    if state[0] != _FORMAT:
        return False
    if not all(-HUGE < value < HUGE for value in state if value == value) or not state[1] >= 0.0:
        raise ValueError("numbers that no scheduler writes")
    scheduler.steps, scheduler.work_seconds = int(state[1]), state[2]
    at = 4
    for target in scheduler.targets:
        target.work, target.risk, target.steps = state[at], state[at + 1], int(state[at + 2])
        target.cost.restore(state[at + 3 : at + _PER_TARGET])
        at += _PER_TARGET
    scheduler.timer.restore(state[at : at + 4])
    scheduler.worth.restore([state[3], *state[at + 4 :]], scheduler.steps)
    return True
