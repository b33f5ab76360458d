"""The engine against libpmemobj, in C, in one process: transactions, allocation, a 256 MiB
overwrite.

Both on tmpfs as persistent memory (PMEM_IS_PMEM_FORCE=1; pmstore's domain "emulated": the same
instructions). Needs a C compiler and Debian's libpmemobj-dev (`apt-get install libpmemobj-dev`);
says so and goes on without if it is missing.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import KILL, Budget, Row, Target, missing, report, scratch, with_ratios
from benchmarks.native import CompileError, compile_program

YARDSTICK = "libpmemobj"
PAGES = (
    "fences and lines: declared memory may be written anywhere in its pages, so a page is captured "
    "whole: in emulated, below 4 KiB, that is dearer than libpmemobj's exact range"
)
TURNS = (
    "2 threads: a store has one writer at a time, so two threads take turns, and a turn moves the "
    "lock and what it guards to the other core's cache; libpmemobj has a log for each thread, and "
    "leaves it to the program to lock its data"
)
LINES = (
    "nearly all of it is the write-back of the new block's lines, as many on both sides (see the "
    "column): from 32 KiB to 1 MiB the two are equal but for the noise of the caches"
)
TITLE = "Engine against libpmemobj (C, tmpfs)"


def _run(program: Path, rounds: int, quick: bool, preload: Path | None = None) -> list[Row]:
    environment = {**os.environ, "PMEM_IS_PMEM_FORCE": "1"}
    if preload:
        environment["LD_PRELOAD"] = str(preload)
    with scratch("memory") as folder:
        command = [str(program), str(folder), str(rounds), *(["quick"] if quick else [])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [Row(**json.loads(line)) for line in done.stdout.splitlines()]


def _targets(rows: Sequence[Row]) -> list[Target]:
    ratio = {(r.case, r.method): r.ratio for r in rows if r.ratio is not None}
    found = []
    for case, method, bound in (("256 MiB overwrite", "pmstore emulated, declared", 0.55),):
        found.append(Target(f"{case}: {method} / libpmemobj", ratio[case, method], bound))
    for case, method in ratio:
        if case.startswith("allocate") and method == "pmstore emulated":
            found.append(
                Target(f"{case}: {method} / libpmemobj", ratio[case, method], 1, reason=LINES)
            )
    return found


def main(quick: bool, budget: Budget) -> None:
    try:
        program = compile_program("engine_vs_pmdk", "-lpmemobj")
        counter = compile_program("count_pmem", shared=True)
    except CompileError as error:
        if "pmemobj" not in str(error):
            raise
        why = "not installed (Debian: apt-get install libpmemobj-dev): question left out"
        report("engine", TITLE, [missing(YARDSTICK, "everything", KILL, why)], quick=quick)
        return
    start = time.monotonic()
    counted = {(r.case, r.method): r.extra for r in _run(program, 5, quick, counter)}
    # of so many, and what making the stores takes
    rounds = 5 * (budget.left - 2) / (time.monotonic() - start)
    rows = _run(program, max(5, min(16 if quick else 120, int(rounds))), quick)
    rows = [replace(r, extra=counted.get((r.case, r.method), r.extra)) for r in rows]
    rows = with_ratios(rows, YARDSTICK)
    report(
        "engine",
        TITLE,
        rows,
        ratio_text="time over libpmemobj's",
        targets=_targets(rows),
        notes=[
            (
                "fences and lines are per operation; of libpmemobj they are counted in a run of "
                "their own"
            ),
            PAGES,
            TURNS,
        ],
        quick=quick,
        plot={
            "cases": [
                "8 B snapshot, overwrite, commit",
                "1 MiB snapshot, overwrite, commit",
                "256 MiB overwrite",
            ]
        },
    )
