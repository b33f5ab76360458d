"""A rank's store in a writer's folder: parts come and go in it."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, finalize

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from pmstore.dcp._format import folder_layout
from pmstore.dcp._format.folder_layout import PartName
from pmstore.dcp._write.items import Filling
from pmstore.dcp._write.reentrancy import Once
from pmstore.dcp._write.save_part import Part
from pmstore.errors import PmstoreError
from pmstore.store import Store


class RankStore:
    """The store of one rank in a folder, open for writing. A process has it once, for any number of
    writers: see `RankStore.of`. It is closed when nobody has it any more.

    lock: taken around what changes the store, from the first array of a part to its commit.
    once: entered by a thread that writes.
    """

    def __init__(self, folder: str, rank: int, domain: Any) -> None:
        os.makedirs(folder, exist_ok=True)
        self.folder: str = folder
        self.rank: int = rank
        self.store: Store = folder_layout.open_marked(
            folder_layout.rank_path(folder, rank), "rank", domain
        )
        self.uuid: str = folder_layout.uuid_of(self.store)
        self.lock: threading.RLock = threading.RLock()
        self.once: Once = Once()
        self._process = os.getpid()
        self._inode = _inode(self.store.path)
        self._unpublished: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()
        finalize(self, self.store.close)

    @staticmethod
    def of(folder: str, rank: int, domain: Any) -> RankStore:
        """Returns this process's store of that rank, and opens or makes it at the first call.
        Raises: as `pmstore.open`; PmstoreError: what lies there is something else."""
        path = folder_layout.rank_path(os.path.realpath(folder), rank)
        with _opening:
            there = RankStore.open_at(path)
            if there is None:
                there = RankStore(os.path.realpath(folder), rank, domain)
                _open[path] = there
            return there

    @staticmethod
    def open_at(path: str) -> RankStore | None:
        """Returns the one of this process that has the file open; None: it has none."""
        there = _open.get(os.path.realpath(path))
        if there is None or there.store.closed or there._process != os.getpid():
            return None
        return there if there._inode == _inode(path) else None

    def write(self, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        """Writes a part and commits it: durable on return, as far as the domain goes. If that
        fails, nothing is left of it.

        Raises: TypeError: what cannot be saved; as `Store.commit`; CorruptStoreError: of an index;
            TransactionError: a signal handler calls it in the middle of another save.
        """
        with self.once.entered(self.folder), self.lock:
            try:
                self._sweep()
                part = self._begin()
                filling = Filling(part)
                filling.fill(items, planner)
                crc, table = folder_layout.sealed_table(filling.chunks)
                part.group["table"] = table
                self.store.commit()
            except BaseException:
                with suppress(PmstoreError, OSError):
                    self.store.rollback()
                raise
            self._unpublished[threading.current_thread()] = part.name
        name = PartName(self.rank, self.uuid, part.name, crc)
        return [
            WriteResult(
                index=MetadataIndex(chunk.fqn, chunk.offset),
                size_in_bytes=chunk.nbytes,
                storage_data=name,
            )
            for chunk in filling.chunks
        ]

    def _begin(self) -> Part:
        """Makes a new part, which is pending."""
        name = f"part-{uuid.uuid4().hex}"
        return Part(self.store.group(name), name)

    def _sweep(self) -> None:
        """Deletes parts that no index names, and makes their room free.

        Raises: CorruptStoreError: of an index, which may name them.
        """
        ours = {name for name in self.store if name.startswith("part-")}
        if ours:
            # before the index is read: what is published meanwhile is in one of the two
            under_way = self._under_way()
            named = {
                part.name
                for part in folder_layout.named_parts(self.folder)
                if part.uuid == self.uuid
            }
            for thread, name in under_way.items():
                if name in named:
                    self._unpublished.pop(thread, None)
            ours -= named.union(under_way.values())
        for name in ours:
            del self.store[name]
        if ours:
            self.store.commit()

    def _under_way(self) -> dict[threading.Thread, str]:
        """Returns the parts that other threads have committed and may yet publish, as long as the
        thread lives. A thread that saves again is done with the part before."""
        for thread in list(self._unpublished):
            if thread is threading.current_thread() or not thread.is_alive():
                self._unpublished.pop(thread, None)
        return dict(self._unpublished)


def _inode(path: str) -> int | None:
    """Returns the file's inode; None: the file is gone, as with a folder that was removed."""
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


_opening = threading.Lock()
_open: WeakValueDictionary[str, RankStore] = WeakValueDictionary()


def _new_lock() -> None:
    # another thread may have held it at the fork; in the child it is not there to give it back
    global _opening
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)
