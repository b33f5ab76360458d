"""Retention: which epochs and files of a run stay in a tier, and deleting the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from pmstore.errors import TierError
from pmstore.tiers._epochs.kept_epochs import KeptEpochs
from pmstore.tiers._epochs.leases import Leases
from pmstore.tiers._epochs.manifest import CHUNKS_SUFFIX, Manifest, ManifestName
from pmstore.tiers._places.place import Lock, Place, Source


class Retention:
    """The retention of one run and rank. Everything that deletes is given the lock, and looks
    whether it still holds first."""

    def __init__(
        self, place: Place, own: ManifestName, keep: int | None, everywhere: Callable[[], Source]
    ) -> None:
        """own: run, rank and number of ranks. keep: how many epochs stay; None: all. everywhere:
        opens the places of all ranks, or gives the place where that is one."""
        self._place, self._own, self._keep, self._everywhere = place, own, keep, everywhere
        # of manifests that were read, or written: they do not change
        self._files: dict[str, frozenset[str]] = {}
        self._leases = Leases(place, own)
        self.kept: KeptEpochs = KeptEpochs(place, own)

    def clean(self, lock: Lock) -> None:
        """Deletes files of this run and rank that no epoch names: left by a writer that was
        killed."""
        self._drop_files(lock, self._place.listed(), temporary=True)

    def published(self, name: str, manifest: Manifest) -> None:
        """Notes that a manifest is there, or may be: what its name stood for before does not
        count."""
        self._files[name] = frozenset(file for file, _ in manifest.files)

    def refuse_another_lineage(self, uuid: str) -> None:
        """Refuses a run that another store flushed. Epochs of one run are commits of one store. One
        that was restored, and trained on, went another way: under the same name its epochs would
        stand beside those of the way it left, and with several ranks an epoch could be put together
        of both.

        Raises: TierError.
        """
        for name in sorted(self._manifests(self._place.listed()), reverse=True):
            try:
                lineage = Manifest.unpack(self._place.read(name)).lineage
            except (FileNotFoundError, ValueError):
                continue
            if lineage != uuid:
                raise TierError(
                    f"{self._place.url}: epochs of run {self._own.run!r} here were flushed by "
                    "another store (this one was restored, or is new): give it another run= or URL"
                )
            return

    def forget(self, lock: Lock, fresh: str) -> None:
        """Lets epochs beyond `keep` go, the oldest first, each manifest before its files, and those
        that were published again. What is kept, or held by a reader, stays. An epoch of several
        ranks counts when all of their manifests are there. fresh: a file that has just been
        written, when the newest epoch counts.
        """
        places = self._place if self._keep is None else self._everywhere()
        names = places.listed()  # anew: a reader may hold what nobody held before
        held, over = self._leases.look(names, fresh)
        gone = [one for one in self._superfluous(names) if one.epoch not in held]
        if gone or over:
            lock.check()
        for name in gone:
            self._place.delete(str(name))
        for lease in over:
            with suppress(PermissionError):  # another user's, where each may delete only his own
                self._place.delete(lease)
        elsewhere = places is not self._place
        left = self._place.listed() if elsewhere else set(names).difference(map(str, gone))
        self._drop_files(lock, left, temporary=False)

    def _superfluous(self, names: Iterable[str]) -> list[ManifestName]:
        """Returns manifests of this rank that may go, the oldest first."""
        own, keep = self._own, self._keep
        ranks: dict[int, set[int]] = {}
        mine: list[ManifestName] = []
        for parsed in filter(None, map(ManifestName.parse, names)):
            if (parsed.run, parsed.world_size) != (own.run, own.world_size):
                continue
            ranks.setdefault(parsed.epoch, set()).add(parsed.rank)
            if parsed.rank == own.rank:
                mine.append(parsed)
        kept = self.kept.epochs(names)
        last = {one.epoch: one for one in sorted(mine)}  # of an epoch that was published again
        whole = [one for one in last.values() if len(ranks[one.epoch]) == own.world_size]
        whole.sort(reverse=True)
        oldest = whole[keep - 1] if keep is not None and len(whole) >= keep else None
        return sorted(
            one
            for one in mine
            if one != last[one.epoch]
            or (oldest is not None and one < oldest and one.epoch not in kept)
        )

    def _drop_files(self, lock: Lock, names: Collection[str], *, temporary: bool) -> None:
        """Deletes files that this run's rank wrote, and that no epoch names. names: of what is
        here. temporary: what was to become a manifest, too."""
        named = self._named(names)
        if named is None:
            return
        written = [name for name in names if name not in named and self._own.is_written(name)]
        gone = [name for name in written if temporary or name.endswith(CHUNKS_SUFFIX)]
        gone += self.kept.leavings(names) if temporary else []
        if gone:
            lock.check()
        for name in gone:
            self._place.delete(name)

    def _named(self, names: Collection[str]) -> set[str] | None:
        """Returns the files that manifests of this run and rank name; None if one of them cannot be
        read, and nothing is known."""
        own = dict.fromkeys(self._manifests(names))
        self._files = {name: files for name, files in self._files.items() if name in own}
        for name in own:
            if name in self._files:
                continue
            try:
                self._files[name] = frozenset(
                    file for file, _ in Manifest.unpack(self._place.read(name)).files
                )
            except FileNotFoundError:
                continue
            except (OSError, ValueError):
                return None
        return {file for files in self._files.values() for file in files}

    def _manifests(self, names: Iterable[str]) -> list[str]:
        """Returns the names of this run's and rank's manifests."""
        parsed = ((name, ManifestName.parse(name)) for name in names)
        return [name for name, one in parsed if one is not None and one[2:] == self._own[2:]]
