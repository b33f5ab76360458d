"""Writing one epoch of a store to a tier: what `plan` says, into a file, then its manifest."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace

import numpy as np

from pmstore.engine.pool_info import PoolInfo
from pmstore.engine.snapshot import Snapshot, SnapshotInfo, Transfer, checksum
from pmstore.errors import TierError
from pmstore.objects.array import Array
from pmstore.tiers.backend import Backend
from pmstore.tiers.config import TierConfig
from pmstore.tiers.handle import Flush
from pmstore.tiers.kept import Keeping
from pmstore.tiers.local import Access, LocalBackend
from pmstore.tiers.manifest import Manifest, ManifestName
from pmstore.tiers.places import RANK, open_backend
from pmstore.tiers.plan import Base, plan
from pmstore.tiers.publishing import Publisher
from pmstore.tiers.remote import FsspecBackend


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
    """One tier of one open store. Called by one thread at a time."""

    def __init__(self, name: str, config: TierConfig, info: PoolInfo) -> None:
        self.name, self.config = name, config
        private = Access((info.permissions & 0o666) | 0o600)
        access = private if config.mode is None else Access(config.mode, exact=True)
        self.backend: Backend = open_backend(
            config.place.replace(RANK, str(config.rank)), config.storage_options, None, access
        )
        self._session = secrets.token_hex(4)
        self.publisher = Publisher(self.backend, config, info.uuid.hex(), self._session)
        self._base: Base | None = None
        self._count = 0

    def write(
        self,
        flush: Flush,
        snapshot: Snapshot,
        transfer: Transfer,
        full: bool,
        keeping: Keeping | None = None,
    ) -> Written:
        """Returns when the epoch counts. snapshot: closed as soon as its content is written.
        keeping: the epoch is to be kept.

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
        manifest, write = plan(self.config, self.publisher.own.run, snapshot, base)
        taken = list(filter(None, map(ManifestName.parse, names)))
        name = self.publisher.next_name(flush.epoch, taken)
        flush.total_bytes = len(write) * self.config.chunk_bytes
        if len(write):
            flush.tell()
            manifest = self._write_file(name, manifest, write, snapshot, transfer)
        info = snapshot.info()
        snapshot.close()  # commits wait no longer than this
        self._refuse_cancelled(flush, transfer)
        if keeping is not None:
            self.publisher.keep(flush.epoch, keeping)
        nbytes = self.publisher.publish(name, manifest)
        self._base = Base(snapshot.tag, str(name), nbytes, manifest)
        return Written(info, flush.total_bytes, manifest.state_bytes, base is None, str(name))

    def _refuse_cancelled(self, flush: Flush, transfer: Transfer) -> None:
        if transfer.cancelled:
            raise TierError(f"the flush of epoch {flush.epoch} to {self.name!r} was cancelled")

    def _write_file(
        self,
        name: ManifestName,
        manifest: Manifest,
        write: Array,
        snapshot: Snapshot,
        transfer: Transfer,
    ) -> Manifest:
        """Writes chunks end to end into a new file. Returns the manifest with their places."""
        size = self.config.chunk_bytes
        data = name.chunks_name(self._session, self._count)
        self._count += 1
        crc = self._write_chunks(data, snapshot, write, transfer)
        chunks = manifest.chunks.copy()
        at = np.searchsorted(chunks["index"], write)
        chunks["position"][at] = np.arange(len(write), dtype=np.uint64) * np.uint64(size)
        chunks["file"][at], chunks["crc"][at] = len(manifest.files), crc
        files = (*manifest.files, (data, len(write) * size))
        return replace(manifest, chunks=chunks, files=files)

    def _write_chunks(
        self, name: str, snapshot: Snapshot, chunks: Array, transfer: Transfer
    ) -> Array:
        if isinstance(self.backend, LocalBackend):
            with self.backend.create(name, len(chunks) * self.config.chunk_bytes) as fd:
                return snapshot.write(fd, self.config.chunk_bytes, chunks, 0, transfer)
        assert isinstance(self.backend, FsspecBackend)
        return self._write_stream(self.backend, name, snapshot, chunks, transfer)

    def _write_stream(
        self,
        backend: FsspecBackend,
        name: str,
        snapshot: Snapshot,
        chunks: Array,
        transfer: Transfer,
    ) -> Array:
        size = self.config.chunk_bytes
        crc = np.zeros(len(chunks), np.uint32)
        buffer = np.empty(size, np.uint8)
        start = time.monotonic()
        with backend.create(name) as file:
            for i, index in enumerate(chunks):
                snapshot.take(int(index) * size, buffer)
                crc[i] = checksum(buffer)
                file.write(buffer.data)
                transfer.raw.done_bytes += size
                while not transfer.cancelled and self.config.max_bytes_per_second:
                    due = start + transfer.done_bytes / self.config.max_bytes_per_second
                    if time.monotonic() >= due:
                        break
                    time.sleep(min(0.05, due - time.monotonic()))
                if transfer.cancelled:
                    raise TierError(f"the flush to {self.name!r} was cancelled")
        return crc
