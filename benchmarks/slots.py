"""A commit without a copy: optimizers and EM steps that write the other slot, beside a memcpy of
the state and the undo log.

The optimizer's step alone is timed, on gradients that do not change: forward and backward would
hide what is asked. Floor: a memcpy of the state by all cores. Each way has a training of its own,
all take turns, and what a way adds is taken against torch's fused step of the same round.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import pmstore
import pmstore.torch
from benchmarks import harness

MEMCPY, FUSED, DEFAULT = "memcpy of the state", "torch fused", "torch default"
IN_PLACE, SLOTS, COMMIT, UNDO = (
    "pmstore, in place",
    "pmstore, slots + commit",
    "  of it the commit",
    "torch fused + undo log",
)
AFTER = "pmstore, slots + commit right after torch"
FLIP, COLD = "pmstore process, flip and commit", "  the same block without a flip"
FLIP_AFTER = "pmstore process, flip and commit right after torch"
CACHES = (
    "a new state of megabytes has just been written: every line of Python and of the engine comes "
    "from memory (see the row with the same block without a flip)"
)
INTERRUPTS = (
    "where another thread of the process runs, the change of the slot's protection interrupts its "
    "core, which a virtual machine makes dear: torch's worker thread spins for 5 to 10 ms after "
    f"its memcpy (see the row {FLIP!r})"
)
BOUND = (
    "the step reads the state and the gradients and writes the state in less time than a memcpy of "
    "the state takes, and torch's own fused step is hardly five times faster than its default "
    "here: both do what this machine's memory does"
)
FIRST = (
    "the slots take twice the state. The rest does not grow with it: the first part of the file, "
    "10 MB of it for other data, and in domain file the journal's first ring, 8 MiB"
)
SPINS = (
    "torch's worker thread spins after each of its steps (5 to 10 ms here; not with "
    "OMP_WAIT_POLICY=passive), and whoever computes next shares that core with it: see the row "
    f"{AFTER!r}"
)
LOWDIFF = (
    "a mark of others, not measured here: LowDiff states less than 3.1 % of the running time for a "
    "checkpoint at each iteration (arXiv 2509.04084v1; differentials of compressed gradients, "
    "persisted behind the step, on GPUs). Of the same kind is what a commit adds to a step in "
    "`training` and `frameworks`"
)


# ---- optimizers ----


def _gradients(parameters: int) -> list[torch.Tensor]:
    """Square layers and their biases."""
    width = 2048 if parameters > 2e7 else 1024
    layers = max(1, round(parameters / (width * width + width)))
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(layers):
        made += [
            torch.randn(width, width, generator=generator),
            torch.randn(width, generator=generator),
        ]
    return made


def _parameters(gradients: list[torch.Tensor]) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.full_like(g, 0.5)) for g in gradients]
    for parameter, gradient in zip(made, gradients, strict=True):
        parameter.grad = gradient
    return made


class Attached:
    """An optimizer whose parameters and state are in a store; a commit after each step."""

    def __init__(
        self, folder: Path, domain: Any, gradients: list[torch.Tensor], make: Callable[[Any], Any]
    ) -> None:
        state = 12 * sum(g.numel() for g in gradients)
        self.store = pmstore.open(folder / "run.pm", size=(16 << 20) + state // 8, domain=domain)
        parameters = _parameters(gradients)
        for parameter in parameters:
            parameter.grad = None  # those that are there at `attach` would be kept, too
        self.optimizer = make(parameters)
        self.run = pmstore.torch.attach(self.store, optimizer=self.optimizer)
        with self.run.next_step():  # those that are there before the first step are kept, too
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()
        self.path = folder / "run.pm"
        self.commits: list[float] = []

    def step(self) -> None:
        with self.run.next_step():
            self.optimizer.step()
        start = time.perf_counter()
        self.run.commit()
        self.commits.append((time.perf_counter() - start) * 1e6)

    def on_medium(self) -> int:
        """Bytes that the file takes there; its length counts the holes of the log, too."""
        return self.path.stat().st_blocks * 512

    def written(self) -> int:
        """Once what is on its way home is there: a thread writes it while the program goes on."""
        seen = -1
        while seen != (seen := self._written()):
            time.sleep(0.2)
        return seen

    def _written(self) -> int:
        stats = self.store.stats()
        return stats.journal_bytes + stats.home_bytes + stats.straight_bytes


def _case(
    parameters: int, domain: Any, rounds: int, *, everything: bool, budget: harness.Budget
) -> list[harness.Row]:
    """One domain: the ways of taking a step, in turn. Of ours those follow each other that are
    compared between domains: right after one of torch's, a step shares a core with torch's worker
    thread, which spins for a while."""
    gradients = _gradients(parameters)
    state = 12 * sum(g.numel() for g in gradients)
    source, target = torch.ones(state // 4), torch.ones(state // 4)
    survives = harness.POWER if domain == "file" else harness.KILL
    with ExitStack() as stack:
        place = "disk" if domain == "file" else "memory"

        def attached(make: Callable[[Any], Any]) -> Attached:
            one = Attached(stack.enter_context(harness.scratch(place)), domain, gradients, make)
            stack.callback(one.store.close)
            return one

        plain = _parameters(gradients)
        ways: dict[str, tuple[str, Callable[[], object]]] = {
            MEMCPY: (harness.NONE, lambda: target.copy_(source))
        }
        if everything:
            ways[DEFAULT] = harness.NONE, torch.optim.AdamW(plain, foreach=False).step
            ways["torch foreach"] = harness.NONE, torch.optim.AdamW(plain, foreach=True).step
        ways[FUSED] = harness.NONE, torch.optim.AdamW(plain, fused=True).step
        ours = attached(pmstore.torch.optim.AdamW)

        def right_after() -> None:
            ours.step()
            ours.commits.pop()

        if domain != "file":
            ways[AFTER] = survives, right_after
            ways[IN_PLACE] = harness.NONE, pmstore.torch.optim.AdamW(_parameters(gradients)).step
        ways[SLOTS] = survives, ours.step
        undo = attached(lambda p: torch.optim.AdamW(p, fused=True))
        ways[UNDO] = survives, undo.step
        times: dict[str, list[float]] = {name: [] for name in ways}
        # a first step makes torch's state; the second touches the other slot's pages first
        warm_up = 3
        done = 0
        for i in budget.rounds(rounds, warm_up=warm_up):
            done = i + 1
            if i == 0:
                times = {name: [] for name in ways}
                ours.commits.clear()
                before = {id(one): one.written() for one in (ours, undo) if domain == "file"}
            for name, (_, run) in ways.items():
                times[name].append(harness.microseconds(run))
        case = f"AdamW, {harness.size_text(state)} of state, {domain}"
        copy = statistics.median(times[MEMCPY])
        rows = []
        for name, (durability, _) in ways.items():
            row = harness.summarize(name, case, durability, times[name])
            added = statistics.median(
                t - base for t, base in zip(times[name], times[FUSED], strict=True)
            )
            extra = {} if name == MEMCPY else {"added / memcpy": added / copy}
            one = {SLOTS: ours, UNDO: undo}.get(name)
            if one is not None:
                extra["on medium / state"] = one.on_medium() / state
                if domain == "file":
                    extra["written / state"] = (one.written() - before[id(one)]) / done / state
            rows.append(replace(row, ratio=row.median_us / copy, extra=extra))
            if name == SLOTS:
                alone = harness.summarize(COMMIT, case, durability, ours.commits)
                rows.append(replace(alone, ratio=alone.median_us / copy))
        return rows


# ---- states of iterative algorithms ----


class Flipped:
    """A state of several arrays in slots, as KMeans or EM keeps it; the next version is written
    before the clock runs."""

    def __init__(self, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        self.store = pmstore.open(folder / "run.pm", size="16MiB", domain="process")
        self.slots = [self.store.slots(name, shape, "float64") for name, shape in shapes.items()]
        self.store.commit()
        self.value = 0.0

    def update(self) -> None:
        self.value += 1
        for one in self.slots:
            one.next[...] = self.value

    def commit(self) -> float:
        with self.store.transaction():
            self.update()
            start = time.perf_counter()
            for one in self.slots:
                one.flip()
        return time.perf_counter() - start

    def nothing(self) -> float:
        """The same writes and no flip: what leaving a block costs when they have filled the
        caches."""
        with self.store.transaction():
            self.update()
            start = time.perf_counter()
        return time.perf_counter() - start


def _states(quick: bool) -> dict[str, dict[str, tuple[int, ...]]]:
    """Centres and inertia of KMeans; weights, means, covariances and likelihood of a Gaussian
    mixture."""
    kmeans = lambda k, width: {"centres": (k, width), "inertia": (1,)}  # noqa: E731
    gmm = lambda k, width: {  # noqa: E731
        "covariances": (k, width, width),
        "means": (k, width),
        "weights": (k,),
        "likelihood": (1,),
    }
    states = {"KMeans, 4.9 MB": kmeans(780, 784)}
    if not quick:
        states |= {
            "GMM, 4.9 MB": gmm(1, 784),
            "KMeans, 24.6 MB": kmeans(3920, 784),
            "GMM, 24.6 MB": gmm(5, 784),
        }
    return states


def _flips(
    title: str, shapes: dict[str, tuple[int, ...]], rounds: int, budget: harness.Budget
) -> list[harness.Row]:
    count = sum(int(np.prod(shape)) for shape in shapes.values())
    source, target = torch.ones(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
    halves = [np.ones(count), np.ones(count)]
    numpy_source = np.ones(count)
    with harness.scratch("memory") as folder, harness.scratch("memory") as other:
        slots = Flipped(folder, shapes)
        store = pmstore.open(other / "run.pm", size=(16 << 20) + 4 * 8 * count, domain="process")
        arrays = [store.zeros(name, shape) for name, shape in shapes.items()]
        store.commit()
        turn = [0]

        def memcpy() -> None:
            target.copy_(source)

        def undo() -> None:
            turn[0] += 1
            with store.transaction(writes=arrays):
                for one in arrays:
                    one[...] = turn[0]

        def copy_and_flip() -> None:
            turn[0] ^= 1
            np.copyto(halves[turn[0] & 1], numpy_source)

        alone = [  # nothing else of the process runs, as in an algorithm in numpy
            harness.Method("memcpy into the other of two, one core", harness.NONE, copy_and_flip),
            harness.Method(FLIP, harness.KILL, slots.commit),
            harness.Method(COLD, harness.NONE, slots.nothing),
            harness.Method("pmstore process, undo log: write and commit", harness.KILL, undo),
        ]
        beside = [
            harness.Method(MEMCPY, harness.NONE, memcpy),
            harness.Method(FLIP_AFTER, harness.KILL, slots.commit),
        ]
        rows: list[harness.Row] = []
        for methods, part in budget.deal(((alone, 2), (beside, 1))):
            rows += harness.measure(title, methods, rounds, warm_up=5, budget=part)
        slots.store.close()
        store.close()
    base = harness.find(rows, title, MEMCPY)
    assert base is not None
    return [replace(row, ratio=row.median_us / base.median_us) for row in rows]


# ---- all of it ----


def _targets(rows: list[harness.Row]) -> list[harness.Target]:
    found = []
    for case in dict.fromkeys(row.case for row in rows):
        ours = harness.find(rows, case, SLOTS)
        for name, why in ((FLIP, CACHES), (FLIP_AFTER, INTERRUPTS)):
            flip = harness.find(rows, case, name)
            if flip is not None:
                words = name.removeprefix("pmstore process, ")
                found.append(harness.Target(f"{case}: {words}, us", flip.median_us, 20, reason=why))
        if ours is None:
            continue
        medium = ours.extra["on medium / state"]
        found.append(
            harness.Target(f"{case}: file on the medium / state", medium, 2.3, reason=FIRST)
        )
        if case.endswith("file"):
            found.append(
                harness.Target(
                    f"{case}: bytes written over the state's", ours.extra["written / state"], 1.05
                )
            )
            continue
        bound = 0.15 if case.endswith("process") else 0.4
        found.append(
            harness.Target(
                f"{case}: added over {FUSED}, in memcpys", ours.extra["added / memcpy"], bound
            )
        )
        alone, fused, default = (
            harness.find(rows, case, name) for name in (IN_PLACE, FUSED, DEFAULT)
        )
        commit = harness.find(rows, case, COMMIT)
        assert fused is not None
        assert commit is not None
        step = ours.median_us - commit.median_us
        words = f"{case}: the step into the other slot over {FUSED}"
        found.append(harness.Target(words, step / fused.median_us, 1.15, reason=SPINS))
        if alone is not None:
            found.append(
                harness.Target(
                    f"{case}: {IN_PLACE} over {FUSED}", alone.median_us / fused.median_us, 1.15
                )
            )
        if default is not None:
            found.append(
                harness.Target(
                    f"{case}: {DEFAULT} over the step",
                    default.median_us / step,
                    5,
                    at_least=True,
                    reason=BOUND,
                )
            )
    return found


def main(quick: bool, budget: harness.Budget) -> None:
    rows = harness.kept()
    cores = f"torch computes with {torch.get_num_threads()} of {os.cpu_count()} cores"
    notes = [cores, SPINS, LOWDIFF]
    flips, steps = (part for _, part in budget.deal((("flips", 1), ("steps", 4))))
    for (title, shapes), part in flips.deal((one, 1) for one in _states(quick).items()):
        rows += _flips(title, shapes, 50 if quick else 300, part)
    parameters = 3_000_000 if quick else 37_700_000
    for (domain, count, rounds), part in steps.deal(
        (
            (("process", parameters, 5 if quick else 15), 4),
            (("emulated", parameters, 5 if quick else 15), 3),
            (("file", 3_000_000, 3 if quick else 6), 1),
        )
    ):
        why = (
            harness.OUT_OF_TIME
            if budget.spent
            else harness.NO_MEMORY
            if 12 * 14 * count > harness.room_bytes("memory", 0.9)
            else ""
        )
        if why:
            rows.append(
                harness.missing(
                    "all of them",
                    f"AdamW, {harness.size_text(12 * count)} of state, {domain}",
                    harness.NONE,
                    why,
                )
            )
            continue
        rows += _case(count, domain, rounds, everything=domain == "process", budget=part)
        gc.collect()
    harness.report(
        "slots",
        "A commit without a copy: slots",
        rows,
        ratio_text=f"{MEMCPY} by all cores",
        targets=_targets(rows),
        notes=notes,
        quick=quick,
        plot={
            "cases": [
                c
                for c in dict.fromkeys(r.case for r in rows)
                if c.startswith(("KMeans, 4", "AdamW"))
            ]
        },
    )
