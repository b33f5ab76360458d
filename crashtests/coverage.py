"""How much of the engine the crash tests reach, by branch.

    python -m crashtests.coverage

Builds the program once more, instrumented, and runs a small part of each workload under the models
(ii) to (iv) and with failing system calls: what is reached here is reached by a full run too. It
writes build/crashtest/coverage.json for the report.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crashtests import jobs
from crashtests.report import commit_id

FOLDER = jobs.BUILD / "coverage"
SAVED = jobs.BUILD / "coverage.json"
PARTS = {
    "recovery": (
        "store/recover.c",
        "log/entries.c",
        "log/apply.c",
        "journal/recover.c",
        "journal/ring.c",
        "heap/super.c",
    ),
    "allocator": (
        "heap/heap.c",
        "heap/class.c",
        "heap/index.c",
        "heap/open.c",
        "heap/query.c",
        "heap/table.c",
    ),
}


@dataclass(frozen=True)
class Branches:
    taken: int
    total: int
    never: tuple[int, ...]
    """Lines with a branch that was never taken."""


def plan(names: list[str]) -> list[jobs.Job]:
    common = {"seed": 1, "stop-after": 1}
    planned = []
    for name in names:
        for model, domain, budget in (
            ("ii", "emulated", 30),
            ("iii", "file", 30),
            ("iv", "emulated", 60),
            ("iv", "file", 60),
        ):
            planned.append(
                jobs.Job(
                    "images", name, domain, model, common | {"budget": budget, "nested-every": 20}
                )
            )
        planned += [
            jobs.Job("fault", name, domain, "", common | {"step": 13})
            for domain in ("process", "file")
        ]
    return planned


def branches(objects: Path, source: str) -> Branches:
    """Of one file of the engine, all runs together. Raises: CalledProcessError."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [
                "gcov",
                "--json-format",
                "--branch-probabilities",
                str(objects / source.replace(".c", ".gcda")),
            ],
            cwd=scratch,
            check=True,
            capture_output=True,
        )
        (found,) = Path(scratch).glob("*.json.gz")
        data = json.loads(gzip.decompress(found.read_bytes()))
    lines = [
        line
        for file in data["files"]
        if file["file"].endswith(f"/{source}")
        for line in file["lines"]
    ]
    every = [
        (line["line_number"], branch["count"]) for line in lines for branch in line["branches"]
    ]
    never = sorted({number for number, count in every if not count})
    return Branches(sum(count > 0 for _, count in every), len(every), tuple(never))


def measure() -> dict[str, Any]:
    shutil.rmtree(FOLDER, ignore_errors=True)
    program = jobs.build(
        target=FOLDER, flags="-O0 --coverage -fprofile-update=atomic", coverage=True
    )
    with jobs.Runner(program) as runner:
        outcomes = runner.run_all(plan(jobs.workloads(program)), lambda job, n: None)
    failures = [failure for o in outcomes for failure in o.failures]
    found = {name: branches(FOLDER / "engine", name) for names in PARTS.values() for name in names}
    parts = {}
    for part, names in PARTS.items():
        taken, total = (
            sum(getattr(found[name], what) for name in names) for what in ("taken", "total")
        )
        parts[part] = {"taken": taken, "total": total, "percent": round(100 * taken / total, 1)}
    files = {
        name: {"taken": b.taken, "total": b.total, "never": list(b.never)}
        for name, b in found.items()
    }
    return {"commit": commit_id(), "parts": parts, "files": files, "failures": failures}


def main() -> int:
    if not shutil.which("gcov"):
        print("branch coverage: left out, there is no gcov")
        return 0
    data = measure()
    SAVED.write_text(json.dumps(data, indent=1) + "\n")
    for part, counted in data["parts"].items():
        print(
            f"branches of the {part}: {counted['taken']:,} of {counted['total']:,} taken "
            f"({counted['percent']} %)"
        )
    for failure in data["failures"]:
        print(f"FAILED: {json.dumps(failure)}")
    return 1 if data["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
