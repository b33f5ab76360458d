"""Pins: epochs that stay in a tier whatever `keep` says, and why.

A pin is a file beside a rank's manifest, `EPOCH.RUN.RANK-WORLD.kept`. Its name alone keeps the
epoch. It holds marks: one for each reason. Only the writer of the run and rank writes them.
"""

from __future__ import annotations

import math
import re
import struct
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple

import msgpack

from pmstore.engine.snapshot import checksum
from pmstore.objects.dtypes import UNDECODABLE
from pmstore.tiers.backend import Backend, Lock
from pmstore.tiers.manifest import GENERATION_MOST, ManifestName
from pmstore.tiers.places import Places

_MAGIC = b"PMSKEPT1"
_HEAD = struct.Struct("<8sIQ")
_BYTES_MOST = 1 << 20
_NAME = re.compile(r"(\d{12,20})\.([A-Za-z0-9_-]{1,64})\.(\d{1,20})-(\d{1,20})\.kept", re.ASCII)
_TEMPORARY = re.compile(r"\.(.*\.kept)\.[0-9a-f]{8}\.new")


class PinName(NamedTuple):
    epoch: int
    run: str
    rank: int
    world_size: int

    def __str__(self) -> str:
        return f"{self.epoch:012d}.{self.run}.{self.rank}-{self.world_size}.kept"

    @classmethod
    def parse(cls, name: str) -> PinName | None:
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        made = cls(int(match[1]), match[2], int(match[3]), int(match[4]))
        ours = made.epoch <= GENERATION_MOST and made.rank < made.world_size
        return made if ours and str(made) == name else None

    @classmethod
    def of(cls, manifest: ManifestName) -> PinName:
        return cls(*manifest[1:])


Series = Literal["last", "best", "named"]


@dataclass(frozen=True, slots=True)
class Mark:
    """Why an epoch is kept. Marks of one group, series and name push each other out."""

    group: str
    """Of the training run in the store."""
    series: Series
    name: str
    """Of the state; of "best" the figure's; of "last" empty."""
    step: int
    value: float | None
    """The figure, of "best"."""
    loss: float | None
    """That the commit was given."""
    time: float
    """Unix time, for people."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.group, self.series, self.name

    def is_called(self, name: str | int) -> bool:
        """Whether that is the state's name, or its step."""
        if isinstance(name, int):
            return self.step == name
        return self.series == "named" and self.name == name

    def __str__(self) -> str:
        if self.series == "named":
            return self.name
        return "last" if self.series == "last" else f"best {self.name} {self.value:g}"


@dataclass(frozen=True, slots=True)
class Pin:
    """A mark that an epoch is to get, and of how many others."""

    mark: Mark
    count: int
    """Marks of its key that stay: the newest, or the best."""
    lowest: bool = True
    """The best value is the lowest one."""

    def better(self, value: float, other: float) -> bool:
        return value < other if self.lowest else value > other

    def surplus(self, marked: Iterable[tuple[int, Mark]]) -> list[tuple[int, Mark]]:
        """Of (epoch, mark), those that are pushed out."""
        mine = [one for one in marked if one[1].key == self.mark.key]
        if self.mark.series == "best":
            sign = 1.0 if self.lowest else -1.0
            mine.sort(key=lambda one: (sign * (one[1].value or 0.0), one[0]))
        else:
            mine.sort(key=lambda one: -one[0])
        return mine[self.count :]


def pack(marks: Iterable[Mark]) -> bytes:
    body: bytes = msgpack.packb([asdict(mark) for mark in marks])
    return _HEAD.pack(_MAGIC, checksum(body), len(body)) + body


