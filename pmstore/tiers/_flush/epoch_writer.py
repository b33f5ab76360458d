"""The writer of epochs: writes what `plan` says into a file, then its manifest."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from pmstore._engine.pool_info import PoolInfo
from pmstore._engine.snapshot import SPARED, Fingerprints, Snapshot, SnapshotInfo, Transfer
from pmstore.errors import TierError
from pmstore.tiers._epochs.kept_epochs import Keeping
from pmstore.tiers._epochs.manifest import Manifest, ManifestName
from pmstore.tiers._flush.flush import Flush
from pmstore.tiers._flush.plan import Base, Plan, carry_over, plan
from pmstore.tiers._flush.publish import Publisher
from pmstore.tiers._flush.unchanged import Comparison
from pmstore.tiers._places.local import Access
from pmstore.tiers._places.place import Place
from pmstore.tiers._places.url import RANK, open_place
from pmstore.tiers.config import TierConfig


@dataclass(frozen=True, slots=True)
class Written:
    """An epoch that counts."""

    info: SnapshotInfo
    nbytes: int
    state_bytes: int
    full: bool
    fresh: str | None
    """Name of a file that was written last; None: the epoch was there, and nothing was."""


class Writer:
    """The writer of one tier of one open store. One thread at a time calls it."""

    def __init__(self, name: str, config: TierConfig, info: PoolInfo) -> None:
        self.name: str = name
        self.config: TierConfig = config
        private = Access((info.permissions & 0o666) | 0o600)
        access = private if config.mode is None else Access(config.mode, exact=True)
        self.place: Place = open_place(
            config.place.replace(RANK, str(config.rank)), config.storage_options, access=access
        )
        self._session = secrets.token_hex(4)
        self.publisher: Publisher = Publisher(self.place, config, info.uuid.hex(), self._session)
        self._base: Base | None = None
        self._prints = Fingerprints()
        self._count = 0

    def write(
        self,
        flush: Flush,
        snapshot: Snapshot,
        transfer: Transfer,
        full: bool,
        keeping: Keeping | None = None,
    ) -> Written:
        """Writes an epoch, and returns when it counts. snapshot: closed as soon as its content is
        written. keeping: the epoch is to be kept.

        Raises: TierError, PmstoreError, OSError.
        """
        self._refuse_cancelled(flush, transfer)  # before its turn came
        names = self.publisher.begin()
        base = None if full else self._base
        if base is not None and not base.intact(names):
            base = None
        if base is not None and base.tag == snapshot.tag:
            fresh = self.publisher.keep(flush.epoch, keeping) if keeping is not None else None
            return Written(snapshot.info(), 0, base.manifest.state_bytes, False, fresh)
        planned = plan(self.config, self.publisher.own.run, snapshot, base)
        taken = list(filter(None, map(ManifestName.parse, names)))
        name = self.publisher.next_name(flush.epoch, taken)
        flush.total_bytes = int(planned.look.sum()) * self.config.chunk_bytes
        flush.tell()
        manifest, seen = self._write_file(name, planned, base, snapshot, transfer, flush)
        info = snapshot.info()
        snapshot.close()  # commits wait no longer than this
        self._refuse_cancelled(flush, transfer)
        if keeping is not None:
            self.publisher.keep(flush.epoch, keeping)
        nbytes = self.publisher.publish(name, manifest)
        self._base = Base(snapshot.tag, str(name), nbytes, manifest, seen)
        written = transfer.written_bytes
        return Written(info, written, manifest.state_bytes, base is None, str(name))

    def _refuse_cancelled(self, flush: Flush, transfer: Transfer) -> None:
        if transfer.cancelled:
            raise TierError(f"the flush of epoch {flush.epoch} to {self.name!r} was cancelled")

    def _write_file(
        self,
        name: ManifestName,
        planned: Plan,
        base: Base | None,
        snapshot: Snapshot,
        transfer: Transfer,
        flush: Flush,
    ) -> tuple[Manifest, dict[int, bytes]]:
        """Writes the chunks that are not in the tier yet end to end into a new file. Returns the
        manifest with all places, and fingerprints of chunks in it."""
        size = self.config.chunk_bytes
        data = name.chunks_name(self._session, self._count)
        self._count += 1
        chunks = planned.manifest.chunks.copy()
        index = chunks["index"]
        look = planned.look
        known = None if base is None else planned.known[look]
        files: list[tuple[str, int]] = []
        seen: dict[int, bytes] = {}
        most = int(look.sum())
        fewer = known is not None and bool((known >= 0).any())
        with self.place.create(data, most * size, fewer) as file:
            found = file.write(snapshot, size, index[look], transfer, known)
            chunks["crc"][look], chunks["position"][look] = found
            rest = look & (chunks["position"] == SPARED)
            keep = ~look
            if base is not None:
                rate = self.config.max_bytes_per_second
                same = Comparison(base, self._prints, self.place, rate)
                keep[rest] = same.unchanged(snapshot, index[rest], transfer)
                changed = set(index[~keep].tolist())
                seen = {i: seen for i, seen in base.seen.items() if i not in changed} | same.seen
                kept = keep.copy()
                files = carry_over(size, base.manifest, chunks, keep)
                rest = (rest | kept) & ~keep
            flush.total_bytes += int(rest.sum()) * size
            found = file.write(snapshot, size, index[rest], transfer)
            chunks["crc"][rest], chunks["position"][rest] = found
        chunks["file"][~keep] = len(files)
        if file.end:
            files.append((data, file.end))
        return replace(planned.manifest, chunks=chunks, files=tuple(files)), seen
