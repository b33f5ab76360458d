"""The plan of an epoch: what it has to look at (all of the state, what may have changed since the
last epoch, or this rank's share of it), and what it keeps of the files of the last epoch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pmstore._engine.snapshot import CHANGED, LIVE, Snapshot
from pmstore.objects.array import Array
from pmstore.tiers._epochs import sharding
from pmstore.tiers._epochs.image import Image
from pmstore.tiers._epochs.manifest import CHUNK, Manifest, Shared
from pmstore.tiers.config import TierConfig

SPACE = 2.0
"""Files may hold so many times the state before chunks of the emptiest ones are written anew."""


@dataclass(slots=True)
class Base:
    """The epoch that this process flushed last, on which a later one may build. It is only ever
    this process's own, so that no epoch rests on a file that another writer may take away."""

    tag: int
    name: str
    nbytes: int
    """The size of the manifest, as it was published."""
    manifest: Manifest
    seen: dict[int, bytes]
    """Fingerprints of chunks that were found unchanged once, by index."""

    def intact(self, names: Mapping[str, int]) -> bool:
        """Says whether all of its files are there: nothing may rest on files that somebody took
        away."""
        return names.get(self.name) == self.nbytes and all(
            names.get(file, -1) >= size for file, size in self.manifest.files
        )


@dataclass(frozen=True, slots=True)
class Plan:
    manifest: Manifest
    """The new epoch's, without files, and without the places of its chunks."""
    look: Array
    """bool for each chunk: it has changed, or it was captured, or the last epoch does not have
    it."""
    known: Array
    """int64 for each chunk: its CRC-32C in the last epoch, or -1."""


def plan(config: TierConfig, run: str, snapshot: Snapshot, base: Base | None) -> Plan:
    found = snapshot.chunks(config.chunk_bytes, base.tag if base else 0)
    shared: tuple[Shared, ...] = ()
    borrowed = np.zeros(0, np.uint64)
    if config.world_size > 1 and config.replicated:
        shared = _shared(config, snapshot)
        borrowed = sharding.borrowed(
            shared, config.rank, config.world_size, config.chunk_bytes, len(found)
        )
        found[borrowed] = 0
    live = np.flatnonzero(found & LIVE).astype(np.uint64)
    chunks = np.zeros(len(live), CHUNK)
    chunks["index"] = live
    look = np.ones(len(live), bool)
    known = np.full(len(live), -1, np.int64)
    if base is not None and len(base.manifest.chunks):
        at, there = _in(base.manifest, chunks)
        look = ((found[live] & CHANGED) != 0) | ~there
        known[there] = base.manifest.chunks["crc"][at][there]
    manifest = Manifest(
        epoch=snapshot.epoch,
        run=run,
        rank=config.rank,
        world_size=config.world_size,
        chunk_bytes=config.chunk_bytes,
        head=snapshot.super,
        files=(),
        chunks=chunks,
        time=time.time(),
        shared=shared,
        borrowed=borrowed,
    )
    return Plan(manifest, look, known)


def _in(old: Manifest, chunks: Array) -> tuple[Array, Array]:
    """Returns where each chunk stands in the old manifest, which is not empty (anywhere, if it does
    not), and whether it does."""
    at = np.minimum(np.searchsorted(old.chunks["index"], chunks["index"]), len(old.chunks) - 1)
    return at, old.chunks["index"][at] == chunks["index"]


def carry_over(
    chunk_bytes: int, old: Manifest, chunks: Array, keep: Array
) -> list[tuple[str, int]]:
    """Takes the places of the chunks to keep over; leaves out the emptiest files while all of
    them are too large. Clears `keep` for what has to be written after all. Returns the files
    that are still named."""
    if not keep.any():
        return []
    at, _ = _in(old, chunks)
    number = old.chunks["file"][at]
    live = np.bincount(number[keep], minlength=len(old.files)) * chunk_bytes
    sizes = np.array([size for _, size in old.files], np.int64)
    used = live > 0
    state = len(chunks) * chunk_bytes
    for file in np.argsort(live / np.maximum(sizes, 1)):
        fresh = state - int(live[used].sum())
        if int(sizes[used].sum()) + fresh <= SPACE * state:
            break
        used[file] = False
    keep &= used[number]
    renumbered = np.cumsum(used) - 1
    chunks["file"][keep] = renumbered[number[keep]]
    chunks["position"][keep] = old.chunks["position"][at][keep]
    chunks["crc"][keep] = old.chunks["crc"][at][keep]
    return [one for one, still in zip(old.files, used, strict=True) if still]


def _shared(config: TierConfig, snapshot: Snapshot) -> tuple[Shared, ...]:
    """Returns replicated arrays of at least a chunk, in order of name, as of the snapshot."""
    image = Image(snapshot.peek, snapshot.file_bytes)
    found = [
        Shared(one.name, one.offset, one.nbytes)
        for one in image.arrays()
        if one.nbytes >= config.chunk_bytes and sharding.matches(one.name, config.replicated)
    ]
    return tuple(sorted(found))
