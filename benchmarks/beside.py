"""What readers cost the process that writes, and what they wait for.

The writer changes an array in place and commits, again and again. Blocks of it take turns: nobody
reads; a reader in another process looks for the last commit once a second, and reads all of it; the
same, and the writer is asked to keep it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import pmstore
from benchmarks import harness

MB = 1_000_000
ALONE, BESIDE, KEPT = "nobody reads", "a reader a second", "a reader a second, kept for it"
READ, MEMCPY = "a reader: refresh and read all", "memcpy of the array"
SIZES = (100_000, 64 * MB)
BLOCK_SECONDS = 1.0

READER = """
import sys, time, pmstore
with pmstore.open(sys.argv[1], "r", lock_timeout=60) as store:
    for line in sys.stdin:
        begun = time.perf_counter()
        lost = 0
        store.refresh(keep=line.strip() == "keep")
        try:
            a, n = store["a"], store["n"]
            assert a[0] == a[-1] == n, (a[0], a[-1], n)
            del a
        except pmstore.SnapshotLostError:
            lost = 1
        print(time.perf_counter() - begun, lost, flush=True)
"""


class Reader:
    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", READER, str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(self.process.kill)
        self.seconds: list[float] = []
        self.lost = 0

    def ask(self, how: str) -> None:
        assert self.process.stdin is not None
        print(how, file=self.process.stdin, flush=True)

    def answer(self) -> None:
        assert self.process.stdout is not None
        seconds, lost = self.process.stdout.readline().split()
        self.lost += int(lost)
        if lost == "0":
            self.seconds.append(float(seconds))


def _case(domain: Any, where: str, size: int, budget: harness.Budget) -> list[harness.Row]:
    times: dict[str, list[float]] = {ALONE: [], BESIDE: [], KEPT: []}
    copies: list[float] = []
    durability = harness.POWER if domain == "file" else harness.KILL
    case = f"{domain}, {harness.size_text(size)}"
    with harness.scratch(where) as folder, ExitStack() as stack:
        path = folder / "run.pm"
        store = stack.enter_context(
            pmstore.open(path, size=int(2.1 * size) + (8 << 20), domain=domain)
        )
        a: Any = store.zeros("a", size // 8)
        plain = np.ones(size // 8)
        n = 0

        def step() -> None:
            nonlocal n
            n += 1
            with store.transaction(writes=[a]):
                a[:] = n
                store["n"] = n

        step()
        reader = Reader(path, stack)
        reader.ask("")
        reader.answer()
        for i in budget.rounds(12, least=3, warm_up=1):
            for way, block in times.items():
                if way != ALONE:
                    reader.ask("keep" if way == KEPT else "")
                until, steps = time.perf_counter() + BLOCK_SECONDS, 0
                begun = time.perf_counter()
                while time.perf_counter() < until:
                    step()
                    steps += 1
                if i >= 0:
                    block.append((time.perf_counter() - begun) / steps * 1e6)
                if way != ALONE:
                    reader.answer()
            begun = time.perf_counter()
            plain.copy()
            copies.append((time.perf_counter() - begun) * 1e6)
        a = None
    beside = [b / a for a, b in zip(times[ALONE], times[BESIDE], strict=True)]
    kept = [b / a for a, b in zip(times[ALONE], times[KEPT], strict=True)]
    rows = [
        harness.summarize(ALONE, case, durability, times[ALONE]),
        harness.summarize(
            BESIDE, case, durability, times[BESIDE], paired=statistics.median(beside)
        ),
        harness.summarize(KEPT, case, durability, times[KEPT], paired=statistics.median(kept)),
        harness.summarize(MEMCPY, case, harness.NONE, copies),
    ]
    if reader.seconds:
        took = [seconds * 1e6 for seconds in reader.seconds]
        rows.append(harness.summarize(READ, case, durability, took, lost=reader.lost))
    return harness.with_ratios(rows, ALONE)


def _spread(alone: harness.Row | None) -> str:
    if alone is None:
        return ""
    least, most = alone.min_us / 1e3, alone.max_us / 1e3
    return f"where nobody reads, a step took {least:.3g} to {most:.3g} ms in this run"


def main(quick: bool = False, budget: harness.Budget | None = None) -> None:
    budget = budget or harness.Budget()
    rows = harness.kept()
    cases = [("process", "memory", size) for size in (SIZES[:1] if quick else SIZES)]
    cases += [] if quick else [("file", "disk", size) for size in SIZES]
    for (domain, where, size), part in budget.deal((case, 1.0) for case in cases):
        rows += _case(domain, where, size, part)
    targets = [
        harness.Target(
            f"step beside a reader a second / alone, {row.case}",
            row.extra["paired"],
            1.05,
            reason=_spread(harness.find(rows, row.case, ALONE)),
        )
        for row in rows
        if row.method == BESIDE
    ]
    harness.report(
        "beside",
        "readers beside a writer",
        rows,
        ratio_text=f"step over that of {ALONE!r}",
        targets=targets,
        quick=quick,
    )


if __name__ == "__main__":
    main()
