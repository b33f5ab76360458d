"""What a checkpoint after every iteration costs: KMeans and Gaussian mixtures, the seed paper's
table with today's peers.

Every method saves each state of one and the same run, in turn, so that all see the same machine:
once after the others' work ("among other work": caches are full of other things, as in a program),
and at once some times more (warm). "Living" methods have the algorithm's own arrays in the store:
their time is that of the transaction around the update, the update included. "Slots: flip and
commit" leaves the update out, which the algorithm writes in any case and in slots is not written
twice.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pmstore
from benchmarks import algorithms, harness
from benchmarks.peers import LEFT_OUT, WAYS, Peer, State, Way

YARDSTICK = "np.savez, disk"
AMONG = "among other work: "
COLD_PREFIX = "cold: "
FILE_COSTS = (
    "beside the pages and the sync, which both have: every byte is checksummed; pages are made "
    "writable and protected again, 0.2 us each; what goes straight home and the record are two "
    "writes; in place the pre-image is kept in memory, and a thread writes the state a second "
    "time, home, while the next save goes on"
)
TWO_COPIES = (
    "an undo log copies twice, the pre-image and the new state, and compares both when the next "
    "transaction begins; that takes microseconds more when 63 KB have just gone through the caches"
)
LMDB_COPIES = (
    "lmdb copies the new state alone; an undo log also copies the pre-image, and compares both "
    "when the next transaction begins, as a program may write between two: three passes against one"
)
SWEPT = (
    "every k from 2 to 10 on digits and (KMeans) MNIST-5k; k = 10, or 2, on the large data sets: k "
    "times the width is the size of what is saved, and the data set but the time between two saves"
)
KMEANS_ITERATIONS, GMM_ITERATIONS, GMM_WIDE_ITERATIONS = 50, 10, 3
COMPRESSED_MOST_BYTES = 1 << 20  # compressing takes 30 ms a megabyte: above, it is left out


@dataclass(frozen=True)
class Case:
    """An algorithm on a data set, and which of its state is kept. rounds: states that are saved, at
    most. weight: of the time of the question, for all data sets' cases alike."""

    algorithm: type[algorithms.KMeans] | type[algorithms.Gmm]
    data_name: str
    k: int
    kind: str
    iterations: int
    rounds: int
    weight: float = 1.0

    def name(self, state: State) -> str:
        bytes_ = sum(a.nbytes for a in state.values())
        return f"{self.words()} ({harness.size_text(bytes_)})"

    def words(self) -> str:
        return f"{self.algorithm.__name__} {self.data_name} k={self.k}, state {self.kind}"


def _kmeans(data: str, k: int, kind: str, rounds: int = 30, weight: float = 1.0) -> Case:
    return Case(algorithms.KMeans, data, k, kind, KMEANS_ITERATIONS, rounds, weight)


def _gmm(
    data: str,
    k: int,
    kind: str,
    iterations: int = GMM_ITERATIONS,
    rounds: int = GMM_ITERATIONS,
    weight: float = 1.0,
) -> Case:
    return Case(algorithms.Gmm, data, k, kind, iterations, rounds, weight)


