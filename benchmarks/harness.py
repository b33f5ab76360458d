"""Interleaved rounds, medians, a table, a JSON file and a plot. No figure here gates a test:
machines are shared and noisy."""

from __future__ import annotations

import datetime
import importlib.util
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import plots
from benchmarks.rows import Row, time_text
from pmstore.extras import install

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
OUT = Path(os.environ.get("PMSTORE_BENCH_OUT", ROOT / "build" / "bench"))
SEED = 12345
RUN_VARIABLE = "PMSTORE_BENCH_RUN"
"""Environment: the name of the run (the runner's process id) that scratch directories are marked
    with."""
SCRATCH_PREFIX = "pmstore-bench-"
LOAD_BEFORE = os.getloadavg()

NONE, TORN, KILL, POWER = "none", "torn", "kill-safe", "power-safe"
"""Durability classes: nothing survives; a crash in a save can leave neither the old nor the new
state; the old or the new state survives the death of the process; and that of the machine."""


@dataclass(frozen=True, slots=True)
class Method:
    """A way of doing the same thing: `run` does it once and is timed, or returns its own time in
    seconds."""

    name: str
    durability: str
    run: Callable[[], float | None]
    extra: Callable[[], dict[str, float]] = dict
    """Asked for when the rounds are over."""


@dataclass(frozen=True, slots=True)
class Target:
    """A figure to reach: `value` of a row, at most or at least `bound`. reason: the cause, as far
    as known, of missing it."""

    text: str
    value: float
    bound: float
    at_least: bool = False
    reason: str = ""

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        why = f": {self.reason}" if self.reason and not self.met else ""
        return (
            f"{'met   ' if self.met else 'MISSED'}  {self.text}: {self.value:.3g} (target {sign} "
            f"{self.bound:g}){why}"
        )


def summarize(
    method: str, case: str, durability: str, times_us: Sequence[float], **extra: float
) -> Row:
    """Median, least and greatest of several times."""
    middle = statistics.median(times_us)
    return Row(
        method,
        case,
        middle,
        min(times_us),
        max(times_us),
        durability,
        None,
        extra,
        rounds=len(times_us),
    )


def absent(module: str) -> str:
    """Why a method that needs a module cannot be tried; empty: it can.

    >>> absent("json"), absent("no_such_module")
    ('', "no_such_module is not installed: pip install 'pmstore[bench]'")
    """
    if not module or importlib.util.find_spec(module) is not None:
        return ""
    return f"{module} is not installed: {install('bench')}"


def missing(method: str, case: str, durability: str, why: str) -> Row:
    """The row of a method that could not be tried here."""
    return Row(method, case, math.nan, math.nan, math.nan, durability, note=why)


def with_ratios(rows: Sequence[Row], yardstick: str, *, speedup: bool = False) -> list[Row]:
    """Each row's time over that of the yardstick in the same case; speedup: the inverse."""
    base = {r.case: r.median_us for r in rows if r.method == yardstick and r.measured}
    made = []
    for r in rows:
        if r.case in base and r.measured and min(base[r.case], r.median_us) > 0:
            r = replace(
                r, ratio=base[r.case] / r.median_us if speedup else r.median_us / base[r.case]
            )
        made.append(r)
    return made


class TimeUp(BaseException):
    """The runner asks a question to end now. No `except Exception` around a peer stops it."""


_kept: list[Row] = []
_measured: dict[tuple[str, str], Row] = {}


def kept() -> list[Row]:
    """The list of a question's rows: what is in it when the question has to end is reported."""
    return _kept


def report_kept(question: str) -> None:
    """After TimeUp: what the question has, also the rounds of the case that was under way."""
    rows = list((_measured | {(r.case, r.method): r for r in _kept}).values())
    rest = missing("what is missing", "the rest", NONE, LIMIT)
    report(question, f"{question}: what was measured until the limit of its time", [*rows, rest])


