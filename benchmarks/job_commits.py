"""What global commits add to a training step: two ranks over gloo, DDP, a commit on every step.

Each way trains a model of its own in the same two processes; they take turns in blocks of steps.
*Added* is what the program waits for beside the commit itself, timed where it waits:

  global commits    the job's part of `run.commit`: the record, the start of the ticket, the wait
                    for the one before
  a blocking all-reduce of 128 bytes after each commit: what it costs to agree at once
  two-phase commit  the commit (prepare: durable at each rank), a blocking vote, and one more
                    durable commit that notes what was decided
"""

from __future__ import annotations

import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import harness

ALONE, JOB = "commit at each rank alone", "global commits"
REDUCE, TWO_PHASE = "and a blocking all-reduce", "two-phase commit"
ORDER = (ALONE, JOB, REDUCE, TWO_PHASE)
RANKS = 2
BLOCK = 5
"""Steps of a way in a row. The first of them is not counted: others were at work before it."""
WIDTH, BATCH, LAYERS = 256, 1024, 4
ADDED, STEP, COMMIT, COMPUTE = "added to a step", "step", "commit", "forward and backward"
PARTS = ("write", "settle", "begin_ticket")
"""Methods of the job's membership: the record, the wait, the start of a ticket."""
COUNTED = 20  # commits
NOT_BLOCKED = (
    "the wait for the ticket is over before it begins; what is left is Python and gloo's "
    "start of an all-reduce, whose thread has no core where both compute"
)


