"""Manifests, names and chunks that an enemy wrote, checksums right: errors in words, in little time
and memory, and nothing read or written outside the tier and the new store."""

from __future__ import annotations

import os
import random
import resource
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tier_helpers import CHUNK, restored

import pmstore
from pmstore._engine.snapshot import checksum
from pmstore.errors import CorruptStoreError, PmstoreError, TierError
from pmstore.tiers._epochs.content import EpochBytes, verify
from pmstore.tiers._epochs.image import Image
from pmstore.tiers._epochs.listing import list_epochs
from pmstore.tiers._epochs.manifest import BadManifestError, Manifest, Shared
from pmstore.tiers._places.place import BrokenEpochError
from pmstore.tiers._places.url import open_place


@pytest.fixture
def manifest(filled: pmstore.Store, url: str) -> Path:
    """Of the only epoch in the tier."""
    filled.flush("t", wait=True)
    (found,) = Path(url).glob("*.manifest")
    return found


def change(**fields: Any) -> Callable[[Manifest], Manifest]:
    return lambda manifest: replace(manifest, **fields)


def with_chunk(**fields: int) -> Callable[[Manifest], Manifest]:
    """The last chunk's fields."""

    def made(manifest: Manifest) -> Manifest:
        chunks = manifest.chunks.copy()
        for name, value in fields.items():
            chunks[name][-1] = value
        return replace(manifest, chunks=chunks)

    return made


@pytest.mark.parametrize(
    "evil",
    [
        change(files=(("../../../etc/passwd.chunks", 1 << 20),)),
        change(files=(("/etc/passwd", 1 << 20),)),
        change(files=(("..", 1 << 20),)),
        change(files=((".hidden.chunks", 1 << 20),)),
        change(files=(("a\0b.chunks", 1 << 20),)),
        change(files=(("x" * 5000 + ".chunks", 1 << 20),)),
        change(files=(("x.chunks", 1 << 63),)),
        change(files=(("x.chunks", -1),)),
        change(files=()),
        change(chunk_bytes=0),
        change(chunk_bytes=4095),
        change(chunk_bytes=1 << 40),
        change(world_size=1 << 40),
        change(rank=-1),
        change(head=b""),
        with_chunk(index=1 << 39),
        with_chunk(index=(1 << 64) - 1),
        with_chunk(index=0),
        with_chunk(file=7),
        with_chunk(position=(1 << 64) - 8),
        with_chunk(position=1 << 59),
        with_chunk(position=0),  # where another one lies
        with_chunk(position=CHUNK // 2),
        change(borrowed=np.array([1 << 60], np.uint64)),
        change(borrowed=np.array([5, 5], np.uint64)),
        change(shared=(Shared("w", 4096, 1 << 59),)),
        change(shared=(Shared("w", 0, 10),)),
        change(shared=(Shared("w", 4096, 100), Shared("v", 4100, 100))),
        change(shared=(Shared("w", -4096, 100),)),
    ],
)
def test_manifests_that_would_lead_astray_are_refused(
    manifest: Path, evil: Callable[[Manifest], Manifest], path: Path
) -> None:
    packed = evil(Manifest.unpack(manifest.read_bytes())).pack()
    with pytest.raises(BadManifestError):
        Manifest.unpack(packed)
    manifest.write_bytes(packed)
    assert (pmstore.epochs(manifest.parent)[0].problem or "").startswith("corrupt")
    with pytest.raises(TierError, match="corrupt"):
        pmstore.restore(path.with_name("no.pm"), manifest.parent)
    assert not path.with_name("no.pm").exists()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\x80",
        b"\x91" * 100_000,
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ],
)
def test_bodies_that_are_no_manifest(body: bytes) -> None:
    with pytest.raises(BadManifestError):
        Manifest.unpack(
            b"PMSTIER1"
            + checksum(body).to_bytes(4, "little")
            + len(body).to_bytes(8, "little")
            + body
        )


def test_a_name_with_a_huge_world_costs_nothing(manifest: Path, path: Path) -> None:
    (manifest.parent / f"99999999.000000000009.run.0-{10**18}.manifest").write_bytes(
        manifest.read_bytes()
    )
    began = time.process_time()
    broken, whole = pmstore.epochs(manifest.parent)
    assert time.process_time() - began < 5  # not 10**18 numbers
    assert broken.problem is not None
    assert broken.problem.startswith("missing: rank 1, 2")
    assert whole.problem is None
    assert restored(path, str(manifest.parent))["epoch"] == whole.epoch


