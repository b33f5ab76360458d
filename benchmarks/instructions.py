"""Instructions of the engine's hot paths, counted by valgrind's callgrind: the same on a busy machine as on an idle one.

    python -m benchmarks.instructions --check      compares with benchmarks/instructions.json, fails beyond 5 % (CI)
    python -m benchmarks.instructions --update     writes it, after a change that is meant

The figures hold for one compiler, whose version is stored with them. Valgrind does not know AVX-512; the engine asks the CPU
what it has, and valgrind answers for itself, so what is counted is the path of a CPU without it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import KILL, Row, missing, report, scratch
from benchmarks.native import compile_program

STORED = Path(__file__).with_name("instructions.json")
TOLERANCE = 0.05
OPERATIONS = 500
TITLE = "Instruction counts of the engine's hot paths"
CASE = "instructions of one operation (not time)"
INSTALL = "valgrind is not installed (Debian: apt-get install valgrind)"


def _compiler() -> str:
    """Name and version: 12.2.0 counts otherwise than 13."""
    return subprocess.run(["cc", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def _counted(program: Path, path: str, folder: Path, operations: int) -> int:
    out = folder / "callgrind.out"
    command = [
        "valgrind",
        "--tool=callgrind",
        "--collect-atstart=no",
        f"--toggle-collect={path}",
        f"--callgrind-out-file={out}",
    ]
    done = subprocess.run(
        [*command, str(program), str(folder), path, str(operations)], capture_output=True, text=True, check=False, timeout=120
    )
    if done.returncode:
        raise RuntimeError(f"callgrind of {path} failed:\n{done.stderr}")
    found = re.search(r"^(?:totals|summary): (\d+)", out.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def count() -> dict[str, float]:
    """Instructions of one operation, by path. What only the first operations do (a page's first capture) cancels out."""
    program = compile_program("hot_paths", "-g")
    names = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.split()
    with scratch("memory") as folder:
        return {
            name.removeprefix("path_"): (
                _counted(program, name, folder, 2 * OPERATIONS) - _counted(program, name, folder, OPERATIONS)
            )
            / OPERATIONS
            for name in names
        }


def main(quick: bool = False) -> None:
    if shutil.which("valgrind") is None:
        report("instructions", TITLE, [missing("callgrind", CASE, KILL, INSTALL)], quick=quick)
        return
    stored = json.loads(STORED.read_text())["instructions"] if STORED.exists() else {}
    rows = [Row(name, CASE, n, n, n, KILL, n / stored[name] if name in stored else None) for name, n in count().items()]
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
    """0 if all counts are within the tolerance of the stored ones, or cannot be compared here (which is said)."""
    if shutil.which("valgrind") is None:
        print(f"instructions: SKIPPED: {INSTALL}")
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
        print("  If the change is meant: python -m benchmarks.instructions --update, and say why in the commit message.")
    return 1 if wrong else 0


def update() -> None:
    """Stores what is counted now."""
    counted = {name: round(n, 1) for name, n in count().items()}
    STORED.write_text(json.dumps({"compiler": _compiler(), "instructions": counted}, indent=1) + "\n")
    print(STORED.read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--check", action="store_true")
    which.add_argument("--update", action="store_true")
    if parser.parse_args().check:
        sys.exit(check())
    update()