DATA: dict[str, Callable[[], Any]] = {
    "digits": algorithms.digits,
    "MNIST-5k": algorithms.mnist,
    "200,000 x 128": lambda: algorithms.synthetic(200_000, 128, harness.SEED),
    "60,000 x 784": lambda: algorithms.synthetic(60_000, 784, harness.SEED),
    "70,000 x 784": lambda: algorithms.synthetic(70_000, 784, harness.SEED),
}
QUICK = (_kmeans("digits", 10, "A", 12),)
FULL = (
    # what figures are aimed at has more time than its other states
    _kmeans("digits", 10, "A", weight=4),
    *(_kmeans("digits", 10, kind) for kind in "BC"),
    *(_gmm("digits", 10, kind) for kind in "ABC"),
    _kmeans("MNIST-5k", 10, "A", weight=4),
    *(_kmeans("MNIST-5k", 10, kind) for kind in "BC"),
    _gmm("MNIST-5k", 2, "A", GMM_WIDE_ITERATIONS, 10, 4),
    *(_gmm("MNIST-5k", 2, kind, GMM_WIDE_ITERATIONS, 3, 2) for kind in "BC"),
    _gmm("MNIST-5k", 10, "A", GMM_WIDE_ITERATIONS, 10, 6),
    *(_kmeans("200,000 x 128", 10, kind, 15, 1.5) for kind in "ABC"),
    _gmm("200,000 x 128", 10, "A", weight=6),
    _gmm("200,000 x 128", 10, "B", rounds=3, weight=3),
    _gmm("200,000 x 128", 10, "C", rounds=5, weight=6),
    _kmeans("60,000 x 784", 2, "A", 5),
    *(_kmeans("60,000 x 784", 10, kind, 10, 2) for kind in "ABC"),
    _gmm("60,000 x 784", 2, "A", GMM_WIDE_ITERATIONS, 3, 6),
    _gmm("60,000 x 784", 10, "A", GMM_WIDE_ITERATIONS, 1, 14),
    _kmeans("70,000 x 784", 10, "A", 10, 2),
)
SWEEP = (  # every k of the paper; last, as the others are what figures are aimed at
    *(_kmeans("digits", k, "A", 10, 0.5) for k in range(2, 10)),
    *(_gmm("digits", k, "A", rounds=5, weight=0.5) for k in range(2, 10)),
    *(_kmeans("MNIST-5k", k, "A", 5, 0.5) for k in range(2, 10)),
)
COLD = ((_kmeans("digits", 10, "A")), (_gmm("MNIST-5k", 2, "A")))


PLOTTED = (
    "KMeans digits k=10",
    "KMeans MNIST-5k k=10",
    "Gmm 200,000 x 128 k=10",
    "Gmm MNIST-5k k=2",
)


class Living:
    """The algorithm's arrays are the store's."""

    def __init__(self, folder: Path, state: State, domain: Any) -> None:
        size = (64 << 20) + 6 * sum(a.nbytes for a in state.values())
        self.store = pmstore.open(folder / "run.pm", size=size, domain=domain)
        self.state: State = {k: self.store.zeros(k, a.shape, a.dtype) for k, a in state.items()}
        self.writes = tuple(self.state.values())
        self.restart(state)

    def restart(self, state: State) -> None:
        for k, a in self.state.items():
            a[...] = state[k]
        self.store.commit()

    def publish(self, algorithm: algorithms.KMeans | algorithms.Gmm) -> float | None:
        with self.store.transaction(writes=self.writes):
            algorithm.publish(self.state)
        return None


class LivingInSlots:
    """The algorithm's arrays are slots: it writes the next state into the idle ones. commit_alone:
    the update is not timed."""

    def __init__(self, folder: Path, state: State, domain: Any, commit_alone: bool) -> None:
        size = (64 << 20) + 6 * sum(a.nbytes for a in state.values())
        self.store = pmstore.open(folder / "run.pm", size=size, domain=domain)
        self.slots = {k: self.store.slots(k, a.shape, a.dtype) for k, a in state.items()}
        self.commit_alone = commit_alone
        self.restart(state)

    def restart(self, state: State) -> None:
        for k, slots in self.slots.items():
            slots.current[...] = state[k]
        self.store.commit()

    def publish(self, algorithm: algorithms.KMeans | algorithms.Gmm) -> float | None:
        with self.store.transaction():
            now = {k: slots.current for k, slots in self.slots.items()}
            algorithm.publish(now, {k: slots.next for k, slots in self.slots.items()})
            start = time.perf_counter()
            for slots in self.slots.values():
                slots.flip()
        return time.perf_counter() - start if self.commit_alone else None


