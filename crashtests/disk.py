"""Files as a disk has them: what is there for sure, and what a power failure may leave of the rest.

Built from the records of native/recorder.c (in the process, by LD_PRELOAD) and native/watch.c (from
outside, by ptrace).
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

_HEAD = struct.Struct("<IIIIQ")
CREATE, WRITE, SYNC, RENAME, LINK, UNLINK, MKDIR, SIZE, MARK, TRUNCATE, STORE, SYNC_RANGE = range(
    1, 13
)
SECTOR = 512
LOST = (0.002, 0.05, 0.35, 0.9)
"""The share of the sectors that were not synced which an image of some does not have as they were
last: a few, or most of them."""

Image = dict[str, "bytes | None"]
"""Paths and contents; None: a directory. A directory comes before what is in it."""


@dataclass(frozen=True)
class Event:
    kind: int
    path: str
    rest: bytes
    offset: int
    more: bool
    """The next event happens in the same instant."""


def events(data: bytes) -> Iterator[Event]:
    at = 0
    while at < len(data):
        kind, path, rest, more, offset = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        yield Event(
            kind,
            data[at : at + path].decode(),
            data[at + path : at + path + rest],
            offset,
            bool(more),
        )
        at += path + rest


@dataclass
class Layer:
    """A file between two truncations: blocks given back are not found again below a later size."""

    now: bytearray = field(default_factory=bytearray)
    sizes: list[int] = field(default_factory=lambda: [0])
    versions: dict[int, list[bytes]] = field(default_factory=dict)
    """Contents of each sector since it was durable; first the durable one."""

    def after(self, how: str, rng: random.Random) -> bytes:
        content = bytearray(self.now)
        lost = rng.choice(LOST)
        size = (
            self.sizes[0]
            if how == "none"
            else self.sizes[-1]
            if how == "all"
            else rng.choice(self.sizes)
        )
        for sector, versions in self.versions.items():
            draw = 0.0 if how == "none" else 1.0 if how == "all" else rng.random() / lost
            if draw >= 1:
                kept = versions[-1]
            elif draw < 0.8:
                kept = versions[0]
            else:
                kept = rng.choice(versions) if draw < 0.95 else rng.randbytes(SECTOR)
            content[sector * SECTOR : (sector + 1) * SECTOR] = kept
        return bytes(content[:size].ljust(size, b"\0"))


class File:
    def __init__(self) -> None:
        self.layers = [Layer()]

    @property
    def now(self) -> bytes:
        return bytes(self.layers[-1].now)

    def write(self, offset: int, data: bytes) -> None:
        layer, end = self.layers[-1], offset + len(data)
        self.grow(end)
        sectors = range(offset // SECTOR, -(-end // SECTOR))
        for sector in sectors:
            if sector not in layer.versions:
                layer.versions[sector] = [self._sector(sector)]
        layer.now[offset:end] = data
        for sector in sectors:
            layer.versions[sector].append(self._sector(sector))

    def _sector(self, sector: int) -> bytes:
        return bytes(self.layers[-1].now[sector * SECTOR : (sector + 1) * SECTOR]).ljust(
            SECTOR, b"\0"
        )

    def grow(self, size: int) -> None:
        layer = self.layers[-1]
        if size > len(layer.now):
            layer.now.extend(bytes(size - len(layer.now)))
            layer.sizes.append(size)

    def truncate(self, size: int) -> None:
        old = self.layers[-1]
        if size < len(old.now):
            kept = {
                sector: versions
                for sector, versions in old.versions.items()
                if (sector + 1) * SECTOR <= size
            }
            self.layers.append(Layer(old.now[:size], [size], kept))
        self.grow(size)

    def sync(self, start: int = 0, end: int | None = None) -> None:
        """Of the bytes in [start, end), and of the size."""
        layer = self.layers[-1]
        last = len(layer.now) if end is None else end
        sizes = [len(layer.now)]
        versions = {
            s: v
            for s, v in layer.versions.items()
            if not start < (s + 1) * SECTOR <= -(-last // SECTOR) * SECTOR
        }
        self.layers = [Layer(layer.now, sizes, versions)]

    def after(self, how: str, rng: random.Random) -> bytes:
        """After a power failure. how: none, all, or some of what was not synced."""
        layer = {"none": 0, "all": -1}.get(how)
        return (rng.choice(self.layers) if layer is None else self.layers[layer]).after(how, rng)


class Disk:
    """Files, and the names by which they can be reached: those that are there for sure, and changes
    that may be lost."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.file: list[File] = []
        self.names: dict[str, int] = {}  # now
        self.durable: dict[str, int] = {}  # -1: a directory
        # Of a directory since it was synced. Each change is whole or not at all: pairs of a name
        # and a file, or none.
        self.changes: dict[str, list[dict[str, int | None]]] = {}

    def _change(self, *changed: tuple[str, int | None]) -> None:
        for path, file in changed:
            if file is None:
                self.names.pop(path)
            else:
                self.names[path] = file
        if len({os.path.dirname(path) for path, _ in changed}) == 1:
            self.changes.setdefault(os.path.dirname(changed[0][0]), []).append(dict(changed))
        else:  # each directory comes to the disk by itself
            for path, file in changed:
                self.changes.setdefault(os.path.dirname(path), []).append({path: file})

    def apply(self, event: Event) -> None:
        path, other = event.path, event.rest.decode() if event.kind in (RENAME, LINK) else ""
        number = self.names.get(path, -1)
        if event.kind == CREATE:
            self.file.append(File())
            self._change((path, len(self.file) - 1))
        elif event.kind == MKDIR:
            self._change((path, -1))
        elif event.kind == LINK:
            self._change((other, number))
        elif event.kind == RENAME:
            self._change((path, None), (other, number))
        elif event.kind == UNLINK:
            self._change((path, None))
        elif event.kind in (WRITE, STORE):
            self.file[number].write(event.offset, event.rest)
        elif event.kind == SIZE:
            self.file[number].grow(event.offset)
        elif event.kind == TRUNCATE:
            self.file[number].truncate(event.offset)
        elif event.kind == SYNC_RANGE:
            self.file[number].sync(
                event.offset, event.offset + int.from_bytes(event.rest, "little")
            )
        elif event.kind == SYNC and number >= 0:
            self.file[number].sync()
        elif event.kind == SYNC:
            for change in self.changes.pop(path, []):
                self._carry_out(change, self.durable)

    @staticmethod
    def _carry_out(change: dict[str, int | None], names: dict[str, int]) -> None:
        for name, file in change.items():
            if file is None:
                names.pop(name, None)
            else:
                names[name] = file

    def now(self) -> Image:
        """What another process sees."""
        return {
            name: None if number == -1 else self.file[number].now
            for name, number in sorted(self.names.items())
        }

    def after(self, how: str, rng: random.Random) -> Image:
        """After a power failure. how: none or all of what was not synced; names: changes of names
        alone; some."""
        names = dict(self.durable)
        for changes in self.changes.values():
            for change in changes:
                if how != "none" and (how != "some" or rng.random() < 0.5):
                    self._carry_out(change, names)
        found: Image = {}
        for name, number in sorted(names.items()):
            above = os.path.dirname(name)
            if above == self.root or (above in found and found[above] is None):
                found[name] = (
                    None
                    if number == -1
                    else self.file[number].after("none" if how == "names" else how, rng)
                )
        return found
