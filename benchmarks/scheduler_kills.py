"""Policies on the MNIST demo under SIGKILL, with seconds between failures: what each costs in
reality, beside what the simulation says of the same jobs.

Every policy trains the demo's model in stores of its own (domain "file", on a disk: a commit waits
for it), in processes that are killed after exponential times; the times are the same for every
policy, and the policies take turns, a process each. A process that is killed resumes at the last
commit. A policy goes on, job after job, until it has been killed 16 times. Counted in seconds of
the training processes, / the seconds of the work that was done:

* lost: training time of steps that had to be done again, the one that the kill cut included;
* added: time from the end of each step, kept or lost, until the data is asked for the next batch;
  and what steps took longer than plain ones (first writes after a commit).

Time from a kill to the first step (Python, imports, data) is the same for all and left out.

The simulation (`pmstore_lab.simulation`) runs the same policies on jobs of as many steps, with the
mean times that this policy's steps and commits took, and the same mean time between failures. Both
have their spread: in reality the standard error that follows from what single kills cost, in the
simulation the standard deviation of so many kills.

"Rate learned" begins every job with what is assumed of a job of which nothing is known.
"""

from __future__ import annotations

import math
import multiprocessing
import random
import signal
import statistics
import threading
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.harness import NONE, POWER, SEED, Budget, Row, missing, report, scratch

KILLS = 16  # of each policy, at least
JOB_KILLS = 8  # of a job, on average
MOST_STEPS, LEAST_STEPS = 1200, 240  # of a job; by the time there is
SIMULATED = 12  # times as many kills
NEVER = 1 << 40
POLICIES: dict[str, dict[str, Any]] = {
    "no commits, no kills": {"name": "EveryN", "steps": NEVER},
    "every step": {"name": "EveryN", "steps": 1},
    "every 100 steps": {"name": "EveryN", "steps": 100},
    "CheckFreq 3.5 %": {"name": "CheckFreq"},
    "Young, true rate": {"name": "Young", "rate": True},
    "auto, true rate": {"name": "Auto", "rate": True},
    "auto, rate learned": {"name": "Auto"},
}
PLAIN = "no commits, no kills"
FORKS = multiprocessing.get_context("forkserver")


@dataclass(slots=True)
class Tally:
    """One policy's jobs, over their processes. Seconds."""

    jobs: int = 1  # that have begun
    done: int = 0  # steps of the present one that its last commit holds
    work: int = 0  # steps of those that have ended
    lives: int = 0
    commits: int = 0
    lost: list[float] = field(default_factory=list)  # by each kill
    added: float = 0.0  # at the end of all steps
    committing: float = 0.0  # of those that were committed
    steps: list[float] = field(default_factory=list)  # training time of each, kept or lost

    def ends(self, seconds: float, committed: bool) -> None:
        """Of a step, after so long."""
        self.added += seconds
        if committed:
            self.commits += 1
            self.committing += seconds

    @property
    def idle_end(self) -> float:
        """The end of a step that was not committed."""
        others = len(self.steps) - self.commits
        return (self.added - self.committing) / others if others > 0 else 0.0

    @property
    def commit(self) -> float:
        """What a commit takes, beyond that."""
        return max(self.committing / max(self.commits, 1) - self.idle_end, 0.0)

    @property
    def step(self) -> float:
        """A step without a commit, in the mean: beside plain ones it has what the store and the
        first writes after a commit cost."""
        return statistics.mean(self.steps) + self.idle_end


def _rule(policy: dict[str, Any]) -> Any:
    from pmstore.scheduler import Auto, EveryN
    from pmstore_lab.simulation.baselines import CheckFreq, Young

    return {
        "EveryN": lambda: EveryN(policy["steps"]),
        "CheckFreq": CheckFreq,
        "Young": Young,
        "Auto": lambda: Auto(free_budget=0.0),
    }[policy["name"]]()


# ---- the trainer