LIVING: dict[str, tuple[str, str, Callable[[Path, State], Living | LivingInSlots]]] = {
    "pmstore process, living": (harness.KILL, "memory", lambda f, s: Living(f, s, "process")),
    "pmstore process, living in slots": (
        harness.KILL,
        "memory",
        lambda f, s: LivingInSlots(f, s, "process", False),
    ),
    "pmstore process, slots: flip and commit": (
        harness.KILL,
        "memory",
        lambda f, s: LivingInSlots(f, s, "process", True),
    ),
    "pmstore emulated, living": (harness.KILL, "memory", lambda f, s: Living(f, s, "emulated")),
    "pmstore file, living": (harness.POWER, "disk", lambda f, s: Living(f, s, "file")),
}
"""Name to class of durability, place, maker."""


def _syncs(store: pmstore.Store) -> dict[str, float]:
    stats = store.stats()
    return {"commits": stats.commits, "syncs": stats.syncs}


def _nudge(state: State) -> None:
    """The least change of every number: a save of it is a save of something new."""
    for a in state.values():
        if a.dtype.kind == "f":
            np.nextafter(a, a.dtype.type(np.inf), out=a)
        else:
            a += 1


def _states(
    case: Case, data: Any
) -> Iterator[tuple[algorithms.KMeans | algorithms.Gmm, State, bool, float]]:
    """The algorithm after each computation, its state (not yet published), whether it has just
    (re)started, seconds it took."""
    for seed in range(harness.SEED, harness.SEED + 1000):
        algorithm = case.algorithm(data, case.k, seed)
        state = algorithm.start(case.kind)
        before: list[Any] = []
        for i in range(case.iterations):
            start = time.perf_counter()
            algorithm.compute(state)
            yield algorithm, state, i == 0, time.perf_counter() - start
            now = next(iter(state.values()))
            if before and np.array_equal(before[0], now):
                break  # converged: nothing changes any more
            before = [now.copy()]


def _run(case: Case, data: Any, budget: harness.Budget) -> list[harness.Row]:
    first = case.algorithm(data, case.k, harness.SEED).start(case.kind)
    total = sum(a.nbytes for a in first.values())
    wanted = [
        w for w in WAYS.values() if total <= COMPRESSED_MOST_BYTES or "compressed" not in w.name
    ]
    ways = [w for w in wanted if not harness.absent(w.needs)]
    failed: dict[str, str] = {}
    burst = 4 if total <= COMPRESSED_MOST_BYTES else 2
    times: dict[str, list[list[float]]] = {}
    durability = {w.name: w.durability for w in ways} | {
        "the update alone, in ordinary memory": harness.NONE
    }
    computed: list[float] = []
    with ExitStack() as stack:
        peers: list[tuple[Way, Peer]] = []
        for way in ways:
            try:
                peers.append(
                    (way, way.make(stack.enter_context(harness.scratch(way.where)), first))
                )
            except Exception as error:  # whatever a peer raises
                failed[way.name] = f"failed: {harness.words_of(error)}"
                continue
            stack.callback(_close, peers[-1][1])
        living: dict[str, Living | LivingInSlots] = {}
        for name, (survives, where, make) in LIVING.items():
            living[name] = make(stack.enter_context(harness.scratch(where)), first)
            stack.callback(living[name].store.close)
            durability[name] = survives
        stores = {w.name: p.store for w, p in peers if hasattr(p, "store")} | {
            n: one.store for n, one in living.items()
        }
        before: dict[str, dict[str, float]] = {}
        order = random.Random(harness.SEED)
        for i, (algorithm, state, fresh, seconds) in zip(
            budget.rounds(case.rounds, least=4 if total <= COMPRESSED_MOST_BYTES else 2, warm_up=1),
            _states(case, data),
            strict=False,
        ):
            if fresh:
                for one in living.values():
                    one.restart(state)
            if i == 0:
                before, times = {name: _syncs(store) for name, store in stores.items()}, {}
            computed.append(seconds)
            saves = list(_saves(algorithm, state, peers, living))
            order.shuffle(saves)
            for name, save, nudge in saves:
                if name in failed:
                    continue
                try:
                    times.setdefault(name, []).append(_timed(save, nudge, burst))
                except Exception as error:
                    failed[name] = f"failed: {harness.words_of(error)}"
        after = {name: _syncs(store) for name, store in stores.items()}
    compute_us = statistics.median(computed) * 1e6
    rows = []
    for name in durability:  # in the order of their definition
        if name in failed:
            rows.append(harness.missing(name, case.name(first), durability[name], failed[name]))
            continue
        rounds = times[name]
        among, warm = [r[0] for r in rounds], [t for r in rounds for t in r[1:]]
        extra = {"bytes": float(total)}
        if durability[name] == harness.POWER and name in stores:
            commits = after[name]["commits"] - before[name]["commits"]
            extra["syncs per commit"] = (after[name]["syncs"] - before[name]["syncs"]) / max(
                commits, 1
            )
        rows.append(harness.summarize(name, case.name(first), durability[name], warm, **extra))
        share = 100 * statistics.median(among) / (statistics.median(among) + compute_us)
        rows.append(
            harness.summarize(
                name,
                f"{AMONG}{case.name(first)}",
                durability[name],
                among,
                **{"share of run %": share},
            )
        )
    rows += [
        harness.missing(w.name, case.name(first), w.durability, harness.absent(w.needs))
        for w in wanted
        if harness.absent(w.needs)
    ]
    rows += [harness.missing(n, case.name(first), harness.POWER, w) for n, w in LEFT_OUT.items()]
    rows.sort(key=lambda r: r.case.startswith(AMONG))
    return harness.with_ratios(rows, YARDSTICK, speedup=True)


