"""What the scheduler keeps in the user's store: its state, and how long runs were."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pmstore.scheduler.hazard import COUNTS
from pmstore.scheduler.loss_fit import LossFit
from pmstore.scheduler.target import Target
from pmstore.scheduler.timer import IterationTimer

if TYPE_CHECKING:
    from pmstore import Store

HUGE = 1e50
"""No loss; its square would overflow."""
_GROUP = "pmstore.scheduler"
_RUNS = 256
_FORMAT = 1.0
_PER_TARGET = 3 + 10
_HEAD = 4 + 4


class Memory:
    """Three arrays in the store, written in place and committed with the user's state.

    `pmstore.scheduler/<run>`: count, then the numbers of `CommitScheduler.state`.
    `pmstore.scheduler/runs of this store`: for each of the last 256 runs (hash of its name, seconds
    of work, whether it reached its end). `pmstore.scheduler/failures`: a copy of
    `HazardModel.counts`, for a store restored from a tier: the history record is not part of what
    is flushed.
    """

    def __init__(self, store: Store, run: str, targets: int) -> None:
        self._store = store
        self._run = run
        self._size = 1 + _HEAD + _PER_TARGET * targets + LossFit.state_size()
        self._key = float(zlib.crc32(run.encode()) + 1)
        self._open()

    def _open(self) -> None:
        self._rollbacks = self._store.rollbacks
        self._state = self._array(self._run, (self._size,))
        self._runs = self._array("runs of this store", (_RUNS, 3))
        self._counts = self._array("failures", (COUNTS,))

    def _array(self, name: str, shape: tuple[int, ...]) -> Any:
        path = f"{_GROUP}/{name}"
        stored = self._store.get(path)
        if stored is not None and (
            not isinstance(stored, np.ndarray)
            or stored.shape != shape
            or stored.dtype != np.float64
        ):
            del self._store[path]  # of another number of targets, or another version
        return self._store.require(path, shape, "float64")

    def read(self) -> list[float] | None:
        if self._rollbacks != self._store.rollbacks:
            self._open()
        count = int(self._state[0])
        return (
            [float(value) for value in self._state[1 : 1 + count]]
            if 0 < count < self._size
            else None
        )

    def write(
        self, state: list[float], work_seconds: float, finished: bool, counts: list[float]
    ) -> None:
        """Pending, until the commit that follows."""
        if self._rollbacks != self._store.rollbacks:
            self._open()
        self._state[1 : 1 + len(state)] = state
        self._state[0] = len(state)
        self._runs[self._row()] = (self._key, work_seconds, finished)
        self._counts[:] = counts

    def counts(self) -> list[float]:
        """Of the hazard model at the last commit; zeros if there was none."""
        return [float(value) for value in self._counts]

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
        """(seconds of work, reached its end) of the other runs in this store."""
        return [
            (float(seconds), bool(done))
            for key, seconds, done in self._runs
            if key not in (0.0, self._key)
        ]


class Remembered(Protocol):
    """What of a scheduler survives."""

    steps: int
    work_seconds: float
    losses_seen: int
    targets: list[Target]
    timer: IterationTimer
    fit: LossFit


def pack(scheduler: Remembered) -> list[float]:
    """What a commit of the user's state has to hold for the scheduler to go on from it."""
    head = [_FORMAT, float(scheduler.steps), scheduler.work_seconds, float(scheduler.losses_seen)]
    targets = [
        value
        for target in scheduler.targets
        for value in (target.work, target.risk, float(target.steps), *target.cost.state())
    ]
    return [*head, *targets, *scheduler.timer.state(), *scheduler.fit.state()]


def unpack(scheduler: Remembered, state: list[float]) -> bool:
    """False, and nothing done: it is of another version.

    Raises: ValueError, OverflowError, IndexError: numbers that `pack` never gives.
    """
    if state[0] != _FORMAT:
        return False
    if not all(-HUGE < value < HUGE for value in state if value == value) or not state[1] >= 0.0:
        raise ValueError("numbers that no scheduler writes")
    scheduler.steps, scheduler.work_seconds = int(state[1]), state[2]
    scheduler.losses_seen = int(state[3])
    at = 4
    for target in scheduler.targets:
        target.work, target.risk, target.steps = state[at], state[at + 1], int(state[at + 2])
        target.cost.restore(state[at + 3 : at + _PER_TARGET])
        at += _PER_TARGET
    scheduler.timer.restore(state[at : at + 4])
    scheduler.fit.restore(state[at + 4 :], scheduler.steps)
    return True
