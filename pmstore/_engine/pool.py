"""One open store, typed: the calls that work on what it holds.

Every method is one call of native/objects/pms.h, and so either happened as a whole or not at all,
whatever interrupts Python. Nothing here looks into names, descriptors or values: they are bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from pmstore._engine import _binding, fault_handler
from pmstore._engine._native import ffi as _ffi
from pmstore._engine._native import lib as _lib
from pmstore._engine.constants import (
    DOMAINS,
    FILL_ZERO,
    GROUP,
    GROUPS_MAX,
    HISTORY_BYTES,
    MODES,
    ROOT,
)
from pmstore._engine.failures import damaged, fail, fail_at, fail_open, in_doubt
from pmstore._engine.pins import Pins
from pmstore._engine.pool_info import PoolInfo, read_info
from pmstore.errors import CorruptStoreError

Found = _binding.Found
MISSING = _binding.MISSING
"""One object of a directory or a list, copied out of the engine: kind, data, data_bytes, meta,
node; and memory, of an array that was found to be used: its block, pinned."""


class SlotPair(NamedTuple):
    """Where a pair of slots lies: struct pms_slot_pair. It holds until the next change."""

    group: int
    data: tuple[int, int]
    """Blocks of the two arrays; 0: without bytes."""
    bytes: int
    current: int
    in_place: bool
    """Log is there for both, as for any array."""


class Pool:
    """One open store: `struct pms_pool` behind a `_binding.Handle`, which owns it.

    Directories are numbers (`ROOT`, or what `group` returns); they hold until a group is removed or
    a roll back. A path is walked from a directory on, in the step that uses it: names with a NUL
    between two, groups but for the last.
    """

    __slots__ = (
        *("_errors", "block_depth", "epoch", "find", "get", "handle", "info", "item", "look_up"),
        *("look_up_item", "path", "pins", "put_plain", "put_value", "raw", "rollbacks", "slot"),
        *("splice", "will_write"),
    )

    def __init__(
        self,
        path: str,
        mode: str,
        *,
        size_bytes: int = 0,
        max_size_bytes: int = 0,
        domain: str = "auto",
        lock_timeout_seconds: float | None = 0.0,
        hot: bool = True,
        force: bool = False,
        hold: bool = False,
        beside: bool = False,
        keep: bool = False,
        before: bool = False,
        ranges: Callable[[Any], Iterable[tuple[int, int]]],
    ) -> None:
        """Opens the file. before: with the lock of mode "r": shows the version before the last
        commit, which must be held. ranges: a function that returns (address, bytes) pairs of an
        object that has no buffer, for declared writes.

        Raises: what `pmstore.open` says.
        """
        options = _ffi.new(
            "struct pms_options *",
            {
                "size": size_bytes,
                "max_size": max_size_bytes,
                "mode": MODES[mode],
                "domain": DOMAINS[domain],
                "hot": hot,
                "force": force,
                "hold": hold,
                "beside": beside,
                "keep": keep,
                "before": before,
            },
        )
        self.path = path
        # One callable for failures of open and for later ones: the handle exists when open has
        # succeeded.
        opened = False

        def told(address: int) -> NoReturn:
            if opened:
                fail_at(path, address)
            fail_open(path, mode, address)

        self.handle: _binding.Handle = _binding.Handle(
            os.fsencode(path),
            int(_ffi.cast("uintptr_t", options)),
            lock_timeout_seconds,
            told,
            ranges,
        )
        opened = True
        self.raw: Any = _ffi.cast("struct pms_pool *", self.handle.pool)
        self.pins: Pins = Pins()
        # One of each from the start: a handler of IndexError that an interrupt ends may keep its
        # traceback, and this pool.
        self._errors: list[Any] = [_ffi.new("struct pms_error *")]
        # What look-ups call is functions of the handle itself: see _objects.c. Each walks its path
        # in the step that uses what is there. The caller of `get`, `item` and `slot` keeps other
        # threads from removing meanwhile what they find.
        handle = self.handle
        self.will_write: Callable[[Sequence[Any]], None] = handle.will_write
        self.rollbacks: Callable[[], int] = handle.rollbacks
        # depth of the calling thread's transaction block; 0: it is in none
        self.block_depth: Callable[[], int] = handle.block_depth
        self.epoch: Callable[[], int] = handle.epoch
        self.find: Callable[[int, bytes], Found | None] = handle.find
        self.get: Callable[[int, bytes, bool], Any] = handle.get
        self.item: Callable[[int, bytes, int, bool], Any] = handle.item
        self.slot: Callable[[int, bytes, int], Any] = handle.slot
        self.put_value: Callable[[int, bytes, bytes], None] = handle.put_value
        self.look_up: Callable[[bytes, Any, Callable[[Any], bytes]], Any] = handle.look_up
        self.look_up_item: Callable[[bytes, int], Any] = handle.look_up_item
        self.put_plain: Callable[[bytes, Any, Callable[[Any], bytes], Any], bool] = handle.put_plain
        self.splice: Callable[[int, bytes, int, int, int, Sequence[tuple[Any, ...]]], None] = (
            handle.splice
        )
        self.info: PoolInfo = read_info(self.raw)
        handle.base, handle.read_only = self.info.base, self.info.read_only

    # A call needs a struct for its error: taken from a list, and put back if nothing went wrong, so
    # that threads, signal handlers and finalizers that call in the middle never share one.
    def _error(self) -> Any:
        try:
            error = self._errors.pop()
        except IndexError:
            error = _ffi.new("struct pms_error *")
        error.status = _lib.PMS_OK
        return error

    def call(self, function: Any, *arguments: Any, missing: bool = False) -> bool:
        """Calls a function of the engine: function(pool, arguments, error). missing: what is asked
        for may not be there; the call then returns False.

        Raises: what its status says.
        """
        error = self._error()
        status = function(self.raw, *arguments, error)
        if status and not (missing and status == _lib.PMS_E_NOT_FOUND):
            fail(self.path, status, error)
        self._errors.append(error)
        return not status

    # -- transactions

    def rollback(self) -> None:
        self.call(_lib.pms_rollback)

    def back(self) -> None:
        """Goes back to the version before the last commit, if it is held. Ends the doubt.

        Raises: TransactionError: it is not.
        """
        self.call(_lib.pms_back)

    def rewind(self) -> None:
        """Goes back as `back` does, for a program alone: the ranks of a job go back together.

        Raises: InDoubtError.
        """
        if self.in_doubt:
            raise in_doubt(self.path, "one rank alone does not go back")
        self.back()

    def release(self) -> None:
        """Lets go of the version before the last commit, which is not needed any more. Ends the
        doubt."""
        self.call(_lib.pms_release)

    def hold_for_job(self) -> None:
        """Has each commit hold the version before it for a job of several ranks, until close. The
        commit is in doubt until `allow`.

        Raises: TransactionError: something is pending, or in a transaction block; StoreFullError:
            no room for the logs of two transactions, and nothing has changed; DomainError.
        """
        self.call(_lib.pms_hold_for_job)

    def allow(self) -> None:
        """Says that all ranks have the last commit: the next one may let go of the version before
        it. Stores nothing, and is forgotten by a crash. Idempotent."""
        self.call(_lib.pms_allow)

    @property
    def in_doubt(self) -> bool:
        """Whether a version is held for a job that has not yet allowed the store to let go of it.
        Commits, and whatever else would let go of it, raise InDoubtError. `back` and `release` end
        the doubt."""
        return bool(_lib.pms_in_doubt(self.raw))

    def holds(self) -> int:
        """Returns whether the version before the last commit is held, and for whom: HELD_NOT (0,
        false), HELD_FOR_STORE or HELD_FOR_JOB."""
        return int(_lib.pms_holds(self.raw))

    def load(self, data: int, data_bytes: int) -> None:
        """Makes an array's bytes readable at `info.base + data`, without a pin. It is called before
        they are read.

        Raises: SnapshotLostError.
        """
        while data_bytes:
            try:
                self.call(_lib.pms_object_load, data, data_bytes)
            except InterruptedError:  # handlers of signals have run
                continue
            return

    def is_old(self) -> bool:
        """Returns whether a reader's view is not the last commit any more, or may not be."""
        old = _ffi.new("int *")
        self.call(_lib.pms_is_old, old)
        return bool(old[0])

    # -- objects

    def entries(self, directory: int) -> list[tuple[bytes, Found]]:
        """Returns all names of a directory with their objects, in order of insertion."""
        return list(self.scan(directory))

    def scan(self, directory: int) -> Iterator[tuple[bytes, Found]]:
        """Yields what `entries` returns, one by one. REQUIRES: nobody changes the directory
        meanwhile."""
        node = 0
        while (entry := self.handle.next(directory, node)) is not None:
            yield entry
            node = entry[1].node

    def tree(self, directory: int = ROOT) -> Iterator[tuple[bytes, Found]]:
        """Yields all objects below a directory with their paths, a group before what is in it.
        REQUIRES: nobody changes any of them meanwhile.

        Raises: CorruptStoreError, also if groups contain each other, or more than GROUPS_MAX of
            them.
        """
        seen = {directory}
        open_groups = [(b"", self.scan(directory))]
        while open_groups:
            prefix, rest = open_groups[-1]
            for name, found in rest:
                yield prefix + name, found
                if found.kind == GROUP:
                    if found.data in seen:
                        path = (prefix + name)[:200].decode(errors="backslashreplace")
                        raise damaged(
                            self.path,
                            f"groups contain each other: {path!r} is met twice",
                            found.node,
                        )
                    seen.add(found.data)
                    if len(open_groups) > GROUPS_MAX:
                        raise CorruptStoreError(
                            f"{self.path}: a group is in more than {GROUPS_MAX - 1} others"
                        )
                    open_groups.append((prefix + name + b"/", self.scan(found.data)))
                    break
            else:
                open_groups.pop()

    def names(self, directory: int, after: int, limit: int) -> list[bytes]:
        """Returns at most `limit` names in order of insertion, beginning with the one behind the
        node `after` (0: with the first)."""
        result: list[bytes] = []
        node = after
        while len(result) < limit and (entry := self.handle.next(directory, node)) is not None:
            result.append(entry[0])
            node = entry[1].node
        return result

    def count(self, directory: int) -> int:
        count = _ffi.new("uint64_t *")
        self.call(_lib.pms_object_count, directory, count)
        return int(count[0])

    def put_array(
        self,
        directory: int,
        name: bytes,
        meta: bytes,
        data_bytes: int,
        *,
        fill: int = FILL_ZERO,
        source: int = 0,
        source_bytes: int = 0,
        must_be_new: bool = False,
    ) -> int:
        """Allocates an array, fills it, and publishes it under the name. source: address of
        source_bytes bytes. Returns the block's offset.

        Raises: NameExistsError if it must be new and is not; StoreFullError.
        """
        data = _ffi.new("uint64_t *")
        content = fill, _ffi.cast("void *", source), source_bytes, must_be_new
        self.call(
            _lib.pms_object_put_array,
            *(directory, name, len(name), meta, len(meta), data_bytes),
            *content,
            data,
        )
        return int(data[0])

    def group(self, directory: int, name: bytes, *, create: bool) -> int | None:
        """Returns the group's directory; None if there is no such group, and it is not to be
        created.

        Raises: NameExistsError if the name is another kind of object.
        """
        return self._open(_lib.pms_object_group, directory, name, create)

    def open_list(self, directory: int, name: bytes, *, create: bool) -> int | None:
        """Opens a list as `group` opens a group. Returns a number that holds until the list is
        removed or the store is rolled back."""
        return self._open(_lib.pms_object_list, directory, name, create)

    def _open(self, function: Any, directory: int, name: bytes, create: bool) -> int | None:
        found = _ffi.new("uint64_t *")
        there = self.call(function, directory, name, len(name), create, found, missing=not create)
        return int(found[0]) if there else None

    def describe_group(self, directory: int, name: bytes, meta: bytes) -> None:
        """Puts a description beside a group's name."""
        self.call(_lib.pms_object_describe_group, directory, name, len(name), meta, len(meta))

    def make_slots(
        self,
        directory: int,
        path: bytes,
        about: bytes,
        meta: bytes,
        data_bytes: int,
        in_place: bool,
    ) -> None:
        """Makes a pair of arrays of zeros, in one step. about: which one is current.

        Raises: NameExistsError, StoreFullError.
        """
        named = directory, path, len(path), about, len(about)
        self.call(_lib.pms_object_make_slots, *named, meta, len(meta), data_bytes, in_place)

    def slot_find(self, directory: int, path: bytes) -> SlotPair | None:
        """Returns where the pair of slots lies; None if no slots are there."""
        pair = _ffi.new("struct pms_slot_pair *")
        if not self.call(_lib.pms_slot_find, directory, path, len(path), pair, missing=True):
            return None
        return SlotPair(
            pair.group, (pair.data[0], pair.data[1]), pair.bytes, pair.current, bool(pair.in_place)
        )

    def is_live(self, data: int) -> bool:
        """Returns whether a name or a list has the block."""
        error = self._error()
        live = bool(_lib.pms_is_live(self.raw, data, error))
        self._errors.append(error)
        return live

    def remove(self, directory: int, name: bytes) -> bool:
        """Removes the object, a group with all it holds. False if there is none."""
        return self.call(_lib.pms_object_remove, directory, name, len(name), missing=True)

    def list_count(self, directory: int, path: bytes = b"") -> int:
        """Returns how many items the list at the path has; without a path, the list itself that
        `open_list` gave.

        Raises: KeyError.
        """
        count = _ffi.new("uint64_t *")
        self.call(_lib.pms_sequence_count, directory, path, len(path), count)
        return int(count[0])

    # -- the record outside transactions

    def read_history(self) -> bytes:
        """Returns the HISTORY_BYTES bytes of the history; they are zeros until something was
        written."""
        raw = _ffi.new("unsigned char[]", HISTORY_BYTES)
        self.call(_lib.pms_history_read, raw)
        return bytes(_ffi.buffer(raw))

    def write_history(self, data: bytes) -> None:
        """Replaces the history, and pads it with zeros. It neither commits nor rolls back with
        anything."""
        self.call(_lib.pms_history_write, data, len(data))


def exiting() -> None:
    """Says that the program ends: its death unlocks closed stores, and nothing is copied for it.
    Should the end take longer than ten seconds, what live arrays show of the files is copied, and
    the files are unlocked."""
    _lib.pms_unlock_exiting()


def _address(name: str) -> int:
    return int(_ffi.cast("uintptr_t", _ffi.addressof(_lib, name)))


# the functions of struct binding_engine, in its order
_FUNCTIONS = (
    *("pms_pool_open", "pms_pool_close", "pms_pool_release", "pms_txblock_enter"),
    *("pms_txblock_commit_pending", "pms_txblock_leave", "pms_txblock_wait", "pms_txblock_depth"),
    *("pms_txblock_set_tasks", "pms_will_write", "pms_object_get", "pms_unpin", "pms_rollbacks"),
    *("pms_object_find", "pms_object_next", "pms_sequence_get", "pms_object_put_value"),
    *("pms_slot_flip", "pms_epoch", "pms_sequence_splice", "pms_put_backs", "pms_slot_get"),
    *("pms_commit", "pms_written"),
)
_binding.bind(*map(_address, _FUNCTIONS))
fault_handler.stay_first()
