"""Tiers on file systems that cannot reserve room: the C library would store to every block instead, over what others write."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

FALLOCATE = {"x86_64": 285, "aarch64": 47}.get(platform.machine())

REFUSING = f"""
import ctypes, errno, os, struct, sys
import numpy as np
import pmstore
from pmstore.tiers import engine

def writes():
    return next(int(line.split()[1]) for line in open("/proc/self/io") if line.startswith("syscw"))

def refuse():
    '''fallocate says from now on what such a file system says: a filter of this process, for threads begun later, too.'''
    one = struct.Struct("<HBBI")
    load, equal, give = 0x20, 0x15, 0x06
    rules = one.pack(load, 0, 0, 0) + one.pack(equal, 0, 1, {FALLOCATE})
    rules += one.pack(give, 0, 0, 0x00050000 | errno.EOPNOTSUPP) + one.pack(give, 0, 0, 0x7FFF0000)
    buffer = ctypes.create_string_buffer(rules)
    program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", 4, ctypes.addressof(buffer)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    no_new_privileges, set_seccomp, filtering = 38, 22, 2
    if prctl(no_new_privileges, 1, 0, 0, 0) or prctl(set_seccomp, filtering, program, 0, 0):
        print("no filters here")
        sys.exit(77)

folder = sys.argv[1]
MIB = 1 << 20
"""


def refusing(folder: Path, body: str) -> list[str]:
    if FALLOCATE is None:
        pytest.skip("the number of fallocate is not known for this machine")
    done = subprocess.run(
        [sys.executable, "-c", REFUSING + body, str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
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
refuse()
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
refuse()
fd = os.open(f"{folder}/new", os.O_RDWR | os.O_CREAT, 0o600)
os.pwrite(fd, b"x", 3 * MIB)
before = writes()
assert not engine.reserve_store(fd, 40 * MIB, engine.Transfer(), "new")
print(writes() - before)
assert os.fstat(fd).st_size == 3 * MIB + 1
engine.allocate_store(fd, 40 * MIB, engine.Transfer(), "new")
assert os.fstat(fd).st_size == 40 * MIB <= os.fstat(fd).st_blocks * 512
assert os.pread(fd, 3, 3 * MIB - 1) == b"\\0x\\0"
""",
    )
    assert int(count) == 0