def _child(config: dict[str, Any], say: Connection) -> None:
    """A process of a job. It is forked by one that has imported torch: what it takes to start is no
    part of the question."""

    def tell(event: str, **what: Any) -> None:
        say.send({"event": event, **what})

    from torch.utils.data import DataLoader, TensorDataset

    import pmstore
    import pmstore.torch
    from pmstore.scheduler import CommitScheduler, Known
    from pmstore_lab.demo_trainer import BATCH, Config, make_job, train_step

    class Asked(TensorDataset):
        """The data, which notes when a batch is asked for: the step before has ended then."""

        at = 0.0  # of the class: attach keeps what changes in a data set

        def __getitems__(self, numbers: list[int]) -> list[Any]:
            Asked.at = time.monotonic()
            return [self[number] for number in numbers]

    job = make_job(Config(config["data"], config["store"], None, "file", config["steps"], SEED, 1))
    data: Any = job.loader.dataset
    loader = DataLoader(Asked(*data.tensors), batch_size=BATCH, shuffle=True, drop_last=True)
    with pmstore.open(config["store"], domain="file") as store:
        rate = 1.0 / config["mtbf"] if config["policy"].get("rate") else None
        scheduler = CommitScheduler(
            _rule(config["policy"]), store=store, known=Known(config["steps"], rate)
        )
        run = pmstore.torch.attach(
            store,
            model=job.model,
            optimizer=job.optimizer,
            lr_scheduler=job.scheduler,
            loader=loader,
            policy=scheduler,
        )
        tell("ready", done=run.step)
        batches, end = run.batches(epochs=None), time.monotonic()
        batch = next(batches, None)
        while batch is not None:
            run.log(loss=train_step(job, batch))
            if run.step + 1 == config["steps"]:
                run.stop()
            trained = time.monotonic()
            batch = next(batches, None)  # ends the step
            start, end = end, time.monotonic() if batch is None else Asked.at
            tell(
                "step",
                train=trained - start,
                commit=end - trained,
                done=run.step if run.committed == run.step else None,
            )
        tell("done")


# ---- the killer


def _life(
    folder: Path, name: str, steps: int, tally: Tally, seconds: float | None, mtbf: float
) -> bool:
    """One process, killed so many seconds after it was ready. True if it reached the end before."""
    config = {
        "data": str(folder),
        "store": str(folder / f"{list(POLICIES).index(name)}-{steps}-{tally.jobs}.pm"),
        "steps": steps,
        "policy": POLICIES[name],
        "mtbf": mtbf,
    }
    tally.lives += 1
    hear, say = FORKS.Pipe(duplex=False)
    trainer = FORKS.Process(target=_child, args=(config, say))
    trainer.start()
    say.close()  # the trainer's end is its alone
    timer = threading.Timer(seconds if seconds is not None else 1e6, trainer.kill)
    timer.daemon = True
    since: list[float] = []  # training times since the last commit
    finished = False
    last = time.monotonic()
    try:
        while not finished:
            try:
                message = hear.recv()
            except (EOFError, OSError):  # it was killed
                break
            last = time.monotonic()
            if message["event"] == "ready":
                tally.done = message["done"]
                timer.start()
            elif message["event"] == "step":
                tally.steps.append(message["train"])
                tally.ends(message["commit"], message["done"] is not None)
                since.append(message["train"])
                if message["done"] is not None:
                    since.clear()
            else:
                finished = True
        if finished:
            timer.cancel()
        trainer.join(30)
        status = trainer.exitcode
    finally:
        timer.cancel()
        trainer.kill()
        trainer.join()
        hear.close()
    if not finished:
        if status != -signal.SIGKILL:
            raise RuntimeError(f"a trainer ended with status {status}")
        tally.lost.append(sum(since) + time.monotonic() - last)
    else:
        tally.work += steps
        tally.jobs += 1
        tally.done = 0
    return finished


def _steps_in(folder: Path, policies: int, budget: Budget) -> tuple[int, float]:
    """Of a job, so that the jobs of all policies end in time; and its training time without
    commits."""
    # torch imports its compiler, for seconds, when the first optimizer is made: as long as a whole
    # life.
    preload = [
        "torch",
        "torch._dynamo",
        "pmstore.torch",
        "pmstore_lab.demo_trainer",
        "pmstore.scheduler",
        __name__,
    ]
    FORKS.set_forkserver_preload(preload)
    tried = Tally()
    for steps in (20, 21):  # in a store each; the first waits for the imports
        start = time.monotonic()
        _life(folder, PLAIN, steps, tried, None, 1.0)
    a_life = time.monotonic() - start
    step = statistics.median(tried.steps)
    # Each policy has so many lives; a job takes half as long again as its steps (commits, what is
    # done twice), and the last job of each is over its kills.
    each = 0.9 * budget.left / policies - (KILLS + JOB_KILLS / 2) * a_life
    steps = int(JOB_KILLS * each / (1.5 * step * (KILLS + JOB_KILLS / 2)))
    steps = max(LEAST_STEPS, min(MOST_STEPS, steps))
    return steps, steps * step


