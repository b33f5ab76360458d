"""Policies on the MNIST demo under SIGKILL, with a mean time between failures of seconds: what each
added and what each lost.

Every policy trains the demo's model in its own store (domain "file", on a disk: a commit waits for
it), in processes that are killed after exponential times; the times are the same for every policy,
and the policies take turns, a process each. A process that is killed resumes at the last commit.
Counted in seconds of the training processes:

* lost: training time of steps that had to be done again, the one that the kill cut included;
* added: time in `run.commit` at every step, kept or lost, and what steps took longer than plain
  ones (first writes after a commit).

Time from a kill to the first step (Python, imports, data) is the same for all and left out.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import statistics
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.harness import NONE, POWER, SEED, Budget, Row, missing, report, scratch

KILLS = 3  # of a job, on average
MOST_STEPS, LEAST_STEPS = 600, 100  # of a job; by the time there is
NEVER = 1 << 40
POLICIES: dict[str, dict[str, Any]] = {
    "no commits, no kills": {"name": "EveryN", "steps": NEVER},
    "every step": {"name": "EveryN", "steps": 1},
    "every 10 steps": {"name": "EveryN", "steps": 10},
    "every 100 steps": {"name": "EveryN", "steps": 100},
    "CheckFreq 3.5 %": {"name": "CheckFreq"},
    "Young, true rate": {"name": "Young"},
    "scheduler time, true rate": {"name": "time", "rate": True},
    "scheduler time, rate learned": {"name": "time", "rate": False},
    "scheduler progress, true rate": {"name": "progress", "rate": True},
}
PLAIN = "no commits, no kills"
FORKS = multiprocessing.get_context("forkserver")


@dataclass(slots=True)
class Tally:
    """One policy's job, over its processes. Seconds."""

    done: int = 0  # steps that the last commit holds
    lives: int = 0
    kills: int = 0
    commits: int = 0
    lost: float = 0.0
    added: float = 0.0
    steps: list[float] = field(default_factory=list)  # training time of each, kept or lost
    loss: float = 0.0  # at the end


# ---- the trainer


def _child(config: dict[str, Any], say: Connection) -> None:
    """A process of a job. It is forked by one that has imported torch: what it takes to start is no
    part of the question."""

    def tell(event: str, **what: Any) -> None:
        say.send({"event": event, **what})

    import pmstore
    import pmstore.torch
    from pmstore.scheduler import (
        CheckFreq,
        CommitScheduler,
        ConvergenceAware,
        EveryN,
        HazardModel,
        Known,
        Young,
    )
    from pmstore_lab.demo_trainer import Config, make_job, train_step

    job = make_job(Config(config["data"], config["store"], None, "file", config["steps"], SEED, 1))
    rate = 1.0 / config["mtbf"]
    with pmstore.open(config["store"], domain="file") as store:
        policy = config["policy"]
        if policy["name"] in ("time", "progress"):
            # The prior's four hours are meant for failures that are hours apart: here they are
            # seconds apart.
            hazard = HazardModel(store, prior_seconds=2.0 * config["mtbf"])
            rule = ConvergenceAware(policy["name"], free_budget=0.0)
            known = Known(config["steps"], rate if policy["rate"] else None, hazard)
            scheduler = CommitScheduler(rule, store=store, known=known)
        else:
            rules = {
                "EveryN": lambda: EveryN(policy["steps"]),
                "CheckFreq": CheckFreq,
                "Young": lambda: Young(rate),
            }
            scheduler = CommitScheduler(
                rules[policy["name"]](), store=store, known=Known(config["steps"], rate)
            )
        run = pmstore.torch.attach(
            store,
            model=job.model,
            optimizer=job.optimizer,
            lr_scheduler=job.scheduler,
            loader=job.loader,
            policy=scheduler,
        )
        tell("ready", done=run.step)
        done, loss, end = run.step, 0.0, time.monotonic()
        for batch in run.batches(epochs=None):
            start, loss = end, train_step(job, batch)
            trained = time.monotonic()
            done += 1
            committed = run.commit(loss)
            end = time.monotonic()
            tell(
                "step",
                train=trained - start,
                commit=end - trained,
                done=run.committed if committed else None,
            )
            if done == config["steps"]:
                break
        start = time.monotonic()
        store.commit()
        tell("done", commit=time.monotonic() - start, loss=loss)


