"""What data sets and samplers change in themselves, in the process that trains: counters of epochs,
weights of samples, tables.

Whether anything has changed is asked in each step, in one look at the objects that they hold and a
comparison of the bytes of small arrays. What has changed is kept, up to 1 MiB together.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from pmstore._engine._binding import Watch, same_bytes
from pmstore.objects.structure import (
    COLLECTIONS,
    at_once,
    encode,
    has_factory,
    is_leaf,
    is_namedtuple,
)
from pmstore.torch._random.defaults import bits_of
from pmstore.torch._state.stateful import is_stateful
from pmstore.torch.changes import Question, all_of, sample_of
from pmstore.torch.kept_structure import become
from pmstore.torch.run_errors import AttachError

MOST_BYTES = 1 << 20
"""That are kept of all attributes together."""
ATTRIBUTES = "attributes"
"""Where changed ones are kept among the generators' states, and of what kind they are."""
_MOST_ITEMS = 4096
"""Objects in the lists and dicts of one attribute."""
_MOST_OBJECTS = 64
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_ARRAYS = (np.ndarray, torch.Tensor)
_WATCHED = (list, tuple, dict)
"""Collections that a `Watch` looks at. Of other ones the items are compared as bytes."""
_SIMPLE = {*_PLAIN, *_ARRAYS, *_WATCHED}
_LARGE = MOST_BYTES + 1
"""The size of what is not measured."""
_LEAF_BYTES = 64
"""Of a value that is no number or text, about."""
_GONE = object()


def objects_of(roots: dict[str, Any]) -> dict[str, Any]:
    """Those of the roots that have attributes, and the data sets and samplers that they hold, each
    once, by their places."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    level = [
        (place, one) for place, one in roots.items() if type(getattr(one, "__dict__", None)) is dict
    ]
    while level and len(found) < _MOST_OBJECTS:
        place, one = level.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        found[place] = one
        if is_stateful(one):
            continue  # it answers for what it holds
        for name, held in list(vars(one).items()):
            parts = held if type(held) in (list, tuple) else (held,)
            level += [
                (f"{place}.{name}" if held is part else f"{place}.{name}[{at}]", part)
                for at, part in enumerate(parts[:_MOST_OBJECTS])
                if isinstance(part, (Dataset, Sampler))
                and type(getattr(part, "__dict__", None)) is dict
            ]
    return found


class StateOf:
    """An object's state, as it says itself."""

    def __init__(self, one: Any) -> None:
        self._one = one

    def get_state(self) -> Any:
        return copy.deepcopy(self._one.state_dict())

    def set_state(self, state: Any, /) -> None:
        """Only where it is another one: one that was given a state may take it for the place where
        its next iteration begins."""
        if bits_of(self._one.state_dict()) != bits_of(state):
            self._one.load_state_dict(copy.deepcopy(state))

    def seed(self, seed: int) -> None:
        """It is in no worker."""


Key = tuple[str, str]
"""The place of an object, and the name of an attribute."""


