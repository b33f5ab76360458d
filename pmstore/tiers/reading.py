"""What epochs a tier has, and whether they are whole."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from pmstore.engine import snapshot
from pmstore.engine.constants import ARRAY
from pmstore.errors import CorruptStoreError, FormatVersionError
from pmstore.objects.generations import NUMBERS, Key, decode
from pmstore.tiers import sharding
from pmstore.tiers.backend import Backend
from pmstore.tiers.image import Image
from pmstore.tiers.kept import KeptName, Reason, read_reasons
from pmstore.tiers.leases import Lease
from pmstore.tiers.manifest import BadManifestError, Manifest, ManifestName
from pmstore.tiers.places import Places

FIRST_BYTES = 1 << 20
"""Of a manifest, read at once: a state of 10 GB in one request."""
LISTINGS = 5
"""Of a tier that is written meanwhile, before what does not fit together is told."""


class BrokenEpochError(Exception):
    """An epoch that cannot be restored. kind: "corrupt" (the bytes are wrong) or "missing" (they
    are not there)."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind


class _GoneError(Exception):
    """What was listed does not fit together: a writer makes epochs, or lets old ones go."""


@dataclass(frozen=True)
class EpochInfo:
    """One epoch of a tier, as its names and manifests tell.

    Attributes:
        generation: newer epochs have higher ones, whatever clocks say.
        ranks: whose manifests are there.
        state_bytes: of all ranks together.
        file_bytes: of the files that it needs.
        time: unix time of the first rank's manifest: for people.
        problem: "missing: ..." or "corrupt: ..."; None: as far as names and sizes tell it is whole
            (`verify` reads everything).
        manifests: name of each rank's manifest.
        kept: why it stays whatever `keep` says, as its first rank has it.
    """

    epoch: int
    run: str
    generation: int
    world_size: int
    ranks: tuple[int, ...]
    state_bytes: int
    file_bytes: int
    time: float
    problem: str | None
    manifests: dict[int, str] = field(repr=False)
    kept: tuple[Reason, ...] = ()


def list_epochs(backend: Backend | Places) -> list[EpochInfo]:
    """All of a tier's epochs, newest first. Where they are made and let go meanwhile, it looks
    again; after a few times those that have gone are left out."""
    for _ in range(LISTINGS - 1):
        with suppress(_GoneError):
            return _list(backend, strict=True)
    found = _list(backend, strict=False)
    if not any(one.problem for one in found):
        return found
    names = backend.names()
    return [one for one in found if one.problem is None or set(one.manifests.values()) & set(names)]


def _list(backend: Backend | Places, strict: bool) -> list[EpochInfo]:
    """Raises: _GoneError, if it is strict."""
    names = backend.names()
    groups: dict[tuple[str, int, int], dict[int, ManifestName]] = {}
    for parsed in filter(None, map(ManifestName.parse, names)):
        ranks = groups.setdefault((parsed.run, parsed.epoch, parsed.world_size), {})
        if parsed.rank not in ranks or ranks[parsed.rank] < parsed:
            ranks[parsed.rank] = parsed
    if not strict:
        names = {**names, **backend.names()}  # files of manifests that came while it listed
    found = [_look(backend, names, ranks, strict) for ranks in groups.values()]
    return sorted(found, key=lambda one: (one.generation, one.epoch), reverse=True)


def _look(
    backend: Backend | Places, names: dict[str, int], ranks: dict[int, ManifestName], strict: bool
) -> EpochInfo:
    first = ranks[min(ranks)]
    problem: str | None = None
    if len(ranks) < first.world_size:  # which may be any number that fits into a name
        missing = list(islice((rank for rank in range(first.world_size) if rank not in ranks), 8))
        more = first.world_size - len(ranks) - len(missing)
        named = f"{', '.join(map(str, missing))}{f' and {more} more' if more else ''}"
        problem = f"missing: rank {named} of {first.world_size} has not published"
    state, files, when = 0, 0, 0.0
    for rank in sorted(ranks):
        try:
            manifest = load_manifest(backend, ranks[rank])
        except BrokenEpochError as error:
            if strict and error.kind == "missing":
                raise _GoneError from None
            problem = problem or str(error)
            continue
        state += manifest.state_bytes
        files += sum(size for _, size in manifest.files)
        when = when or manifest.time
        for file, size in manifest.files:
            if strict and file not in names:
                raise _GoneError  # or it came after others were listed
            if file not in names:
                problem = problem or f"missing: file {file}"
            elif names[file] < size:
                problem = problem or f"corrupt: file {file} has {names[file]} bytes of {size}"
    return EpochInfo(
        epoch=first.epoch,
        run=first.run,
        generation=max(one.generation for one in ranks.values()),
        world_size=first.world_size,
        ranks=tuple(sorted(ranks)),
        state_bytes=state,
        file_bytes=files,
        time=when,
        problem=problem,
        manifests={rank: str(one) for rank, one in ranks.items()},
        kept=read_reasons(backend, kept) if (kept := str(KeptName.of(first))) in names else (),
    )


