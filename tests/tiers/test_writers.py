"""Runs and writers of a tier: branches, two writers of one run, files that somebody took away."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tier_helpers import CHUNK, HeldLock, newest_file, restored

import pmstore
from pmstore.errors import TierError
from pmstore.tiers._epochs.manifest import CHUNKS_SUFFIX, Manifest, ManifestName
from pmstore.tiers._epochs.retention import Retention
from pmstore.tiers._places.local import Access, LocalPlace

Step = Callable[[float], int]


def test_a_branch_is_a_run_of_its_own(
    step: Step, filled: pmstore.Store, path: Path, url: str
) -> None:
    first, second = step(1), step(2)
    branch = path.with_name("branch.pm")
    pmstore.restore(branch, url, first)
    with pmstore.open(branch) as store:
        store["a"][:] = 20
        store.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK))
        store.commit()
        assert store.flush("t", wait=True).epoch == second
        new = store.info().uuid
    assert {(one.epoch, one.run == new) for one in pmstore.epochs(url)} == {
        (first, False),
        (second, False),
        (second, True),
    }
    with pytest.raises(TierError, match="several runs"):
        pmstore.restore(path.with_name("c.pm"), url, second)
    assert restored(path, url, second, run=new[:8])["a"][0] == 20
    assert restored(path, url, second, run=filled.info().uuid)["a"][0] == 2
    assert restored(path, url)["a"][0] == 20  # what was flushed last
    step(3)
    assert restored(path, url)["a"][0] == 3


def test_two_writers_of_one_run(filled: pmstore.Store, path: Path, url: str) -> None:
    filled.close()
    shutil.copy(path, path.with_name("copy.pm"))
    with pmstore.open(path) as store, pmstore.open(path.with_name("copy.pm")) as copy:
        store.flush("t", wait=True)
        copy["x"] = 1
        copy.commit()
        with (
            pytest.warns(UserWarning, match="did not have it added here"),
            pytest.raises(TierError, match="another store or process"),
        ):
            copy.flush("t", wait=True)
        store.remove_tier("t")
        copy.flush("t", wait=True)


def test_a_run_is_of_one_store(filled: pmstore.Store, path: Path, url: str, shm: Path) -> None:
    """A restored store that was trained on cannot put its epochs beside those of the way it left,
    whatever name it gives."""
    filled.add_tier("t", pmstore.TierConfig(url, run="job", chunk_bytes=CHUNK))
    filled["a"][:] = 1
    filled.commit()
    filled.flush("t", wait=True)
    filled.close()
    pmstore.restore(path.with_name("branch.pm"), url)
    with pmstore.open(path.with_name("branch.pm")) as branch:
        branch.add_tier("t", pmstore.TierConfig(url, run="job", chunk_bytes=CHUNK))
        branch["a"][:] = 2
        branch.commit()
        with pytest.raises(TierError, match="another store"):
            branch.flush("t", wait=True)
        branch.add_tier("t", pmstore.TierConfig(url, run="job-2", chunk_bytes=CHUNK))
        branch.flush("t", wait=True)
    assert restored(path, url, run="job-2")["a"][0] == 2
    with pmstore.open(path) as store:  # the first store goes on as before
        store["a"][:] = 3
        store.commit()
        store.flush("t", wait=True)
    assert len({(one.run, one.epoch) for one in pmstore.epochs(url)}) == 3
    assert restored(path, url)["a"][0] == 3


def test_files_that_somebody_took_away_are_written_anew(
    filled: pmstore.Store, step: Step, path: Path, url: str
) -> None:
    step(1)
    for file in Path(url).glob("*.chunks"):
        file.unlink()
    filled["a"][5] = 7
    filled.commit()
    assert filled.flush("t", wait=True).stats.full  # type: ignore[union-attr]
    assert restored(path, url)["a"][:6].tolist() == [1, 1, 1, 1, 1, 7]
    filled.drain()
    shutil.rmtree(url)
    with pytest.raises(TierError, match="removed"):
        filled.flush("t", wait=True)
    filled.remove_tier("t")
    filled.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK))
    filled.flush("t", wait=True)
    assert restored(path, url)["a"][5] == 7


def test_a_tier_that_somebody_emptied_gets_the_same_commit_again(
    filled: pmstore.Store, path: Path, url: str
) -> None:
    """Under a name of its own: what is known of the manifest that was there before says nothing of
    it."""
    filled.add_tier("t", pmstore.TierConfig(url, chunk_bytes=CHUNK, keep=2))
    names: set[str] = set()
    for _ in range(3):
        filled.flush("t", wait=True)
        filled.drain()
        found = {file.name for file in Path(url).glob("*.manifest")}
        assert not found & names
        names |= found
        assert restored(path, url)["a"][5] == 5
        for file in Path(url).glob("*"):
            if not file.name.endswith("lock"):
                file.unlink()


def test_what_a_name_stood_for_before_is_forgotten(step: Step, url: str) -> None:
    """A manifest that is written again under the name of one that was read."""
    step(1)
    place = LocalPlace(Path(url), Access())
    name = newest_file(url, ".manifest").name
    own = ManifestName.parse(name)
    assert own is not None
    retention = Retention(place, own, None, lambda: place)
    held = HeldLock()
    retention.forget(held, name)  # reads it
    manifest = Manifest.unpack(place.read(name))
    ((old, size),) = manifest.files
    new = f"{own.data_prefix}deadbeef.000009{CHUNKS_SUFFIX}"
    os.rename(Path(url) / old, Path(url) / new)
    again = replace(manifest, files=((new, size),))
    retention.published(name, again)
    place.publish(name, again.pack())
    retention.forget(held, name)
    assert (Path(url) / new).exists()


def test_nothing_is_deleted_by_a_writer_that_lost_its_lock(step: Step, url: str) -> None:
    step(1)
    name = newest_file(url, ".manifest").name
    own = ManifestName.parse(name)
    assert own is not None
    place = LocalPlace(Path(url), Access())
    lost = HeldLock(lost=True)
    again = own._replace(generation=own.generation + 1)
    os.link(Path(url) / name, Path(url) / str(again))
    before = sorted(os.listdir(url))
    with pytest.raises(TierError, match="lost"):
        Retention(place, own, None, lambda: place).forget(lost, name)
    assert sorted(os.listdir(url)) == before


def test_a_clock_that_goes_back_decides_nothing(
    step: Step, path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(1)
    monkeypatch.setattr("time.time", lambda: 5.0)
    step(2)
    assert restored(path, url)["a"][0] == 2
