"""Kept epochs: they stay in a tier whatever the `keep` of its TierConfig says, and why.

One is kept by a file beside a rank's manifest, `EPOCH.RUN.RANK-WORLD.kept`. Its name alone keeps
the epoch. In it are the reasons, for people and programs. Only the writer of the run and rank
writes it.
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

from pmstore._engine.snapshot import checksum
from pmstore.objects.dtypes import UNDECODABLE
from pmstore.tiers._epochs.manifest import GENERATION_MOST, ManifestName
from pmstore.tiers._places.place import Lock, Place, Source

_MAGIC = b"PMSKEPT1"
_HEAD = struct.Struct("<8sIQ")
_BYTES_MOST = 1 << 20
_NAME = re.compile(r"(\d{12,20})\.([A-Za-z0-9_-]{1,64})\.(\d{1,20})-(\d{1,20})\.kept", re.ASCII)
_SUFFIX = ".kept"
_TEMPORARY = re.compile(r"\.(.*\.kept)\.[0-9a-f]{8}\.new")


class KeptName(NamedTuple):
    epoch: int
    run: str
    rank: int
    world_size: int

    def __str__(self) -> str:
        return f"{self.epoch:012d}.{self.run}.{self.rank}-{self.world_size}.kept"

    @classmethod
    def parse(cls, name: str) -> KeptName | None:
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        made = cls(int(match[1]), match[2], int(match[3]), int(match[4]))
        ours = made.epoch <= GENERATION_MOST and made.rank < made.world_size
        return made if ours and str(made) == name else None

    @classmethod
    def of(cls, manifest: ManifestName) -> KeptName:
        return cls(*manifest[1:])


Series = Literal["last", "best", "named"]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an epoch is kept. Reasons of one group, series and name push each other out."""

    group: str
    """The training run in the store."""
    series: Series
    name: str
    """The state's name; of "best" the figure's; of "last" empty."""
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
class Keeping:
    """Says that an epoch is to be kept, and how many others of its kind stay."""

    reason: Reason
    count: int
    """Reasons of its key that stay: the newest, or the best."""
    lowest: bool = True
    """The best value is the lowest one."""

    def better(self, value: float, other: float) -> bool:
        return value < other if self.lowest else value > other

    def surplus(self, reasons: Iterable[tuple[int, Reason]]) -> list[tuple[int, Reason]]:
        """Returns those (epoch, reason) that are pushed out."""
        mine = [one for one in reasons if one[1].key == self.reason.key]
        if self.reason.series == "best":
            sign = 1.0 if self.lowest else -1.0
            mine.sort(key=lambda one: (sign * (one[1].value or 0.0), one[0]))
        else:
            mine.sort(key=lambda one: -one[0])
        return mine[self.count :]


def pack(reasons: Iterable[Reason]) -> bytes:
    body: bytes = msgpack.packb([asdict(reason) for reason in reasons])
    return _HEAD.pack(_MAGIC, checksum(body), len(body)) + body


def unpack(data: bytes) -> tuple[Reason, ...]:
    """Returns the reasons in a file that keeps an epoch.

    Raises: ValueError.
    """
    if len(data) < _HEAD.size:
        raise ValueError("what keeps an epoch is cut off")
    magic, crc, length = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if magic != _MAGIC or length != len(body) or checksum(body) != crc:
        raise ValueError("not what keeps an epoch, or damaged")
    try:
        return tuple(_reason(said) for said in msgpack.unpackb(body))
    except (*UNDECODABLE, msgpack.UnpackException) as error:
        raise ValueError(f"what keeps an epoch does not decode: {error!r}") from error


def _reason(said: Any) -> Reason:
    made = Reason(**{field.name: said[field.name] for field in fields(Reason)})
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
        raise ValueError("a reason of another kind")
    return made


def read_reasons(place: Source, name: str) -> tuple[Reason, ...]:
    """Returns the reasons in a file; none if it cannot be read: it keeps its epoch all the same."""
    try:
        return unpack(place.read(name, 0, _BYTES_MOST))
    except (FileNotFoundError, ValueError):
        return ()


class KeptEpochs:
    """Kept epochs of one run and rank, as their writer makes them. `reasons` may be called by any
    thread."""

    def __init__(self, place: Place, own: ManifestName) -> None:
        self._place, self._own = place, own
        self._reasons: dict[int, tuple[Reason, ...]] | None = None  # by epoch, once known
        self._reading = threading.RLock()

    def epochs(self, names: Iterable[str]) -> set[int]:
        """Returns the epochs that are kept."""
        parsed = (KeptName.parse(name) for name in names if name.endswith(_SUFFIX))
        return {one.epoch for one in parsed if one is not None and one[1:] == self._own[2:]}

    def reasons(self) -> list[tuple[int, Reason]]:
        """Returns all reasons, with their epochs."""
        with self._reading:
            return [(epoch, one) for epoch, reasons in self._known().items() for one in reasons]

    def _known(self) -> dict[int, tuple[Reason, ...]]:
        if self._reasons is None:
            names = self._place.names()
            there = {
                one.epoch
                for one in filter(None, map(ManifestName.parse, names))
                if one[2:] == self._own[2:]
            }
            self._reasons = {
                epoch: read_reasons(self._place, self._name(epoch))
                for epoch in self.epochs(names) & there
            }
        return self._reasons

    def _name(self, epoch: int) -> str:
        return str(KeptName(epoch, *self._own[2:]))

    def _write(self, epoch: int, reasons: tuple[Reason, ...]) -> None:
        known = self._known()
        if reasons:
            self._place.publish(self._name(epoch), pack(reasons))
            known[epoch] = reasons
        else:
            self._place.delete(self._name(epoch))
            known.pop(epoch, None)

    def add(self, lock: Lock, epoch: int, keeping: Keeping) -> str:
        """Keeps an epoch, before it counts: so none is there that should be kept and is not.
        Returns the name of the file that keeps it."""
        with self._reading:
            lock.check()
            held = self._known().get(epoch, ())
            self._write(
                epoch, (*(one for one in held if one.key != keeping.reason.key), keeping.reason)
            )
        return self._name(epoch)

    def push_out(self, lock: Lock, keeping: Keeping) -> None:
        """Removes the reasons that a new one pushes out, when its epoch counts."""
        with self._reading:
            for epoch, reason in keeping.surplus(self.reasons()):
                lock.check()
                left = tuple(one for one in self._known()[epoch] if one is not reason)
                self._write(epoch, left)

    def forget_known(self) -> None:
        """Has what there is read again: an epoch may not count after all."""
        with self._reading:
            self._reasons = None

    def leavings(self, names: Iterable[str]) -> list[str]:
        """Returns the files that a killed writer left: those that keep epochs that are not there,
        and what was to become such files."""
        names = list(names)
        there = {one[1:] for one in filter(None, map(ManifestName.parse, names))}
        found = []
        for name in names:
            unfinished = _TEMPORARY.fullmatch(name)
            parsed = KeptName.parse(unfinished[1] if unfinished else name)
            mine = parsed is not None and parsed[1:] == self._own[2:]
            if parsed is not None and mine and (unfinished or tuple(parsed) not in there):
                found.append(name)
        return found
