"""Interleaved rounds, medians, a table, a JSON file and a plot. No figure here gates a test: machines are shared and noisy."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "bench"
SEED = 12345

NONE, TORN, KILL, POWER = "none", "torn", "kill-safe", "power-safe"
"""Durability classes: nothing survives; a crash in a save can leave neither the old nor the new state; the old or the new
state survives the death of the process; and that of the machine."""


@dataclass(frozen=True, slots=True)
class Row:
    """One method in one case. Times in microseconds. ratio: to the case's yardstick, by the table's title."""

    method: str
    case: str
    median_us: float
    min_us: float
    max_us: float
    durability: str
    ratio: float | None = None
    extra: dict[str, float] = field(default_factory=dict)
    """Further measured figures of this row: counts, bytes, shares."""


@dataclass(frozen=True, slots=True)
class Method:
    """A way of doing the same thing: `run` does it once and is timed, or returns its own time in seconds."""

    name: str
    durability: str
    run: Callable[[], float | None]
    extra: Callable[[], dict[str, float]] = dict
    """Asked for when the rounds are over."""


@dataclass(frozen=True, slots=True)
class Target:
    """A figure to reach: `value` of a row, at most or at least `bound`."""

    text: str
    value: float
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{'met   ' if self.met else 'MISSED'}  {self.text}: {self.value:.3g} (target {sign} {self.bound:g})"


def summarize(method: str, case: str, durability: str, times_us: Sequence[float], **extra: float) -> Row:
    """Median, least and greatest of several times."""
    return Row(method, case, statistics.median(times_us), min(times_us), max(times_us), durability, None, extra)


def with_ratios(rows: Sequence[Row], yardstick: str, *, speedup: bool = False) -> list[Row]:
    """Each row's time over that of the yardstick in the same case; speedup: the inverse."""
    base = {r.case: r.median_us for r in rows if r.method == yardstick}
    made = []
    for r in rows:
        if r.case in base and min(base[r.case], r.median_us) > 0:
            r = replace(r, ratio=base[r.case] / r.median_us if speedup else r.median_us / base[r.case])
        made.append(r)
    return made


def measure(case: str, methods: Sequence[Method], rounds: int, warm_up: int = 2, per_run: int = 1) -> list[Row]:
    """Runs all methods in turn, `rounds` times; `per_run` operations make one run."""
    times: dict[str, list[float]] = {m.name: [] for m in methods}
    for i in range(-warm_up, rounds):
        for m in methods:
            start = time.perf_counter()
            own = m.run()
            seconds = time.perf_counter() - start if own is None else own
            if i >= 0:
                times[m.name].append(seconds * 1e6 / per_run)
    return [summarize(m.name, case, m.durability, times[m.name], **m.extra()) for m in methods]


def find(rows: Sequence[Row], case: str, method: str) -> Row | None:
    """The row of a method in a case, if it was measured."""
    return next((r for r in rows if r.case == case and r.method == method), None)


# ---- places ----


@contextmanager
def scratch(where: str) -> Iterator[Path]:
    """A directory on tmpfs ("memory") or on the disk of the temporary directory ("disk"), gone afterwards."""
    base = "/dev/shm" if where == "memory" else None
    with tempfile.TemporaryDirectory(prefix="pmstore-bench-", dir=base) as name:
        yield Path(name)


def room_bytes(where: str) -> int:
    """What a benchmark may fill there: a third of the memory that is free (tmpfs is memory), or half of the disk's room."""
    available = next(
        int(s.split()[1]) << 10 for s in Path("/proc/meminfo").read_text().splitlines() if s.startswith("MemAvailable")
    )
    if where == "memory":
        return min(available, shutil.disk_usage("/dev/shm").free) // 3
    return min(shutil.disk_usage(tempfile.gettempdir()).free // 2, available // 3)  # what is written is also in the page cache


# ---- what a run leaves ----


def _git_commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def machine() -> dict[str, Any]:
    """What a figure depends on."""
    cpu = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def size_text(count: float) -> str:
    """Bytes for people: 5.1 KB.

    >>> size_text(5120), size_text(62_720), size_text(4.9e6)
    ('5.1 KB', '63 KB', '4.9 MB')
    """
    for unit in ("B", "KB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    return f"{count:.2g} {unit}" if count < 10 and unit != "B" else f"{count:.0f} {unit}"


def time_text(us: float) -> str:
    """Microseconds for people."""
    for limit, divisor, unit in ((1e3, 1.0, "us"), (1e6, 1e3, "ms")):
        if us < limit:
            return f"{us / divisor:.3g} {unit}"
    return f"{us / 1e6:.3g} s"


def table(rows: Sequence[Row], ratio_text: str, unit: str = "us") -> str:
    """For the terminal. unit: of the rows' figures, if they are not times."""
    text = time_text if unit == "us" else "{:,.0f}".format
    width = max(len(r.method) for r in rows) + 2
    lines, case = [], None
    for r in rows:
        if r.case != case:
            case = r.case
            lines.append(f"  {case}   (ratio: {ratio_text})")
        ratio = "" if r.ratio is None else f"{r.ratio:.3g} x"
        span = f"[{text(r.min_us)} - {text(r.max_us)}]"
        extra = "  ".join(f"{name} {value:.4g}" for name, value in r.extra.items())
        lines.append(f"    {r.method:<{width}}{text(r.median_us):>10} {span:<24}{ratio:>9}  {r.durability:<11}{extra}")
    return "\n".join(lines)


def report(
    question: str,
    title: str,
    rows: Sequence[Row],
    *,
    ratio_text: str = "time over the yardstick's",
    targets: Sequence[Target] = (),
    notes: Sequence[str] = (),
    quick: bool = False,
    unit: str = "us",
    plot: Mapping[str, Any] | None = None,
) -> None:
    """Prints the table and writes build/bench/<question>.json and .png. plot: arguments of `plots.draw`."""
    from benchmarks import plots

    print(f"\n== {title}   (load {os.getloadavg()[0]:.1f})")
    print(table(rows, ratio_text, unit))
    for target in targets:
        print(f"  {target}")
    for note in notes:
        print(f"  note: {note}")
    OUT.mkdir(parents=True, exist_ok=True)
    data = {
        "question": question,
        "title": title,
        "ratio": ratio_text,
        "quick": quick,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "commit": _git_commit(),
        "load": os.getloadavg(),
        "targets": [{**asdict(t), "met": t.met} for t in targets],
        "notes": list(notes),
        "rows": [asdict(r) for r in rows],
    }
    (OUT / f"{question}.json").write_text(json.dumps(data, indent=1))
    plots.draw(OUT / f"{question}.png", title, rows, **(plot or {}))
    print(f"  {OUT / question}.json .png", flush=True)
