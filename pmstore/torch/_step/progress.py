"""Where a training run is: in this process, and by the store's last commit."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from pmstore import Store
from pmstore.torch._data.position import Place, Position
from pmstore.torch.lookahead import Lookahead

# Places in the stored array.
_STEP, _DATA_EPOCH, _BATCH, _MIDSTEP = range(4)
_FOUR = struct.Struct("=4q")


class Progress:
    """Where a run is, and the four numbers `<name>/progress` that say so in the store: steps, data
    epoch, batch, and whether the optimizer is in the middle of a step.

    Attributes:
        finished: steps that are finished, committed or not.
        place: in the data.
        lookahead: watches the loop over the data that goes on, if any.
        stale: the store was rolled back, and what Python holds is not yet.
        restored: how often Python followed the store; a loop over the data sees by it.
    """

    def __init__(self, store: Store, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self.finished: int = 0
        self.place: Place = Place()
        self.lookahead: Lookahead | None = None
        self.stale = False
        self.restored: int = 0
        self._store = store
        self._numbers = numbers
        self._raw = numbers.data.cast("B")  # of it: packed in one go
        self._handle = store._core.pool.handle
        self._committed = 0
        self._seen_epoch = store.epoch  # the store's, when _committed was last brought up to date
        self._rollbacks = store.rollbacks  # of the store, that Python has followed

    @classmethod
    def create(cls, store: Store, name: str) -> Progress:
        """Of a new run; pending until the next commit."""
        return cls(store, store.zeros(f"{name}/progress", (4,), "int64"))

    @classmethod
    def open(cls, store: Store, name: str) -> Progress:
        """Of a stored run; `restore` reads it.

        Raises: KeyError, ValueError: it is not as a run was stored.
        """
        numbers = store[f"{name}/progress"]
        if not isinstance(numbers, np.ndarray) or (numbers.shape, numbers.dtype) != (
            (4,),
            np.dtype(np.int64),
        ):
            raise ValueError(f"{name}/progress is not four numbers")
        return cls(store, numbers)

    @property
    def torn(self) -> bool:
        """Whether the store says that a step is under way."""
        return bool(self._numbers[_MIDSTEP])

    @property
    def committed(self) -> int:
        """Steps that the store's last commit holds."""
        self.settle()
        return self._committed

    @property
    def followed(self) -> bool:
        """Whether Python has followed every roll back of the store."""
        core = self._store._core
        return core.pool.rollbacks() + core.moves == self._rollbacks

    def settle(self) -> None:
        """Notices a commit, whoever made it and whatever interrupted what followed: the store says
        what it holds."""
        if self._handle.closed:
            return
        epoch = self._handle.epoch()
        if epoch != self._seen_epoch:
            self._committed = int(self._numbers[_STEP])
            self._seen_epoch = epoch

    def begin_update(self, writes: list[Any]) -> None:
        """Says in the store that a step is under way, and declares what it writes: captured in one
        go, without a fault for each piece."""
        self._store.will_write(self._numbers, *writes)
        self._numbers[_MIDSTEP] = 1

    def end_of_step(self, finished: int) -> None:
        """The place counts the step's batches as trained on. Raises: LookaheadError."""
        if self.lookahead is not None:
            self.lookahead.finish()
        self.place.finish(finished)

    def write(self, finished: int) -> None:
        """Pending until the next commit."""
        done = self.place.done
        _FOUR.pack_into(self._raw, 0, finished, done.data_epoch, done.batch, 0)

    def touch(self) -> None:
        """Something is pending, whatever was: for a roll back that counts."""
        self._numbers[_MIDSTEP] ^= 1

    def restore(self) -> None:
        """Is where the store's last commit was."""
        step, data_epoch, batch, _ = (int(number) for number in self._numbers)
        self.place.restore(Position(data_epoch, batch))
        if self.lookahead is not None:
            self.lookahead.roll_back()
        self.finished = self._committed = step
        self._seen_epoch = self._store.epoch
        self._rollbacks = self._store.rollbacks
        self.restored += 1