# ---- the simulation


def _simulated(name: str, tally: Tally, steps: int, plain: float, mtbf: float) -> list[float]:
    """Lost and added time / work, of jobs like the real ones: with this policy's mean step and
    commit, which is what its scheduler can see."""
    import numpy as np

    from pmstore.scheduler import HazardModel
    from pmstore_lab.simulation import CURVES, Cell, CostClass, Job
    from pmstore_lab.simulation.failures import poisson
    from pmstore_lab.simulation.figure import scheduler

    policy, work = POLICIES[name], steps * plain
    cost = CostClass("demo", tally.step, tally.commit, 0.0, 0.0, steps * tally.step)
    cell = Cell(cost, CURVES["exponential"], mtbf)
    found = []
    for seed in range(SIMULATED):
        spent = 0.0
        for number in range(tally.jobs - 1):
            chance = np.random.default_rng([SEED, seed, number])
            failures = poisson(chance, mtbf, 1000.0 * work)
            hazard = HazardModel()
            rate = cell.rate if policy.get("rate") else None
            make = scheduler(_rule(policy), rate, hazard=hazard)
            spent += Job(cell, seed).run(make, failures, hazard=hazard).overhead
            spent += cost.job - work
        found.append(spent / ((tally.jobs - 1) * work))
    return found


def _added(tally: Tally, plain: float) -> float:
    return tally.added + max(sum(tally.steps) - len(tally.steps) * plain, 0.0)


def main(quick: bool, budget: Budget) -> None:
    from pmstore_lab.demo import _write_data

    names = [
        name
        for name in POLICIES
        if not quick or name in (PLAIN, "every 100 steps", "auto, rate learned")
    ]
    kills = 4 if quick else KILLS
    tallies = {name: Tally() for name in names}
    with scratch("disk") as folder:
        _write_data(folder)
        steps, job_seconds = _steps_in(folder, len(names), budget)
        mtbf = job_seconds / JOB_KILLS
        waiting, life = list(names), 0
        chance = random.Random(SEED)
        while waiting and not (life and budget.spent):
            seconds = chance.expovariate(1.0 / mtbf)
            life += 1
            for name in list(waiting):
                tally, kill = tallies[name], None if name == PLAIN else seconds
                if _life(folder, name, steps, tally, kill, mtbf) and (
                    name == PLAIN or len(tally.lost) >= kills
                ):
                    waiting.remove(name)
            print(
                f"  turn {life}: still running: {len(waiting)} ({budget.left:.0f} s left)",
                flush=True,
            )
    plain = statistics.mean(tallies[PLAIN].steps)  # with what disturbs all policies alike
    case = f"jobs of {steps} steps of {plain * 1e3:.1f} ms, a SIGKILL every {mtbf:.2f} s"
    rows = []
    for name, tally in tallies.items():
        if name == PLAIN or name in waiting:
            continue
        work = tally.work * plain
        added, lost = _added(tally, plain), sum(tally.lost)
        total = added + lost
        simulated = _simulated(name, tally, steps, plain, mtbf)
        extra = {
            "reality": total / work,
            "its error": statistics.pstdev(tally.lost) * math.sqrt(len(tally.lost)) / work,
            "simulation": statistics.mean(simulated),
            "its spread": statistics.pstdev(simulated),
            "lost": lost / work,
            "added": added / work,
            "kills": float(len(tally.lost)),
            "commits": float(tally.commits),
            "jobs": float(tally.jobs - 1),
        }
        us = total / work * 1e6  # in a second of work
        rows.append(Row(name, case, us, us, us, POWER, None, extra))
    best = min((row.median_us for row in rows), default=1.0)
    rows = [replace(row, ratio=row.median_us / best) for row in rows]
    late = [
        missing(name, case, POWER, f"{len(tallies[name].lost)} kills, not at its end: no time left")
        for name in waiting
    ]
    notes = [
        f"plain step: {plain * 1e3:.2f} ms in the mean ({PLAIN}, {NONE})",
        "lost and added time in a second of work; reality and simulation: the same as shares",
    ]
    report(
        "scheduler_kills",
        "Lost and added time under SIGKILL: reality and simulation",
        sorted(rows, key=lambda row: row.median_us) + late,
        ratio_text="lost + added over the least",
        notes=notes,
        quick=quick,
    )
