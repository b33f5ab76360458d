"""`python -m tests.upstream_pymm CHECKOUT...`: PyMM's own programs and unit tests, from checkouts
of its repositories (github.com/IBM/pymm; programs for it are in others).

A program is a Python file that imports pymm, but for the modules of PyMM itself. All of a folder
share a pool and run in the order of their names, as PyMM's `run.sh` runs them. A file that is the
same as one before, in the same checkout or another, is passed over.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from . import known

ROOT = Path(__file__).parent.parent.parent


def programs(checkout: Path) -> list[Path]:
    imports = re.compile(r"^\s*(import|from) pymm\b", re.MULTILINE)
    found = []
    for path in sorted(checkout.rglob("*.py")):
        name = str(path)
        of_pymm = path.parent.name == "pymm" and path.parent.parent.name == "python"
        if of_pymm and not known.find(known.CALLS, name) and path.name != "sample.py":
            continue
        if imports.search(path.read_text(errors="replace")) or known.find(known.CALLS, name):
            found.append(path)
    return found


def _path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def run(program: Path, pools: Path, scratch: Path, limit: float) -> tuple[str, dict[str, str]]:
    """What became of it ("ok", "needs x", or what it ended with), and of its unit tests."""
    report = scratch / "report.json"
    report.unlink(missing_ok=True)
    name = str(program)
    call = known.find(known.CALLS, name) or ""
    places = {"data": scratch / "data", "out": scratch / "out", "pool": pools / "pmem0"}
    given = known.find(known.ARGUMENTS, name) or []
    command = [sys.executable, "-m", "tests.upstream_pymm.child", name, str(pools), str(report)]
    command += [call, *(one.format(**places) for one in given)]
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": _path()}
    log = scratch / "log"
    with log.open("w") as told:
        try:
            code = subprocess.run(
                command,
                cwd=scratch,
                env=environment,
                stdout=told,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=limit,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"did not end in {limit:.0f} s", {}
    tests = json.loads(report.read_text()) if report.exists() else {}
    if code == 0:
        return "ok", tests
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {code}"
    missing = re.match(r"ModuleNotFoundError: No module named '([\w.]+)'", last)
    return (f"needs {missing[1]}" if missing else last), tests


def main() -> int:
    asked = argparse.ArgumentParser(prog="python -m tests.upstream_pymm", description=__doc__)
    asked.add_argument("checkouts", nargs="+", type=Path)
    asked.add_argument("--only", default="", help="only programs whose path contains this")
    asked.add_argument("--limit", type=float, default=600, help="seconds for each (default 600)")
    given = asked.parse_args()
    began, seen = time.monotonic(), set()
    ends: Counter[str] = Counter()
    tests: Counter[bool] = Counter()
    with tempfile.TemporaryDirectory(prefix="pmstore-upstream-pymm-") as folder:
        (data := Path(folder, "data")).mkdir()
        pictures = np.random.default_rng(0).integers(0, 256, (60, 28, 28)).astype(np.uint8)
        np.savez(data / "mnist.npz", X_train=pictures, X_test=pictures[:20])
        for checkout in given.checkouts:
            for program in programs(checkout.resolve()):
                name = str(program.relative_to(checkout.resolve()))
                digest = hashlib.sha256(program.read_bytes()).digest()
                if digest in seen or given.only not in name:
                    continue
                seen.add(digest)
                reason = known.find(known.NOT_APPLICABLE, str(program))
                outcome, told = f"not run: {reason}", {}
                if reason is None:
                    place = hashlib.sha256(str(program.parent).encode()).hexdigest()[:12]
                    pools = Path(folder, place)
                    (pools / "pmem0").mkdir(parents=True, exist_ok=True)
                    outcome, told = run(program, pools, Path(folder), given.limit)
                kind = outcome if outcome == "ok" else "not run" if reason else "failed"
                ends[kind] += 1
                tests.update(one == "ok" for one in told.values())
                print(f"{name}: {outcome}", flush=True)
                for test, one in told.items():
                    if one != "ok":
                        print(f"    {test}: {one}", flush=True)
    print(
        f"{ends['ok']} of {sum(ends.values())} programs passed, {ends['failed']} failed, "
        f"{ends['not run']} were not run; {tests[True]} of {tests.total()} unit tests passed; "
        f"{time.monotonic() - began:.0f} s"
    )
    return ends["failed"] != 0


if __name__ == "__main__":
    sys.exit(main())
