"""Peers under the crash tests with a small budget (`make nightly WHAT=crashtest-peers`: with more),
and the recorder behind them."""

from __future__ import annotations

import os
import platform
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pairwise import ALL

ROOT = Path(__file__).resolve().parents[2]
IMAGES = int(os.environ.get("PMS_PEER_IMAGES", "150"))

if platform.machine() != "x86_64" or shutil.which("cc") is None:
    pytest.skip("the recorder needs x86-64 and a C compiler", allow_module_level=True)

from crashtests import disk, peers  # noqa: E402

PROGRAM = """
import ctypes, mmap, os, sys
root = sys.argv[1]
prctl = ctypes.CDLL(None).prctl
fd = os.open(root + "/mapped", os.O_RDWR)
view = mmap.mmap(fd, 8192)
word = ctypes.c_uint64.from_buffer(view, 4096)
far = ctypes.c_uint64.from_buffer(view, 64)
prctl(0x706D73, 0, 0, 0, 0)
word.value = 0x1111111111111111
far.value = 0x2222222222222222
word.value = 0x3333333333333333
view.flush(4096, 4096)
prctl(0x706D73, 7, 0, 0, 0)
other = os.open(root + "/new", os.O_RDWR | os.O_CREAT, 0o600)
os.write(other, b"abc")
os.writev(other, [b"de", b"f"])
os.pwrite(other, b"X", 1)
os.fsync(other)
os.ftruncate(other, 2)
os.posix_fallocate(other, 0, 100)
os.rename(root + "/new", root + "/name")
os.fsync(os.open(root, os.O_RDONLY))
os.close(os.open(root + "/name", os.O_WRONLY | os.O_TRUNC | os.O_DSYNC))
os.write(os.open(root + "/name", os.O_WRONLY | os.O_DSYNC), b"synced")
os.unlink(root + "/name")
os._exit(3)
"""


@pytest.fixture(scope="module")
def watch() -> Path:
    built = peers.build()
    done = subprocess.run(
        [built, ROOT, "/dev/null", "same", "true"], capture_output=True, text=True
    )
    if "ptrace is not allowed" in done.stderr or "PTRACE_" in done.stderr:
        pytest.skip(done.stderr)
    return built


def test_every_call_and_store_is_recorded_in_order(watch: Path, shm: Path) -> None:
    root = shm / "files"
    root.mkdir()
    (root / "mapped").write_bytes(bytes(8192))
    done = subprocess.run(
        [watch, root, shm / "record", "same", sys.executable, "-c", PROGRAM, str(root)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 3, done.stderr
    found = [
        (e.kind, Path(e.path).name, e.rest, e.offset)
        for e in disk.events((shm / "record").read_bytes())
    ]
    start = found.index((disk.SYNC, "files", b"", 0)) + 1
    assert found[start:] == [
        (disk.STORE, "mapped", b"\x11" * 8, 4096),
        (disk.STORE, "mapped", b"\x22" * 8, 64),
        (disk.STORE, "mapped", b"\x33" * 8, 4096),
        (disk.SYNC_RANGE, "mapped", (4096).to_bytes(8, "little"), 4096),
        (disk.MARK, "", b"", 7),
        (disk.CREATE, "new", b"", 0),
        (disk.WRITE, "new", b"abc", 0),
        (disk.WRITE, "new", b"def", 3),
        (disk.WRITE, "new", b"X", 1),
        (disk.SYNC, "new", b"", 0),
        (disk.TRUNCATE, "new", b"", 2),
        (disk.SIZE, "new", b"", 100),
        (disk.RENAME, "new", str(root / "name").encode(), 0),
        (disk.SYNC, "files", b"", 0),
        (disk.TRUNCATE, "name", b"", 0),
        (disk.WRITE, "name", b"synced", 0),
        (disk.SYNC_RANGE, "name", (6).to_bytes(8, "little"), 0),
        (disk.UNLINK, "name", b"", 0),
    ]


def after_many(file: disk.File) -> set[bytes]:
    rng = random.Random(1)
    return {file.after("some", rng) for _ in range(400)}


def test_what_a_disk_may_hold_of_a_file() -> None:
    file = disk.File()
    file.write(0, b"a" * 1024)
    file.sync()
    assert after_many(file) == {b"a" * 1024}
    file.write(0, b"b" * 512)
    file.write(512, b"b" * 512)
    found = after_many(file)
    # any version of each sector
    assert {x + y for x in (b"a" * 512, b"b" * 512) for y in (b"a" * 512, b"b" * 512)} <= found
    assert any(set(content) - set(b"ab") for content in found)  # or noise
    file.sync(0, 512)
    assert all(content.startswith(b"b" * 512) for content in after_many(file))
    file.sync()
    file.truncate(0)
    file.write(0, b"c" * 512)
    found = after_many(file)
    assert {b"b" * 1024, b"", b"c" * 512} <= found
    assert not any(
        b"b" in content and b"c" in content and len(set(content)) == 2 for content in found
    )  # no old block in the new file


def test_a_rename_is_whole_or_not_at_all() -> None:
    image_of = disk.Disk("/r")
    for event in [
        disk.Event(disk.CREATE, "/r/old", b"", 0, False),
        disk.Event(disk.WRITE, "/r/old", b"1", 0, False),
        disk.Event(disk.SYNC, "/r/old", b"", 0, False),
        disk.Event(disk.SYNC, "/r", b"", 0, False),
        disk.Event(disk.CREATE, "/r/new", b"", 0, False),
        disk.Event(disk.WRITE, "/r/new", b"2", 0, False),
        disk.Event(disk.SYNC, "/r/new", b"", 0, False),
        disk.Event(disk.RENAME, "/r/new", b"/r/old", 0, False),
    ]:
        image_of.apply(event)
    rng = random.Random(1)
    images = [image_of.after("some", rng) for _ in range(100)]
    assert {image["/r/old"] for image in images} == {b"1", b"2"}
    assert all("/r/new" not in image for image in images if image["/r/old"] == b"2")


@pytest.mark.parametrize("model", peers.MODELS)
def test_who_survives_what(watch: Path, model: str) -> None:
    """A save into a store is recorded an instruction at a time: of one here, of two nightly."""

    def outcomes(name: str, steps: int = 2) -> set[str]:
        found = peers.try_peer(watch, name, model, IMAGES, seed=1, steps=steps)
        assert found.images > IMAGES // 6
        assert not found.broken(), found.reasons
        assert sum(found.outcomes.values()) == found.images
        return {outcome for outcome, count in found.outcomes.items() if count}

    assert outcomes("pmstore-file", steps=2 if ALL else 1) == {"old or new"}
    assert outcomes("savez-dirsync") == {"old or new"}
    assert "unreadable" in outcomes("savez")
    assert outcomes("safetensors-rename") >= (
        {"lost", "unreadable"} if model == "iii" else {"old or new"}
    )
