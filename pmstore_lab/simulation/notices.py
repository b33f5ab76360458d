"""Preemption notices, by the hundred thousand: what is lost, and whether the last commit is in
time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pmstore.scheduler import CommitScheduler, EveryN, Known, PreemptionGuard
from pmstore_lab.simulation.driver import Clock


@dataclass(frozen=True, slots=True)
class NoticeTrials:
    """Attributes:
    misses: trials in which no commit made after the notice was whole at the deadline, or the last
        one was not.
    worst_lost, allowed: seconds of work lost; and 2 iterations + one commit at p99.
    over: trials in which more was lost than allowed.
    """

    trials: int
    misses: int
    over: int
    worst_lost: float
    mean_lost: float
    allowed: float


def notice_trials(
    trials: int,
    *,
    iteration: float,
    commit: float,
    spread: float = 0.1,
    notice: float = 30.0,
    seed: int = 0,
) -> NoticeTrials:
    """Trials of one job: iterations with 3 % noise, log-normal commits of standard deviation
    `spread`, notices at random times.

    The scheduler is the one users run; before the first notice it has seen 60 commits.
    """
    rng = np.random.default_rng(seed)
    commits = (commit * np.exp(spread * rng.standard_normal(1 << 16))).tolist()
    times = (iteration * np.exp(0.03 * rng.standard_normal(1 << 16))).tolist()
    places = rng.uniform(0.0, iteration, trials).tolist()
    clock = Clock()
    ends: list[float] = []
    count = 0

    def save() -> None:
        nonlocal count
        count += 1
        clock.now += commits[count & 0xFFFF]
        ends.append(clock.now)

    scheduler = CommitScheduler(
        EveryN(1), targets={"disk": save}, clock=clock, known=Known(failure_rate_per_second=0.0)
    )
    for i in range(60):
        clock.now += times[i]
        scheduler.step()
    scheduler.policy = EveryN(1 << 60)
    allowed = 2.0 * iteration + commit * float(np.exp(2.326 * spread))
    misses = over = 0
    worst = total = 0.0
    at = 0
    for trial in range(trials):
        guard = scheduler.guard = PreemptionGuard(notice_seconds=notice, signals=(), clock=clock)
        began = clock.now
        clock.now += places[trial]  # the notice comes in the middle of an iteration
        deadline = clock.now + notice
        guard.notify()
        ends.clear()
        clock.now = began
        while not scheduler.stopping and clock.now < deadline:
            at += 1
            clock.now += times[at & 0xFFFF]
            scheduler.step()
        whole = [end for end in ends if end <= deadline]
        missed = not whole or len(whole) < len(ends)
        lost = deadline - whole[-1] if whole else notice
        misses += missed
        over += lost > allowed
        worst, total = max(worst, lost), total + lost
    return NoticeTrials(trials, misses, over, worst, total / trials, allowed)
