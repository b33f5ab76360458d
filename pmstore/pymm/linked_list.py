"""Lists on a shelf, over the store's persistent lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence
from typing import Any, ClassVar

import numpy as np

from pmstore.objects.lists import List
from pmstore.objects.tensor import is_tensor
from pmstore.pymm.scalars import plain
from pmstore.pymm.shelf_names import Core, Shadow, ShelvedCommon
from pmstore.store import Store


class ShelfIndexError(IndexError, RuntimeError):
    """An index beyond the ends of a list. It is an IndexError as in Python, and a RuntimeError as
    in PyMM."""


class linked_list(Shadow):
    """A list to be made on the shelf, of these items: `shelf.x = pymm.linked_list()`."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._items = list(items)

    def store_in(self, store: Store, name: str) -> None:
        if name in store:
            del store[name]
        store.list(name).extend(map(_storable, self._items))


class shelved_linked_list(MutableSequence[Any], ShelvedCommon):
    """A list of numbers, strings, bytes, arrays and tensors on a shelf, with all that a Python list
    does. Every change is a transaction. Arrays and tensors of it are members: `shelf.x[2] += 1` is
    written in place.
    """

    def __init__(self, core: Core, name: str, items: List) -> None:
        self._core = core
        self._items = items
        self.name = name

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        """Returns the member at the index, or a list of those of a slice. Raises:
        ShelfIndexError."""
        try:
            found = self._items[index]
        except IndexError as error:
            raise ShelfIndexError(*error.args) from None
        if isinstance(index, slice):
            return [
                self._member(item, at)
                for item, at in zip(found, range(*index.indices(len(self))), strict=True)
            ]
        return self._member(found, index)

    def __iter__(self) -> Iterator[Any]:
        for at, item in enumerate(self._items):
            yield self._member(item, at)

    def __setitem__(self, index: Any, value: Any) -> None:
        new = [_storable(item) for item in value] if isinstance(index, slice) else _storable(value)
        with self._core.writing():
            try:
                self._items[index] = new
            except IndexError as error:
                raise ShelfIndexError(*error.args) from None

    def __delitem__(self, index: Any) -> None:
        with self._core.writing():
            try:
                del self._items[index]
            except IndexError as error:
                raise ShelfIndexError(*error.args) from None

    def insert(self, index: int, value: Any) -> None:
        with self._core.writing():
            self._items.insert(index, _storable(value))

    def extend(self, values: Iterable[Any]) -> None:
        """Appends all of them in one transaction."""
        new = list(map(_storable, values))
        with self._core.writing():
            self._items.extend(new)

    def clear(self) -> None:
        del self[:]

    def sort(self, *, key: Any = None, reverse: bool = False) -> None:
        self[:] = sorted(self, key=key, reverse=reverse)

    def copy(self) -> list[Any]:
        """Returns a plain list of the same items."""
        return list(self)

    def __add__(self, other: Any) -> Any:
        """Returns a plain list of the items of both."""
        return list(self) + list(other) if isinstance(other, _LISTS) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return other + list(self) if isinstance(other, list) else NotImplemented

    def __mul__(self, times: int) -> list[Any]:
        return list(self) * times

    __rmul__ = __mul__

    def persist(self) -> None:
        """Does nothing: a change is committed when it returns. PyMM's programs call it."""

    def __repr__(self) -> str:
        return repr(list(self))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _LISTS):
            return NotImplemented
        return list(self) == list(other)

    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def _member(self, item: Any, at: Any) -> Any:
        if isinstance(item, np.ndarray) or is_tensor(item):
            return self._core.bind(self._core, f"{self.name}[{at}]", item)
        return item


_LISTS = (list, shelved_linked_list)


def _storable(item: Any) -> Any:
    item = plain(item)
    if isinstance(item, Shadow):
        raise TypeError(
            "a shadow becomes a variable of the shelf: append a value, an array or a tensor"
        )
    if is_tensor(item) and item.grad_fn is not None:
        raise RuntimeError(
            "the tensor has an autograd graph, which a list cannot keep: append x.detach(), or "
            "assign it to an attribute of the shelf"
        )
    return item.as_tensor() if hasattr(item, "name_on_shelf") else item
