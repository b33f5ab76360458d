"""System calls that the kernel refuses: on file systems that cannot reserve room the C library
would store to every block instead, over what others write; and a medium that does not give back
what was written to it."""

from __future__ import annotations

import errno
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import pmstore

NUMBERS = {"x86_64": (285, 17, 295, 296), "aarch64": (47, 67, 69, 70)}.get(platform.machine())
"""Of fallocate, pread64, preadv, pwritev."""

REFUSING = """
import ctypes, errno, os, struct, sys
import numpy as np
import pmstore
from pmstore._engine import snapshot
from pmstore.tiers._restore import restore as restoring

def writes():
    return next(int(line.split()[1]) for line in open("/proc/self/io") if line.startswith("syscw"))

def refuse(error, *numbers, start=0):
    '''What these calls say from now on, also in later threads, if their fourth argument, an offset,
    is from `start` on.'''
    one = struct.Struct("<HBBI")
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    rules = [(load, 0, 0, 0)]
    for i, number in enumerate(numbers):
        rules.append((equal, len(numbers) - i, 0, number))
    rules += [(give, 0, 0, 0x7FFF0000), (load, 0, 0, 40)]
    rules += [(at_least, 1, 0, start), (give, 0, 0, 0x7FFF0000)]
    rules += [(give, 0, 0, 0x00050000 | error)]
    buffer = ctypes.create_string_buffer(b"".join(one.pack(*rule) for rule in rules))
    packed = struct.pack("<HxxxxxxQ", len(rules), ctypes.addressof(buffer))
    program = ctypes.create_string_buffer(packed)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    no_new_privileges, set_seccomp, filtering = 38, 22, 2
    if prctl(no_new_privileges, 1, 0, 0, 0) or prctl(set_seccomp, filtering, program, 0, 0):
        print("no filters here")
        sys.exit(77)

folder = sys.argv[1]
fallocate, pread, preadv, pwritev = map(int, sys.argv[2:])
MIB = 1 << 20
"""


def refusing(folder: Path, body: str) -> list[str]:
    if NUMBERS is None:
        pytest.skip("the numbers of system calls are not known for this machine")
    command = [sys.executable, "-c", REFUSING + body, str(folder), *map(str, NUMBERS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 77:
        pytest.skip("system calls cannot be filtered here")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_room_of_a_flush_is_not_written(shm: Path) -> None:
    """16 MiB are 64 chunks, and 4096 pages: a byte written to each of them would be seen."""
    (count,) = refusing(
        shm,
        """
store = pmstore.open(f"{folder}/s.pm", size=64 * MIB)
store["a"] = np.full(16 * MIB, 7, np.uint8)
store.add_tier("t", f"{folder}/tier")
store.commit()
refuse(errno.EOPNOTSUPP, fallocate)
before = writes()
store.flush("t", wait=True)
print(writes() - before)
store.close()
pmstore.restore(f"{folder}/r.pm", f"{folder}/tier")
with pmstore.open(f"{folder}/r.pm") as found:
    assert (found["a"] == 7).all() and found.check().problems == ()
status = os.stat(f"{folder}/r.pm")
assert status.st_blocks * 512 >= status.st_size == os.stat(f"{folder}/s.pm").st_size
""",
    )
    assert int(count) < 1024


def test_nothing_is_written_beside_the_copying_of_a_restore(shm: Path) -> None:
    (count,) = refusing(
        shm,
        """
pmstore.open(f"{folder}/s.pm", size=40 * MIB).close()
head = open(f"{folder}/s.pm", "rb").read(4096)
refuse(errno.EOPNOTSUPP, fallocate)
fd = os.open(f"{folder}/new", os.O_RDWR | os.O_CREAT, 0o600)
os.pwrite(fd, b"x", 3 * MIB)
before = writes()
assert not snapshot.reserve_store(fd, head, snapshot.Transfer(), "new")
print(writes() - before)
assert os.fstat(fd).st_size == 3 * MIB + 1
snapshot.allocate_store(fd, 40 * MIB, snapshot.Transfer(), "new")
assert os.fstat(fd).st_size == 40 * MIB <= os.fstat(fd).st_blocks * 512
assert os.pread(fd, 3, 3 * MIB - 1) == b"\\0x\\0"
""",
    )
    assert int(count) == 0


@pytest.mark.parametrize("mapped", [True, False])
def test_a_medium_that_cannot_be_read(shm: Path, mapped: bool) -> None:
    """Epoch 2 has a file of 12 MiB that cannot be read from 8 MiB on; epoch 1 is taken, and
    told."""
    with pmstore.open(shm / "s.pm", size="40MiB") as store:
        store["a"] = bytes(1000)
        store.add_tier("t", shm / "tier")
        store.commit()
        store.flush("t", wait=True)
        store["b"] = bytes(12 << 20)
        store.commit()
        store.flush("t", wait=True)
    found = refusing(
        shm,
        f"""
refuse(errno.EIO, pread, preadv, start=8 * MIB)
restoring.MAP_MEMORY = {mapped}
report = pmstore.restore(f"{{folder}}/r.pm", f"{{folder}}/tier")
print(report.epoch, *report.skipped[0])
""",
    )
    assert found[:3] == ["1", "2", "corrupt:"]
    assert f"cannot be read: [Errno {errno.EIO}]" in " ".join(found)
    with pmstore.open(shm / "r.pm") as store:
        assert sorted(store) == [".pmstore", "a"]


@pytest.mark.parametrize("mapped", [True, False])
def test_a_disk_that_does_not_take_the_store(shm: Path, mapped: bool) -> None:
    """That is not the tier's fault: an error, not an older epoch."""
    with pmstore.open(shm / "s.pm", size="4MiB") as store:
        store.add_tier("t", shm / "tier")
        for i in range(2):
            store["a"] = i
            store.commit()
            store.flush("t", wait=True)
    told = refusing(
        shm,
        f"""
refuse(errno.EIO, pwritev)
restoring.MAP_MEMORY = {mapped}
try:
    pmstore.restore(f"{{folder}}/r.pm", f"{{folder}}/tier")
except OSError as error:
    print(error.errno, type(error).__name__, *sorted(os.listdir(folder)))
""",
    )
    assert told == [str(errno.EIO), "OSError", "s.pm", "tier"]
    assert pmstore.restore(shm / "r.pm", shm / "tier").skipped == ()