def test_what_is_no_file_is_not_waited_for(manifest: Path) -> None:
    """Opening a FIFO would block for ever."""
    (chunks,) = manifest.parent.glob("*.chunks")
    chunks.unlink()
    os.mkfifo(chunks)
    os.mkfifo(manifest.parent / "00000009.000000000009.run.0-1.manifest")
    (found,) = pmstore.epochs(manifest.parent)
    assert found.problem == f"missing: file {chunks.name}"


@pytest.mark.parametrize("kind", ["manifest", "chunks"])
def test_a_link_is_no_file_of_the_tier(manifest: Path, tmp_path: Path, kind: str) -> None:
    """What it leads to lies elsewhere, and is somebody else's."""
    (one,) = manifest.parent.glob(f"*.{kind}")
    elsewhere = manifest.parent.parent / one.name
    one.rename(elsewhere)
    one.symlink_to(elsewhere)
    found = pmstore.epochs(manifest.parent)
    assert [each.problem for each in found] == (
        [] if kind == "manifest" else [f"missing: file {one.name}"]
    )
    with pytest.raises(TierError):
        pmstore.restore(tmp_path / "made.pm", manifest.parent)
    assert not (tmp_path / "made.pm").exists()
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        open_place(manifest.parent).read(one.name)


def test_a_sparse_manifest_is_not_read_into_memory(manifest: Path) -> None:
    evil = manifest.with_name("00000009.000000000009.run.0-1.manifest")
    with open(evil, "wb") as file:
        file.write(b"PMSTIER1" + bytes(4) + (1 << 40).to_bytes(8, "little"))
        file.truncate(1 << 40)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (pmstore.epochs(manifest.parent)[0].problem or "").startswith("corrupt")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 1 << 20  # KiB


def read_arrays(manifest: Path) -> None:
    """Reads all arrays of the newest epoch, as whoever loads it without a store does."""
    place = open_place(manifest.parent)
    source = EpochBytes(place, list_epochs(place)[0], 0)
    for one in Image(source.read, source.manifest.state_bytes).arrays():
        source.read(one.offset, one.nbytes)


@pytest.mark.parametrize("seed", range(6))
def test_state_that_an_enemy_wrote(manifest: Path, path: Path, seed: int) -> None:
    """Chunks changed at random, with checksums that fit: what is read or restored is an error or a
    store, never a hang."""
    rng = random.Random(seed)
    info = list_epochs(open_place(manifest.parent))[0]
    source = EpochBytes(open_place(manifest.parent), info, 0)
    root = Image(source.read, source.manifest.state_bytes)
    (file,) = manifest.parent.glob("*.chunks")
    data = np.frombuffer(file.read_bytes(), np.uint8).copy()
    for _ in range(40):
        at = rng.randrange(min(len(data), 40 * CHUNK) // 8) * 8
        value = rng.choice(
            [0, 1, root._root, at, (1 << 63) + 5, (1 << 64) - 1, rng.randrange(1 << 30)]
        )
        data[at : at + 8] = np.frombuffer(value.to_bytes(8, "little"), np.uint8)
    file.write_bytes(data.tobytes())
    seal(manifest, data.tobytes())
    with suppress(PmstoreError, ValueError, BrokenEpochError):
        read_arrays(manifest)
    target = path.with_name("enemy.pm")
    with suppress(PmstoreError, OSError):
        pmstore.restore(target, manifest.parent)
        with pmstore.open(target) as store:
            store.check()


def with_head(manifest: Path, at: int, form: str, value: int) -> None:
    """A number in the superblock, sealed again."""
    found = Manifest.unpack(manifest.read_bytes())
    head = bytearray(found.head)
    struct.pack_into(form, head, at, value)
    struct.pack_into("<I", head, 4092, checksum(bytes(head[:4092])))
    manifest.write_bytes(replace(found, head=bytes(head)).pack())


@pytest.mark.parametrize(
    ("at", "form", "value"), [(56, "<Q", 1 << 50), (56, "<Q", (1 << 59) + 4096), (8, "<I", 77)]
)
def test_a_superblock_that_is_none_is_not_believed(
    manifest: Path, path: Path, at: int, form: str, value: int
) -> None:
    """Where segments lie, and how large the store is: whoever reads an epoch asks the engine
    first."""
    with_head(manifest, at, form, value)
    place = open_place(manifest.parent)
    with pytest.raises(BrokenEpochError, match="corrupt"):
        read_arrays(manifest)
    with pytest.raises(TierError, match="corrupt"):
        pmstore.restore(path.with_name("x.pm"), manifest.parent)
    assert (verify(place, list_epochs(place)[0]) or "").startswith("corrupt")
    assert {one.name for one in path.parent.iterdir()} == {path.name, manifest.parent.name}


def nodes(data: bytearray, name: bytes, meta: bytes) -> int:
    """Where the directory's node of a name lies."""
    return bytes(data).index(name + meta) - 64


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [
        (44, "<I", (1 << 32) - 1),
        (44, "<I", 3 << 20),
        (32, "<Q", 6 << 30),
        (32, "<Q", 1 << 21),
        (48, "<I", 4097),
    ],
    ids=[
        "description of 4 GiB",
        "description of 3 MiB",
        "array of 6 GiB",
        "array of 2 MiB",
        "name of a page",
    ],
)
def test_sizes_of_objects_are_not_believed(
    manifest: Path, path: Path, at: int, form: str, value: int
) -> None:
    """The file has 8 MiB, so that the smaller ones are within it; what is behind the array is in no
    chunk."""
    place = open_place(manifest.parent)
    source = EpochBytes(place, list_epochs(place)[0], 0)
    (one,) = [
        one for one in Image(source.read, source.manifest.state_bytes).arrays() if one.name == "a"
    ]
    (file,) = manifest.parent.glob("*.chunks")
    data = bytearray(file.read_bytes())
    struct.pack_into(form, data, nodes(data, b"a", one.meta) + at, value)
    seal(manifest, data)
    file.write_bytes(data)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((BrokenEpochError, CorruptStoreError)):
        read_arrays(manifest)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 64 << 10  # KiB
    assert {one.name for one in path.parent.iterdir()} == {path.name, manifest.parent.name}