# ---- the killer


def _life(
    folder: Path, name: str, steps: int, tally: Tally, seconds: float | None, mtbf: float
) -> bool:
    """One process, killed so many seconds after it was ready. True if it reached the end before."""
    config = {
        "data": str(folder),
        "store": str(folder / f"{list(POLICIES).index(name)}-{steps}.pm"),
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
                tally.added += message["commit"]
                since.append(message["train"])
                if message["done"] is not None:
                    tally.commits += 1
                    since.clear()
            else:
                tally.added += message["commit"]
                tally.loss = message["loss"]
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
        tally.kills += 1
        tally.lost += sum(since) + time.monotonic() - last
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
    # A job takes half as long again as its steps (commits, what is done twice), and so many lives.
    left = 0.9 * budget.left / policies - (1 + KILLS) * a_life
    steps = max(LEAST_STEPS, min(MOST_STEPS, int(left / (1.5 * step))))
    return steps, steps * step


def main(quick: bool, budget: Budget) -> None:
    from pmstore_lab.demo import _write_data

    names = [
        name
        for name in POLICIES
        if not quick or name in (PLAIN, "every step", "scheduler time, true rate")
    ]
    tallies = {name: Tally() for name in names}
    with scratch("disk") as folder:
        _write_data(folder)
        steps, job_seconds = _steps_in(folder, len(names), budget)
        mtbf = job_seconds / KILLS
        waiting, life = list(names), 0
        chance = random.Random(SEED)
        while waiting and not budget.spent:
            seconds = chance.expovariate(1.0 / mtbf)
            life += 1
            for name in list(waiting):
                if _life(
                    folder, name, steps, tallies[name], None if name == PLAIN else seconds, mtbf
                ):
                    waiting.remove(name)
            print(
                f"  turn {life}: still running: {len(waiting)} ({budget.left:.0f} s left)",
                flush=True,
            )
    plain = statistics.median(tallies[PLAIN].steps)
    case = f"{steps} steps of {plain * 1e3:.1f} ms, a SIGKILL every {mtbf:.1f} s"
    rows = []
    for name, tally in tallies.items():
        if name == PLAIN or name in waiting:
            continue
        slower = max(sum(tally.steps) - len(tally.steps) * plain, 0.0)
        total = tally.added + slower + tally.lost
        extra = {
            "lost s": tally.lost,
            "added s": tally.added + slower,
            "of which in commit s": tally.added,
            "kills": float(tally.kills),
            "commits": float(tally.commits),
            "steps done": float(len(tally.steps)),
            "of work": total / (steps * plain),
        }
        us = total * 1e6
        rows.append(Row(name, case, us, us, us, POWER, None, extra))
    best = min((row.median_us for row in rows), default=1.0)
    rows = [
        Row(
            r.method,
            r.case,
            r.median_us,
            r.min_us,
            r.max_us,
            r.durability,
            r.median_us / best,
            r.extra,
        )
        for r in rows
    ]
    late = [
        missing(
            name, case, POWER, f"not at its end after {tallies[name].lives} lives: no time left"
        )
        for name in waiting
    ]
    notes = [
        f"plain step: median {plain * 1e3:.2f} ms ({PLAIN}, {NONE})",
        "one job for each policy: chance decides between close ones",
    ]
    report(
        "scheduler_kills",
        "Lost and added time of commit policies on the MNIST demo under SIGKILL",
        sorted(rows, key=lambda row: row.median_us) + late,
        ratio_text="lost + added over the least",
        notes=notes,
        quick=quick,
    )
