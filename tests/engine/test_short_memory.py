"""Stores in domain file that are larger than the memory that their process may take."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pmstore

MIB = 1 << 20
PARTS = 36
PART_BYTES = 8 * MIB
LIMIT_BYTES = PARTS * PART_BYTES // 3

# Fills the store, a commit for each part, and trains: each step changes the part that its number
# says, all over, and counts. Whatever was filled or trained before is gone on with.
PROGRAM = """
import sys
import numpy as np
import pmstore

path, parts, part_bytes, steps = sys.argv[1], *map(int, sys.argv[2:5])

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))

store = pmstore.open(path, "a", size=f"{parts * part_bytes + (24 << 20)}", domain="file")
before = anonymous()
for i in range(len(store.group("parts")), parts):
    with store.transaction():
        store.full(f"parts/{i}", part_bytes // 4, i * 1000, "i4")
        store["step"] = 0
begun = store["step"]
print("filled", begun, anonymous() - before, flush=True)
while store["step"] < begun + steps:
    step = store["step"] + 1
    with store.transaction():
        part = store[f"parts/{step * 7 % parts}"]
        part += 1
        store["step"] = step
    print("step", step, anonymous() - before, flush=True)
stats = store.stats()
print("own", stats.own_bytes, stats.given_back_bytes, flush=True)
store.close()
"""


def expected(part: int, steps: int) -> int:
    return part * 1000 + sum(step * 7 % PARTS == part for step in range(1, steps + 1))


def check(path: Path, least: int, most: int) -> int:
    """What was acknowledged is there, and each part is as the number of steps says."""
    with pmstore.open(path, "r") as store:
        steps = int(store["step"])  # type: ignore[call-overload]
        assert least <= steps <= most
        for i in range(PARTS):
            part = store[f"parts/{i}"]
            assert isinstance(part, np.ndarray)
            assert part.size == PART_BYTES // 4
            assert (part == expected(i, steps)).all(), (i, steps)
    return steps


def command(path: Path, steps: int) -> list[str]:
    numbers = [str(n) for n in (PARTS, PART_BYTES, steps)]
    return [sys.executable, "-c", PROGRAM, str(path), *numbers]


def figures(said: str) -> tuple[int, int]:
    """The last step that was acknowledged, and the most memory that was seen."""
    lines = [line.split() for line in said.splitlines()]
    steps = [line for line in lines if len(line) == 3 and line[0] in ("filled", "step")]
    parts = [line for line in lines if len(line) == 3 and line[0] == "part"]
    return max((int(line[1]) for line in steps), default=0), max(
        (int(line[2]) for line in steps + parts), default=0
    )


@pytest.mark.alone
def test_memory_is_bounded_by_what_the_environment_says(disk: Path) -> None:
    path = disk / "large.pm"
    done = subprocess.run(
        command(path, 2 * PARTS),
        capture_output=True,
        text=True,
        env={**os.environ, "PMSTORE_MEMORY": f"{LIMIT_BYTES >> 20}M"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    steps, most = figures(done.stdout)
    own, given = (int(n) for n in done.stdout.splitlines()[-1].split()[1:])
    # half of it; a part that is written, its log, and what is committed between two looks
    assert most < LIMIT_BYTES // 2 + 3 * PART_BYTES + 16 * MIB, most / MIB
    assert own < LIMIT_BYTES // 2 + 2 * PART_BYTES
    assert given > PARTS * PART_BYTES
    assert check(path, 2 * PARTS, 2 * PARTS) == steps == 2 * PARTS


# ---- a real limit ----


@contextlib.contextmanager
def group_of(limit_bytes: int) -> Iterator[Path]:
    """A control group for memory, of either version. Skips where none can be made."""
    made = None
    for root, file in (
        ("/sys/fs/cgroup", "memory.max"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
    ):
        group = Path(root) / f"pmstore-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / file).exists():
                (group / file).write_text(str(limit_bytes))
                made = group
                break
        with contextlib.suppress(OSError):
            group.rmdir()
    if made is None:
        pytest.skip("no control group with a limit of memory can be made here")
    try:
        yield made
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                made.rmdir()
                break
            time.sleep(0.05)


def start(group: Path, program: list[str], folder: Path) -> subprocess.Popen[str]:
    """The program, born in the group."""
    enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    with (folder / "said").open("a") as said:
        return subprocess.Popen(
            ["sh", "-c", enter, "sh", *program], stdout=said, stderr=subprocess.STDOUT, text=True
        )


@pytest.mark.alone
def test_three_times_the_limit_of_a_control_group_with_kills(disk: Path) -> None:
    """Without the limit's share the system would end the program before the store is filled."""
    rng = random.Random(20261126)
    path, said = disk / "large.pm", disk / "said"
    said.touch()
    with group_of(LIMIT_BYTES) as group:
        least = most = 0
        for _ in range(4):
            program = start(group, command(path, 10**6), disk)
            end = time.monotonic() + 300
            while "filled" not in said.read_text()[most:] and program.poll() is None:
                assert time.monotonic() < end
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 0.5))
            assert program.poll() is None, said.read_text()[-2000:]
            program.send_signal(signal.SIGKILL)
            program.wait()
            least = max(least, figures(said.read_text())[0])
            most = len(said.read_text())
            least = check(path, least, least + 1)
        program = start(group, command(path, PARTS), disk)
        assert program.wait(timeout=600) == 0, said.read_text()[-2000:]
        check(path, least + PARTS, least + PARTS)
    assert figures(said.read_text())[1] < LIMIT_BYTES


