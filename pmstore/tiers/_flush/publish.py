"""Publishing: makes an epoch count by its name and its manifest, and lets older ones go after
it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from pmstore.errors import TierError
from pmstore.tiers._epochs.kept_epochs import Keeping, KeptEpochs
from pmstore.tiers._epochs.manifest import Manifest, ManifestName
from pmstore.tiers._epochs.retention import Retention
from pmstore.tiers._places.place import Lock, Place
from pmstore.tiers._places.url import RANK, open_places
from pmstore.tiers.config import TierConfig


class Publisher:
    """The publisher of one run and rank at one place. It holds the lock that keeps other writers
    out."""

    def __init__(self, place: Place, config: TierConfig, uuid: str, session: str) -> None:
        """uuid: of the store, whose epochs these are. session: of this writer."""
        self.place: Place = place
        self._uuid, self._session = uuid, session
        self.own: ManifestName = ManifestName(
            0, 0, config.run or uuid, config.rank, config.world_size
        )
        """Run, rank and number of ranks."""
        self._lock: Lock | None = None
        # the last one given: a name stands for one manifest, even if somebody empties the tier
        self._generation = 0
        self._retention = Retention(
            place,
            self.own,
            config.keep,
            lambda: (
                open_places(config.place, config.storage_options) if RANK in config.place else place
            ),
        )

    def begin(self) -> Mapping[str, int]:
        """Takes the lock, the first time, and makes sure of it. Returns names and sizes of what is
        there.

        Raises: TierError, OSError.
        """
        if self._lock is None:
            self._retention.refuse_another_lineage(self._uuid)
            self._lock = self.place.lock(self.own.data_prefix, self._session)
            self._retention.clean(self._lock)
        self._lock.check()
        return self.place.listed()

    def next_name(self, epoch: int, taken: list[ManifestName]) -> ManifestName:
        """Returns the name of an epoch that follows all there are.

        Raises: TierError.
        """
        newest = max(taken, default=None)
        generation = max(self._generation, newest.generation if newest else 0) + 1
        name = self.own._replace(generation=generation, epoch=epoch)
        if ManifestName.parse(str(name)) != name:
            raise TierError(
                f"{self.place.url}: no epoch can follow {str(newest)!r}, whose generation is the "
                "last one there is: remove that file, which no flush wrote"
            )
        self._generation = generation
        return name

    @property
    def kept(self) -> KeptEpochs:
        """The epochs that stay."""
        return self._retention.kept

    def keep(self, epoch: int, keeping: Keeping) -> str:
        """Keeps an epoch: after `begin`, before `publish`. Returns the name of the file that keeps
        it.

        Raises: TierError, OSError.
        """
        assert self._lock is not None, "begin comes first"
        return self.kept.add(self._lock, epoch, keeping)

    def push_out(self, keeping: Keeping) -> None:
        """Removes marks that this one's replaces, after `publish`; their epochs go with those that
        are forgotten."""
        if self._lock is not None:
            self.kept.push_out(self._lock, keeping)

    def publish(self, name: ManifestName, manifest: Manifest) -> int:
        """Publishes a manifest: the epoch counts on return. Returns the manifest's size.

        Raises: TierError, OSError.
        """
        assert self._lock is not None, "begin comes first"
        self._lock.check()
        self._retention.published(str(name), manifest)
        packed = manifest.pack()
        self.place.publish(str(name), packed)
        self._read_back(name, packed, manifest)
        return len(packed)

    def _read_back(self, name: ManifestName, packed: bytes, manifest: Manifest) -> None:
        """Checks that the epoch is as whoever restores will find it; before that, nothing older is
        let go.

        Raises: TierError, OSError.
        """
        names, epoch = self.place.listed(), name.epoch
        if any(names.get(file, -1) < size for file, size in manifest.files):
            raise TierError(
                f"{self.place.url}: files of epoch {epoch} disappeared after they were written"
            )
        try:
            found = self.place.read(str(name)) if str(name) in names else None
        except FileNotFoundError:
            found = None
        if found != packed:
            how = "is not there" if found is None else "is another one"
            raise TierError(
                f"{self.place.url}: epoch {epoch} was published, and its manifest {how} when it "
                "is read back"
            )

    def forget(self, fresh: str) -> None:
        """Lets old epochs go. fresh: a file that has just been written."""
        if self._lock is not None:
            self._retention.forget(self._lock, fresh)

    def release(self) -> None:
        """Gives the lock up: other writers may come."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._lock.release()
            self._lock = None