def seal(manifest: Path, data: bytes | bytearray) -> None:
    """Checksums of chunks that were changed."""
    found = Manifest.unpack(manifest.read_bytes())
    chunks = found.chunks.copy()
    for one in chunks:
        one["crc"] = checksum(bytes(data[int(one["position"]) : int(one["position"]) + CHUNK]))
    manifest.write_bytes(replace(found, chunks=chunks).pack())


def test_descriptions_that_overlap() -> None:
    """A few bytes, which a thousand names say are theirs, are not read a thousand times."""
    from pmstore.tiers._epochs import image

    first, count, meta = 64 * 4096, 1000, 1 << 20
    data = bytearray(first + 64 * count + meta + 100)
    data[image.ROOT_OFFSET : image.ROOT_OFFSET + 16] = image._ROOT.pack(3, 4096)
    data[4096 : 4096 + 48] = image._HEADER.pack(count, 0, 0, 0, first, 0)
    for i in range(count):
        at = first + 64 * i
        data[at : at + image._NODE.size] = image._NODE.pack(0, 0, at + 64, 0, 0, 2, meta, 1, 0)
    taken = 0

    def read(offset: int, nbytes: int) -> bytes:
        nonlocal taken
        taken += nbytes
        return bytes(data[offset : offset + nbytes])

    with pytest.raises(CorruptStoreError):
        list(Image(read, len(data)).objects())
    assert taken < 2 * len(data)


def test_a_tier_that_is_listed_and_not_found(filled: pmstore.Store, path: Path) -> None:
    """The slot of a remembered tier's name says another hash: iterating finds the name, looking it
    up does not."""
    filled.close()
    data = bytearray(path.read_bytes())
    image = Image(lambda offset, nbytes: bytes(data[offset : offset + nbytes]), len(data))
    (tiers,) = [one for one in image.objects() if one.name == ".pmstore/tiers/t"]
    node = data.index(b"t" + tiers.meta) - 64
    slot = data.index(data[node : node + 8] + node.to_bytes(8, "little"))
    data[slot : slot + 8] = (1).to_bytes(8, "little")
    path.write_bytes(data)
    with pmstore.open(path) as store, pytest.raises(PmstoreError, match="damaged"):
        store.flush("t")


def test_a_directory_that_goes_in_a_circle(filled: pmstore.Store) -> None:
    """Names whose chain leads back to its start are an error, not a loop."""
    from pmstore.tiers._epochs import image

    node = 64 * 4096
    pages = {
        image.ROOT_OFFSET: image._ROOT.pack(3, 4096),
        4096: image._HEADER.pack(1 << 60, 0, 0, 0, node, 0),
        node: image._NODE.pack(0, 0, node, 0, 0, 0, 0, 1, 0).ljust(image._NODE_BYTES, b"\0"),
        node + image._NODE_BYTES: b"x",
    }
    with pytest.raises(CorruptStoreError):
        list(Image(lambda offset, nbytes: pages[offset][:nbytes], 1 << 20).objects())
