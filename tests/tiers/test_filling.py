"""Restores into memory, through a mapping of the new file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._engine import snapshot
from pmstore.tiers._restore import restore as restoring

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("chunk_bytes", [4 * KIB, 12 * KIB, 256 * KIB, 20 * MIB])
def test_every_byte_whatever_the_size_of_a_chunk(
    shm: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, mapped: bool
) -> None:
    """Chunks that end with the file or go beyond it, are larger than what room is made for at once,
    or do not divide it."""
    monkeypatch.setattr(restoring, "MAP_MEMORY", mapped)
    rng = np.random.default_rng(chunk_bytes)
    content = {
        f"a{i}": rng.integers(0, 256, size, np.uint8)
        for i, size in enumerate([10, 3 * MIB, 100 * KIB, 5 * MIB + 1])
    }
    with pmstore.open(shm / "s.pm", size=40 * MIB + 12 * KIB) as store:
        for name, value in content.items():
            store[name] = value
        store["gone"] = np.ones(4 * MIB)
        del store["gone"]
        store["after"] = rng.integers(0, 256, 9 * MIB, np.uint8)
        content["after"] = store["after"].copy()
        store.add_tier("t", pmstore.TierConfig(shm / "tier", chunk_bytes=chunk_bytes))
        store.commit()
        store.flush("t", wait=True)
    report = pmstore.restore(shm / "r.pm", shm / "tier")
    status = (shm / "r.pm").stat()
    # the last one is not of the state
    assert status.st_size == report.nbytes == (shm / "s.pm").stat().st_size - 4 * KIB
    assert status.st_blocks * 512 >= space_of(shm / "r.pm")
    with pmstore.open(shm / "r.pm") as store:
        assert store.check().problems == ()
        for name, value in content.items():
            assert np.array_equal(store[name], value)
            store[name] += 1
        store["more"] = np.ones(MIB)
        store.commit()
        assert store.check().problems == ()


def space_of(path: Path) -> int:
    """What of a store is no hole: all but its logs."""
    with path.open("rb") as file:
        return sum(nbytes for _, nbytes in snapshot.store_space(file.read(4 * KIB)))


@pytest.mark.parametrize("mapped", [True, False])
def test_logs_are_holes_until_the_store_is_opened_for_writing(
    shm: Path, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    monkeypatch.setattr(restoring, "MAP_MEMORY", mapped)
    with pmstore.open(shm / "s.pm", size=160 * MIB) as store:
        store["a"] = np.arange(3 * MIB)
        store.add_tier("t", shm / "tier")
        store.commit()
        store.flush("t", wait=True)
    pmstore.restore(shm / "r.pm", shm / "tier")

    def allocated() -> int:
        return (shm / "r.pm").stat().st_blocks * 512

    space = space_of(shm / "r.pm")
    assert space <= allocated() < space + 2 * snapshot.FILLING_BLOCK < 120 * MIB
    with pmstore.open(shm / "r.pm", "r") as store:
        assert np.array_equal(store["a"], np.arange(3 * MIB))
        assert allocated() < space + 2 * snapshot.FILLING_BLOCK
    with pmstore.open(shm / "r.pm") as store:
        assert allocated() > space + 23 * MIB  # what is live can be captured, whatever comes
        store["a"] += 1
        store.commit()
        assert np.array_equal(store["a"], np.arange(1, 3 * MIB + 1))


def test_what_is_mapped(shm: Path, disk: Path) -> None:
    for folder in (shm, disk):
        kind = subprocess.run(
            ["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=True
        ).stdout.strip()
        mapped = kind == "tmpfs"
        with open(folder / "new", "w+b") as file:
            fill = snapshot.Fill(file.fileno(), 40 * MIB, "new")
            assert fill.mapped == mapped
            fill.close()
            assert (folder / "new").stat().st_size == (40 * MIB if mapped else 0)


def test_a_cancelled_reservation(shm: Path) -> None:
    with open(shm / "new", "w+b") as file:
        fill = snapshot.Fill(file.fileno(), 40 * MIB, "new")
        transfer = snapshot.Transfer()
        transfer.cancel()
        with pytest.raises(pmstore.TransactionError):
            fill.reserve(0, 40 * MIB, True, transfer, "new")
        fill.close()
        assert (shm / "new").stat().st_blocks * 512 < MIB


@pytest.mark.parametrize("more", [0, 3])
def test_an_interrupt_ends_the_copying(
    shm: Path, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    """Which is done in threads of the engine that no signal reaches; they have ended before their
    memory goes, however often it comes."""
    with pmstore.open(shm / "s.pm", size=40 * MIB) as store:
        store["a"] = np.ones(MIB)
        store.add_tier("t", shm / "tier")
        store.commit()
        store.flush("t", wait=True)
    main, copy, told = threading.get_ident(), snapshot.copy_pieces, []

    def interrupted(*arguments: Any) -> int | None:
        transfer = arguments[-1]
        signal.pthread_kill(main, signal.SIGINT)
        end = time.monotonic() + 60
        while not transfer.cancelled and time.monotonic() < end:
            time.sleep(0.01)
        for _ in range(more):
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.05)
        try:
            return copy(*arguments)
        except pmstore.TransactionError as error:
            told.append(str(error))
            raise

    monkeypatch.setattr(snapshot, "copy_pieces", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pmstore.restore(shm / "r.pm", shm / "tier")
    assert len(told) == 1
    assert "cancelled" in told[0]
    assert sorted(os.listdir(shm)) == ["s.pm", "tier"]


FULL = """
import os, sys, pmstore
from pathlib import Path
place, url = Path(sys.argv[1]), sys.argv[2]
for filled in range(0, 12, 3):
    (place / "else").write_bytes(bytes(filled << 20))
    try:
        pmstore.restore(place / "r.pm", url)
    except pmstore.StoreFullError as error:
        print("full", os.listdir(place))