class Timed:
    """Adds up the time in some methods of an object. What one calls of the others is its own."""

    def __init__(self, target: Any, *names: str) -> None:
        self._seconds = dict.fromkeys(names, 0.0)
        self._depth = 0
        for name in names:
            setattr(target, name, self._timed(name, getattr(target, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            self._depth += 1
            start = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._seconds[name] += time.perf_counter() - start

        return timed

    def take(self) -> dict[str, float]:
        taken = self._seconds
        self._seconds = dict.fromkeys(taken, 0.0)
        return taken


class Way:
    """One way to commit, with a model and a store of its own, in one rank."""

    def __init__(self, name: str, folder: Path, rank: int, domain: str, stack: ExitStack) -> None:
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        import pmstore
        import pmstore.torch

        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.model = DistributedDataParallel(nn.Sequential(*layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, foreach=True)
        self.batch = torch.randn(BATCH, WIDTH)
        path = folder / f"{ORDER.index(name)}-{domain}-{rank}.pm"
        self.store = stack.enter_context(pmstore.open(path, size=64 << 20, domain=domain))  # type: ignore[arg-type]
        self.run = pmstore.torch.attach(
            self.store,
            model=self.model,
            optimizer=self.optimizer,
            job=pmstore.torch.Job(timeout=60) if name == JOB else None,
        )
        self._clock: Timed | None = None
        self._after: Callable[[], None] | None = None
        if name == JOB:
            self._clock = Timed(self.run._steps.job, *PARTS)
        if name in (REDUCE, TWO_PHASE):
            group = dist.new_group(backend="gloo")
            vote = torch.zeros(16, dtype=torch.int64)

            def agree() -> None:
                dist.all_reduce(vote, dist.ReduceOp.MIN, group)

            self._after = agree
        if name == TWO_PHASE:
            decided = self.store.zeros("decided", (1,), "int64")
            self.store.commit()

            def decide() -> None:
                agree()
                decided[0] = self.run.step
                self.store.commit()

            self._after = decide

    def step(self) -> dict[str, float]:
        """Seconds."""
        start = time.perf_counter()
        with self.run.next_step():
            self.optimizer.zero_grad(set_to_none=False)
            self.model(self.batch).square().mean().backward()
            computed = time.perf_counter()
            self.optimizer.step()
        updated = time.perf_counter()
        self.run.commit()
        committed = time.perf_counter()
        if self._after is not None:
            self._after()
        end = time.perf_counter()
        parts = self._clock.take() if self._clock is not None else {}
        return {
            **parts,
            ADDED: sum(parts.values()) or end - committed,
            STEP: end - start,
            COMMIT: end - updated,
            COMPUTE: computed - start,
        }

    def durable(self) -> tuple[int, int]:
        """Fences and syncs so far."""
        stats = self.store.stats()
        return stats.fences, stats.syncs


def rank(number: int, folder: str, domain: str, rounds: int, seconds: float) -> None:
    """One rank; leaves what it measured beside the stores."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "this process is rank", RuntimeWarning)  # ALONE is meant
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet-{domain}", rank=number, world_size=RANKS
    )
    ends = time.monotonic() + seconds
    found: dict[str, Any] = {name: [] for name in ORDER}
    with ExitStack() as stack:
        ways = {name: Way(name, Path(folder), number, domain, stack) for name in ORDER}
        for i in range(-1, rounds):
            late = torch.tensor([int(time.monotonic() > ends and i >= 3)])
            dist.all_reduce(late)
            if late:
                break
            turn = ORDER[i % len(ORDER) :] + ORDER[: i % len(ORDER)]
            for name in turn:
                measured = [ways[name].step() for _ in range(BLOCK)][1:]
                if i >= 0:
                    found[name] += measured
        counted = {}
        for name, way in ways.items():
            before = way.durable()
            for _ in range(COUNTED):
                way.step()
            counted[name] = [
                (after - one) / COUNTED for after, one in zip(way.durable(), before, strict=True)
            ]
    found["counted"] = counted
    Path(folder, f"{domain}-{number}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# ---- in the parent ----


def _measure(domain: str, where: str, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """What each rank measured. Raises: RuntimeError."""
    with harness.scratch(where) as folder:
        rest = f"{str(folder)!r}, {domain!r}, {rounds}, {seconds}"
        main = "from benchmarks.job_commits import rank; rank"
        codes = [f"{main}({number}, {rest})" for number in range(RANKS)]
        harness.run_ranks(codes, 3 * seconds + 120)
        return [json.loads((folder / f"{domain}-{n}.json").read_text()) for n in range(RANKS)]


def _rows(domain: str, durability: str, ranks: list[dict[str, Any]]) -> list[harness.Row]:
    """Of both ranks together. Ratios: of what is added, to the all-reduce's; else to the commit of
    a rank alone."""
    rows = []
    for what in (ADDED, STEP, COMMIT):
        case = f"{what}, domain {domain}"
        for name in ORDER[1:] if what == ADDED else ORDER:
            times = [one[what] * 1e6 for found in ranks for one in found[name]]
            extra = {}
            if what == ADDED and name == JOB:
                samples = [one for found in ranks for one in found[name]]
                extra = {
                    f"{part} us": 1e6 * statistics.median(one[part] for one in samples)
                    for part in PARTS
                }
            if what == STEP:
                compute = statistics.median(one[COMPUTE] for found in ranks for one in found[name])
                extra = {"forward and backward ms": compute * 1e3}
            if what == COMMIT:
                fences, syncs = ranks[0]["counted"][name]
                extra = {"fences": fences, "syncs": syncs}
            rows.append(harness.summarize(name, case, durability, times, **extra))
    added = f"{ADDED}, domain {domain}"
    return [
        *harness.with_ratios([r for r in rows if r.case == added], REDUCE),
        *harness.with_ratios([r for r in rows if r.case != added], ALONE),
    ]


def _targets(domain: str, rows: list[harness.Row]) -> list[harness.Target]:
    def of(what: str, name: str) -> harness.Row:
        row = harness.find(rows, f"{what}, domain {domain}", name)
        assert row is not None
        return row

    ours = of(ADDED, JOB).median_us
    writes = [sum(of(COMMIT, name).extra.values()) for name in (JOB, ALONE)]
    words = f"domain {domain}"
    return [
        harness.Target(
            f"{words}: added / a blocking all-reduce of 128 bytes",
            ours / of(ADDED, REDUCE).median_us,
            0.5,
            reason=NOT_BLOCKED,
        ),
        harness.Target(
            f"{words}: added, share of the step",
            ours / of(STEP, JOB).median_us,
            0.02,
            reason=NOT_BLOCKED,
        ),
        harness.Target(
            f"{words}: added by two-phase commit / by global commits",
            of(ADDED, TWO_PHASE).median_us / ours,
            2,
            at_least=True,
            reason=NOT_BLOCKED,
        ),
        # the protocol adds none; now and then a fault that captures a page adds one to either
        harness.Target(
            f"{words}: fences and syncs that a global commit adds to one",
            writes[0] - writes[1],
            0.5,
        ),
    ]


def main(quick: bool, budget: harness.Budget) -> None:
    cases = [("process", "memory", harness.KILL), ("emulated", "memory", harness.KILL)]
    if not quick:
        cases.append(("file", "disk", harness.POWER))
    rows = harness.kept()
    targets: list[harness.Target] = []
    for (domain, where, durability), part in budget.deal((case, 1) for case in cases):
        rounds = 3 if quick else 40
        try:
            measured = _measure(domain, where, rounds, 0.6 * part.left)
        except RuntimeError as error:
            why = f"failed: {harness.words_of(error)}"
            rows.append(harness.missing(JOB, f"{ADDED}, domain {domain}", durability, why))
            continue
        made = _rows(domain, durability, measured)
        rows += made
        targets += _targets(domain, made)
    harness.report(
        "job_commits",
        "Global commits: what they add to a step of two ranks",
        rows,
        ratio_text="over a blocking all-reduce's; whole commits over a commit alone",
        targets=targets,
        notes=[f"one thread a rank, {os.cpu_count()} cores"],
        quick=quick,
    )
