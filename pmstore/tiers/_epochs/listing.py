"""The epochs that a tier has, and whether they are whole."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pmstore._base.workers import Patience
from pmstore.tiers._epochs.kept_epochs import KeptName, Reason, read_reasons
from pmstore.tiers._epochs.manifest import BadManifestError, Manifest, ManifestName
from pmstore.tiers._places.place import BrokenEpochError, Source
from pmstore.tiers._places.url import STALL_SECONDS, open_places

FIRST_BYTES = 1 << 20
"""So many bytes of a manifest are read at once: a state of 10 GB in one request."""
LISTINGS = 5
"""So often a tier that is written meanwhile is listed, before what does not fit together is
told."""


class _GoneError(Exception):
    """A listing does not fit together: a writer makes epochs, or lets old ones go."""


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


def list_epochs(place: Source) -> list[EpochInfo]:
    """Returns all of a tier's epochs, newest first. Where they are made and let go meanwhile, it
    looks again; after a few times those that have gone are left out."""
    for _ in range(LISTINGS - 1):
        with suppress(_GoneError):
            return _list(place, strict=True)
    found = _list(place, strict=False)
    if not any(one.problem for one in found):
        return found
    names = place.names()
    return [one for one in found if one.problem is None or set(one.manifests.values()) & set(names)]


def _list(place: Source, strict: bool) -> list[EpochInfo]:
    """Raises: _GoneError, if it is strict."""
    names = place.names()
    groups: dict[tuple[str, int, int], dict[int, ManifestName]] = {}
    for parsed in filter(None, map(ManifestName.parse, names)):
        ranks = groups.setdefault((parsed.run, parsed.epoch, parsed.world_size), {})
        if parsed.rank not in ranks or ranks[parsed.rank] < parsed:
            ranks[parsed.rank] = parsed
    if not strict:
        names = {**names, **place.names()}  # files of manifests that came while it listed
    found = [_look(place, names, ranks, strict) for ranks in groups.values()]
    return sorted(found, key=lambda one: (one.generation, one.epoch), reverse=True)


def _look(
    place: Source, names: dict[str, int], ranks: dict[int, ManifestName], strict: bool
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
            manifest = load_manifest(place, ranks[rank])
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
        kept=read_reasons(place, kept) if (kept := str(KeptName.of(first))) in names else (),
    )


def load_manifest(place: Source, name: ManifestName | str) -> Manifest:
    """Reads a manifest.

    Raises: BrokenEpochError.
    """
    try:
        data = place.read(str(name), 0, FIRST_BYTES)
        if Manifest.packed_bytes(data) > len(data):
            data += place.read(str(name), len(data), Manifest.packed_bytes(data))
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


def forgotten(place: Source, info: EpochInfo) -> bool:
    """Says whether its writer has let the epoch go since it was listed."""
    names = place.names()
    return any(name not in names for name in info.manifests.values())


def epochs(
    url: str | os.PathLike[str],
    *,
    storage_options: dict[str, Any] | None = None,
    stall_seconds: float | None = STALL_SECONDS,
) -> list[EpochInfo]:
    """Returns the epochs of a tier, newest first. stall_seconds: as of `restore`.

    Raises: TierError, OSError.
    """
    return list_epochs(open_places(url, storage_options, Patience(stall_seconds)))