os.unlink(place / "else")
"""


def in_small_memory(
    shm: Path, store_mib: int, state_mib: int, memory_mib: int, program: str
) -> list[str]:
    """What a program says that restores a store into so little memory."""
    with pmstore.open(shm / "s.pm", size=store_mib * MIB) as store:
        store["a"] = np.ones(state_mib * MIB // 8)
        store.add_tier("t", shm / "tier")
        store.commit()
        store.flush("t", wait=True)
    place = shm / "small"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={memory_mib}m", "none", place],
        capture_output=True,
        check=False,
    ).returncode:
        pytest.skip("mounts need root")
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, place, shm / "tier"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()
    finally:
        subprocess.run(["umount", place], check=True)


def test_memory_that_is_full(shm: Path) -> None:
    """An error before the end, however far it came; never a SIGBUS; and nothing is left behind."""
    assert in_small_memory(shm, 40, 8, 12, FULL) == ["full ['else']"] * 4


FULL_FOR_LOGS = """
import os, shutil, sys, pmstore
from pathlib import Path
place, url = Path(sys.argv[1]), sys.argv[2]
pmstore.restore(place / "r.pm", url)
with open(place / "else", "wb") as file:
    os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(place).free - (2 << 20))
free = shutil.disk_usage(place).free
for mode in "r", "r+":
    try:
        with pmstore.open(place / "r.pm", mode) as store:
            print(mode, store["a"].sum())
    except pmstore.StoreFullError as error:
        print(mode, "full", "can be read" in str(error))
    print("took", (free - shutil.disk_usage(place).free) // 8192)  # a footer has a page
os.unlink(place / "else")
with pmstore.open(place / "r.pm") as store:
    store["a"] += 1
    store.commit()
    print(store["a"].sum())
"""


def test_memory_that_is_full_for_logs_alone(shm: Path) -> None:
    """What was restored can be read; an open for writing says what it has no room for."""
    assert in_small_memory(shm, 160, 24, 140, FULL_FOR_LOGS) == [
        "r 3145728.0",
        "took 0",
        "r+ full True",
        "took 0",
        "6291456.0",
    ]


LIMITED = """
import resource, sys, pmstore
from pathlib import Path
from pmstore._engine import snapshot
place, size = Path(sys.argv[1]), int(sys.argv[2])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + size,) * 2)
with open(place / "new", "w+b") as file:
    print(snapshot.Fill(file.fileno(), 2 * size, "new").mapped)
print(pmstore.restore(place / "r.pm", place / "tier").nbytes)
"""


def test_address_space_that_is_limited(shm: Path) -> None:
    """There is none for a mapping of the new store: it is filled by system calls."""
    with pmstore.open(shm / "s.pm", size=200 * MIB) as store:
        store["a"] = np.arange(MIB)
        store.add_tier("t", shm / "tier")
        store.commit()
        store.flush("t", wait=True)
    size = (shm / "s.pm").stat().st_size - 4 * KIB
    one_arena = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # glibc sets 64 MiB aside for each thread
    command = [sys.executable, "-c", LIMITED, shm, str(size)]
    done = subprocess.run(
        command, env=one_arena, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", str(size)]
    with pmstore.open(shm / "r.pm", "r") as store:
        assert np.array_equal(store["a"], np.arange(MIB))
