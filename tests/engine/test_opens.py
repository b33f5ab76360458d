"""What an open refuses, what it leaves when it fails, and what it tells from a store that was
closed."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_repair import PAGE, crc32c
from typer.testing import CliRunner

import pmstore
from pmstore.commands.application import app

MOST_STORES = 64
BOOT_ID = slice(16, 32)


def killed_writer(path: Path, domain: str) -> None:
    """Leaves a store that nobody closed: x is 1, and what was stored later is not committed."""
    code = f"""
import os, signal, pmstore
store = pmstore.open({str(path)!r}, size="1MiB", domain={domain!r})
store["x"] = 1
store["a"] = [1.0] * 1000
store.commit()
store["x"] = 2
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL


def set_boot_id(path: Path, boot: bytes) -> None:
    with path.open("r+b") as file:
        for copy in (5, 6):
            file.seek(copy * PAGE)
            record = bytearray(file.read(508))
            record[BOOT_ID] = boot
            file.seek(copy * PAGE)
            file.write(record + struct.pack("<I", crc32c(bytes(record))))


# ---- an open that fails ----


def records(path: Path) -> bytes:
    return path.read_bytes()[5 * PAGE : 7 * PAGE]


def test_an_open_that_fails_leaves_the_store_closed(shm: Path) -> None:
    victim = shm / "victim.pm"
    with pmstore.open(victim, size="1MiB", domain="process") as store:
        store["x"] = 1
    before = records(victim)
    others = [pmstore.open(shm / f"{i}.pm", size="1MiB") for i in range(MOST_STORES)]
    with pytest.raises(pmstore.TransactionError, match="too many stores"):
        pmstore.open(victim, "r+")
    for other in others:
        other.close()
    assert records(victim) == before
    set_boot_id(victim, b"another machine!")
    with pmstore.open(victim) as store:
        assert store["x"] == 1


@pytest.mark.parametrize("gigabytes", [1, 8])
def test_a_limit_of_memory(path: Path, gigabytes: int) -> None:
    """Of what may be written: the file system's size is no reason to ask for more than the process
    may have."""
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_DATA, ({gigabytes} << 30, resource.RLIM_INFINITY))
import pmstore
with pmstore.open({str(path)!r}, size="16MiB", domain="file") as store:
    a = store.zeros("a", 1 << 20, dtype="u1")
    with store.transaction():
        a[:] = 1
