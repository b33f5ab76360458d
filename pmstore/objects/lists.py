"""Persistent lists: sequences of values, arrays and tensors."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from typing import Any, overload

from pmstore._base import notebook
from pmstore._base.text import counted
from pmstore._engine.constants import LIST, LIST_END, ROOT, VALUE
from pmstore._engine.pool import MISSING, Found
from pmstore.errors import NameExistsError, NoSuchNameError, PmstoreError
from pmstore.objects.core import Core, Payload, payload, represent
from pmstore.objects.names import in_the_way


class List(MutableSequence[Any]):
    """A list in the store, made or opened by `store.list(name)`: what `list` does, with indices,
    slices, `append`, `insert`, `del`, `pop`, `extend`, ... Each of them happens as a whole or not
    at all, and is part of the next commit.

    `items[i]` is an array or tensor **over the heap**, whose writes are part of the next commit,
    and which is the same object as long as it lives; or a copy of a plain value, which cannot be
    changed in place, but assigned again. A slice is a plain `list` of these. Reading, appending and
    changing anywhere take a time that hardly grows with the length (a tree of 126 items a leaf),
    and opening a store does not depend on it.

    A list is its path, not the object: if it is removed and made again, this is the new one. Two
    are equal if they are one.

    Raises (all methods): KeyError if the list is not in the store any more; ClosedStoreError, and
    for changes ReadOnlyStoreError, StoreFullError (nothing changed), TypeError (cannot be stored),
    ForkedStoreError; CorruptStoreError.

    >>> import pmstore, tempfile
    >>> with (
    ...     tempfile.TemporaryDirectory() as folder,
    ...     pmstore.open(f"{folder}/run.pm", size="8MiB") as store,
    ... ):
    ...     losses = store.list("losses")
    ...     losses.extend([0.5, 0.25, 0.125])
    ...     losses[0] = 1.0
    ...     del losses[-1]
    ...     losses[:], len(store["losses"])
    ([1.0, 0.25], 2)
    """

    __slots__ = ("_core", "_parts", "_path")

    def __init__(self, core: Core, parts: tuple[bytes, ...]) -> None:
        self._core = core
        self._parts = parts
        self._path = b"\0".join(parts)

    # ---- finding ----

    def _find(self, index: int) -> Any:
        """Returns the array or tensor at the index that is alive, or a Found. REQUIRES: the
        lock."""
        while (found := self._core.pool.item(ROOT, self._path, index, False)) is None:
            self._index(index, len(self))  # raises, if a signal handler made the list shorter
        return found

    def _gone(self) -> NoSuchNameError:
        return NoSuchNameError(f"the list {self.name!r} is not in the store any more")

    def _index(self, index: Any, length: int) -> int:
        try:
            at = index.__index__()
        except AttributeError:
            raise TypeError(
                f"indices of a list are integers or slices, not {type(index).__name__}"
            ) from None
        if at < 0:
            at += length
        if not 0 <= at < length:
            raise IndexError(
                f"index {index} is out of range for the list {self.name!r} of "
                f"{counted(length, 'item')}"
            )
        return int(at)

    # ---- the sequence ----

    @property
    def name(self) -> str:
        """The list's path."""
        return b"/".join(self._parts).decode()

    def __len__(self) -> int:
        with self._core.lock:
            try:
                return self._core.pool.list_count(ROOT, self._path)
            except KeyError:
                raise self._gone() from None

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Returns the item at the index, or a plain `list` of those of a slice. Raises:
        IndexError."""
        core = self._core
        with core.lock:
            if type(index) is int and 0 <= index < 1 << 62:
                found = core.pool.look_up_item(self._path, index)
                if type(found) is Found:
                    return core.load(found, self.name)
                if found is not MISSING:
                    return found  # a plain value, or the array or tensor that is alive
            if isinstance(index, slice):
                return [
                    core.load(self._find(i), self.name) for i in range(*index.indices(len(self)))
                ]
            return core.load(self._find(self._index(index, len(self))), self.name)

    def __iter__(self) -> Iterator[Any]:
        at = 0
        while True:
            with self._core.lock:
                found = self._core.pool.item(ROOT, self._path, at, False)
                if found is None:
                    len(self)  # raises if the list is gone
                    return
                item = self._core.load(found, self.name)
            yield item
            at += 1

    @overload
    def __setitem__(self, index: int, value: Any) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: Iterable[Any]) -> None: ...
    def __setitem__(self, index: int | slice, value: Any) -> None:
        """Copies the value, or for a slice the values, in. An item assigned to its own place stays
        where it is."""
        if isinstance(index, slice):
            self._set_slice(index, [payload(item) for item in value])
            return
        new = payload(value)
        with self._core.lock:
            at = self._index(index, len(self))
            if new.kind == VALUE or self._find(at) is not value:
                self._splice(at, 1, [new])

    def _set_slice(self, index: slice, new: list[Payload]) -> None:
        with self._core.lock:
            places = range(*index.indices(len(self)))
            if places.step == 1:
                self._splice(places.start, len(places), new)
                return
            if len(places) != len(new):
                raise ValueError(
                    f"{len(new)} values for the {counted(len(places), 'item')} of an extended slice"
                )
            if places.step < 0:
                places, new = places[::-1], new[::-1]
            if new:
                self._splice(places[0], len(places), new, places.step)

    def __delitem__(self, index: int | slice) -> None:
        """Removes the item or items. Room is free after the next commit; works when full."""
        with self._core.lock:
            if not isinstance(index, slice):
                self._splice(self._index(index, len(self)), 1, [])
                return
            places = range(*index.indices(len(self)))
            if places:
                low = min(places[0], places[-1])
                self._splice(low, len(places), [], abs(places.step))

    def insert(self, index: int, value: Any) -> None:
        """Inserts the value before what is at the index, as `list.insert` does."""
        new = payload(value)
        with self._core.lock:
            length = len(self)
            at = operator.index(index)
            self._splice(max(0, at + length) if at < 0 else min(at, length), 0, [new])

    def append(self, value: Any) -> None:
        """Adds the value behind the last item."""
        new = payload(value)
        with self._core.lock:
            self._splice(LIST_END, 0, (new,))

    def extend(self, values: Iterable[Any]) -> None:
        """Appends all of them, in one step."""
        new = [payload(value) for value in values]
        with self._core.lock:
            self._splice(LIST_END, 0, new)

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Returns the place of the first item that equals the value. Raises: ValueError if none
        does."""
        try:
            return super().index(value, start, len(self) if stop is None else stop)
        except ValueError as error:
            if error.args:  # an error of a comparison
                raise
            raise ValueError(f"{reprlib.repr(value)} is not in the list {self.name!r}") from None

    def clear(self) -> None:
        """Removes all items of the list, in one step."""
        del self[:]

    def _splice(self, index: int, remove: int, new: Sequence[Payload], step: int = 1) -> None:
        try:
            self._core.pool.splice(ROOT, self._path, index, remove, step, new)
        except KeyError:
            raise self._gone() from None

    # Comparing contents would compare arrays.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, List):
            return NotImplemented
        return self._core is other._core and self._parts == other._parts

    def __hash__(self) -> int:
        return hash((id(self._core), self._parts))

    def __repr__(self) -> str:
        return represent(self._core, "List", self.name, lambda: counted(len(self), "item"))

    def _repr_html_(self) -> str:
        try:
            length = len(self)
            rows = [(at, reprlib.repr(item)) for at, item in enumerate(self[: notebook.SHOWN])]
            picture = self._curve(length)
        except (KeyError, PmstoreError):
            return notebook.table(repr(self), [], [], 0)
        return notebook.table(repr(self), ("", "item"), rows, length, picture)

    def _curve(self, length: int) -> notebook.Drawn | None:
        """Draws the list's numbers as a curve; of a long list, some of them, evenly spread. Returns
        None if they are no numbers, or fewer than two."""
        if length < 2:
            return None
        some = self[:: -(-length // notebook.DRAWN)]
        if not all(type(item) in (int, float) for item in some):
            return None
        try:
            return notebook.curve([float(item) for item in some])
        except OverflowError:  # an integer beyond all floats
            return None


def open_list(core: Core, parts: tuple[bytes, ...], name: str) -> List:
    """Opens or makes a list: see `Group.list`. name: for messages."""
    pool, path = core.pool, b"\0".join(parts)
    with core.lock:
        found = pool.find(ROOT, path)
        if found is not None and found.kind != LIST:
            raise NameExistsError(
                f"{core.path}: {name!r} is no list: del it first, or use another name"
            )
        try:
            if pool.open_list(ROOT, path, create=not pool.info.read_only) is None:
                raise KeyError(name)
        except NameExistsError as error:
            raise in_the_way(pool, parts, error) from None
    return List(core, parts)