def load_manifest(backend: Backend | Places, name: ManifestName | str) -> Manifest:
    """Raises: BrokenEpochError."""
    try:
        data = backend.read(str(name), 0, FIRST_BYTES)
        if Manifest.packed_bytes(data) > len(data):
            data += backend.read(str(name), len(data), Manifest.packed_bytes(data))
        manifest = Manifest.unpack(data)
    except FileNotFoundError:
        raise BrokenEpochError("missing", f"manifest {name}") from None
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise BrokenEpochError("corrupt", f"{name} cannot be read: {error}") from None
    except BadManifestError as error:
        raise BrokenEpochError("corrupt", f"{name}: {error}") from None
    parsed = ManifestName.parse(str(name))
    if parsed is not None and parsed[1:] != (
        manifest.epoch,
        manifest.run,
        manifest.rank,
        manifest.world_size,
    ):
        raise BrokenEpochError("corrupt", f"{name}: the manifest is that of another epoch")
    return manifest


class EpochBytes:
    """The bytes of one rank's store as of an epoch: its own chunks, and those that other ranks
    flushed for it. Every chunk is checked when it is read."""

    def __init__(self, backend: Backend | Places, info: EpochInfo, rank: int) -> None:
        """Raises: BrokenEpochError."""
        if rank not in info.manifests:
            raise BrokenEpochError("missing", f"rank {rank} of {info.world_size} has not published")
        self.manifest: Manifest = load_manifest(backend, info.manifests[rank])
        try:
            self.store_bytes: int = snapshot.store_size(self.manifest.head, info.manifests[rank])
        except (CorruptStoreError, FormatVersionError) as error:
            raise BrokenEpochError("corrupt", str(error)) from error
        self._everywhere = backend
        self.backend: Backend = (
            backend.of(info.manifests[rank]) if isinstance(backend, Places) else backend
        )
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
        """None: the epoch has no such chunk (it held nothing). Raises: BrokenEpochError."""
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
            data = self.backend.read(file, position, position + size)
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
        """A chunk that another rank flushed: there it lies where that rank's store has the
        array."""
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
        """Bytes of the store's file, of chunks that are there: all that a store holds lies in some.
        own: they must all be this rank's.

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
    """Epochs are numbered by each rank's store. Where ranks of a job have committed different
    numbers of times, the same number is another generation at each.

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
    """Of the runs in it that are in a job."""
    found = {}
    for one in Image(epoch.read, epoch.manifest.state_bytes).objects():
        if one.kind == ARRAY and one.name.endswith("/job") and one.nbytes == 8 * NUMBERS:
            with suppress(ValueError):  # of the program's own
                numbers = np.frombuffer(epoch.read(one.offset, one.nbytes), np.int64)
                found[one.name.removesuffix("/job")] = decode(numbers).key
    return found


def forgotten(place: Backend | Places, info: EpochInfo) -> bool:
    """Whether its writer has let the epoch go since it was listed."""
    names = place.names()
    return any(name not in names for name in info.manifests.values())


def verify(
    backend: Backend | Places, info: EpochInfo, progress: Callable[[int], Any] | None = None
) -> str | None:
    """Reads every chunk of an epoch, which a lease holds meanwhile. Returns what is wrong, or
    None."""
    if info.problem is not None:
        return info.problem
    with Lease(backend, info.epoch, info.run, info.world_size):
        try:
            ranks = {rank: EpochBytes(backend, info, rank) for rank in range(info.world_size)}
            if info.world_size > 1:
                refuse_mixed(ranks)
            for epoch in ranks.values():
                for index in epoch.manifest.chunks["index"]:
                    epoch.own_chunk(int(index))
                    if progress is not None:
                        progress(epoch.manifest.chunk_bytes)
        except BrokenEpochError as error:
            if error.kind == "missing" and forgotten(backend, info):
                return "missing: its writer let it go meanwhile"
            return str(error)
    return None