# ---- one transaction ----

ONE_LIMIT = 160 * MIB
ONE_PARTS = 3 * ONE_LIMIT // PART_BYTES

# Overwrites every part in place in one transaction, again and again: each adds one.
ONE_PROGRAM = """
import sys, time
import numpy as np
import pmstore

path, parts, part_bytes, rounds = sys.argv[1], *map(int, sys.argv[2:5])

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(key))

store = pmstore.open(path, "a", size=f"{parts * part_bytes + (24 << 20)}", domain="file")
for i in range(len(store.group("parts")), parts):
    with store.transaction():
        store.full(f"parts/{i}", part_bytes // 4, i * 1000, "i4")
        store["step"] = 0
print("filled", store["step"], status("RssAnon"), flush=True)
for _ in range(rounds):
    begun, step = time.perf_counter(), store["step"] + 1
    with store.transaction():
        for i in range(parts):
            part = store[f"parts/{i}"]
            part += 1
            if i % 4 == 0:
                print("part", i, status("RssAnon"), flush=True)
        store["step"] = step
        stored = time.perf_counter()
    now = time.perf_counter()
    print("step", step, status("RssAnon"), flush=True)
    print("took", round(stored - begun, 2), round(now - stored, 2), status("VmHWM") >> 20,
          flush=True)
store.close()
"""


def one_command(path: Path, rounds: int) -> list[str]:
    numbers = [str(n) for n in (ONE_PARTS, PART_BYTES, rounds)]
    return [sys.executable, "-c", ONE_PROGRAM, str(path), *numbers]


def check_one(path: Path, least: int, most: int) -> int:
    """All parts are of one and the same round: the last that was acknowledged, or the next."""
    with pmstore.open(path, "r") as store:
        step = int(store["step"])  # type: ignore[call-overload]
        assert least <= step <= most
        for i in range(ONE_PARTS):
            part = store[f"parts/{i}"]
            assert isinstance(part, np.ndarray)
            assert (part == i * 1000 + step).all(), (i, step)
            del part
            store.refresh()
    return step


def test_one_transaction_of_three_times_the_limit_with_kills(disk: Path) -> None:
    rng = random.Random(20261127)
    path, said = disk / "large.pm", disk / "said"
    said.touch()
    with group_of(ONE_LIMIT) as group:
        least = read = 0
        for _ in range(4):
            program = start(group, one_command(path, 10**6), disk)
            end = time.monotonic() + 300
            # some part of a transaction, then a moment in it, in its commit, or behind it
            part = f"part {4 * rng.randrange(ONE_PARTS // 4)} "
            while part not in said.read_text()[read:] and program.poll() is None:
                assert time.monotonic() < end
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 0.5))
            assert program.poll() is None, said.read_text()[-2000:]
            program.send_signal(signal.SIGKILL)
            program.wait()
            least = max(least, figures(said.read_text())[0])
            read = len(said.read_text())
            least = check_one(path, least, least + 1)
        program = start(group, one_command(path, 2), disk)
        assert program.wait(timeout=600) == 0, said.read_text()[-2000:]
        check_one(path, least + 2, least + 2)
    assert figures(said.read_text())[1] < ONE_LIMIT
    assert sorted(entry.name for entry in disk.iterdir()) == ["large.pm", "said"]
