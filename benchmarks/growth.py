"""How the cost of a commit grows: with the bytes that changed, the store's size, the number of
objects. And of open.

A commit should be linear in the bytes that changed (slope 1) and not depend on the rest (slope 0).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import pmstore
from benchmarks import harness
from benchmarks.plots import slope

MB, GB = 1_000_000, 1_000_000_000
CHUNK = 1 << 18
SOURCE = 256 * MB


def _file_bytes(size: int) -> int:
    """Of a store with so many live bytes: twice that, for the log."""
    return int(2.05 * size) + (64 << 20)


def _open(folder: Path, size: int, domain: Any = "process") -> pmstore.Store:
    return pmstore.open(folder / f"{domain}.pm", size=size, domain=domain)


def _at(rows: list[harness.Row], x: float) -> list[harness.Row]:
    """Where on the x axis of the plot they are."""
    return [replace(r, extra={"x": float(x), **r.extra}) for r in rows]


def _dirty_bytes(
    sizes: list[int], rounds: int, domain: str, where: str, durability: str, budget: harness.Budget
) -> list[harness.Row]:
    """The whole of an array is overwritten, from at most 256 MB of source, and committed. Peer: the
    same in plain memory."""
    rows = []
    source = np.ones(min(max(sizes), SOURCE), np.uint8)
    with harness.scratch(where) as folder, _open(folder, _file_bytes(max(sizes)), domain) as store:
        large = store.zeros("a", max(sizes), "uint8")
        plain = np.zeros(min(max(sizes), SOURCE), np.uint8)
        store.commit()
        for size, part in budget.deal((size, 100 * MB + size) for size in sizes):
            case = f"changed bytes: {harness.size_text(size)}"
            parts = [(at, min(SOURCE, size - at)) for at in range(0, size, SOURCE)]

            def write(size: int = size, parts: list[tuple[int, int]] = parts) -> None:
                with store.transaction(writes=[large[:size]]):
                    source[0] += 1
                    for at, count in parts:
                        large[at : at + count] = source[:count]

            def copy(parts: list[tuple[int, int]] = parts) -> None:
                for _, count in parts:
                    plain[:count] = source[:count]

            methods = [harness.Method(f"pmstore {domain}", durability, write)]
            if domain == "process":
                methods.append(harness.Method("memcpy", harness.NONE, copy))
            rows += _at(
                harness.measure(
                    case,
                    methods,
                    rounds,
                    1 if size >= GB else 2,
                    budget=part,
                    least=2 if size >= GB else 5,
                ),
                size,
            )
        large = None
    return rows


def _store_size(sizes: list[int], rounds: int, budget: harness.Budget) -> list[harness.Row]:
    """100 KB of a state of growing size change; the rest is there."""
    rows = []
    for size, part in budget.deal((size, GB + size) for size in sizes):
        case = f"bytes in the store: {harness.size_text(size)}"
        with harness.scratch("memory") as folder:
            with _open(folder, _file_bytes(size)) as store:
                for i in range(10):
                    store.empty(f"layer{i}", size // 10, "uint8")
                a = store.zeros("a", 100_000, "uint8")
                store.commit()

                def write(store: pmstore.Store = store, a: Any = a) -> None:
                    with store.transaction(writes=[a]):
                        a += 1

                rows += _at(
                    harness.measure(
                        case,
                        [harness.Method("commit of 100 KB", harness.KILL, write)],
                        rounds,
                        budget=part,
                        least=10,
                    ),
                    size,
                )
                a = None
            again = harness.Method(
                "open + bind", harness.KILL, lambda f=folder, s=size: _reopen(f, s)
            )  # type: ignore[misc]
            rows += _at(harness.measure(case, [again], 9, budget=part, least=5), size)
    return rows


def _reopen(folder: Path, size: int) -> float:
    """Seconds; without the close."""
    start = time.perf_counter()
    store = pmstore.open(folder / "process.pm", "r+")
    arrays = [store[f"layer{i}"] for i in range(10)]
    assert sum(a.nbytes for a in arrays) == size // 10 * 10
    seconds = time.perf_counter() - start
    del arrays
    store.close()
    return seconds


def _objects(counts: list[int], rounds: int, budget: harness.Budget) -> list[harness.Row]:
    """A value is replaced and committed, among many others."""
    rows = []
    with (
        harness.scratch("memory") as folder,
        pmstore.open(folder / "run.pm", size=64 << 20, domain="process") as store,
    ):
        done = 0
        for count, part in budget.deal((count, 10_000 + count) for count in counts):
            start, before = time.perf_counter(), done
            while done < count:
                store[f"name{done}"] = done
                done += 1
                if done % 10_000 == 0:
                    store.commit()
            store.commit()
            inserted = (time.perf_counter() - start) * 1e6 / (done - before)
            case = f"objects in the store: {count:,}"
            rows.append(
                harness.Row(
                    "insert (mean)",
                    case,
                    inserted,
                    inserted,
                    inserted,
                    harness.KILL,
                    None,
                    {"x": float(count)},
                )
            )
            step = [0]

            def put(step: list[int] = step) -> None:
                step[0] += 1
                store["name5"] = step[0]
                store.commit()

            methods = [
                harness.Method("put + commit", harness.KILL, put),
                harness.Method("get", harness.KILL, lambda: store["name7"] and None),
            ]
            rows += _at(harness.measure(case, methods, 20 * rounds, budget=part, least=20), count)
    return rows


def _dirty_share(size: int, rounds: int, budget: harness.Budget) -> list[harness.Row]:
    """Some chunks of 256 KiB of a state change a number each, undeclared: every chunk faults
    once."""
    rows = []
    with harness.scratch("memory") as folder, _open(folder, _file_bytes(size)) as store:
        a = store.zeros("a", size, "uint8")
        store.commit()
        chunks = size // CHUNK
        for percent, part in budget.deal(
            (percent, percent + 10) for percent in (1, 3, 10, 30, 100)
        ):
            chosen = (
                np.unique(np.linspace(0, chunks - 1, max(1, chunks * percent // 100)).astype(int))
                * CHUNK
            )

            def write(chosen: Any = chosen) -> None:
                with store.transaction():
                    a[chosen] += 1

            case = f"changed chunks (of {harness.size_text(size)}): {percent} %"
            rows += _at(
                harness.measure(
                    case,
                    [harness.Method("pmstore process, undeclared", harness.KILL, write)],
                    rounds,
                    budget=part,
                ),
                len(chosen),
            )
        a = None
    return rows


def _slopes(rows: list[harness.Row]) -> list[tuple[str, str, float]]:
    """Group of cases, method, log-log slope."""
    found = []
    for group in dict.fromkeys(r.case.partition(":")[0] for r in rows):
        here = [r for r in rows if r.case.startswith(group + ":")]
        for method in dict.fromkeys(r.method for r in here):
            points = [
                (r.extra["x"], r.median_us) for r in here if r.method == method and r.measured
            ]
            if len(points) > 1:
                found.append((group, method, slope(points)))
    return found


def main(quick: bool, budget: harness.Budget) -> None:
    room = harness.room_bytes("memory", 0.85)
    asked = [1 * MB, 10 * MB] if quick else [1 * MB, 10 * MB, 100 * MB, GB, 4 * GB, 8 * GB]
    fitting = [s for s in asked if _file_bytes(s) + 2 * SOURCE < room]
    rounds = 5 if quick else 15
    small = [100_000, *fitting]
    rows = harness.kept()
    parts: list[tuple[Callable[[harness.Budget], list[harness.Row]], float]] = [
        (lambda b: _dirty_bytes(small, rounds, "process", "memory", harness.KILL, b), 10),
        (
            lambda b: _dirty_bytes(
                [s for s in small if s <= 100 * MB], rounds, "file", "disk", harness.POWER, b
            ),
            2,
        ),
        (lambda b: _dirty_share((16 if quick else 256) << 20, rounds, b), 1),
        (lambda b: _store_size(fitting, 4 * rounds, b), 5),
        (lambda b: _objects([10, 1000] if quick else [10, 1000, 100_000, 1_000_000], rounds, b), 4),
    ]
    for run, part in budget.deal(parts):
        rows += run(part)
        print(f"  {rows[-1].case.partition(':')[0]}: done ({budget.left:.0f} s left)", flush=True)
    slopes = _slopes(rows)
    notes = [f"slope of {method} over {group}: {value:.2f}" for group, method, value in slopes]
    rows += [
        harness.missing(
            "pmstore process", f"{what}: {harness.size_text(s)}", harness.KILL, harness.NO_MEMORY
        )
        for what in ("changed bytes", "bytes in the store")
        for s in asked
        if s not in fitting
    ]
    cases = list(dict.fromkeys(r.case for r in rows))  # of one case the rows of all domains
    rows.sort(
        key=lambda r: (
            [g for g, _, _ in slopes].index(r.case.partition(":")[0]),
            cases.index(r.case),
        )
    )
    # caches: no copy is linear
    plain = max(1, *(value for _, method, value in slopes if method == "memcpy"))
    targets = [
        harness.Target(f"slope of {method} over {group}", value, bound)
        for group, method, value in slopes
        for g, m, bound in (
            ("changed bytes", "pmstore process", plain + 0.1),
            ("bytes in the store", "commit of 100 KB", 0.1),
            ("bytes in the store", "open + bind", 0.1),
            ("objects in the store", "put + commit", 0.1),
        )
        if (group, method) == (g, m)
    ]
    opened = [
        r for r in rows if r.method == "open + bind" and r.measured and r.extra["x"] >= 4 * GB
    ]
    targets += [harness.Target(f"open + bind, {r.case}, ms", r.median_us / 1e3, 20) for r in opened]
    harness.report(
        "growth",
        "Cost as work grows",
        rows,
        ratio_text="none",
        targets=targets,
        notes=notes,
        quick=quick,
        plot={"lines": "x"},
    )
