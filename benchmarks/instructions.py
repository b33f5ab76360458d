"""Instructions of the engine's hot paths, counted by valgrind's callgrind: the same on a busy
machine as on an idle one.

    python -m benchmarks.instructions --check     compares with benchmarks/instructions.json, fails
                                                  beyond 5 % (CI)
    python -m benchmarks.instructions --update    writes it, after a change that is meant

The figures hold for one compiler, whose version is stored with them. Valgrind answers for the CPU:
any machine with AVX2 looks like one and the same to the engine and the C library (and without
AVX-512): it does not matter which.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.harness import KILL, Budget, Row, missing, report, scratch
from benchmarks.native import compile_program

STORED = Path(__file__).with_name("instructions.json")
TOLERANCE = 0.05
OPERATIONS = 500
TITLE = "Instruction counts of the engine's hot paths"
CASE = "instructions of one operation (not time)"
INSTALL = "valgrind is not installed (Debian: apt-get install valgrind)"


def _compiler() -> str:
    """Name and version: 12.2.0 counts otherwise than 13."""
    return subprocess.run(
        ["cc", "--version"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[0]


def _counted(program: Path, path: str, operations: int, folder: Path) -> int:
    out = folder / "callgrind.out"
    command = [
        "valgrind",
        "--tool=callgrind",
        "--collect-atstart=no",
        f"--toggle-collect={path}",
        f"--callgrind-out-file={out}",
    ]
    done = subprocess.run(
        [*command, str(program), str(folder), path, str(operations)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.returncode:
        raise RuntimeError(f"callgrind of {path} failed:\n{done.stderr}")
    found = re.search(r"^(?:totals|summary): (\d+)", out.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def _why_not() -> str:
    """Why nothing can be counted here; empty: it can."""
    if shutil.which("valgrind") is None:
        return INSTALL
    tried = subprocess.run(
        ["valgrind", "--tool=none", "/bin/true"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return (
        f"valgrind does not run here: {tried.stderr.strip().splitlines()[-1:]}"
        if tried.returncode
        else ""
    )


def count() -> dict[str, float]:
    """Instructions of one operation, by path. What only the first operations do (a page's first
    capture) cancels out."""
    program = compile_program("hot_paths")
    names = subprocess.run(
        [str(program)], capture_output=True, text=True, check=True
    ).stdout.split()

    def counted(asked: tuple[str, int]) -> int:
        with scratch("memory") as folder:
            return _counted(program, *asked, folder)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        more = pool.map(counted, [(name, 2 * OPERATIONS) for name in names])
        less = pool.map(counted, [(name, OPERATIONS) for name in names])
        return {
            name.removeprefix("path_"): (two - one) / OPERATIONS
            for name, two, one in zip(names, more, less, strict=True)
        }


def main(quick: bool, budget: Budget) -> None:
    del budget  # a count is a count
    if why := _why_not():
        report("instructions", TITLE, [missing("callgrind", CASE, KILL, why)], quick=quick)
        return
    stored = json.loads(STORED.read_text())["instructions"] if STORED.exists() else {}
    rows = [
        Row(name, CASE, n, n, n, KILL, n / stored[name] if name in stored else None)
        for name, n in count().items()
    ]
    report(
        "instructions",
        TITLE,
        rows,
        ratio_text="over the stored figure",
        quick=quick,
        unit="instructions",
        plot={"unit": "instructions"},
    )


def check() -> int:
    """0 if all counts are within the tolerance of the stored ones, or cannot be compared here
    (which is said)."""
    if why := _why_not():
        print(f"instructions: SKIPPED: {why}")
        return 0
    stored = json.loads(STORED.read_text())
    if stored["compiler"] != _compiler():
        print(f"instructions: SKIPPED: stored for {stored['compiler']!r}, this is {_compiler()!r}")
        return 0
    counted = count()
    wrong = sorted(set(counted) ^ set(stored["instructions"]))
    for name, n in counted.items():
        before = stored["instructions"].get(name, n)
        apart = n / before - 1
        print(f"  {name:<32}{n:12.1f} instructions, stored {before:10.1f} ({apart:+.1%})")
        if abs(apart) > TOLERANCE:
            wrong.append(name)
    if wrong:
        print(f"instructions: beyond {TOLERANCE:.0%} or not stored: {', '.join(wrong)}")
        print(
            "  If the change is meant: python -m benchmarks.instructions --update, and say why in "
            "the commit message."
        )
    return 1 if wrong else 0


def update() -> None:
    """Stores what is counted now."""
    counted = {name: round(n, 1) for name, n in count().items()}
    STORED.write_text(
        json.dumps({"compiler": _compiler(), "instructions": counted}, indent=1) + "\n"
    )
    print(STORED.read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--check", action="store_true")
    which.add_argument("--update", action="store_true")
    if parser.parse_args().check:
        sys.exit(check())
    update()
