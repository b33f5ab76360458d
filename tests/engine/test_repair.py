"""What `pmstore repair` mends, and that it says so first; `check` beside it changes no byte."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import pmstore
from pmstore.commands.application import app

PAGE = 4096


def run(*words: str | Path, answer: str = "") -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], input=answer)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.fixture
def path(disk: Path) -> Path:
    path = disk / "run.pm"
    with pmstore.open(path, domain="process", size="2MiB") as store:
        store["w"] = np.arange(100_000.0)
        store["big"] = np.arange(1_000_000.0)  # the file has grown
        store["small/x"] = np.arange(10)
        store["note"] = "hello"
    return path


def content_is_whole(path: Path) -> None:
    with pmstore.open(path, "r") as store:
        assert store.check().problems == ()
        assert store.check().sound_copies == 3
        assert store["w"][-1] == 99_999
        assert store["big"][-1] == 999_999
        assert store["note"] == "hello"


def damage_superblock(path: Path, copy: int) -> None:
    with open(path, "r+b") as file:
        file.seek(copy * PAGE + 100)
        byte = file.read(1)[0]
        file.seek(copy * PAGE + 100)
        file.write(bytes([byte ^ 1]))


def leak_blocks(path: Path) -> int:
    """Sets the last bit of a slab's bitmap: a block in use that nobody owns. Returns how many."""
    data = bytearray(path.read_bytes())
    (count,) = struct.unpack_from("<I", data, 80)
    leaked = 0
    for segment in range(count):
        table, _, _, start, pages = struct.unpack_from("<5Q", data, 128 + 64 * segment)
        for page in range(pages):
            (word,) = struct.unpack_from("<Q", data, table + 16 * page)
            kind, length = word >> 44 & 15, word & (1 << 36) - 1
            if word and kind == 3 and length > 1 and not leaked:
                place = table + 16 * (page + 1)
                (bitmap,) = struct.unpack_from("<Q", data, place)
                free = next(bit for bit in range(64) if not bitmap >> bit & 1)
                struct.pack_into("<Q", data, place, bitmap | 1 << free)
                leaked += 1
        del start
    path.write_bytes(data)
    return leaked


def crash_the_machine(path: Path) -> None:
    """The session record as it is when another run of the machine left the store open."""
    data = bytearray(path.read_bytes())
    for copy in (5, 6):
        record = bytearray(data[copy * PAGE : copy * PAGE + 508])
        struct.pack_into("<I", record, 8, 2)
        record[16:32] = bytes(range(16))
        data[copy * PAGE : copy * PAGE + 512] = bytes(record) + struct.pack("<I", crc32c(record))
    path.write_bytes(data)


def test_a_sound_store_needs_nothing(path: Path) -> None:
    before = path.read_bytes()
    result = run("repair", path)
    assert result.exit_code == 0
    assert "nothing to repair" in result.stdout
    assert json.loads(run("repair", path, "--json").stdout)["state"] == "sound"
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("copy", [0, 1])
def test_either_copy_of_the_superblock(path: Path, copy: int) -> None:
    damage_superblock(path, copy)
    damaged = path.read_bytes()
    checked = run("check", path)
    assert checked.exit_code == 0
    assert "a copy of the superblock is damaged" in checked.stdout
    dry = run("repair", path, "--dry-run")
    assert dry.exit_code == 0
    assert f"restore copy {copy} of the superblock" in dry.stdout
    declined = run("repair", path, answer="n\n")
    assert declined.exit_code == 1
    assert "nothing was done" in declined.stderr
    assert path.read_bytes() == damaged
    assert list(path.parent.iterdir()) == [path]
    accepted = run("repair", path, answer="y\n")
    assert accepted.exit_code == 0
    [backup] = [other for other in path.parent.iterdir() if other != path]
    assert str(backup) in accepted.stdout
    assert backup.read_bytes() == damaged
    assert backup.stat().st_mode & 0o777 == 0o600
    content_is_whole(path)
    damage_superblock(path, 1 - copy)  # the one that was restored holds by itself
    with pmstore.open(path, "r") as store:
        assert store["big"][-1] == 999_999


def test_blocks_that_belong_to_nobody(path: Path) -> None:
    assert leak_blocks(path) == 1
    checked = run("check", path)
    assert checked.exit_code == 1
    assert "belongs to nobody" in checked.stdout
    assert json.loads(run("check", path, "--json").stdout)["leaks"] == 1
    with pmstore.open(path, "r") as store:
        used = store.stats().used_bytes
    result = run("repair", path, "--yes", "--no-backup", "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert told["state"] == "repaired"
    assert told["steps"][0].startswith("free 1 block ")
    assert list(path.parent.iterdir()) == [path]
    content_is_whole(path)
    with pmstore.open(path, "r") as store:
        assert store.stats().used_bytes < used


def test_a_machine_that_went_down(path: Path) -> None:
    crash_the_machine(path)
    refused = run("info", path)
    assert refused.exit_code == 1
    assert "pmstore: " in refused.stderr
    told = run("repair", path, "-n")
    assert told.exit_code == 0
    assert "accept the content as it is" in told.stdout
    with pytest.raises(pmstore.UncleanMachineCrashError):
        pmstore.open(path)
    assert run("repair", path, "--yes").exit_code == 0
    content_is_whole(path)


def test_all_at_once(path: Path) -> None:
    leak_blocks(path)
    crash_the_machine(path)
    damage_superblock(path, 1)
    told = json.loads(run("repair", path, "--yes", "--json").stdout)
    assert len(told["steps"]) == 3
    assert told["problems"] == []
    content_is_whole(path)


def test_what_cannot_be_repaired(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[:PAGE] = data[PAGE : 2 * PAGE] = bytes(PAGE)
    path.write_bytes(data)
    result = run("repair", path, "--yes")
    assert result.exit_code == 1
    assert path.read_bytes() == bytes(data)
    assert list(path.parent.iterdir()) == [path]
    assert run("repair", path.with_name("none.pm")).exit_code == 2


def test_what_is_damaged_beside_it_stays_bad_news(path: Path) -> None:
    with pmstore.open(path, "r+") as store:
        store._core.pool.put_value(0, b"note", b"\xc1")  # no msgpack
    leak_blocks(path)
    result = run("repair", path, "--yes")
    assert result.exit_code == 1
    assert "'note'" in result.stdout
    checked = run("check", path, "--json")
    assert checked.exit_code == 1
    assert json.loads(checked.stdout)["leaks"] == 0
