"""Making an epoch count: its name, its manifest, and letting older ones go after it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from pmstore.errors import TierError
from pmstore.tiers._epochs.kept import Keeping, KeptEpochs
from pmstore.tiers._epochs.manifest import Manifest, ManifestName
from pmstore.tiers._epochs.retention import Retention
from pmstore.tiers._places.place import Backend, Lock
from pmstore.tiers.config import TierConfig


class Publisher:
    """Of one run and rank at one place. Holds the lock that keeps other writers out."""

    def __init__(self, backend: Backend, config: TierConfig, uuid: str, session: str) -> None:
        """uuid: of the store, whose epochs these are. session: of this writer."""
        self.backend: Backend = backend
        self._uuid, self._session = uuid, session
        self.own: ManifestName = ManifestName(
            0, 0, config.run or uuid, config.rank, config.world_size
        )
        """Run, rank and number of ranks."""
        self._lock: Lock | None = None
        # the last one given: a name stands for one manifest, even if somebody empties the tier
        self._generation = 0
        self._retention = Retention(backend, config, self.own)

    def begin(self) -> Mapping[str, int]:
        """Takes the lock, the first time, and makes sure of it. Returns names and sizes of what is
        there.

        Raises: TierError, OSError.
        """
        if self._lock is None:
            self._retention.refuse_another_lineage(self._uuid)
            self._lock = self.backend.lock(self.own.data_prefix, self._session)
            self._retention.clean(self._lock)
        self._lock.check()
        return self.backend.listed()

    def next_name(self, epoch: int, taken: list[ManifestName]) -> ManifestName:
        """Raises: TierError."""
        newest = max(taken, default=None)
        generation = max(self._generation, newest.generation if newest else 0) + 1
        name = self.own._replace(generation=generation, epoch=epoch)
        if ManifestName.parse(str(name)) != name:
            raise TierError(
                f"{self.backend.url}: no epoch can follow {str(newest)!r}, whose generation is the "
                "last one there is: remove that file, which no flush wrote"
            )
        self._generation = generation
        return name

    @property
    def kept(self) -> KeptEpochs:
        """Which epochs stay."""
        return self._retention.kept

    def keep(self, epoch: int, keeping: Keeping) -> str:
        """After `begin`, before `publish`. Returns the name of its file. Raises: TierError,
        OSError."""
        assert self._lock is not None, "begin comes first"
        return self.kept.add(self._lock, epoch, keeping)

    def push_out(self, keeping: Keeping) -> None:
        """Marks that this one's replace: after `publish`; their epochs go with those that are
        forgotten."""
        if self._lock is not None:
            self.kept.push_out(self._lock, keeping)

    def publish(self, name: ManifestName, manifest: Manifest) -> int:
        """The epoch counts on return. Bytes of the manifest.

        Raises: TierError, OSError.
        """
        assert self._lock is not None, "begin comes first"
        self._lock.check()
        self._retention.published(str(name), manifest)
        packed = manifest.pack()
        self.backend.publish(str(name), packed)
        self._read_back(name, packed, manifest)
        return len(packed)

    def _read_back(self, name: ManifestName, packed: bytes, manifest: Manifest) -> None:
        """The epoch is as whoever restores will find it; before that, nothing older is let go.

        Raises: TierError, OSError.
        """
        names, epoch = self.backend.listed(), name.epoch
        if any(names.get(file, -1) < size for file, size in manifest.files):
            raise TierError(
                f"{self.backend.url}: files of epoch {epoch} disappeared after they were written"
            )
        try:
            found = self.backend.read(str(name)) if str(name) in names else None
        except FileNotFoundError:
            found = None
        if found != packed:
            how = "is not there" if found is None else "is another one"
            raise TierError(
                f"{self.backend.url}: epoch {epoch} was published, and its manifest {how} when it "
                "is read back"
            )

    def forget(self, fresh: str) -> None:
        """Lets old epochs go. fresh: a file that has just been written."""
        if self._lock is not None:
            self._retention.forget(self._lock, fresh)

    def release(self) -> None:
        """Other writers may come."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._lock.release()
            self._lock = None
