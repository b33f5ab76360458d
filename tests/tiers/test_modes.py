"""Who may read what a tier holds, and whose files it touches: no more than the store's readers, and
none but its own."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tier_helpers import CHUNK, restored

import pmstore
from pmstore.errors import TierError
from pmstore.tiers._epochs.manifest import GENERATION_MOST, Manifest, ManifestName


@pytest.fixture(params=[0o022, 0o000, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(one.stat().st_mode) for one in folder.iterdir()}


def directory_modes(folder: Path, top: Path) -> list[int]:
    return [
        stat.S_IMODE(one.stat().st_mode)
        for one in (folder, *folder.parents)
        if one != top and top in one.parents
    ]


def test_files_are_as_private_as_the_store(path: Path, shm: Path, umask: int) -> None:
    tier = shm / "deep" / "er" / "tier"
    with pmstore.open(path, size="4MiB") as store:
        store.add_tier("t", tier)
        store["a"] = np.arange(1000.0)
        store.commit()
        store.flush("t", wait=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert modes(tier) == {0o600}
    assert directory_modes(tier, shm) == [0o700] * 3
    pmstore.restore(shm / "back.pm", tier)
    assert stat.S_IMODE((shm / "back.pm").stat().st_mode) == 0o600


def test_a_store_that_others_read(path: Path, shm: Path, umask: int) -> None:
    pmstore.open(path, size="4MiB").close()
    path.chmod(0o644)
    with pmstore.open(path) as store:
        store.add_tier("t", shm / "tier")
        store["a"] = np.arange(1000.0)
        store.commit()
        store.flush("t", wait=True)
    assert modes(shm / "tier") == {0o644 & ~umask}
    assert directory_modes(shm / "tier", shm) == [0o700]


def test_a_tier_that_is_shared(path: Path, shm: Path, umask: int) -> None:
    tier = shm / "deep" / "tier"
    with pmstore.open(path, size="4MiB") as store:
        store.add_tier("t", pmstore.TierConfig(tier, mode=0o640))
        store["a"] = np.arange(1000.0)
        store.commit()
        store.flush("t", wait=True)
        assert store.tiers["t"].mode == 0o640
    assert modes(tier) == {0o640}
    assert directory_modes(tier, shm) == [0o750, 0o750]
    with pmstore.open(path) as store:
        assert store.tiers["t"].mode == 0o640


@pytest.mark.parametrize("mode", [0o400, 0o1600, 0o700, -1, 0, True, "640", 0o602 | 0o100])
def test_modes_that_are_none(path: Path, mode: object) -> None:
    with (
        pmstore.open(path, size="1MiB") as store,
        pytest.raises(
            ValueError if type(mode) is int else TypeError,
            match="permissions of files, such as 0o640",
        ),
    ):
        store.add_tier("t", pmstore.TierConfig("x", mode=mode))  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["link", "dangling link", "fifo", "directory"])
def test_a_lock_that_is_no_file(filled: pmstore.Store, shm: Path, url: str, what: str) -> None:
    """Nothing is made, or waited for, through it."""
    Path(url).mkdir()
    lock = Path(url) / f".{filled.info().uuid}.0-1.lock"
    elsewhere = shm / "elsewhere"
    if what == "link":
        elsewhere.write_text("mine")
    if what == "fifo":
        os.mkfifo(lock)
    elif what == "directory":
        lock.mkdir()
    else:
        lock.symlink_to(elsewhere)
    with pytest.raises(TierError, match="the lock of a tier is a file, and this is none"):
        filled.flush("t", wait=True)
    assert elsewhere.exists() == (what == "link")
    lock.rmdir() if what == "directory" else lock.unlink()
    filled.flush("t", wait=True)


# ---- names ---------------------------------------------------------------------------------------


def test_only_files_that_it_wrote_are_deleted(filled: pmstore.Store, path: Path, url: str) -> None:
    run = f"{filled.info().uuid}.0-1"
    own = ManifestName(7, 7, filled.info().uuid, 0, 1)
    users = (
        f"{run}.thesis.chunks",
        f"{run}.deadbeef.thesis.chunks",
        f"{run}.deadbeef.000001.old.chunks",
        f"{run}.deadbeef.0000001.chunks",  # no writer puts a zero more
        f"{run}.DEADBEEF.000001.chunks",
        f"{run}.deadbeef.000001.chunks.bak",
        f"{run}.chunks",
        f".a.{run}.0-1.b.new",
        f".{run}.new",
        f".{own}.new",
        f".{own}.notes.new",
        f".0{own}.deadbeef.new",
        f".{own}.deadbeef.new.new",
        f"0{own}",
        f"{own}.bak",
        "notes.txt",
    )
    left = (own.chunks_name("deadbeef", 3), f".{own}.deadbeef.new")
    Path(url).mkdir()
    for name in (*users, *left):
        (Path(url) / name).write_text("mine")
    filled.add_tier("t", pmstore.TierConfig(url, keep=1, chunk_bytes=CHUNK))
    for i in range(3):
        filled["a"][:] = i
        filled.commit()
        filled.flush("t", wait=True)
    filled.drain()
    there = {one.name for one in Path(url).iterdir()}
    assert there >= set(users)
    assert not there & set(left)
    assert all((Path(url) / name).read_text() == "mine" for name in users)
    assert restored(path, url)["a"][0] == 2


@pytest.mark.parametrize(
    "generation",
    [
        "9" * 20,
        str(1 << 63),
        "9" * 19,
        "0" + "9" * 19,
        str(GENERATION_MOST + 1),
        "0" * 12 + "99999998",
    ],
)
def test_a_stray_file_takes_no_epoch_with_it(
    filled: pmstore.Store, path: Path, url: str, generation: str
) -> None:
    Path(url).mkdir()
    stray = Path(url) / f"{generation}.000000000001.other.0-1.manifest"
    stray.touch()
    filled.add_tier("t", pmstore.TierConfig(url, keep=1, chunk_bytes=CHUNK))
    for i in range(3):
        filled["a"][:] = i
        filled.commit()
        epoch = filled.flush("t", wait=True).epoch
        found = restored(path, url)
        assert (found["epoch"], found["a"][0]) == (epoch, i)
    filled.drain()
    assert stray.exists()


def test_the_last_generation(filled: pmstore.Store, path: Path, url: str) -> None:
    """One below it, a flush is still possible; then each says why none is, and what was flushed
    stays."""
    filled["a"][:] = 1
    filled.commit()
    filled.flush("t", wait=True)
    stray = Path(url) / str(ManifestName(GENERATION_MOST - 1, 1, "other", 0, 1))
    stray.touch()
    filled["a"][:] = 2
    filled.commit()
    filled.flush("t", wait=True)
    for i in (3, 4):
        filled["a"][:] = i
        filled.commit()
        with pytest.raises(TierError, match=r"no epoch can follow '4611686018427387904\..*remove"):
            filled.flush("t", wait=True)
    assert restored(path, url)["a"][0] == 2


@pytest.mark.parametrize(
    "name",
    [
        "00000001.000000000001.r.0-1.manifest",
        "123456789.1234567890123.r-_.10-11.manifest",
        f"{GENERATION_MOST}.000000000001.r.0-1.manifest",
    ],
)
def test_names_of_manifests(name: str) -> None:
    found = ManifestName.parse(name)
    assert found is not None
    assert str(found) == name


@pytest.mark.parametrize(
    "name",
    [
        f"{GENERATION_MOST + 1}.000000000001.r.0-1.manifest",
        f"00000001.{GENERATION_MOST + 1}.r.0-1.manifest",
        "000000001.000000000001.r.0-1.manifest",
        "00000001.0000000000001.r.0-1.manifest",
        "00000001.000000000001.r.00-1.manifest",
        "00000001.000000000001.r.0-01.manifest",
        "00000001.000000000001.r.1-1.manifest",
        "00000001.000000000001.r.0-1.manifest\n",
        "\u0660" * 8 + ".000000000001.r.0-1.manifest",
    ],
)
def test_names_that_are_no_manifests(name: str) -> None:
    assert ManifestName.parse(name) is None


# ---- reading back --------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["gone", "empty", "another", "chunks cut"])
def test_an_epoch_that_cannot_be_read_back_is_no_success(
    filled: pmstore.Store, path: Path, url: str, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    """And nothing older is let go."""
    from pmstore.tiers._places.local import LocalPlace

    filled.add_tier("t", pmstore.TierConfig(url, keep=1, chunk_bytes=CHUNK))
    filled["a"][:] = 1
    filled.commit()
    filled.flush("t", wait=True)
    filled.drain()
    publish = LocalPlace.publish

    def harmed(place: LocalPlace, name: str, data: bytes) -> None:
        publish(place, name, data)
        file = place.path / name
        if harm == "gone":
            file.unlink()
        elif harm == "empty":
            os.truncate(file, 0)
        elif harm == "another":
            file.write_bytes(data[:-1] + b"x")
        else:
            for chunks, _ in Manifest.unpack(data).files:
                os.truncate(place.path / chunks, 100) if not chunks.endswith(
                    "000000.chunks"
                ) else None

    filled["a"][:] = 2
    filled.commit()
    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "publish", harmed)
        with pytest.raises(TierError, match=r"read back|disappeared"):
            filled.flush("t", wait=True)
    filled.drain()
    assert restored(path, url)["a"][0] == 1
    filled["a"][:] = 3
    filled.commit()
    filled.flush("t", wait=True)
    assert restored(path, url)["a"][0] == 3


def test_a_manifest_that_was_emptied_is_not_built_on(
    filled: pmstore.Store, path: Path, url: str
) -> None:
    """The same commit again: what is there is looked at, not only its name."""
    filled.flush("t", wait=True)
    (manifest,) = Path(url).glob("*.manifest")
    os.truncate(manifest, 0)
    filled.flush("t", wait=True)
    assert restored(path, url)["epoch"] == filled.epoch
