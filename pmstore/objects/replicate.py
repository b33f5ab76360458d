"""Makes a store hold what another one holds: what is alike stays where it is, and only what differs
is written."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from pmstore._engine.constants import ARRAY, FILL_COPY, GROUP, LIST, LIST_END, ROOT, VALUE
from pmstore._engine.pool import Found
from pmstore.objects import array
from pmstore.objects.array import Array
from pmstore.objects.core import Core, Payload
from pmstore.objects.slots import Slots, pack, unpack

_PIECE_BYTES = 1 << 20
_PAGE_BYTES = 4096
_BATCH_ITEMS = 1000


def make_alike(live: Core, wanted: Core, left_alone: Collection[str] = ()) -> None:
    """Makes the live store hold what the wanted one does: groups, lists, values, the bytes of
    arrays and the current versions of slots. Arrays of the same description stay where they are: a
    program that holds one sees the wanted bytes. Names that have to be made again come last in
    their group.

    left_alone: names at the top. REQUIRES: a transaction block of the live store, in which nothing
    was written; nobody else uses either of them. Raises: StoreFullError, CorruptStoreError.
    """
    with live.lock, wanted.lock:
        _Likening(live, wanted).group((), frozenset(name.encode() for name in left_alone))


class _Likening:
    def __init__(self, live: Core, wanted: Core) -> None:
        self._live, self._wanted = live, wanted
        self._ours, self._theirs = live.pool, wanted.pool

    def group(self, parts: tuple[bytes, ...], left_alone: frozenset[bytes] = frozenset()) -> None:
        ours = self._held(self._live, parts)
        theirs = self._held(self._wanted, parts)
        for name in ours.keys() - theirs.keys() - left_alone:
            self._ours.remove(ROOT, b"\0".join((*parts, name)))
        for name, wanted in theirs.items():
            if name not in left_alone:
                self._one((*parts, name), ours.get(name), wanted)

    @staticmethod
    def _held(core: Core, parts: tuple[bytes, ...]) -> dict[bytes, Found]:
        directory = ROOT
        if parts:
            found = core.pool.find(ROOT, b"\0".join(parts))
            assert found is not None  # its group has just been read
            directory = found.data
        return dict(core.pool.entries(directory))

    def _one(self, parts: tuple[bytes, ...], ours: Found | None, theirs: Found) -> None:
        path = b"\0".join(parts)
        if ours is not None and _kind(ours) != _kind(theirs):
            self._ours.remove(ROOT, path)
            ours = None
        if theirs.kind == VALUE:
            if ours is None or ours.meta != theirs.meta:
                self._ours.put_value(ROOT, path, theirs.meta)
        elif theirs.kind == LIST:
            self._list(path, ours is None)
        elif theirs.kind == ARRAY:
            self._array(path, ours, theirs)
        elif theirs.meta:
            self._slots(parts, ours, theirs)
        else:
            if ours is None:
                self._ours.group(ROOT, path, create=True)
            self.group(parts)

    def _array(self, path: bytes, ours: Found | None, theirs: Found) -> None:
        wanted = _bytes(self._theirs.get(ROOT, path, True))
        if ours is not None and _same_kind(ours, theirs):
            self._copy(_bytes(self._ours.get(ROOT, path, True)), wanted)
            return
        self._ours.put_array(
            ROOT,
            path,
            theirs.meta,
            theirs.data_bytes,
            fill=FILL_COPY,
            source=array.address(wanted),
            source_bytes=len(wanted),
        )

    def _copy(self, ours: Array, theirs: Array) -> None:
        """Copies the bytes that differ, page by page, so that only those are captured."""
        for start in range(0, len(ours), _PIECE_BYTES):
            old, new = ours[start : start + _PIECE_BYTES], theirs[start : start + _PIECE_BYTES]
            differs = old != new
            if not differs.any():
                continue
            firsts = np.arange(0, len(old), _PAGE_BYTES)
            pages = np.logical_or.reduceat(differs, firsts)
            ends = np.flatnonzero(np.diff(np.concatenate(([False], pages, [False]))))
            for first, end in ends.reshape(-1, 2) * _PAGE_BYTES:
                self._ours.will_write([old[first:end]])
                old[first:end] = new[first:end]

    # ---- slots

    def _slots(self, parts: tuple[bytes, ...], ours: Found | None, theirs: Found) -> None:
        path = b"\0".join(parts)
        about = self._theirs.find(ROOT, path + b"\0" + _version(theirs.meta))
        assert about is not None  # the store is sound
        wanted = _bytes(self._theirs.get(ROOT, path + b"\0" + _version(theirs.meta), True))
        if ours is not None:
            here = self._ours.find(ROOT, path + b"\0" + _version(ours.meta))
            assert here is not None
            if _same_kind(here, about):
                self._turn(parts, ours, wanted)
                return
            self._ours.remove(ROOT, path)
        pair = self._theirs.slot_find(ROOT, path)
        assert pair is not None
        self._ours.make_slots(ROOT, path, pack(0), about.meta, about.data_bytes, pair.in_place)
        self._live.turns.pop(parts, None)
        self._copy(_bytes(self._ours.get(ROOT, path + b"\0" + _version(pack(0)), True)), wanted)

    def _turn(self, parts: tuple[bytes, ...], ours: Found, wanted: Array) -> None:
        path = b"\0".join(parts)
        current = _bytes(self._ours.get(ROOT, path + b"\0" + _version(ours.meta), True))
        if np.array_equal(current, wanted):
            return
        slots = Slots(self._live, parts)
        held = slots.next  # from here on it may be written
        idle = b"1" if _version(ours.meta) == b"0" else b"0"
        _bytes(self._ours.get(ROOT, path + b"\0" + idle, True))[:] = wanted
        del held
        slots.flip()
        slots.forget_previous()

    # ---- lists

    def _list(self, path: bytes, new: bool) -> None:
        if new:
            self._ours.open_list(ROOT, path, create=True)
        ours, theirs = self._ours.list_count(ROOT, path), self._theirs.list_count(ROOT, path)
        for at in range(min(ours, theirs)):
            self._item(path, at)
        if ours > theirs:
            self._ours.splice(ROOT, path, theirs, ours - theirs, 1, ())
        for first in range(ours, theirs, _BATCH_ITEMS):
            batch = range(first, min(theirs, first + _BATCH_ITEMS))
            self._ours.splice(ROOT, path, LIST_END, 0, 1, [self._payload(path, at) for at in batch])

    def _item(self, path: bytes, at: int) -> None:
        ours = self._ours.item(ROOT, path, at, True)
        theirs = self._theirs.item(ROOT, path, at, True)
        if not _same_kind(ours, theirs):
            self._ours.splice(ROOT, path, at, 1, 1, [self._payload(path, at)])
        elif theirs.kind == ARRAY:
            self._copy(_bytes(ours), _bytes(theirs))

    def _payload(self, path: bytes, at: int) -> Payload:
        found = self._theirs.item(ROOT, path, at, True)
        held = _bytes(found)
        return Payload(found.kind, found.meta, found.data_bytes, array.address(held), held)


def _kind(found: Found) -> tuple[int, bool]:
    """Returns the kind of an object. Slots are a kind of their own: a group with a description."""
    return found.kind, found.kind == GROUP and bool(found.meta)


def _same_kind(ours: Found, theirs: Found) -> bool:
    """Returns whether both are the same value, or arrays of one description and size."""
    return (ours.kind, ours.meta, ours.data_bytes) == (theirs.kind, theirs.meta, theirs.data_bytes)


def _version(meta: bytes) -> bytes:
    """Returns the name of the array in the slots that is the current version."""
    return str(unpack(meta)).encode()


def _bytes(found: Any) -> Array:
    """Returns the bytes of the array's block, as uint8 over the block itself. REQUIRES: the array
    was found with its memory."""
    memory = found.memory
    return np.empty(0, np.uint8) if memory is None else np.frombuffer(memory, np.uint8)