class Budget:
    """Seconds that a question has, dealt out to its cases: what one leaves over the later ones
    have. Where the machine is slow there are fewer rounds, not fewer cases."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = seconds
        self._ends = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._ends - time.monotonic()

    @property
    def spent(self) -> bool:
        """So far over that a case is left out. (A case's least rounds may take longer than its
        part.)"""
        return self.left < -0.25 * self.seconds - 5

    def deal(self, cases: Iterable[tuple[T, float]]) -> Iterator[tuple[T, Budget]]:
        """Each case with its part, by weight, of what is left when its turn comes.

        >>> [(case, round(part.seconds)) for case, part in Budget(10).deal([("a", 1), ("b", 4)])]
        [('a', 2), ('b', 10)]
        """
        waiting = list(cases)
        weights = [weight for _, weight in waiting]
        for i, (case, weight) in enumerate(waiting):
            yield case, Budget(self.left * weight / sum(weights[i:]))

    def rounds(self, most: int, least: int = 2, warm_up: int = 0) -> Iterator[int]:
        """-warm_up, ..., -1, 0, 1, ...: `most` rounds, or as many as end in time if the next takes
        as long as those before; `least` in any case.

        >>> list(Budget().rounds(3, warm_up=1)), list(Budget(0).rounds(9))
        ([-1, 0, 1, 2], [0, 1])
        """
        start = time.monotonic()
        for i in range(-warm_up, most):
            if i == 0:
                start = time.monotonic()
            if i >= max(least, 1) and (time.monotonic() - start) / i > self.left:
                return
            yield i


NO_MEMORY = "left out: not enough memory is free"
LIMIT = "ended at the limit of its time"
OUT_OF_TIME = "left out: the question's share of the time was over"


def words_of(error: BaseException) -> str:
    """One line, for a table.

    >>> words_of(OSError(28, "No space left on device")), words_of(KeyError())
    ('OSError: [Errno 28] No space left on device', 'KeyError')
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{': ' + lines[0][:150] if lines else ''}"


def measure(
    case: str,
    methods: Sequence[Method],
    rounds: int,
    warm_up: int = 2,
    per_run: int = 1,
    budget: Budget | None = None,
    least: int = 2,
) -> list[Row]:
    """Runs all methods in turn, `rounds` times or as often as the budget allows, `least` in any
    case; `per_run` operations make one run. A method that fails has a row that says how; the others
    go on."""
    times: dict[str, list[float]] = {m.name: [] for m in methods}
    failed: dict[str, str] = {}
    try:
        for i in (budget or Budget()).rounds(rounds, least, warm_up):
            for m in methods:
                if m.name in failed:
                    continue
                try:
                    start = time.perf_counter()
                    own = m.run()
                    seconds = time.perf_counter() - start if own is None else own
                except Exception as error:  # whatever a peer raises
                    failed[m.name] = f"failed: {words_of(error)}"
                    continue
                if i >= 0:
                    times[m.name].append(seconds * 1e6 / per_run)
    except TimeUp:
        _keep(
            summarize(m.name, case, m.durability, times[m.name]) for m in methods if times[m.name]
        )
        raise
    return _keep(
        missing(m.name, case, m.durability, failed[m.name])
        if m.name in failed
        else summarize(m.name, case, m.durability, times[m.name], **m.extra())
        for m in methods
    )


def _keep(rows: Iterable[Row]) -> list[Row]:
    """For a question that has to end before it has put them anywhere."""
    made = list(rows)
    _measured.update(((r.case, r.method), r) for r in made)
    return made


def find(rows: Sequence[Row], case: str, method: str) -> Row | None:
    """The row of a method in a case, if it was measured."""
    return next((r for r in rows if r.case == case and r.method == method and r.measured), None)


# ---- places ----


