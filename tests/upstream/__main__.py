"""`python -m tests.upstream CHECKOUT`: all test files, and a table. 0: nothing is wrong.

What does not pass with pmstore's storage is tried with torch's own: it is wrong if it passes there,
and `known.py` has no reason for it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from . import known

FOLDER = Path("test", "distributed", "checkpoint")
ROOT = Path(__file__).parent.parent.parent
PASSED, FAILED = "passed", "failed"
NOT_OURS, DOES_NOT_APPLY, WRONG = "fails with torch's own storage", "does not apply", "WRONG"

Ends = dict[str, tuple[str, str]]
"""Of tests, by name: how each ended, and why."""


def run(writer: str, file: Path, seconds: float) -> Ends:
    with tempfile.TemporaryDirectory() as scratch:
        results, log = Path(scratch, "results"), Path(scratch, "log")
        command = [sys.executable, "-m", "tests.upstream.one", writer, str(file), str(results)]
        with log.open("w") as told:
            try:
                subprocess.run(command, cwd=ROOT, stdout=told, stderr=told, timeout=seconds)
            except subprocess.TimeoutExpired:
                return {"(all)": (FAILED, f"not over after {seconds:.0f} s")}
        if not results.exists():
            return {"(all)": (FAILED, log.read_text()[-2000:])}
        found: Ends = json.loads(results.read_text())
        return found


def judged(file: Path, seconds: float) -> Ends:
    ends = run("pmstore", file, seconds)
    if not any(end == FAILED for end, _ in ends.values()):
        return ends
    own = run("torch", file, seconds)
    for name, (end, why) in ends.items():
        if end == FAILED:
            reason = known.DOES_NOT_APPLY.get(name.rpartition("::")[2])
            if own.get(name, own.get("(all)", ("",)))[0] == FAILED:
                ends[name] = (NOT_OURS, why)
            elif reason is not None:
                ends[name] = (DOES_NOT_APPLY, reason)
            else:
                ends[name] = (WRONG, why)
    return ends


def main() -> int:
    asked = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__)
    asked.add_argument("checkout", type=Path, help="of pytorch")
    asked.add_argument("words", nargs="*", help="only files whose names contain one of them")
    asked.add_argument("--seconds", type=float, default=1800, help="for each file")
    given = asked.parse_args()
    files = sorted((given.checkout / FOLDER).rglob("test_*.py"))
    if not files:
        asked.error(f"{given.checkout}: no tests in {FOLDER}")
    total: Counter[str] = Counter()
    wrong: Ends = {}
    for file in files:
        if given.words and not any(word in file.name for word in given.words):
            continue
        ends = judged(file, given.seconds)
        count = Counter(end for end, _ in ends.values())
        total += count
        print(f"{file.stem:<40} {_line(count)}", flush=True)
        wrong |= {f"{file.stem}::{n}": each for n, each in ends.items() if each[0] == WRONG}
        for name, (end, why) in ends.items():
            if end == DOES_NOT_APPLY:
                print(f"    {name}: {why}")
    print(f"{'all':<40} {_line(total)}")
    for name, (_, why) in wrong.items():
        print(f"{name}:\n{why}")
    return 1 if wrong or not total[PASSED] else 0


def _line(count: Counter[str]) -> str:
    return ", ".join(f"{number} {end}" for end, number in sorted(count.items()))


if __name__ == "__main__":
    sys.exit(main())
