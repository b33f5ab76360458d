"""`StoreWriter`: torch.distributed.checkpoint writes into stores."""

from __future__ import annotations

import operator
import os
import threading
import uuid
import warnings
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from pmstore._base.weak_registry import alive
from pmstore._engine.constants import DOMAINS
from pmstore.dcp._format import folder_layout
from pmstore.dcp._write.publication import forget_ranks, publish
from pmstore.dcp._write.rank_store import RankStore
from pmstore.dcp._write.reentrancy import Once
from pmstore.dcp._write.staging import PROCESS, Memory, Staging
from pmstore.errors import TransactionError
from pmstore.opening import Domain

TESTED_TORCH = (2, 6)
"""The oldest torch that this was tried with."""
_warned: list[str] = []
_stagings: WeakValueDictionary[str, Staging] = WeakValueDictionary()
"""What was staged last, by the folder."""
_writers: WeakValueDictionary[int, StoreWriter] = WeakValueDictionary()
_INSTEAD = "give a folder that all ranks see"


class _Told:
    """Remembers what a thread was told of the save that it does: the folder, from `reset`."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.save_id = uuid.uuid4().hex


@dataclass
class _Save:
    """One save, from `set_up_storage_writer` to its end, in the thread that does it."""

    told: _Told
    together: bool
    store: RankStore


class StoreWriter(StorageWriter, AsyncStager):
    """Writes checkpoints of `torch.distributed.checkpoint` into stores: each save is there as a
    whole or not at all, at all ranks.

        writer = StoreWriter("checkpoints", keep=2)
        dcp.save(state_dict, checkpoint_id="checkpoints", storage_writer=writer)
        future = dcp.async_save(state_dict, checkpoint_id="checkpoints", storage_writer=writer)

    folder: that all ranks see. A checkpoint_id that is given to `save` or `async_save` is another
        folder, from then on.
    keep: checkpoints that stay in the folder; a save deletes older ones when it is published. While
        a save goes on there is room for up to keep + 2 of them.
    domain: of the stores (see `pmstore.open`).

    When `save` returns, and when the future of `async_save` has a result, the checkpoint is durable
    as far as the domain goes. `async_save` returns when no write to the tensors can reach the
    checkpoint any more: they are copied. Tensors of a run that is attached in
    this process are not copied meanwhile, where they are what the run last committed; closing the
    run's store waits until they are. One save of a folder goes on at a time: a further one waits
    for it.

    A writer has its rank's store open as long as it lives: other processes cannot write to it. In a
    fork child it is as a new one: saves of the parent are the parent's, and so is its store.

    Raises: ValueError, TypeError: keep, domain or folder are none.
    """

    _synchronize_after_execute = False  # stage returns when all is staged

    def __init__(
        self, folder: str | os.PathLike[str], keep: int = 2, domain: Domain = "auto"
    ) -> None:
        super().__init__()
        place = folder_layout.path_of(folder, _INSTEAD)
        if isinstance(keep, bool) or operator.index(keep) < 1:
            raise ValueError(f"keep={keep}: at least 1, the checkpoint that is saved last")
        if domain not in DOMAINS:
            raise ValueError(f"domain={domain!r}: use one of {', '.join(map(repr, DOMAINS))}")
        self.checkpoint_id: str = place
        self.keep: int = operator.index(keep)
        self.domain: Domain = domain
        self._begin()
        _writers[id(self)] = self
        _warn_of_old_torch()

    def _begin(self) -> None:
        """Makes what belongs to one process: a writer in a fork child was never used."""
        self._store: RankStore | None = None  # kept open
        self._local = threading.local()
        self._memory = Memory()  # of what `stage` copies
        self._staging: Staging | None = None
        self._once = Once()
        self._one_stages = threading.Lock()  # it has the memory
        self._used = False

    # ---- the contract, in the order in which torch calls it ----

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies tensors, so that later writes to them do not reach the checkpoint. `async_save`
        calls it before all else. It waits for the save before.

        Raises: TypeError: a tensor that cannot be saved, by its name; TransactionError: a signal
            handler calls it in the middle of another save.
        """
        with self._once.entered(self.checkpoint_id), self._one_stages:
            before = self._staging
            if before is not None and not before.wait():
                self._memory = Memory()  # somebody may still read what is in the other one
            self._wait(self.checkpoint_id)
            self._staging = staging = Staging(self._memory)
            _stagings[os.path.realpath(self.checkpoint_id)] = staging
            return staging.stage(state_dict)

    def synchronize_staging(self) -> None:
        """Does nothing: `stage` returns when all is staged."""

    def _wait(self, folder: str) -> None:
        """Waits for the staged save before: of this writer, and the last one to that folder."""
        mine = self._staging
        if mine is not None and not mine.is_of_this_thread():
            mine.wait()
            mine = None
        there = _stagings.get(os.path.realpath(folder))
        if there is not None and (mine is None or there.number < mine.number):
            there.wait()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new save. checkpoint_id: its folder; None: the folder of the save before."""
        if checkpoint_id is not None:
            try:
                self.checkpoint_id = folder_layout.path_of(checkpoint_id, _INSTEAD)
            except (TypeError, ValueError):
                if self._staging is not None:
                    self._staging.begin()  # the next one waits for the end of this thread
                raise
        self._local.told = _Told(self.checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        told = self._told()
        return StorageMeta(checkpoint_id=told.folder, save_id=told.save_id)

    def _told(self) -> _Told:
        """Returns what this thread was told of its save. Raises: TransactionError: the writer was
        used before, and not told of a new save."""
        told: _Told | None = getattr(self._local, "told", None)
        if told is None:
            if self._used:
                raise TransactionError(
                    "this StoreWriter was used for a save already: torch tells it of a new one by "
                    "checkpoint_id alone. Give the folder to save or async_save, checkpoint_id="
                    f"{self.checkpoint_id!r}; or make a new StoreWriter"
                )
            told = self._local.told = _Told(self.checkpoint_id)
        return told

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Opens the rank's store, and waits for the save before. Raises: TransactionError: the
        writer was used before, and not told of a new save; StoreLockedError: another process writes
        to the rank's store; as `pmstore.open`."""
        told, rank = self._told(), kwargs.get("rank")
        self._wait(told.folder)
        store = self._store = RankStore.of(
            told.folder, _rank() if rank is None else rank, self.domain
        )
        self._local.save = _Save(told, kwargs.get("use_collectives", True), store)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes and commits the rank's part. Returns when it is durable.

        Raises: TypeError: what cannot be saved, by its name; as `Store.commit`.
        """
        save: _Save = self._local.save
        self._used, self._local.told = True, None  # the writer has to be told of the next save
        if self._staging is not None and self._staging.is_of_this_thread():
            self._staging.require()
        done: Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(save.store.write(plan.items, planner) if plan.items else [])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes the checkpoint. The coordinator calls it when all ranks have written their
        parts. It is durable on return."""
        save: _Save = self._local.save
        rank = None if save.together else save.store.rank
        metadata.storage_meta = StorageMeta(
            checkpoint_id=save.told.folder, save_id=save.told.save_id
        )
        path = folder_layout.index_path(save.store.folder, rank)
        publish(path, self.domain, self.keep, metadata, results)
        if save.together:
            forget_ranks(save.store.folder, len(results))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether it is a folder, or may become one."""
        place = os.fspath(checkpoint_id)
        if not isinstance(place, str) or "://" in place or not place:
            return False
        while place and not os.path.lexists(place):
            place = os.path.dirname(place)
        return os.path.isdir(place or ".")

    # ---- its own ----

    def close(self) -> None:
        """Waits for a save under way, and gives the rank's store up if no other writer of this
        process has it. The writer may be used again."""
        if self._staging is not None:
            self._staging.wait()
        self._staging = self._store = None
        self._memory = Memory()
        self._local = threading.local()

    def __reduce__(self) -> NoReturn:
        raise TypeError(PROCESS)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _warn_of_old_torch() -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2] if part.isdigit())
    if version < TESTED_TORCH and not _warned:
        _warned.append(torch.__version__)
        warnings.warn(
            f"pmstore.dcp was tried with torch {'.'.join(map(str, TESTED_TORCH))} and later; this "
            f"is {torch.__version__}",
            stacklevel=3,
        )


def _begin_in_child() -> None:
    # threads that had locks, or were saving, are the parent's; so are its stores
    global _stagings
    _stagings = WeakValueDictionary()
    for writer in alive(_writers):
        writer._begin()


os.register_at_fork(after_in_child=_begin_in_child)