def _close(peer: Peer) -> None:
    """One that failed may fail in this too."""
    with suppress(Exception):
        peer.close()


def _timed(save: Callable[[], float | None], nudge: Callable[[], None], burst: int) -> list[float]:
    """The first is a save among other work, as in a program. The others follow at once: warm."""
    times = []
    for _ in range(burst):
        nudge()
        start = time.perf_counter()
        own = save()
        times.append((time.perf_counter() - start if own is None else own) * 1e6)
    return times


def _saves(
    algorithm: algorithms.KMeans | algorithms.Gmm,
    state: State,
    peers: Sequence[tuple[Way, Peer]],
    living: dict[str, Living | LivingInSlots],
) -> Iterator[tuple[str, Callable[[], float | None], Callable[[], None]]]:
    """Name, save, and what changes what is saved next. Afterwards the state is what was computed,
    but for the last bits."""
    changed = {k: a.copy() for k, a in state.items()}
    for way, peer in peers:
        yield way.name, lambda peer=peer: peer.save(changed), lambda: _nudge(changed)  # type: ignore[misc]
    for name, one in living.items():
        yield name, lambda one=one: one.publish(algorithm), algorithm.nudge  # type: ignore[misc]
    yield "the update alone, in ordinary memory", lambda: algorithm.publish(state), algorithm.nudge


def _cold(case: Case, data: Any, rounds: int, budget: harness.Budget) -> list[harness.Row]:
    """The first save of a process that has just opened or made what it saves to. Opening is not
    timed."""
    state = case.algorithm(data, case.k, harness.SEED).start(case.kind)

    def first(way: Way) -> float:
        with harness.scratch(way.where) as folder:
            peer = way.make(folder, state)
            start = time.perf_counter()
            peer.save(state)
            seconds = time.perf_counter() - start
            peer.close()
        return seconds

    ways = [w for w in WAYS.values() if "compressed" not in w.name and not harness.absent(w.needs)]
    methods = [harness.Method(w.name, w.durability, lambda w=w: first(w)) for w in ways]  # type: ignore[misc]
    rows = harness.measure(
        COLD_PREFIX + case.name(state), methods, rounds, warm_up=1, budget=budget
    )
    return harness.with_ratios(rows, YARDSTICK, speedup=True)


