"""One piece of Python-side state in the store, written when it changed."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from pmstore import Store
from pmstore._base.mapping_protocol import Held
from pmstore._engine._binding import same_bytes
from pmstore.objects.structure import COLLECTIONS, Array, encode, is_namedtuple, join
from pmstore.objects.values import LEAVES, Encoded

_ARRAYS = (torch.Tensor, np.ndarray, torch.nn.Parameter)


def raw_bytes(array: Array) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The array's bytes in C order, as uint8: over its own memory where it is contiguous, else over
    a copy's.

    Bytes and not elements: nan differs from nan and -0.0 equals 0.0, but here only bits count.
    """
    if isinstance(array, torch.Tensor):
        flat = array.detach().contiguous().reshape(-1)
        bits: np.ndarray[Any, np.dtype[np.uint8]] = (
            flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
        )
        return bits
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _copy(to: Array, array: Array) -> None:
    """Its bits, into one of its kind, shape and dtype, whose strides may be others."""
    if isinstance(to, torch.Tensor):
        assert isinstance(array, torch.Tensor)
        to.detach().copy_(array.detach())
    else:
        np.copyto(to, array, casting="no")


def read_structure(held: Held, path: str) -> Any:
    """What a `Structure` of that path has stored. Its arrays are copies: nobody holds on to the
    heap through them.

    Raises:
        KeyError: nothing is stored.
    """
    return _joined(held[f"{path}/value"], _arrays(held, path))


def _arrays(held: Held, path: str) -> list[Array]:
    found: list[Array] = []
    while (place := f"{path}/{len(found)}") in held:
        found.append(held[place])
    return found


def _joined(skeleton: Any, arrays: Sequence[Array]) -> Any:
    return join(skeleton, [_copied(one) for one in arrays])


def _copied(array: Array) -> Array:
    if not isinstance(array, torch.Tensor):
        return np.array(array, order="C")
    made: torch.Tensor = array.detach().clone()
    if isinstance(array, torch.nn.Parameter):
        return torch.nn.Parameter(made, array.requires_grad)
    made.requires_grad = array.requires_grad
    return made


def _fits(here: Array, array: Array) -> bool:
    """Whether the array differs from the stored one in its bytes alone."""
    return (
        type(here) is type(array)
        and here.dtype == array.dtype
        and here.shape == array.shape
        and getattr(here, "requires_grad", False) == getattr(array, "requires_grad", False)
    )


_FLAT = LEAVES - {bytearray}


def objects_in(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """What can be changed in a value: its collections and arrays, with their places."""
    kind = type(value)
    if kind in _ARRAYS or (kind in COLLECTIONS and kind is not tuple and kind is not frozenset):
        yield place, value
    if kind in _ARRAYS or not isinstance(value, (dict, list, tuple, deque)):
        return
    items = value.values() if isinstance(value, dict) else value
    if not _FLAT.issuperset(map(type, items)):
        for key, one in [*(value.items() if isinstance(value, dict) else enumerate(value))]:
            if type(one) not in _FLAT:
                yield from objects_in(one, f"{place}[{key!r}]")


def become(here: Any, wanted: Any, ours: dict[int, Any]) -> Any:
    """Returns what is wanted, in the collections and arrays that are here: the program may hold
    them. Only in those that are ours, which were there at the last commit, and in each once: others
    are the program's, which has put them here since then. wanted: nobody else holds it."""
    kind: Any = type(here)
    named = is_namedtuple(kind) or kind is tuple
    if named and kind is type(wanted) and len(here) == len(wanted):
        return tuple.__new__(kind, map(become, here, wanted, [ours] * len(here)))
    # a dict: as one is stored whose factory is code
    if kind is not type(wanted) and (kind, type(wanted)) != (defaultdict, dict):
        return wanted
    if ours.pop(id(here), None) is None:
        return wanted
    if isinstance(here, dict):
        for key in wanted:
            wanted[key] = become(here.get(key), wanted[key], ours)
    elif kind is list or kind is deque:
        for at, one in enumerate([*here][: len(wanted)]):
            wanted[at] = become(one, wanted[at], ours)
    return here if _refill(here, wanted) else wanted


def _refill(here: Any, value: Any) -> bool:
    """Puts what the value holds into a collection or array. False: it cannot hold that, and nothing
    has happened."""
    kind = type(here)
    if kind is list or kind is bytearray:
        here[:] = value
    elif kind is deque and here.maxlen == value.maxlen:
        here.clear()
        here.extend(value)
    elif kind in (dict, OrderedDict, Counter, defaultdict, set):
        here.clear()
        here.update(value)
    elif kind in _ARRAYS and here.shape == value.shape and here.dtype == value.dtype:
        try:
            with torch.inference_mode():  # its tensors, and leaves, are written to as others are
                here[...] = value
        except (RuntimeError, ValueError):  # it is expanded, or for reading: nothing was written
            return False
    else:
        return False
    return True


class Structure:
    """A nested structure of plain values and arrays under one group of the store.

    The skeleton is the value `<path>/value`, array i is `<path>/<i>`. Writing is cheap where little
    changed: arrays are compared and copied in place, the value is written when its bytes differ
    from those written last.
    """

    def __init__(self, store: Store, path: str) -> None:
        self.path = path
        self._store = store
        self._bytes: bytes | None = None  # of the value in the store, if known
        self._arrays: list[Array] | None = None

    @property
    def stored(self) -> bool:
        return f"{self.path}/value" in self._store

    def write(self, state: Any, *, exact: bool = False) -> None:
        """Writes the structure; pending until the next commit. exact: see `structure.split`.

        Raises:
            TypeError: it holds something that is not data.
            StoreFullError: nothing of the array or value at hand was written.
        """
        encoded, arrays = encode(state, _ARRAYS, exact=exact)
        held, self._arrays = self._held(), None
        known = self._put(arrays, held)
        while len(held) > len(arrays):
            self._store.pop(f"{self.path}/{len(held) - 1}", None)
            held.pop()
        if known:  # new ones are looked up when they are needed
            self._arrays = held
        if encoded != self._bytes:
            self._store[f"{self.path}/value"] = Encoded(encoded)
            # after the write: an interrupt between the two only costs a second write
            self._bytes = encoded

    def read(self) -> Any:
        """Reads what `read_structure` reads."""
        return _joined(self._store[f"{self.path}/value"], self._held())

    def forget(self) -> None:
        """Drops what is known of the store's content: after a roll back."""
        self._bytes = None
        self._arrays = None

    def _held(self) -> list[Array]:
        if self._arrays is None:
            self._arrays = _arrays(self._store, self.path)
        return self._arrays

    def _put(self, arrays: Sequence[Array], held: Sequence[Array]) -> bool:
        """Returns whether each has the place of one that is there."""
        others: list[tuple[Array, Array]] = []
        known = True
        for index, array in enumerate(arrays):
            here = held[index] if index < len(held) else None
            if here is None or not _fits(here, array):
                self._store[f"{self.path}/{index}"] = array
                known = False
            elif not same_bytes(here, array):  # nor if it does not know
                others.append((here, array))
        if others:
            self._store.will_write(*(here for here, _ in others))  # at once, without page faults
            for here, array in others:
                _copy(here, array)
        return known
