"""The parts of `make nightly WHAT=crashtest-vm` that need no machine: the program that runs in it,
and what power failures leave."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from crashtests import jobs, vm  # noqa: E402

DOMAINS = jobs.DOMAINS


@pytest.fixture(scope="module")
def guest() -> Path:
    if shutil.which("make") is None or shutil.which("cc") is None:
        pytest.skip("needs a C compiler and make")
    return vm.build_guest()


def check(
    guest: Path, path: Path, domain: str, acknowledged: int
) -> subprocess.CompletedProcess[str]:
    words = [guest, "check", path, str(DOMAINS[domain]), str(acknowledged)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_the_guest_finds_what_it_acknowledged(guest: Path, path: Path, domain: str) -> None:
    acknowledged = 0
    for commits in (3, 11, 26):
        words = [guest, "run", path, str(DOMAINS[domain]), "0"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                assert "BROKEN" not in line
                acknowledged = vm.last_ack([line.strip()], acknowledged)
                if acknowledged >= commits:
                    break
            child.kill()
        found = check(guest, path, domain, acknowledged)
        assert found.returncode == 0, found.stdout
        acknowledged += 2  # which the check committed
    lost = check(guest, path, domain, 1_000_000)
    assert lost.returncode == 1
    assert "an acknowledged commit is lost" in lost.stdout


def test_the_guest_notices_mixed_state(guest: Path, path: Path) -> None:
    subprocess.run(
        [guest, "run", path, str(DOMAINS["process"]), "9"],
        check=True,
        capture_output=True,
        timeout=120,
    )
    content = path.read_bytes()
    of_nine = (9).to_bytes(4, "little") * 64
    assert of_nine in content
    path.write_bytes(content.replace(of_nine, of_nine[:-4] + (8).to_bytes(4, "little")))
    found = check(guest, path, "process", 9)
    assert found.returncode == 1
    assert "mixed state" in found.stdout


def test_what_a_power_failure_leaves_of_block_writes() -> None:
    def write(sector: int, letter: bytes, acknowledged: int = 0) -> vm.Block:
        return vm.Block(sector, letter * vm.SECTOR * 2, False, acknowledged)

    flush = vm.Block(0, b"", True, False)
    record = [
        write(8, b"m", 1),
        write(0, b"a"),
        flush,
        write(0, b"b"),
        write(2, b"c"),
        vm.Block(0, b"", True, True),
        write(8, b"m", 2),
    ]
    base = bytearray(b"." * 10 * vm.SECTOR)
    seen = {}
    for at, how, image, acknowledged in vm.power_failures(record, base, 2000, 1):
        letters = "".join(chr(image[sector * vm.SECTOR]) for sector in range(4))
        seen.setdefault(at, set()).add(letters)
        assert acknowledged == (2 if at == 6 else 1)
        assert how != "none" or letters == ("...." if at < 2 else "aa.." if at < 5 else "aacc")
    assert seen[1] == {"....", "aa..", "a...", ".a.."}
    assert seen[2] == {"aa.."}
    assert {"aa..", "bbcc", "bacc", "aacc", "ba.c"} <= seen[4]
    assert all(letters.endswith("cc") for letters in seen[5])  # written through
