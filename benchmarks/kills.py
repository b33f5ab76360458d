"""The crash column: SIGKILL at a random moment of a save, reopen, compare. The state must be
iteration i or i + 1, exactly.

A child saves iterations 1, 2, 3, ... and says in shared memory which it began and which it
finished; the parent kills it after a random time. The next child loads what is there, compares it
with what an iteration is made of, and goes on from it. i is the last finished iteration. Only kills
in a save count. "older" is a whole state from before i; "torn" cannot be loaded or is no
iteration's state.

This tries the death of the process. What power failure leaves is not tried here: the class
power-safe rests on the calls made.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks import harness
from benchmarks.peers import WAYS, Pmstore, State, Way, in_domain
from pmstore.testing import shared_words

KILLS, KILLS_QUICK = 200, 10
QUICK_WAYS = (
    "np.savez, disk",
    "sqlite WAL, FULL",
    "lmdb, nosync + writemap",
    "np.memmap + flush",
    "pmstore process, in place",
    "pmstore process, copy in",
    "pmstore file, in place",
)
SLOW = {
    "zarr, disk": 48.0,
    "h5py + flush + fsync": 18.0,
    "torch.save, disk": 14.0,
    "torch.save + fsync + rename": 14.0,
}
"""Seconds that 200 kills take, about; of others 2 to 4."""
LEAST_KILLS = 20  # of a method, where the time is short
CASE = "SIGKILL in a save of 63 KB; times: open and load afterwards"
SHAPE = (10, 784)  # 63 KB, as KMeans on MNIST
RUNNING, TORN_STATE = 1, 2


class NotDeclared(Pmstore):
    """Arrays of the store that an algorithm writes by itself, as "living" ones: every page is
    noticed by its protection."""

    def save(self, state: State) -> None:
        with self.store.transaction():
            for k, a in self.arrays.items():
                a[...] = state[k]


NOT_DECLARED = (
    Way("pmstore process, living", harness.KILL, "memory", NotDeclared),
    Way("pmstore emulated, living", harness.KILL, "memory", in_domain(NotDeclared, "emulated")),
    Way("pmstore file, living", harness.POWER, "disk", in_domain(NotDeclared, "file")),
)


PHASE, FOUND, BEGUN, FINISHED, LOAD_NS = range(5)  # the words in which a child tells its parent


def state_of(i: int) -> State:
    """Every byte of it follows from i."""
    return {
        "centres": np.full(SHAPE, float(i)) + np.arange(SHAPE[1]),
        "iteration": np.full(1, i, np.int64),
        "inertia": np.full(1, 1.0 / (i + 1)),
    }


def iteration_of(state: State) -> int | None:
    """Whose state it is, or None."""
    try:
        i = int(state["iteration"][0])
        expected = state_of(i)
        same = state.keys() == expected.keys() and all(
            np.array_equal(state[k], a) for k, a in expected.items()
        )
    except (KeyError, IndexError, ZeroDivisionError, OverflowError):
        return None
    return i if same else None


def _child(way: Way, folder: Path, board: memoryview) -> None:
    start = time.perf_counter_ns()
    try:
        peer = way.make(folder, state_of(0))
        found = iteration_of(peer.load())
    except Exception:  # whatever a damaged file makes a peer raise
        found = None
    board[LOAD_NS] = time.perf_counter_ns() - start
    if found is None:
        board[PHASE] = TORN_STATE
        return
    board[FOUND] = board[BEGUN] = board[FINISHED] = found
    board[PHASE] = RUNNING
    i, state = found, state_of(found)
    while True:
        i += 1
        state["centres"] += 1  # the least work between two saves: most kills are to fall into one
        state["iteration"][0], state["inertia"][0] = i, 1.0 / (i + 1)
        board[BEGUN] = i
        peer.save(state)
        board[FINISHED] = i


def _fork(run: Callable[[], None]) -> int:
    with warnings.catch_warnings():
        # a library may have started a thread; the child does not use it
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    try:
        run()
    finally:
        os._exit(0)


def _wait(pid: int, until: Callable[[], bool]) -> None:
    """Until then, or until the child has ended by itself. It is not reaped: its number stays its
    own."""
    while not until() and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(50e-6)


def _fresh(way: Way, folder: Path) -> None:
    """Iteration 0, whole, made by a child: what a save is later killed over."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()

    def make() -> None:
        peer = way.make(folder, state_of(0))
        peer.save(state_of(0))
        peer.close()

    os.waitpid(_fork(make), 0)