class SetsHeld:
    """How many data sets or samplers the lists of others have, where that is another number than at
    attach. They are the program's, and cannot be made again from a store."""

    def __init__(self, objects: dict[str, Any], lists: set[str]) -> None:
        """lists: their places."""
        self._objects = objects
        self._lists = lists
        self._first = {place: (held, [*held]) for place, held in self._held()}
        self._wanted: dict[str, int] | None = None  # of the last state that was set

    def _held(self) -> Iterator[tuple[str, Any]]:
        for place, one in self._objects.items():
            for name, held in list(vars(one).items()):
                if f"{place}.{name}" in self._lists and type(held) in (list, tuple):
                    yield f"{place}.{name}", held

    def get_state(self) -> dict[str, int]:
        counts = ((place, len(held)) for place, held in self._held())
        return {place: n for place, n in counts if n != len(self._first[place][1])}

    def set_state(self, state: dict[str, int], /) -> None:
        self._wanted = state

    def asked(self, state: dict[str, int]) -> list[Question]:
        """See `Found`."""
        tables: list[Any] = [vars(one) for one in self._objects.values()]
        tables += [held for _, held in self._held() if type(held) is list]
        return all_of((Watch(tables, [], [], 0),))

    def check(self, *, begun: bool) -> None:
        """An epoch is opened. begun: it had begun before that state. Else what the program has done
        in its head counts.

        Raises: AttachError: the numbers are others than in the state that was set.
        """
        wanted, now = self._wanted, dict(self._held())
        if wanted is None:
            return
        for place, (held, items) in self._first.items():
            here, count = now.get(place, ()), wanted.get(place, len(items))
            as_made = here is held and [*map(id, here)] == [*map(id, items)]
            if len(here) != count and (begun or as_made):
                raise AttachError(
                    f"{place} held {count} data sets at the last commit, and holds {len(here)} "
                    "now. Which data sets there are is the program's, and is not kept: make all of "
                    "them before attach, and choose among them by an attribute that is a number, "
                    "which is kept, or choose anew at the beginning of each epoch"
                )
        if not begun:
            self._wanted = None

    def seed(self, seed: int) -> None:
        """They are in no worker."""


class Attributes:
    """Attributes of objects that are not what they were at attach.

    Attributes:
        lost: those that have changed and are too large to be kept.
    """

    def __init__(self, objects: dict[str, Any]) -> None:
        self._objects = objects
        self._look = _Look(objects)
        self._first = dict(self._look.values)
        self._names = {(place, name) for place, one in objects.items() for name in vars(one)}
        self._changed: set[Key] = set()
        self.lost: set[Key] = set()
        self._told: set[Key] = set()
        self._state: dict[str, dict[str, Any]] = {}

    def get_state(self) -> dict[str, dict[str, Any]]:
        """Returns the attributes by place and name. It is the same object as before, where nothing
        has changed since."""
        look = self._look
        others = look.watch.look()
        written = look.written()  # with those that may be other objects now
        if others:
            self._look = _Look(self._objects, look)
            written |= look.differences(self._look)
        if written:
            self._take(written)
        return self._state

    def asked(self, state: dict[str, dict[str, Any]]) -> list[Question] | None:
        """See `Found`."""
        return None if self.lost else self._look.asked()

    def _take(self, written: set[Key]) -> None:
        look = self._look
        self._changed |= written
        self.lost |= self._changed & look.large.keys()
        state: dict[str, dict[str, Any]] = {}
        for place, name in sorted(self._changed & look.values.keys()):
            state.setdefault(place, {})[name] = look.values[place, name]
        self._state = state

    def refuse_lost(self) -> None:
        """Raises: AttachError: one that has changed is too large to be kept. Of lists and dicts a
        warning says so: they may be caches."""
        for key in self.lost - self._told:
            told = (
                f"{'.'.join(key)} has changed since attach, and what data sets and samplers change "
                f"is kept up to {MOST_BYTES >> 20} MiB together"
            )
            way = f"give {key[0]} state_dict() and load_state_dict(), which are asked in each step"
            if not isinstance(self._look.large.get(key), (list, dict)):
                raise AttachError(f"{told}, so that it would be lost at a restart: {way}")
            self._told.add(key)
            warnings.warn(
                f"{told}: it is not, and after a restart it is as the program makes it. If it is "
                f"more than a cache, {way}",
                RuntimeWarning,
                stacklevel=2,
            )

    def set_state(self, state: dict[str, dict[str, Any]], /) -> None:
        """Those of which there is no state are as they were at attach; what is lost stays."""
        ours: dict[int, Any] = {}
        for entry in self._look.entries.values():
            ours[id(entry.value)] = entry.value
        self.get_state()  # what has changed
        if not (self._changed or state):
            return
        given = {(place, name): one for place, held in state.items() for name, one in held.items()}
        for key in (self._changed | given.keys()) - self.lost:
            value = given.get(key, self._first.get(key, _GONE))
            if key[0] in self._objects and (value is not _GONE or key not in self._names):
                _put(self._objects[key[0]], key[1], value, ours)
        self._look = _Look(self._objects)
        self._take(set(given))

    def seed(self, seed: int) -> None:
        """They are in no worker."""