def unpack(data: bytes) -> tuple[Mark, ...]:
    """Raises: ValueError."""
    if len(data) < _HEAD.size:
        raise ValueError("the pin is cut off")
    magic, crc, length = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if magic != _MAGIC or length != len(body) or checksum(body) != crc:
        raise ValueError("not a pin, or a damaged one")
    try:
        return tuple(_mark(said) for said in msgpack.unpackb(body))
    except (*UNDECODABLE, msgpack.UnpackException) as error:
        raise ValueError(f"the pin does not decode: {error!r}") from error


def _mark(said: Any) -> Mark:
    made = Mark(**{field.name: said[field.name] for field in fields(Mark)})
    numbers = (made.value, made.loss)
    right = (
        type(made.group) is type(made.name) is str
        and made.series in ("last", "best", "named")
        and type(made.step) is int
        and all(one is None or type(one) is float for one in numbers)
        and type(made.time) is float
        and math.isfinite(made.time)
        and (made.series != "best" or made.value is not None)
    )
    if not right:
        raise ValueError("a mark of another kind")
    return made


def read_marks(place: Backend | Places, name: str) -> tuple[Mark, ...]:
    """None of a pin that cannot be read: it keeps its epoch all the same."""
    try:
        return unpack(place.read(name, 0, _BYTES_MOST))
    except (FileNotFoundError, ValueError):
        return ()


class Pins:
    """Of one run and rank, as their writer makes them. `marked` may be called by any thread."""

    def __init__(self, backend: Backend, own: ManifestName) -> None:
        self._backend, self._own = backend, own
        self._marks: dict[int, tuple[Mark, ...]] | None = None  # by epoch, once known
        self._reading = threading.RLock()

    def epochs(self, names: Iterable[str]) -> set[int]:
        """That are kept."""
        parsed = filter(None, map(PinName.parse, names))
        return {one.epoch for one in parsed if one[1:] == self._own[2:]}

    def marked(self) -> list[tuple[int, Mark]]:
        """All marks, with their epochs."""
        with self._reading:
            return [(epoch, one) for epoch, marks in self._known().items() for one in marks]

    def _known(self) -> dict[int, tuple[Mark, ...]]:
        if self._marks is None:
            names = self._backend.names()
            there = {
                one.epoch
                for one in filter(None, map(ManifestName.parse, names))
                if one[2:] == self._own[2:]
            }
            self._marks = {
                epoch: read_marks(self._backend, self._name(epoch))
                for epoch in self.epochs(names) & there
            }
        return self._marks

    def _name(self, epoch: int) -> str:
        return str(PinName(epoch, *self._own[2:]))

    def _write(self, epoch: int, marks: tuple[Mark, ...]) -> None:
        known = self._known()
        if marks:
            self._backend.publish(self._name(epoch), pack(marks))
            known[epoch] = marks
        else:
            self._backend.delete(self._name(epoch))
            known.pop(epoch, None)

    def add(self, lock: Lock, epoch: int, pin: Pin) -> str:
        """Before the epoch counts, so that none is there without. Returns the name of its file."""
        with self._reading:
            lock.check()
            held = self._known().get(epoch, ())
            self._write(epoch, (*(one for one in held if one.key != pin.mark.key), pin.mark))
        return self._name(epoch)

    def push_out(self, lock: Lock, pin: Pin) -> None:
        """What it pushes out, when the epoch counts."""
        with self._reading:
            for epoch, mark in pin.surplus(self.marked()):
                lock.check()
                left = tuple(one for one in self._known()[epoch] if one is not mark)
                self._write(epoch, left)

    def leavings(self, names: Iterable[str]) -> list[str]:
        """Of a writer that was killed: pins of epochs that are not there, and what was to become
        pins."""
        names = list(names)
        there = {one[1:] for one in filter(None, map(ManifestName.parse, names))}
        found = []
        for name in names:
            unfinished = _TEMPORARY.fullmatch(name)
            pin = PinName.parse(unfinished[1] if unfinished else name)
            mine = pin is not None and pin[1:] == self._own[2:]
            if pin is not None and mine and (unfinished or tuple(pin) not in there):
                found.append(name)
        return found
