"""A job in a real store and in simulated time, ended again and again. Tests import it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np

import pmstore
from pmstore.scheduler import CommitScheduler, Known, PreemptionGuard
from pmstore_lab.simulation.driver import Clock


class End(Exception):
    """Of a life."""


def wall_seconds(
    path: Path,
    *,
    steps: int,
    iteration: float,
    commit: float,
    mtbf: float,
    notice: float = 0.0,
    rate: float | None = None,
    seed: int = 0,
    lives_max: int = 400,
) -> float:
    """Until the job has made its steps. Each life ends by an exception that leaves the store's
    block, at a random time. notice: seconds that it is announced before. rate: of failures, if the
    scheduler is to know it."""
    clock = Clock()
    chance = np.random.default_rng(seed)
    for _ in range(lives_max):
        end = clock.now + float(chance.exponential(mtbf))
        with contextlib.suppress(End), pmstore.open(path) as store:
            _live(store, clock, end, steps, iteration, commit, notice, rate)
            return clock.now
        clock.now = end
    raise AssertionError(f"not at its end after {lives_max} lives")


def _live(
    store: pmstore.Store,
    clock: Clock,
    end: float,
    steps: int,
    iteration: float,
    commit: float,
    notice: float,
    rate: float | None,
) -> None:
    done = store.require("done", (1,), "int64")

    def save() -> None:
        clock.now += commit
        if clock.now >= end:
            raise End
        store.commit()

    guard = PreemptionGuard(signals=(), clock=clock)
    scheduler = CommitScheduler(
        store=store,
        targets={"store": save},
        clock=clock,
        known=Known(failure_rate_per_second=rate),
        guard=guard if notice else None,
    )
    while done[0] < steps:
        clock.now += iteration
        if clock.now >= end:
            raise End
        if notice and clock.now >= end - notice:
            guard.notify(end - clock.now)
        done[0] += 1
        scheduler.step()
        if scheduler.stopping:
            raise End


def mean_ratio(path: Path, seeds: int, **job: Any) -> float:
    """Wall time of jobs that learn the rate of failures, of that with the rate known."""
    learned = known = 0.0
    for seed in range(seeds):
        learned += wall_seconds(path / f"learned{seed}.pm", seed=seed, **job)
        known += wall_seconds(path / f"known{seed}.pm", seed=seed, rate=1 / job["mtbf"], **job)
    return learned / known