@contextmanager
def scratch(where: str) -> Iterator[Path]:
    """A directory on tmpfs ("memory") or on the disk of the temporary directory ("disk"), gone
    afterwards."""
    base = "/dev/shm" if where == "memory" else None
    run = os.environ.get(RUN_VARIABLE, str(os.getpid()))
    with tempfile.TemporaryDirectory(prefix=f"{SCRATCH_PREFIX}{run}-", dir=base) as name:
        yield Path(name)


def room_bytes(where: str, share: float) -> float:
    """What a benchmark may fill there: a share of what is free. tmpfs is memory."""
    available = next(
        int(s.split()[1]) << 10
        for s in Path("/proc/meminfo").read_text().splitlines()
        if s.startswith("MemAvailable")
    )
    disk = shutil.disk_usage("/dev/shm" if where == "memory" else tempfile.gettempdir()).free
    return share * (min(available, disk) if where == "memory" else disk)


# ---- processes ----


def run_ranks(codes: Sequence[str], seconds: float) -> None:
    """Runs a program for each rank. Raises: RuntimeError: one failed; TimeoutExpired."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment) for code in codes
    ]
    try:
        status = [process.wait(seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(status):
        raise RuntimeError(f"a rank ended with {status}, see above")


def microseconds(run: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


# ---- what a run leaves ----


def _git_commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
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


def table(rows: Sequence[Row], ratio_text: str, unit: str = "us") -> str:
    """For the terminal. unit: of the rows' figures, if they are not times."""
    text = time_text if unit == "us" else "{:,.0f}".format
    width = max(len(r.method) for r in rows) + 2
    lines, case = [], None
    for r in rows:
        if r.case != case:
            case = r.case
            lines.append(f"  {case}   (ratio: {ratio_text})")
        if not r.measured:
            lines.append(f"    {r.method:<{width}}{'-':>10} {r.note}")
            continue
        ratio = "" if r.ratio is None else f"{r.ratio:.3g} x"
        span = f"[{text(r.min_us)} - {text(r.max_us)}]"
        extra = "  ".join(f"{name} {value:.4g}" for name, value in r.extra.items())
        lines.append(
            f"    {r.method:<{width}}{text(r.median_us):>10} {span:<24}{ratio:>9}  "
            f"{r.durability:<11}{extra}"
        )
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
    """Prints the table and writes build/bench/<question>.json and .png. plot: arguments of
    `plots.draw`."""
    print(f"\n== {title}   (load {os.getloadavg()[0]:.1f})")
    print(table(rows, ratio_text, unit))
    for target in targets:
        print(f"  {target}")
    for note in notes:
        print(f"  note: {note}")
    write_json(
        question, title, rows, ratio_text=ratio_text, targets=targets, notes=notes, quick=quick
    )
    if shown := [r for r in rows if r.measured]:
        plots.draw(OUT / f"{question}.png", title, shown, **(plot or {}))
    print(f"  {OUT / question}.json .png", flush=True)


def write_json(
    question: str,
    title: str,
    rows: Sequence[Row] = (),
    *,
    ratio_text: str = "",
    targets: Sequence[Target] = (),
    notes: Sequence[str] = (),
    quick: bool = False,
    failure: str = "",
) -> None:
    """build/bench/<question>.json. failure: why there are no rows."""
    OUT.mkdir(parents=True, exist_ok=True)
    data = {
        "question": question,
        "title": title,
        "ratio": ratio_text,
        "quick": quick,
        "failure": failure,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "commit": _git_commit(),
        "load": os.getloadavg(),
        "load_before": LOAD_BEFORE,
        "targets": [{**asdict(t), "met": t.met} for t in targets],
        "notes": list(notes),
        # NaN is not JSON
        "rows": [{k: None if v != v else v for k, v in asdict(r).items()} for r in rows],
    }
    written = OUT / f"{question}.json.new"
    written.write_text(json.dumps(data, indent=1, allow_nan=False))
    written.rename(OUT / f"{question}.json")  # there is a whole one or none
