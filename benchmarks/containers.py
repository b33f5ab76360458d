"""Groups and lists of a million: insert, look up, list, open again. A dict and a list in memory are
the floor of the language.

Targets: insert at most 3.5 us amortised, look up at most 2 us from Python, open at most 50 ms,
    listing streams.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pmstore
from benchmarks.harness import (
    KILL,
    NONE,
    Budget,
    Row,
    Target,
    find,
    report,
    scratch,
    summarize,
    with_ratios,
)

LOOKUPS = 100_000
RANDOM = (
    "names and places are random among a million: directory, block and description are cache "
    "misses each, as a dict's own look-up is; what is left is the call from Python and the "
    "decoding of the value"
)
WRITES = (
    "a name, its value and the index are three blocks, each logged before it changes; the rest is "
    "the call from Python"
)
COMMIT_EVERY = 10_000


def _each(
    run: Callable[[Any], Any], over: Iterable[Any], count: int, commit: Callable[[], None]
) -> float:
    """Microseconds for one, with a commit now and then."""
    start = time.perf_counter()
    for i, one in enumerate(over):
        run(one)
        if i % COMMIT_EVERY == COMMIT_EVERY - 1:
            commit()
    commit()
    return (time.perf_counter() - start) * 1e6 / count


def _peak_bytes(iterable: Iterable[Any]) -> int:
    tracemalloc.start()
    for _ in iterable:
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def _steps(mapping: Any, sequence: Any, count: int, commit: Callable[[], None]) -> dict[str, float]:
    """The same for a store and for Python's own."""
    rng = random.Random(1)
    names = [f"name{i}" for i in range(count)]
    some, places = rng.choices(names, k=LOOKUPS), [rng.randrange(count) for _ in range(LOOKUPS)]
    return {
        "group: insert": _each(lambda name: mapping.__setitem__(name, 1), names, count, commit),
        "group: look up": _each(mapping.__getitem__, some, LOOKUPS, lambda: None),
        "group: list a name": _each(lambda name: None, mapping, count, lambda: None),
        "list: append": _each(sequence.append, range(count), count, commit),
        "list: look up": _each(sequence.__getitem__, places, LOOKUPS, lambda: None),
        "list: iterate": _each(lambda item: None, sequence, count, lambda: None),
        "list: insert anywhere": _each(
            lambda at: sequence.insert(at, 0), places[:2000], 2000, commit
        ),
        "list: delete anywhere": _each(sequence.__delitem__, places[:2000], 2000, commit),
    }


def _open(path: Path, rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        with pmstore.open(path, "r+") as store:
            assert store["group/name7"] == 1
            assert store["items"][5] is not None
            times.append((time.perf_counter() - start) * 1e6)
    return times


def main(quick: bool, budget: Budget) -> None:
    count = 20_000 if quick else 1_000_000
    times: dict[str, dict[str, list[float]]] = {"pmstore": {}, "dict, list": {}}
    opens: list[float] = []
    for _ in budget.rounds(1 if quick else 2, least=1):
        with scratch("memory") as folder:
            with pmstore.open(folder / "run.pm", size="64MiB") as store:
                found = {
                    "pmstore": _steps(
                        store.group("group"), store.list("items"), count, store.commit
                    )
                }
                peaks = _peak_bytes(store["group"]), _peak_bytes(store["items"])
                bytes_each = store.stats().used_bytes / (2 * count)
            opens += _open(folder / "run.pm", 5)
        found["dict, list"] = _steps({}, [], count, lambda: None)
        for method, steps in found.items():
            for case, us in steps.items():
                times[method].setdefault(case, []).append(us)
    rows = [
        summarize(method, case, KILL if method == "pmstore" else NONE, times[method][case])
        for case in times["pmstore"]
        for method in times
    ]
    rows = with_ratios(rows, "dict, list")
    rows.append(summarize("pmstore", "open", KILL, opens, bytes_each=bytes_each))

    def median_us(case: str) -> float:
        row = find(rows, case, "pmstore")
        assert isinstance(row, Row)
        return row.median_us

    report(
        "containers",
        f"Groups and lists of {count:,}",
        rows,
        ratio_text="time over that of a dict or a list in memory",
        targets=[
            Target("insert into a group, us", median_us("group: insert"), 3.5, reason=WRITES),
            Target("look up in a group, us", median_us("group: look up"), 2, reason=RANDOM),
            Target("append to a list, us", median_us("list: append"), 3.5, reason=WRITES),
            Target("look up in a list, us", median_us("list: look up"), 2, reason=RANDOM),
            Target("open, ms", median_us("open") / 1000, 50),
            Target("memory of listing names, KB", peaks[0] / 1000, 500),
            Target("memory of iterating a list, KB", peaks[1] / 1000, 500),
        ],
        quick=quick,
    )