def _targets(rows: Sequence[harness.Row]) -> list[harness.Target]:
    """Of the warm cases that were run."""
    warm = [r for r in rows if not r.case.startswith((AMONG, COLD_PREFIX))]
    found = []
    for part, bound, lmdb, reason in (
        ("KMeans digits k=10, state A", 75, True, ""),
        ("KMeans MNIST-5k k=10, state A", 60, True, TWO_COPIES),
        ("Gmm 200,000 x 128 k=10, state A", 25, False, ""),
        ("Gmm MNIST-5k k=2, state A", 18, True, ""),
    ):
        here = [r for r in warm if r.case.startswith(part)]
        ours = [
            r
            for r in here
            if r.method.startswith("pmstore") and r.durability == harness.KILL and r.measured
        ]
        if not ours:
            continue
        best = min(ours, key=lambda r: r.median_us)
        found.append(
            harness.Target(
                f"{best.case}: {best.method}, times cheaper than {YARDSTICK}",
                best.ratio or 0,
                bound,
                True,
                reason,
            )
        )
        peer = harness.find(here, best.case, "lmdb, nosync + writemap")
        if lmdb and peer:
            found.append(
                harness.Target(
                    f"{best.case}: {best.method} / lmdb nosync + writemap",
                    best.median_us / peer.median_us,
                    1,
                    reason=reason and LMDB_COPIES,
                )
            )
    for case in dict.fromkeys(r.case for r in warm):
        ours = [
            r for r in warm if r.case == case and r.method.startswith("pmstore file") and r.measured
        ]
        if not ours:
            continue
        best = min(ours, key=lambda r: r.median_us)
        if durable := harness.find(warm, case, "torch.save + fsync + rename"):
            times = durable.median_us / best.median_us
            found.append(
                harness.Target(
                    f"{case}: {best.method}, times cheaper than {durable.method}",
                    times,
                    3,
                    True,
                    FILE_COSTS,
                )
            )
        if lmdb_sync := harness.find(warm, case, "lmdb, sync"):
            found.append(
                harness.Target(
                    f"{case}: {best.method} / lmdb sync",
                    best.median_us / lmdb_sync.median_us,
                    1,
                    reason=FILE_COSTS,
                )
            )
        found.append(
            harness.Target(
                f"{case}: {best.method}, syncs per commit", best.extra["syncs per commit"], 1
            )
        )
    return found


def main(quick: bool, budget: harness.Budget) -> None:
    if not harness.absent("torch"):  # its first use is not to be part of a save
        import torch

        torch.zeros(1)
    rows = harness.kept()
    notes = [
        f"savez_compressed is left out above {harness.size_text(COMPRESSED_MOST_BYTES)}",
        SWEPT,
    ]
    work: list[tuple[tuple[Case, bool], float]] = []  # by data sets: they are large
    for cases, cold in ((QUICK, COLD[:1]),) if quick else ((FULL, COLD), (SWEEP, ())):
        for name in DATA:
            work += [((case, False), case.weight) for case in cases if case.data_name == name]
            work += [((case, True), 2.0) for case in cold if case.data_name == name]
    data, data_name = None, ""
    for (case, cold_save), part in budget.deal(work):
        if budget.spent:
            words = (COLD_PREFIX if cold_save else "") + case.words()
            rows.append(harness.missing("all of them", words, harness.NONE, harness.OUT_OF_TIME))
            continue
        if case.data_name != data_name:
            data = None  # before the next is made
            data, data_name = DATA[case.data_name](), case.data_name
        print(
            f"  {'cold: ' if cold_save else ''}{case.words()} ({budget.left:.0f} s left)",
            flush=True,
        )
        rows += _cold(case, data, 3 if quick else 7, part) if cold_save else _run(case, data, part)
    plotted = [
        r.case
        for r in rows
        if any(f"{text}, state A" in r.case for text in PLOTTED)
        and not r.case.startswith((AMONG, COLD_PREFIX))
    ]
    harness.report(
        "iterations",
        "A checkpoint after every iteration: KMeans and Gaussian mixtures",
        rows,
        ratio_text=f"how many times cheaper than {YARDSTICK}",
        targets=_targets(rows),
        notes=notes,
        quick=quick,
        plot={"cases": list(dict.fromkeys(plotted))},
    )
