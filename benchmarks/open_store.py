"""Opening a large store: 8 GiB, 10,000 arrays; and what binding them reads."""

from __future__ import annotations

import shutil
import time

import pmstore
from benchmarks.harness import Method, measure, report, scratch

ARRAYS = 10_000


def _build(path: str, size: str, arrays: int) -> None:
    with pmstore.open(path, size=size, domain="process") as store:
        each = int(store.stats().data_bytes * 0.9 / arrays)
        for i in range(arrays):
            store.empty(f"layer{i}", each, "uint8")


def main(quick: bool = False) -> None:
    with scratch("memory") as folder:
        size = "8GiB"
        if quick or shutil.disk_usage(folder).free < (10 << 30):
            size = "1GiB"
        path = str(folder / "large")
        _build(path, size, ARRAYS)

        def opened() -> float:
            start = time.perf_counter()
            store = pmstore.open(path, "r+")
            seconds = time.perf_counter() - start
            store.close()
            return seconds

        def bound() -> float:
            store = pmstore.open(path, "r+")
            start = time.perf_counter()
            arrays = [store[name] for name in store]
            seconds = time.perf_counter() - start
            assert len(arrays) == ARRAYS
            del arrays
            store.close()
            return seconds

        methods = [Method("open", "process", opened), Method("bind all arrays", "process", bound)]
        rows = measure(f"{size}, {ARRAYS} arrays", methods, 5 if quick else 15, "open", 1)
    report("open_store", "Opening a large store (target: open <= 20 ms)", rows)