class _Entry:
    """An attribute that is data.

    Attributes:
        size: in bytes, about.
        kept: a copy; of one that is large: `_GONE`.
        bits: of what was kept, if it has collections that a `Watch` does not look at.
    """

    def __init__(self, value: Any, size: int) -> None:
        self.value = value
        self.size = size
        parts = _parts(value) if size <= MOST_BYTES and type(value) not in _PLAIN else []
        self.tables = [one for one in parts if type(one) in (list, dict)]
        self._watch = Watch(self.tables, [], [], 0) if self.tables else None
        self.kept: Any = _GONE
        self._coded = any(map(_is_coded, {*map(type, parts)} - _SIMPLE))
        self.bits: bytes | None = None
        self.arrays: list[tuple[Any, Any]] = []  # with their copies
        self.samples: list[tuple[Any, Any]] = []  # of what is large

    def is_of(self, value: Any) -> bool:
        """Whether the value is the object that it was, and the objects in it are."""
        return value is self.value and (self._watch is None or not self._watch.look())

    def keep(self) -> None:
        """What it holds now."""
        now = at_once(self.value) if self.tables or self._coded else self.value
        self.kept, self.samples = copy.deepcopy(now), []
        if self._coded:
            self.bits = bits_of(self.kept)
        if self.tables or isinstance(self.value, (tuple, *_ARRAYS)):
            both = zip(_parts(now), _parts(self.kept), strict=True)
            self.arrays = [each for each in both if type(each[0]) in _ARRAYS]

    def leave(self) -> None:
        """It is too large to be kept."""
        self.kept, self.bits, self.arrays, value = _GONE, None, [], self.value
        some = value[:_MOST_OBJECTS] if isinstance(value, (list, tuple)) else ()
        samples = [(one, sample_of(one)) for one in (value, *some)]
        self.samples = [each for each in samples if each[1] is not None]


class _Look:
    """What attributes hold that is data.

    Attributes:
        entries: all of them, by places and names.
        values: copies of what is small.
        large: what is not; it is watched for changes.
        watch: sees whether all are the objects that they were.
    """

    def __init__(self, objects: dict[str, Any], before: _Look | None = None) -> None:
        """before: what has not changed since is taken from there."""
        known: dict[Key, _Entry] = before.entries if before is not None else {}
        self.entries: dict[Key, _Entry] = {}
        entries = self.entries
        for place, one in objects.items():
            for name, value in list(vars(one).items()):
                entry = known.get((place, name))
                if entry is None or not entry.is_of(value):
                    size = _size(value)
                    entry = None if size is None else _Entry(value, size)
                if entry is not None:
                    entries[place, name] = entry
        self.values: dict[Key, Any] = {}
        self.large: dict[Key, Any] = {}
        room = MOST_BYTES
        for key, entry in sorted(entries.items(), key=lambda each: each[1].size):
            room -= entry.size
            if room >= 0:
                if entry.kept is _GONE:
                    entry.keep()
                self.values[key] = entry.kept
            else:
                if entry.kept is not _GONE or not entry.samples:
                    entry.leave()
                self.large[key] = entry.value
        tables: list[Any] = [vars(one) for one in objects.values()]
        for key in self.values:
            tables += entries[key].tables
        self.watch = Watch(tables, [], [], 0)
        self._index()

    def _index(self) -> None:
        entries = self.entries
        self._arrays = [(key, *pair) for key, entry in entries.items() for pair in entry.arrays]
        self._samples = [(key, *pair) for key, entry in entries.items() for pair in entry.samples]
        self._coded = [(key, entry) for key, entry in entries.items() if entry.bits is not None]

    def asked(self) -> list[Question] | None:
        """What tells whether anything is another; None: `written` alone does."""
        if self._samples or self._coded:
            return None
        return [
            *all_of((self.watch,)),
            *((same_bytes, (one, copied), True) for _, one, copied in self._arrays),
        ]

    def written(self) -> set[Key]:
        """Those whose arrays were written; of large ones, as far as a sample tells."""
        found: set[Key] = set()
        for key, one, copied in self._arrays:
            if not same_bytes(one, copied):
                found.add(key)
        gone: set[Key] = set()
        for key, entry in self._coded:
            try:
                if bits_of(entry.value) != entry.bits:
                    found.add(key)
            except (TypeError, ValueError):  # it holds something that is no data
                gone.add(key)
                del self.entries[key], self.values[key]
        if found or gone:
            for key in found:
                self.entries[key].keep()
                self.values[key] = self.entries[key].kept
            self._index()
        for key, one, sample in self._samples:
            if sample_of(one) != sample:
                found.add(key)
        return found | gone

    def differences(self, now: _Look) -> set[Key]:
        """Those that a later look has found to be others."""
        ours, theirs = self.entries, now.entries
        found: set[Key] = set()
        for key in ours.keys() | theirs.keys():
            one, other = ours.get(key), theirs.get(key)
            if one is not other:
                kept = one.kept if one is not None else _GONE
                if other is None or other.kept is _GONE or not _same(kept, other.kept):
                    found.add(key)
        return found