with pmstore.open({str(path)!r}, "r") as store:
    assert (store["a"] == 1).all()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_limit_of_memory_that_the_store_does_not_fit_in(path: Path) -> None:
    """Said by open: a capture that is refused memory later would end the process."""
    with pmstore.open(path, size="256MiB", domain="file") as store:
        store["x"] = 1
    code = f"""
import resource, pmstore.opening
status = open("/proc/self/status")
now = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
for more in range(0, 1200, 20):
    resource.setrlimit(resource.RLIMIT_DATA, (now + (more << 20), resource.RLIM_INFINITY))
    try:
        store = pmstore.open({str(path)!r}, domain="file")
    except OSError as error:
        assert error.errno == 12, error
        refused = more
        continue
    a = store.zeros("a", 100 << 20, dtype="u1")
    a[:] = 1
    store.rollback()
    del a
    break
print(refused)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) < 1100


# ---- left open: whose bytes are they? ----


@pytest.mark.parametrize("domain", ["process", "emulated"])
def test_a_machine_that_does_not_tell_when_it_started(path: Path, domain: str) -> None:
    killed_writer(path, domain)
    set_boot_id(path, bytes(16))
    for mode in ("r", "r+"):
        with pytest.raises(pmstore.UncleanMachineCrashError, match="does not tell"):
            pmstore.open(path, mode)  # type: ignore[arg-type]
    with pmstore.open(path, force=True) as store:
        assert store["x"] == 1


def test_a_durable_domain_needs_no_boot_id(path: Path) -> None:
    killed_writer(path, "file")
    set_boot_id(path, bytes(16))
    with pmstore.open(path) as store:
        assert store["x"] == 1


def test_a_copy_made_while_the_writer_runs(shm: Path, domain: Any) -> None:
    path, copy = shm / "store.pm", shm / "copy.pm"
    with pmstore.open(path, size="1MiB", domain=domain) as store:
        store["x"] = 1
        store["a"] = np.zeros(20_000, np.int64)
        store.commit()
        with path.open("rb") as source:  # as cp reads it: half of it, a commit, the rest
            first = source.read(path.stat().st_size // 2)
            home = store.stats().home_syncs
            x = 1
            # in "file" until images went home that were committed after the first half was read
            while x < 20 or (domain == "file" and store.stats().home_syncs < home + 2):
                x += 1
                store["a"][:] = x
                store["x"] = x
                store.commit()
            copy.write_bytes(first + source.read())
        for mode in ("r", "r+", "a"):
            with pytest.raises(pmstore.UncleanCopyError, match="Close the original"):
                pmstore.open(copy, mode)  # type: ignore[arg-type]
        store["x"] = 100  # nobody commits it
        shutil.copy(path, copy)
        with pmstore.open(copy, "r") as copied:
            assert copied["x"] == x
            assert (copied["a"] == x).all()
        with pmstore.open(copy) as copied:
            assert copied["x"] == x
        store["x"] = 1
    shutil.copy(path, copy)  # now it is closed
    with pmstore.open(copy, "r") as copied:
        assert copied["x"] == 1
    with pmstore.open(copy) as copied:
        copied["x"] = 2
    with pmstore.open(path) as store:
        assert store["x"] == 1


def test_a_copy_of_a_crashed_store(shm: Path, domain: Any) -> None:
    """Whole, as nobody wrote while it was copied. So is what was moved."""
    path, copy, moved = shm / "store.pm", shm / "copy.pm", shm / "folder" / "moved.pm"
    killed_writer(path, domain)
    shutil.copy2(path, copy)
    with pmstore.open(copy) as store:
        assert store["x"] == 1
        assert not store.recovery.clean
    with pmstore.open(copy) as store:  # it is a store of its own now
        assert store.recovery.clean
    moved.parent.mkdir()
    path.rename(moved)
    os.link(moved, path)
    path.unlink()
    with pmstore.open(moved) as store:
        assert store["x"] == 1
        assert not store.recovery.clean


def test_the_command_line_names_the_remedy_of_a_copy(shm: Path) -> None:
    path, copy = shm / "store.pm", shm / "copy.pm"
    killed_writer(path, "process")
    torn = bytearray(path.read_bytes())
    # the writer was far ahead when the end was read
    torn[-PAGE + 8 : -PAGE + 16] = struct.pack("<Q", 1000 << 40)
    copy.write_bytes(torn)
    refused = CliRunner().invoke(app, ["info", str(copy)])
    assert refused.exit_code == 1
    assert "copy it again" in refused.stderr
    repaired = CliRunner().invoke(app, ["repair", str(copy), "--yes", "--no-backup"])
    assert repaired.exit_code == 0
    with pmstore.open(copy) as store:
        assert store["x"] == 1


def test_holes_of_a_sparse_copy_are_filled(shm: Path, domain: Any) -> None:
    """Else a store into one, where the disk has become full, ends the process by SIGBUS."""
    path, copy = shm / "store.pm", shm / "copy.pm"
    with pmstore.open(path, size="8MiB", domain=domain) as store:
        store["a"] = np.arange(1000)
    subprocess.run(["cp", "--sparse=always", path, copy], check=True)
    has = path.stat().st_blocks  # all but the log room that nothing needs yet
    assert copy.stat().st_blocks < has
    with pmstore.open(copy, domain=domain) as store:
        assert copy.stat().st_blocks >= has
        assert (store["a"] == np.arange(1000)).all()


# ---- what a killed creator leaves ----


def leftovers(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("."))


def test_a_file_that_a_killed_creator_left_is_removed(shm: Path) -> None:
    from pmstore.testing import ForkServer

    path = shm / "run.pm"
    with ForkServer([str(Path(__file__).parent), str(Path(__file__).parents[1])]) as server:
        for kill_at in (1, 2, 3):
            server.run("workloads:steps", [str(path), "file", 1, 1], kill_at=kill_at)
            assert len(leftovers(shm)) == 1
    with pmstore.open(path, "x", size="1MiB"):
        assert leftovers(shm) == []


def test_nothing_else_is_removed(shm: Path) -> None:
    path = shm / "run.pm"
    theirs = {
        ".run.pm.new": b"",
        ".run.pm.12.0badcafe.new": b"a program's own file",
        ".run.pm.12.0badcafe.new.old": b"",
        ".run.pm.x.0badcafe.new": b"",
        ".other.pm.12.0badcafe.new": b"",
    }
    for name, content in theirs.items():
        (shm / name).write_bytes(content)
    (shm / ".run.pm.13.0badcafe.new").symlink_to(path)
    (shm / ".run.pm.14.0badcafe.new").mkdir()
    before = leftovers(shm)
    for mode in ("x", "w"):
        with pmstore.open(path, mode, size="1MiB"):  # type: ignore[arg-type]
            assert leftovers(shm) == before


REMOVER = """
import fcntl, os, sys
folder = sys.argv[1]
print("ready", flush=True)
while os.getppid() == int(sys.argv[2]):
    for name in os.listdir(folder):
        if name.endswith(".new"):
            try:
                file = os.open(f"{folder}/{name}", os.O_RDWR)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(f"{folder}/{name}")
            except OSError:
                pass
            os.close(file)
"""


def test_a_file_that_another_creator_removes_before_it_is_locked(shm: Path) -> None:
    """It takes it for a dead one's. The next file is locked in time, or the one after it."""
    words = [sys.executable, "-c", REMOVER, str(shm), str(os.getpid())]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as remover:
        try:
            assert remover.stdout is not None
            assert remover.stdout.readline() == "ready\n"
            for number in range(300):
                pmstore.open(shm / f"run{number}.pm", "w", size="1MiB").close()
        finally:
            remover.kill()


def test_two_that_create_at_once(shm: Path) -> None:
    """Neither takes the other's unfinished file for a dead one's."""
    path = shm / "run.pm"
    code = f"""
import pmstore
for _ in range(100):
    pmstore.open({str(path)!r}, "w", size="1MiB", lock_timeout=30).close()
"""
    creators = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [creator.wait(timeout=100) for creator in creators] == [0, 0, 0]
    assert leftovers(shm) == []
