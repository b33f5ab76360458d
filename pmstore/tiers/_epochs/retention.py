"""Which epochs and files of a run stay in a tier, and deleting the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress

from pmstore.errors import TierError
from pmstore.tiers._epochs.kept import KeptEpochs
from pmstore.tiers._epochs.leases import Leases
from pmstore.tiers._epochs.manifest import CHUNKS_SUFFIX, Manifest, ManifestName
from pmstore.tiers._places.place import Backend, Lock
from pmstore.tiers._places.url import RANK, open_places
from pmstore.tiers.config import TierConfig


class Retention:
    """Of one run and rank. Everything that deletes is given the lock, and looks whether it still
    holds first."""

    def __init__(self, backend: Backend, config: TierConfig, own: ManifestName) -> None:
        """own: run, rank and number of ranks."""
        self._backend, self._config, self._own = backend, config, own
        # of manifests that were read, or written: they do not change
        self._files: dict[str, frozenset[str]] = {}
        self._leases = Leases(backend, own)
        self.kept: KeptEpochs = KeptEpochs(backend, own)

    def clean(self, lock: Lock) -> None:
        """Deletes files of this run and rank that no epoch names: left by a writer that was
        killed."""
        self._drop_files(lock, self._backend.listed(), temporary=True)

    def published(self, name: str, manifest: Manifest) -> None:
        """It is there, or may be: what this name stood for before does not count."""
        self._files[name] = frozenset(file for file, _ in manifest.files)

    def refuse_another_lineage(self, uuid: str) -> None:
        """Epochs of one run are commits of one store. One that was restored, and trained on, went
        another way: under the same name its epochs would stand beside those of the way it left, and
        with several ranks an epoch could be put together of both.

        Raises: TierError.
        """
        for name in sorted(self._manifests(self._backend.listed()), reverse=True):
            try:
                lineage = Manifest.unpack(self._backend.read(name)).lineage
            except (FileNotFoundError, ValueError):
                continue
            if lineage != uuid:
                raise TierError(
                    f"{self._backend.url}: epochs of run {self._own.run!r} here were flushed by "
                    "another store (this one was restored, or is new): give it another run= or URL"
                )
            return

    def forget(self, lock: Lock, fresh: str) -> None:
        """Lets epochs beyond `keep` go, the oldest first, each manifest before its files, and those
        that were published again. What is kept, or held by a reader, stays. An epoch of several
        ranks counts when all of their manifests are there. fresh: a file that has just been
        written, when the newest epoch counts.
        """
        everywhere = RANK in self._config.place
        places = (
            open_places(self._config.place, self._config.storage_options)
            if everywhere and self._config.keep is not None
            else self._backend
        )
        names = places.listed()
        held, over = self._leases.look(names, fresh)
        gone = [one for one in self._superfluous(names) if one.epoch not in held]
        if gone or over:
            lock.check()
        for name in gone:
            self._backend.delete(str(name))
        for lease in over:
            with suppress(PermissionError):  # another user's, where each may delete only his own
                self._backend.delete(lease)
        left = self._backend.listed() if everywhere else set(names).difference(map(str, gone))
        self._drop_files(lock, left, temporary=False)

    def _superfluous(self, names: Iterable[str]) -> list[ManifestName]:
        """Manifests of this rank, the oldest first."""
        own, keep = self._own, self._config.keep
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
        """Those that this run's rank wrote, and that no epoch names. names: of what is here.
        temporary: what was to become a manifest, too."""
        named = self._named(names)
        if named is None:
            return
        written = [name for name in names if name not in named and self._own.is_written(name)]
        gone = [name for name in written if temporary or name.endswith(CHUNKS_SUFFIX)]
        gone += self.kept.leavings(names) if temporary else []
        if gone:
            lock.check()
        for name in gone:
            self._backend.delete(name)

    def _named(self, names: Collection[str]) -> set[str] | None:
        """The files that manifests of this run and rank name; None if one of them cannot be read,
        and nothing is known."""
        own = self._manifests(names)
        self._files = {name: files for name, files in self._files.items() if name in own}
        for name in own:
            if name in self._files:
                continue
            try:
                self._files[name] = frozenset(
                    file for file, _ in Manifest.unpack(self._backend.read(name)).files
                )
            except FileNotFoundError:
                continue
            except (OSError, ValueError):
                return None
        return {file for files in self._files.values() for file in files}

    def _manifests(self, names: Iterable[str]) -> list[str]:
        """Of this run and rank."""
        parsed = ((name, ManifestName.parse(name)) for name in names)
        return [name for name, one in parsed if one is not None and one[2:] == self._own[2:]]