def _same(one: Any, other: Any) -> bool:
    """Returns whether two values are the same data, or both are none."""
    return type(one) is type(other) and (one is other or bits_of(one) == bits_of(other))


def _size(value: Any) -> int | None:
    """Bytes, about. None: it cannot be stored and put back, as plain values can, arrays in memory,
    and collections of these. (What has many items is large, whatever they are.)"""
    size, left, waiting, coded = 0, _MOST_ITEMS, [value], False
    while waiting:
        one = waiting.pop()
        kind: Any = type(one)
        if kind is str or kind is bytes:
            size += len(one)
        elif kind in _PLAIN:
            size += 8
        elif issubclass(kind, np.generic):
            size += one.nbytes
        elif is_leaf(kind):
            size += _LEAF_BYTES
            coded = True
        elif kind is bytearray:
            size += len(one)
        elif kind is np.ndarray:
            if one.dtype.hasobject or isinstance(one.base, np.memmap):
                return None
            size += one.nbytes
        elif kind is torch.Tensor:
            if one.requires_grad or one.layout is not torch.strided:
                return None
            size += one.nbytes if one.device.type == "cpu" else _LARGE
        elif kind in COLLECTIONS or is_namedtuple(kind):
            left -= len(one)
            if left < 0:
                return _LARGE
            if isinstance(one, dict):
                coded = coded or not all(type(key) in _PLAIN for key in [*one])
                waiting += one.values()
            else:
                waiting += one
            coded = coded or kind not in _WATCHED
        else:
            return None
    if coded:
        plain = dict(value) if type(value) is defaultdict and has_factory(value) else value
        try:
            encode(plain, exact=True)
        except (TypeError, ValueError):  # a key is no data, or it would come back as another type
            return None
    return size


def _is_coded(kind: type) -> bool:
    return (kind in COLLECTIONS and kind not in _WATCHED) or is_namedtuple(kind)


def _parts(value: Any) -> list[Any]:
    """It, and what is in it."""
    parts = [value]
    for one in parts:  # which gets longer
        if type(one) in (list, tuple):
            parts += one
        elif type(one) is dict:
            parts += one.values()
    return parts


def _put(holder: Any, name: str, value: Any, ours: dict[int, Any]) -> None:
    """The value, in the object that is there, if it can be: others may hold it too. ours: see
    `become`."""
    held = vars(holder).get(name, _GONE)
    if held is not _GONE and _size(held) is None:
        return  # an object that was made since: a generator, a file
    if value is _GONE:
        if held is not _GONE:
            delattr(holder, name)
        return
    if not _same(held, value):
        setattr(holder, name, become(held, copy.deepcopy(value), ours))
