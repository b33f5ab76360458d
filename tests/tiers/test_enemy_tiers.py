"""Manifests, names and chunks that an enemy wrote, checksums right: errors in words, in little time and memory, and nothing
read or written outside the tier and the new store."""

from __future__ import annotations

import os
import random
import resource
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
from pmstore.errors import PmstoreError, TierError
from pmstore.tiers import export_safetensors
from pmstore.tiers.backend import open_backend
from pmstore.tiers.engine import checksum
from pmstore.tiers.image import Image
from pmstore.tiers.manifest import BadManifestError, Manifest, Shared
from pmstore.tiers.reading import EpochBytes, list_epochs


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
        change(borrowed=np.array([1 << 60], np.uint64)),
        change(borrowed=np.array([5, 5], np.uint64)),
        change(shared=(Shared("w", 4096, 1 << 59),)),
        change(shared=(Shared("w", 0, 10),)),
        change(shared=(Shared("w", 4096, 100), Shared("v", 4100, 100))),
        change(shared=(Shared("w", -4096, 100),)),
    ],
)
def test_manifests_that_would_lead_astray_are_refused(manifest: Path, evil: Callable[[Manifest], Manifest], path: Path) -> None:
    packed = evil(Manifest.unpack(manifest.read_bytes())).pack()
    with pytest.raises(BadManifestError):
        Manifest.unpack(packed)
    manifest.write_bytes(packed)
    assert (pmstore.epochs(manifest.parent)[0].problem or "").startswith("corrupt")
    with pytest.raises(TierError, match="corrupt"):
        pmstore.restore(path.with_name("no.pm"), manifest.parent)
    assert not path.with_name("no.pm").exists()


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x90", b"\x80", b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
)
def test_bodies_that_are_no_manifest(body: bytes) -> None:
    with pytest.raises(BadManifestError):
        Manifest.unpack(b"PMSTIER1" + checksum(body).to_bytes(4, "little") + len(body).to_bytes(8, "little") + body)


def test_a_name_with_a_huge_world_costs_nothing(manifest: Path, path: Path) -> None:
    (manifest.parent / f"99999999.000000000009.run.0-{10**18}.manifest").write_bytes(manifest.read_bytes())
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


def test_a_sparse_manifest_is_not_read_into_memory(manifest: Path) -> None:
    evil = manifest.with_name("00000009.000000000009.run.0-1.manifest")
    with open(evil, "wb") as file:
        file.write(b"PMSTIER1" + bytes(4) + (1 << 40).to_bytes(8, "little"))
        file.truncate(1 << 40)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (pmstore.epochs(manifest.parent)[0].problem or "").startswith("corrupt")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 1 << 20  # KiB


@pytest.mark.parametrize("seed", range(6))
def test_state_that_an_enemy_wrote(manifest: Path, path: Path, seed: int) -> None:
    """Chunks changed at random, with checksums that fit: what is exported or restored is an error or a store, never a hang."""
    rng = random.Random(seed)
    info = list_epochs(open_backend(manifest.parent))[0]
    source = EpochBytes(open_backend(manifest.parent), info, 0)
    root = Image(source.read)
    (file,) = manifest.parent.glob("*.chunks")
    data = np.frombuffer(file.read_bytes(), np.uint8).copy()
    found = Manifest.unpack(manifest.read_bytes())
    chunks = found.chunks.copy()
    for _ in range(40):
        at = rng.randrange(min(len(data), 40 * CHUNK) // 8) * 8
        value = rng.choice([0, 1, root._root, at, (1 << 63) + 5, (1 << 64) - 1, rng.randrange(1 << 30)])
        data[at : at + 8] = np.frombuffer(value.to_bytes(8, "little"), np.uint8)
    for one in chunks:
        one["crc"] = checksum(data[int(one["position"]) : int(one["position"]) + CHUNK].tobytes())
    file.write_bytes(data.tobytes())
    manifest.write_bytes(replace(found, chunks=chunks).pack())
    with suppress(PmstoreError, ValueError, OSError):
        export_safetensors(path.with_name("x.safetensors"), manifest.parent)
    target = path.with_name("enemy.pm")
    with suppress(PmstoreError, OSError):
        pmstore.restore(target, manifest.parent)
        with pmstore.open(target) as store:
            store.check()


def test_a_tier_that_is_listed_and_not_found(filled: pmstore.Store, path: Path) -> None:
    """The slot of a remembered tier's name says another hash: iterating finds the name, looking it up does not."""
    filled.close()
    data = bytearray(path.read_bytes())
    image = Image(lambda offset, nbytes: bytes(data[offset : offset + nbytes]))
    (tiers,) = [one for one in image.objects() if one.name == ".pmstore/tiers/t"]
    node = data.index(b"t" + tiers.meta) - 64
    slot = data.index(data[node : node + 8] + node.to_bytes(8, "little"))
    data[slot : slot + 8] = (1).to_bytes(8, "little")
    path.write_bytes(data)
    with pmstore.open(path) as store, pytest.raises(PmstoreError, match="damaged"):
        store.flush("t")


def test_a_directory_that_goes_in_a_circle(filled: pmstore.Store) -> None:
    """Names whose chain leads back to its start are an error, not a loop."""
    from pmstore.errors import CorruptStoreError
    from pmstore.tiers import image

    node = 64 * 4096
    pages = {
        image.ROOT_OFFSET: image._ROOT.pack(3, 4096),
        4096: image._HEADER.pack(1 << 60, 0, 0, 0, node, 0),
        node: image._NODE.pack(0, 0, node, 0, 0, 0, 0, 1, 0).ljust(image._NODE_BYTES, b"\0"),
        node + image._NODE_BYTES: b"x",
    }
    with pytest.raises(CorruptStoreError):
        list(Image(lambda offset, nbytes: pages[offset][:nbytes]).objects())
