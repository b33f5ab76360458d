"""The bytes of one epoch, each chunk of them checked."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from pmstore._engine import snapshot
from pmstore._engine.constants import ARRAY
from pmstore.errors import CorruptStoreError, FormatVersionError
from pmstore.objects.generations import NUMBERS, Key, decode
from pmstore.tiers._epochs import sharding
from pmstore.tiers._epochs.image import Image
from pmstore.tiers._epochs.leases import Lease
from pmstore.tiers._epochs.listing import EpochInfo, forgotten, load_manifest
from pmstore.tiers._epochs.manifest import Manifest
from pmstore.tiers._places.place import BrokenEpochError, Place, Source


class EpochBytes:
    """The bytes of one rank's store as of an epoch: its own chunks, and those that other ranks
    flushed for it. Every chunk is checked when it is read."""

    def __init__(self, place: Source, info: EpochInfo, rank: int) -> None:
        """Reads the rank's manifest.

        Raises: BrokenEpochError.
        """
        if rank not in info.manifests:
            raise BrokenEpochError("missing", f"rank {rank} of {info.world_size} has not published")
        self.manifest: Manifest = load_manifest(place, info.manifests[rank])
        try:
            self.store_bytes: int = snapshot.store_size(self.manifest.head, info.manifests[rank])
        except (CorruptStoreError, FormatVersionError) as error:
            raise BrokenEpochError("corrupt", str(error)) from error
        self._everywhere = place
        self.place: Place = place.of(info.manifests[rank])
        self._info = info
        self._others: dict[int, EpochBytes] = {}
        self._lenders: dict[int, tuple[int, int, int]] = {}
        self._cache: tuple[int, bytes] = (-1, b"")
        manifest = self.manifest
        if len(manifest.borrowed):
            self._lenders = sharding.lenders(
                manifest.shared, rank, manifest.world_size, manifest.chunk_bytes, manifest.borrowed
            )

    def own_chunk(self, index: int) -> bytes | None:
        """Returns a chunk that this rank flushed; None: the epoch has no such chunk (it held
        nothing).

        Raises: BrokenEpochError.
        """
        if self._cache[0] == index:
            return self._cache[1]
        manifest = self.manifest
        at = int(np.searchsorted(manifest.chunks["index"], index))
        if at == len(manifest.chunks) or manifest.chunks["index"][at] != index:
            return None
        one = manifest.chunks[at]
        data = self._read(manifest.files[int(one["file"])][0], int(one["position"]), index)
        if snapshot.checksum(data) != int(one["crc"]):
            file = manifest.files[int(one["file"])][0]
            raise BrokenEpochError("corrupt", f"chunk {index} in {file}: its checksum is wrong")
        self._cache = (index, data)
        return data

    def _read(self, file: str, position: int, index: int) -> bytes:
        size = self.manifest.chunk_bytes
        try:
            data = self.place.read(file, position, position + size)
        except FileNotFoundError:
            raise BrokenEpochError("missing", f"file {file}") from None
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise BrokenEpochError(
                "corrupt", f"chunk {index} in {file} cannot be read: {error}"
            ) from None
        if len(data) != size:
            raise BrokenEpochError("corrupt", f"chunk {index} in {file}: the file is too short")
        return data

    def borrowed_chunk(self, index: int) -> bytes:
        """Returns a chunk that another rank flushed: it lies there where that rank's store has the
        array.

        Raises: BrokenEpochError.
        """
        size = self.manifest.chunk_bytes
        if index not in self._lenders:
            raise BrokenEpochError(
                "corrupt", f"chunk {index} is said to be another rank's, and is not"
            )
        lender, number, start = self._lenders[index]
        if lender not in self._others:
            other = EpochBytes(self._everywhere, self._info, lender)
            refuse_mixed({self.manifest.rank: self, lender: other})
            self._others[lender] = other
        other, name = self._others[lender], self.manifest.shared[number].name
        offsets = {one.name: one for one in other.manifest.shared}
        if name not in offsets or offsets[name].nbytes != self.manifest.shared[number].nbytes:
            raise BrokenEpochError(
                "missing", f"array {name!r} at rank {lender}, or it has another size there"
            )
        return other.read(offsets[name].offset + start, size, own=True)

    def read(self, offset: int, nbytes: int, *, own: bool = False) -> bytes:
        """Returns bytes of the store's file, of chunks that are there: all that a store holds lies
        in some. own: they must all be this rank's.

        Raises: BrokenEpochError.
        """
        size = self.manifest.chunk_bytes
        if not 0 <= offset <= offset + nbytes <= self.store_bytes:
            raise BrokenEpochError(
                "corrupt", f"a reference to byte {offset + nbytes}, past the end of the state"
            )
        if nbytes > self.manifest.state_bytes:  # before any of it is read
            raise BrokenEpochError(
                "corrupt", f"a reference to {nbytes} bytes, of {self.manifest.state_bytes} in all"
            )
        parts = []
        while nbytes > 0:
            index, start = divmod(offset, size)
            data = self.own_chunk(index)
            if data is None and own:
                raise BrokenEpochError(
                    "missing", f"chunk {index} of rank {self.manifest.rank}, which others rely on"
                )
            if data is None and index in self._lenders:
                data = self.borrowed_chunk(index)
            if data is None:
                raise BrokenEpochError(
                    "corrupt", f"a reference to chunk {index}, which the epoch does not have"
                )
            part = data[start : start + nbytes]
            parts.append(part)
            offset, nbytes = offset + len(part), nbytes - len(part)
        return b"".join(parts)


def refuse_mixed(ranks: Mapping[int, EpochBytes]) -> None:
    """Refuses an epoch that is not one commit of a job. Epochs are numbered by each rank's store:
    where ranks have committed different numbers of times, the same number is another generation at
    each.

    Raises: BrokenEpochError.
    """
    found = {rank: _generations(one) for rank, one in sorted(ranks.items())}
    for run in sorted({run for one in found.values() for run in one}):
        keys = {rank: one.get(run) for rank, one in found.items()}
        if len(set(keys.values())) > 1:
            told = ", ".join(f"rank {rank}: {key or 'none'}" for rank, key in keys.items())
            raise BrokenEpochError(
                "corrupt", f"the ranks did not flush the same commit of {run!r}: {told}"
            )


def _generations(epoch: EpochBytes) -> dict[str, Key]:
    """Returns the generation of each run in the epoch that is in a job."""
    found = {}
    for one in Image(epoch.read, epoch.manifest.state_bytes).objects():
        if one.kind == ARRAY and one.name.endswith("/job") and one.nbytes == 8 * NUMBERS:
            with suppress(ValueError):  # of the program's own
                numbers = np.frombuffer(epoch.read(one.offset, one.nbytes), np.int64)
                found[one.name.removesuffix("/job")] = decode(numbers).key
    return found


def verify(
    place: Source, info: EpochInfo, progress: Callable[[int], Any] | None = None
) -> str | None:
    """Reads every chunk of an epoch, which a lease holds meanwhile. Returns what is wrong, or
    None."""
    if info.problem is not None:
        return info.problem
    with Lease(place, info.epoch, info.run, info.world_size):
        try:
            ranks = {rank: EpochBytes(place, info, rank) for rank in range(info.world_size)}
            if info.world_size > 1:
                refuse_mixed(ranks)
            for epoch in ranks.values():
                for index in epoch.manifest.chunks["index"]:
                    epoch.own_chunk(int(index))
                    if progress is not None:
                        progress(epoch.manifest.chunk_bytes)
        except BrokenEpochError as error:
            if error.kind == "missing" and forgotten(place, info):
                return "missing: its writer let it go meanwhile"
            return str(error)
    return None
