"""Large stores: bytes, objects, arrays, epochs of a tier. What each operation costs, and how that
grows.

No step of a commit may grow with the store: slope 0. To look at everything takes as long as there
is to look at: slope 1. A full run takes what fits in its share; for stores as large as the disk and
the memory allow: `python -m benchmarks --seconds 1001 scale`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import pmstore
from benchmarks import harness
from benchmarks.plots import slope

GB = 1_000_000_000
PIECE = 64 << 20  # bytes of an array of a filled store
SESSION = 4 * GB  # that are written before the store is closed and opened again
LARGEST = 40 * (1 << 30)
FILE_SHARE = 2.3  # what a file takes, of its arrays: the log's room too
KEPT = 10  # epochs that a tier keeps, where their number is asked for
ROUNDS = 30
LARGE_SECONDS = 1000
"""A run with more takes stores as large as fit."""

COMMIT, OPEN, CHECK, LIST = "put and commit", "open and read one", "check", "list all names"
FLUSH, AGAIN, COMPACT = "first flush to a tier", "flush of one object", "compact"
EVERY = "commit of all arrays, declared"
FLAT = (COMMIT, OPEN, AGAIN)
"""What must not grow with the store."""
REASONS = {
    (OPEN, "bytes in a store"): "it grows with the arrays, of which there are more here: to know "
    "what is free, an open looks at one descriptor of each, and those of arrays of 64 MiB lie in "
    "pages of their own. 125 MB (1 array): 30 page faults; 1 GB (14 arrays): 68, 5 us each. In "
    "domain file those that are not in the page cache are read one after the other, as each says "
    "where the next one is: cold 3 and 11 ms. With 10 arrays at every size: see growth",
    (OPEN, "arrays in a model"): "as of objects: 0.6 ms, and 1 ms with 100,000 arrays",
    (OPEN, "objects in a store"): "to know what is free, an open looks at the descriptors of all "
    "pages: 1 us for each MiB of the store, which has nearly 8 GB with ten million objects",
    (AGAIN, "bytes in a store"): "a flush asks of each chunk whether it was written, and its list "
    "of chunks, written and synced, has all of them: {1e6} ms for each GB",
    (AGAIN, "epochs in a tier"): "a flush lists the tier three times and looks at each name: "
    "before it writes (what it builds on may be gone), when the epoch is read back (as a restore "
    "finds it), and before others go (a reader may have begun to hold one): {1} us for an epoch "
    "there",
}
"""By what is done, and the beginning of the axis. {n}: what so many more take longer, in n us."""


class _Rows:
    """Of one axis, kept as they are measured."""

    def __init__(self, axis: str) -> None:
        self._axis = axis

    def add(self, x: float, method: str, seconds: list[float], **extra: float) -> None:
        case = f"{self._axis}: {_number(x)}"
        row = harness.summarize(
            method, case, harness.KILL, [1e6 * one for one in seconds], x=float(x), **extra
        )
        harness.kept().append(row)
        print(f"    {case}: {method} {row.median_us / 1e6:.4g} s", flush=True)


def _number(x: float) -> str:
    return f"{x:,.0f}" if x < GB else harness.size_text(x)


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _commits(store: pmstore.Store) -> list[float]:
    """Of a value of its own, put and committed."""
    times = []
    for number in range(ROUNDS):
        start = time.perf_counter()
        store["probe"] = number
        store.commit()
        times.append(time.perf_counter() - start)
    return times


def _everything(path: Path, rows: _Rows, x: float, read: str, **options: Any) -> None:
    """What is done with a store that is closed and whole."""
    opens = []
    for _ in range(3):
        start = time.perf_counter()
        store = pmstore.open(path, "r+", **options)
        _ = store[read]
        opens.append(time.perf_counter() - start)
        store.close()
    rows.add(x, OPEN, opens)
    with pmstore.open(path, "r+", **options) as store:
        rows.add(x, COMMIT, _commits(store))
        rows.add(x, CHECK, [_timed(store.check)])


# ---- bytes ----


def _fill(path: Path, nbytes: int, domain: str) -> None:
    """Arrays of noise, committed one by one: what is never written takes no room on a disk. In
    domain file what a session has written stays in memory until it ends, so there are several."""
    noise = np.random.default_rng(harness.SEED).integers(0, 256, PIECE, np.uint8)
    waiting = list(range(max(1, nbytes // PIECE)))
    while waiting:
        now, waiting = waiting[: SESSION // PIECE], waiting[SESSION // PIECE :]
        with pmstore.open(path, "a", size=nbytes, domain=domain) as store:  # type: ignore[arg-type]
            for index in now:
                with store.transaction():
                    noise[0] = index % 256
                    store[f"array{index}"] = noise


def _bytes(sizes: list[int], domain: str, where: str, budget: harness.Budget) -> None:
    rows = _Rows(f"bytes in a store of domain {domain}")
    for size, _ in budget.deal((size, size) for size in sizes):
        if budget.spent:
            break
        with harness.scratch(where) as folder:
            path = folder / "run.pm"
            seconds = _timed(lambda p=path, n=size: _fill(p, n, domain))  # type: ignore[misc]
            taken = 512 * path.stat().st_blocks
            rows.add(size, "fill", [seconds], taken=taken / size)
            _everything(path, rows, size, "array0", domain=domain)
            if size < harness.room_bytes(where, 0.9):
                with pmstore.open(path, "r+", domain=domain) as store:  # type: ignore[arg-type]
                    store.add_tier("t", pmstore.TierConfig(folder / "tier", keep=1))
                    rows.add(size, FLUSH, [_timed(lambda s=store: s.flush("t", wait=True))])  # type: ignore[misc]
                    again = []
                    for number in range(3):
                        store["probe"] = number
                        store.commit()
                        again.append(_timed(lambda s=store: s.flush("t", wait=True)))  # type: ignore[misc]
                    rows.add(size, AGAIN, again)
                    store.remove_tier("t")
                _remove(folder / "tier")
            if FILE_SHARE * size < harness.room_bytes(where, 0.9):
                rows.add(size, COMPACT, [_timed(lambda p=path: pmstore.compact(p))])  # type: ignore[misc]


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


# ---- objects, arrays ----


def _objects(counts: list[int], budget: harness.Budget) -> None:
    """Values by name, in one group."""
    rows = _Rows("objects in a store")
    with _one_store("memory", 64 << 20) as path:
        done = 0
        for count, _ in budget.deal((count, count) for count in counts):
            if budget.spent:
                break
            with pmstore.open(path, "a", domain="process") as store:
                group, start, before = store.group("g"), time.perf_counter(), done
                while done < count:
                    upto = min(done + 20_000, count)
                    with store.transaction():
                        for number in range(done, upto):
                            group[f"name{number}"] = number
                    done = upto
                inserted = (time.perf_counter() - start) / (done - before)
                rows.add(count, "insert, each", [inserted])
                rows.add(count, LIST, [_timed(lambda g=group: sum(1 for _ in g))])  # type: ignore[misc]
            _everything(path, rows, count, "g/name0", domain="process")
            rows.add(count, COMPACT, [_timed(lambda: pmstore.compact(path))])


def _arrays(counts: list[int], budget: harness.Budget) -> None:
    """Small arrays, as of a model of many parts, all declared and written in a commit."""
    rows = _Rows("arrays in a model")
    for count, _ in budget.deal((count, count) for count in counts):
        if budget.spent:
            break
        with _one_store("memory", 2048 * count + (64 << 20)) as path:
            with pmstore.open(path, domain="process") as store:
                group = store.group("model")
                arrays = [group.zeros(f"p{index}", 32, "float32") for index in range(count)]
                store.commit()
                times = []
                for number in range(5):
                    start = time.perf_counter()
                    with store.transaction(writes=arrays):
                        for array in arrays:
                            array[0] = number
                    times.append((time.perf_counter() - start) / count)
                rows.add(count, f"{EVERY}, each", times)
                rows.add(count, COMMIT, _commits(store))
                del arrays, array
            _everything(path, rows, count, "model/p0", domain="process")


@contextmanager
def _one_store(where: str, size: int) -> Iterator[Path]:
    with harness.scratch(where) as folder:
        path = folder / "run.pm"
        pmstore.open(path, size=size, domain="process").close()
        yield path


# ---- epochs of a tier ----


def _epochs(counts: list[int], budget: harness.Budget) -> None:
    """Flushes of a small change, one after the other; every state stays."""
    rows = _Rows("epochs in a tier")
    with (
        _one_store("memory", 64 << 20) as path,
        harness.scratch("disk") as folder,
        pmstore.open(path, "r+", domain="process") as store,
    ):
        store["state"] = np.zeros(1 << 20, np.uint8)
        store.commit()
        store.add_tier("t", pmstore.TierConfig(folder / "tier", keep=max(counts) + KEPT))
        done = 0
        for count, _ in budget.deal((count, count) for count in counts):
            if budget.spent:
                break
            while done < count:
                done += 1
                _change(store, done)
                store.flush("t", wait=True)
            times = []
            for _ in range(5):
                done += 1
                _change(store, done)
                times.append(_timed(lambda: store.flush("t", wait=True)))
            rows.add(count, AGAIN, times)
            store.drain()  # a commit alone: not beside the thread that lets old epochs go
            rows.add(count, COMMIT, _commits(store))
            tier = str(folder / "tier")
            rows.add(count, "list the epochs", [_timed(lambda t=tier: pmstore.epochs(t))])  # type: ignore[misc]
            copy = path.with_name("restored.pm")
            rows.add(
                count,
                "restore the newest",
                [_timed(lambda t=tier, c=copy: pmstore.restore(c, t))],  # type: ignore[misc]
            )
            copy.unlink()


def _change(store: pmstore.Store, number: int) -> None:
    state = store["state"]
    state[number % state.size] += 1
    store.commit()


# ---- all of it ----


def _slopes(rows: list[harness.Row]) -> list[tuple[str, str, float]]:
    """Axis, method, log-log slope."""
    found = []
    for axis, method in dict.fromkeys((r.case.partition(":")[0], r.method) for r in rows):
        points = [
            (r.extra["x"], r.median_us)
            for r in rows
            if r.measured and r.method == method and r.case.startswith(axis + ":")
        ]
        if len(points) > 1:
            found.append((axis, method, slope(points)))
    return found


def _reason(rows: list[harness.Row], method: str, axis: str) -> str:
    """Of missing the aim, where it was looked for."""
    found = (why for (what, of), why in REASONS.items() if what == method and axis.startswith(of))
    first, *_, last = (
        r for r in rows if r.measured and r.method == method and r.case.startswith(axis + ":")
    )
    each = (last.median_us - first.median_us) / (last.extra["x"] - first.extra["x"])
    return re.sub(r"\{(.*)\}", lambda n: f"{each * float(n[1]):.3g}", next(found, ""))


def main(quick: bool, budget: harness.Budget) -> None:
    memory, disk = harness.room_bytes("memory", 0.9), harness.room_bytes("disk", 0.9)
    largest = min(LARGEST, int(disk / FILE_SHARE))
    size = 0 if quick else 1 if budget.seconds < LARGE_SECONDS else 2
    epochs = ([10, 30], [10, 30, 100], [10, 100, 1000])[size]
    arrays = ([100, 1000], [1000, 10_000], [1000, 10_000, 100_000])[size]
    objects = ([1000, 10_000], [1000, 10_000, 100_000], [10_000, 10**5, 10**6, 10**7])[size]
    stores = ([GB // 8, GB // 2], [GB // 8, GB], [GB, 4 * GB, 8 * (1 << 30)])[size]
    files = ([GB // 8, GB // 2], [GB // 8, GB], [GB, 4 * GB, 16 * GB, largest])[size]
    parts: list[tuple[Callable[[harness.Budget], None], float]] = [
        (lambda b: _epochs(epochs, b), 1),
        (lambda b: _arrays(arrays, b), 1),
        (lambda b: _objects(objects, b), 2),
        (
            lambda b: _bytes(
                [s for s in stores if FILE_SHARE * s <= memory], "process", "memory", b
            ),
            2,
        ),
        (lambda b: _bytes([s for s in files if FILE_SHARE * s <= disk], "file", "disk", b), 2),
    ]
    for run, part in budget.deal(parts):
        run(part)
    rows = list(harness.kept())
    slopes = _slopes(rows)
    harness.report(
        "scale",
        "Large stores",
        rows,
        ratio_text="none",
        targets=[
            harness.Target(
                f"slope of {method} over {axis}", value, 0.1, reason=_reason(rows, method, axis)
            )
            for axis, method, value in slopes
            if method in FLAT
        ],
        notes=[f"slope of {method} over {axis}: {value:.2f}" for axis, method, value in slopes],
        quick=quick,
        plot={"lines": "x"},
    )
