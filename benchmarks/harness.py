"""Interleaved rounds, medians, a table and a JSON file. No figure here gates a test: the machine is shared and noisy."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Row:
    """One method in one case. Times in microseconds; ratio to the case's yardstick, smaller is better."""

    method: str
    case: str
    median_us: float
    min_us: float
    max_us: float
    durability: str
    ratio: float | None = None
    target: float | None = None


@dataclass(frozen=True, slots=True)
class Method:
    """A way of doing the same thing: `run` does it once and is timed, or returns its own time in seconds."""

    name: str
    durability: str
    run: Callable[[], float | None]
    target: float | None = None


def measure(case: str, methods: Sequence[Method], rounds: int, yardstick: str, warm_up: int = 2, per_run: int = 1) -> list[Row]:
    """Runs all methods in turn, `rounds` times; `per_run` operations make one run."""
    times: dict[str, list[float]] = {m.name: [] for m in methods}
    for i in range(-warm_up, rounds):
        for m in methods:
            start = time.perf_counter()
            own = m.run()
            seconds = time.perf_counter() - start if own is None else own
            if i >= 0:
                times[m.name].append(seconds * 1e6 / per_run)
    base = statistics.median(times[yardstick])
    return [
        Row(m.name, case, statistics.median(t), min(t), max(t), m.durability, statistics.median(t) / base, m.target)
        for m, t in ((m, times[m.name]) for m in methods)
    ]


@contextmanager
def scratch(where: str) -> Iterator[Path]:
    """A directory on tmpfs ("memory") or on the disk of the temporary directory ("disk"), gone afterwards."""
    base = "/dev/shm" if where == "memory" else None
    with tempfile.TemporaryDirectory(prefix="pmstore-bench-", dir=base) as name:
        yield Path(name)


def _git_commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def report(question: str, title: str, rows: Sequence[Row]) -> None:
    """Prints the table and writes build/bench/<question>.json."""
    print(f"\n{title}   (load {os.getloadavg()[0]:.1f})")
    width = max(len(r.method) for r in rows) + 2
    case = ""
    for r in rows:
        if r.case != case:
            case = r.case
            print(f"  {case}")
        ratio = "" if r.ratio is None else f"{r.ratio:8.2f}x"
        target = "" if r.target is None else f"  (target <= {r.target:g}x)"
        span = f"[{r.min_us:.2f} - {r.max_us:.2f}]"
        print(f"    {r.method:<{width}}{r.median_us:14.2f} us  {span}{ratio}{target}  {r.durability}")
    out = ROOT / "build" / "bench"
    out.mkdir(parents=True, exist_ok=True)
    machine = {"cpu": _cpu(), "cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}
    data = {"machine": machine, "commit": _git_commit(), "load": os.getloadavg(), "rows": [asdict(r) for r in rows]}
    (out / f"{question}.json").write_text(json.dumps(data, indent=1))
