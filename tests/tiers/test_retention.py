"""What retention deletes, against a model of it: any history of epochs, ranks, kept epochs and
readers."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tier_helpers import HeldLock

import pmstore
from pmstore._engine.constants import PAGE_BYTES
from pmstore.tiers._epochs.kept_epochs import KeptName
from pmstore.tiers._epochs.leases import LeaseName
from pmstore.tiers._epochs.manifest import CHUNK, Manifest, ManifestName
from pmstore.tiers._epochs.retention import Retention
from pmstore.tiers._places.local import Access, LocalPlace

WORLD = 2
OTHER = ManifestName(1, 1, "other", 0, WORLD)
"""Another run in the same place: nothing of it is ever deleted."""


@functools.cache
def head() -> bytes:
    """The superblock of some store."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "store.pm"
        pmstore.open(path, "x", size="1MiB").close()
        with path.open("rb") as file:
            return file.read(PAGE_BYTES)


class Tier:
    """A folder in which two ranks publish epochs, each with a file of its own and, where that is
    asked for, the file of the epoch before."""

    def __init__(self, folder: Path, keep: int | None) -> None:
        self.place = LocalPlace(folder, Access())
        self.folder = folder
        own = [ManifestName(1, 1, "run", rank, WORLD) for rank in range(WORLD)]
        self.ranks = [Retention(self.place, one, keep, lambda: self.place) for one in own]
        self.files: dict[str, set[str]] = {}
        """Of each manifest that was published: what it names."""
        self.add(OTHER, ["other.0-2.deadbeef.000001.chunks"])

    def add(self, name: ManifestName, files: list[str]) -> None:
        for file in files:
            (self.folder / file).touch()
        made = Manifest(
            epoch=name.epoch,
            run=name.run,
            rank=name.rank,
            world_size=WORLD,
            chunk_bytes=PAGE_BYTES,
            head=head(),
            files=tuple((file, 0) for file in files),
            chunks=np.zeros(0, CHUNK),
        )
        self.place.publish(str(name), made.pack())
        self.files[str(name)] = set(files)

    def there(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


@given(
    keep=st.sampled_from([None, 1, 2, 3]),
    epochs=st.lists(st.sampled_from(["both", "0", "1", "again", "after"]), max_size=9),
    kept=st.sets(st.integers(0, 8), max_size=3),
    held=st.sets(st.integers(0, 8), max_size=2),
    knows=st.booleans(),
)
def test_what_stays(
    keep: int | None, epochs: list[str], kept: set[int], held: set[int], knows: bool
) -> None:
    """epochs: which ranks publish each one; "again": both, rank 0 twice; "after": both, and the
    files of the epoch before are named too. knows: the process that deletes is the one that wrote.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        tier = Tier(Path(folder), keep)
        before: dict[int, list[str]] = {0: [], 1: []}
        whole, twice = [], []
        for epoch, what in enumerate(epochs):
            for rank in (0, 1) if what in ("both", "again", "after") else (int(what),):
                name = ManifestName(2 * epoch, epoch, "run", rank, WORLD)
                files = [name.chunks_name("deadbeef", epoch)]
                files += before[rank] if what == "after" else []
                before[rank] = files
                tier.add(name, files)
                if knows:
                    manifest = Manifest.unpack(tier.place.read(str(name)))
                    tier.ranks[rank].published(str(name), manifest)
                if what == "again" and rank == 0:
                    twice.append(str(name))
                    tier.add(name._replace(generation=2 * epoch + 1), files)
            whole += [epoch] if what not in ("0", "1") else []
        for epoch in kept:
            for rank in range(WORLD):
                (tier.folder / str(KeptName(epoch, "run", rank, WORLD))).touch()
        for epoch in held:
            tier.place.touch(str(LeaseName(epoch, "run", WORLD, "0123456789abcdef")))
        for strange in ("run.0-2.notes", "notes.txt", "run.0-1.deadbeef.000001.chunks"):
            (tier.folder / strange).touch()  # nobody's business
        strangers = {"run.0-2.notes", "notes.txt", "run.0-1.deadbeef.000001.chunks"}
        orphan = ManifestName(1, 1, "run", 0, WORLD).chunks_name("deadbeef", 77)
        (tier.folder / orphan).touch()  # of a writer that was killed

        oldest = whole[-keep] if keep is not None and len(whole) >= keep else 0
        for rank, retention in enumerate(tier.ranks):
            newest = [n for n in tier.files if n.startswith("0") and f".run.{rank}-" in n]
            retention.forget(HeldLock(), max(newest) if newest else str(OTHER))
            retention.clean(HeldLock())

        stays = {
            name
            for name in tier.files
            if (parsed := ManifestName.parse(name)) is not None
            and (
                parsed.run == "other"
                or parsed.epoch in held
                or (name not in twice and (parsed.epoch >= oldest or parsed.epoch in kept))
            )
        }
        found = tier.there()
        assert {name for name in found if ManifestName.parse(name)} == stays
        named = set().union(*(tier.files[name] for name in stays))
        assert {name for name in found if name.endswith(".chunks")} - strangers == named
        assert strangers <= found


def test_a_manifest_that_cannot_be_read_keeps_every_file(shm: Path) -> None:
    """What it names is not known."""
    tier = Tier(shm, keep=1)
    names = [ManifestName(n, n, "run", rank, WORLD) for n in range(3) for rank in range(WORLD)]
    for name in names:
        tier.add(name, [name.chunks_name("deadbeef", name.epoch)])
    (shm / str(names[-2])).write_bytes(b"damaged")  # rank 0's newest
    tier.ranks[0].forget(HeldLock(), str(names[-2]))
    tier.ranks[0].clean(HeldLock())
    for epoch in range(3):
        assert names[0].chunks_name("deadbeef", epoch) in tier.there()