def try_way(way: Way, kills: int, budget: harness.Budget | None = None) -> harness.Row:
    """Kills one method's saves, and counts what the next process found; fewer kills where the
    budget ends before."""
    budget = budget or harness.Budget()
    moment = random.Random(harness.SEED)
    outcomes: Counter[str] = Counter()
    loads: list[float] = []
    with harness.scratch(way.where) as outer:
        folder = outer / "state"
        _fresh(way, folder)
        last: tuple[int, int] | None = None  # finished, begun, of the child that was killed
        saving_seconds, between = 1e-3, 0
        while outcomes.total() < (kills if budget.left > 0 else min(kills, LEAST_KILLS)):
            board = shared_words(LOAD_NS + 1)
            pid = _fork(lambda board=board: _child(way, folder, board))  # type: ignore[misc]
            _wait(pid, lambda: board[PHASE] != 0)  # noqa: B023
            whole = board[PHASE] == RUNNING
            if last is not None:
                finished, begun = last
                found = board[FOUND]
                outcome = (
                    "torn" if not whole else "survived" if found in (finished, begun) else "older"
                )
                if begun > finished or outcome != "survived":
                    outcomes[outcome] += 1
                else:
                    between += 1  # not in a save, and rightly unharmed: does not count
                loads.append(board[LOAD_NS] / 1e3)
            if not whole:
                os.waitpid(pid, 0)
                _fresh(way, folder)
                last = None
                continue
            first = board[FOUND]
            start = time.perf_counter()
            _wait(pid, lambda: board[FINISHED] >= first + 2)  # noqa: B023
            saving_seconds = 0.5 * saving_seconds + 0.25 * (time.perf_counter() - start)
            until = time.perf_counter() + moment.random() * 3 * saving_seconds
            while time.perf_counter() < until:
                pass
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            last = board[FINISHED], board[BEGUN]
    tried = outcomes.total()
    extra = {
        "kills": float(tried),
        **{k: float(outcomes[k]) for k in ("survived", "older", "torn")},
    }
    extra["between saves, not counted"] = float(between)
    median = statistics.median(loads)
    return harness.Row(
        way.name,
        CASE,
        median,
        min(loads),
        max(loads),
        way.durability,
        outcomes["survived"] / tried,
        extra,
    )


def _answer(task: tuple[str, int, float]) -> harness.Row:
    """One method's row, in a process that no other has made heavy: each kill forks it. task: name,
    kills, end (monotonic)."""
    name, kills, ends = task
    way = next(way for way in (*WAYS.values(), *NOT_DECLARED) if way.name == name)
    why = harness.absent(way.needs)
    if not why:
        try:
            if way.needs:
                importlib.import_module(way.needs)  # once, so that children need not
            return try_way(way, kills, harness.Budget(ends - time.monotonic()))
        except Exception as error:  # whatever a peer raises
            why = f"failed: {harness.words_of(error)}"
    return harness.missing(name, CASE, way.durability, why)


def _tasks(ways: Sequence[Way], kills: int, budget: harness.Budget) -> list[tuple[str, int, float]]:
    """For `_answer`, the slow ones first. One may go on until all cores together could have done it
    and those before it."""
    seconds = {way: SLOW.get(way.name, 4.0 if way.where == "disk" else 2.5) for way in ways}
    total, before, tasks = sum(seconds.values()), 0.0, []
    for way in sorted(ways, key=lambda way: -seconds[way]):
        part = min(1.0, (before + (os.cpu_count() or 1) * seconds[way]) / total)
        tasks.append((way.name, kills, time.monotonic() + budget.left * part))
        before += seconds[way]
    return tasks


def main(quick: bool, budget: harness.Budget) -> None:
    ways = [WAYS[name] for name in QUICK_WAYS] if quick else [*WAYS.values(), *NOT_DECLARED]
    ways.sort(key=lambda way: not way.name.startswith("pmstore"))
    rows = harness.kept()
    tasks = _tasks(ways, KILLS_QUICK if quick else KILLS, budget)
    # a child starts most of the time, or waits
    with multiprocessing.get_context("spawn").Pool(maxtasksperchild=1) as pool:
        for row in pool.imap_unordered(_answer, tasks):
            rows.append(row)
            said = (
                f"{row.ratio:.1%} of {row.extra['kills']:.0f} survived"
                if row.measured
                else row.note
            )
            print(f"  {row.method}: {said} ({budget.left:.0f} s left)", flush=True)
    rows.sort(key=lambda row: [way.name for way in ways].index(row.method))
    notes = [
        f"{r.method}: {r.extra['kills']:.0f} kills, as its time was over"
        for r in rows
        if r.measured and r.extra["kills"] < KILLS
    ]
    harness.report(
        "kills",
        "Crash column: SIGKILL at a random moment of a save",
        rows,
        ratio_text="share of kills survived",
        targets=[
            harness.Target(f"{r.method}, share of kills survived", r.ratio or 0, 1, True)
            for r in rows
            if r.method.startswith("pmstore") and r.measured
        ],
        notes=[] if quick else notes,
        quick=quick,
        plot={"value": "ratio", "unit": "share of kills survived"},
    )
