"""Runs a job in simulated time, with the very `CommitScheduler` that users run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pmstore.scheduler import CommitScheduler
from pmstore_lab.simulation.cells import Cell
from pmstore_lab.simulation.curves import noisy

Make = Callable[..., CommitScheduler]
"""Called with targets=, clock= and total_steps=."""


class Clock:
    """Simulated seconds."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Writing:
    """A commit in the background."""

    __slots__ = ("_clock", "ends")

    def __init__(self, clock: Clock, ends: float) -> None:
        self._clock = clock
        self.ends = ends

    def done(self) -> bool:
        return self._clock.now >= self.ends


class Disk:
    """A target: its commit blocks, and goes on in the background. `factor` scales its cost; noise
    is log-normal."""

    def __init__(
        self,
        clock: Clock,
        blocking: float,
        background: float,
        rng: np.random.Generator,
        noise: float,
    ) -> None:
        self._clock = clock
        self._blocking = blocking
        self._background = background
        self._noise = np.exp(noise * rng.standard_normal(997) - noise**2 / 2.0).tolist()
        self._count = 0
        self.factor = 1.0
        self.busy_until = -math.inf

    def commit(self) -> _Writing | None:
        factor = self.factor * self._noise[self._count % 997]
        self._count += 1
        self._clock.now += self._blocking * factor
        if not self._background:
            return None
        self.busy_until = self._clock.now + self._background * factor
        return _Writing(self._clock, self.busy_until)


@dataclass(slots=True)
class Outcome:
    """What became of a simulated job. Seconds.

    Attributes:
        commits: iterations after which the surviving history has a commit.
        wall, failures: of the whole job; overhead: wall beyond the work.
        at_stake: what `overhead` is on average over jobs that make the same choices: the seconds of
            commits, and the rate of failures x the seconds that one would have cost, added up over
            all the time. It has the same mean as `overhead` and scatters far less.
    """

    commits: list[int] = field(default_factory=list)
    wall: float = 0.0
    overhead: float = 0.0
    failures: int = 0
    at_stake: float = 0.0
    scheduler: CommitScheduler | None = None


@dataclass(slots=True)
class _Commit:
    """at: iterations that it holds; when: it was launched; durable: it was written. Seconds."""

    at: int = 0
    state: list[float] | None = None
    when: float = 0.0
    durable: float = -math.inf


class _History:
    """The commits that survive, and what failures cost: what was `lost`, and what was `expected` to
    be."""

    def __init__(self, rate: float) -> None:
        self.lost = self.expected = 0.0
        self._rate = rate
        self._made = [_Commit()]

    @property
    def commits(self) -> list[int]:
        return [each.at for each in self._made[1:]]

    def resume(self, now: float) -> tuple[int, list[float] | None]:
        last = self._made[-1]
        last.when = now  # it is here that the next failure takes the job back to
        return last.at, last.state

    def commit(self, at: int, state: list[float], now: float, durable: float) -> None:
        self._expect(now)
        self._made.append(_Commit(at, state, now, durable))

    def fail(self, now: float) -> None:
        self._expect(now)
        if self._made[-1].durable > now:
            self._made.pop()
        self.lost += now - self._made[-1].when

    def _expect(self, now: float) -> None:
        """Adds rate x what a failure would have cost, over the time since the last launch."""
        last = self._made[-1]
        middle = min(max(last.durable, last.when), now)
        if middle > last.when:
            before = self._made[-2].when
            self.expected += self._rate * ((middle - before) ** 2 - (last.when - before) ** 2) / 2.0
        self.expected += self._rate * ((now - last.when) ** 2 - (middle - last.when) ** 2) / 2.0


class Job:
    """One job of a cell: noise of losses, iterations and commits is fixed by the seed, the same for
    every policy.

    Args:
        noise: relative standard deviation of iteration and of commit times.
        factor: of the commit cost, after each iteration; None: 1.
    """

    def __init__(
        self,
        cell: Cell,
        seed: int,
        *,
        noise: tuple[float, float] = (0.1, 0.1),
        factor: Sequence[float] | None = None,
    ) -> None:
        self.cell = cell
        self._seed = seed
        self._noise = noise[1]
        self._factor = factor
        rng = np.random.default_rng(seed)
        n = cell.iterations
        self.losses: list[float] = noisy(cell.losses(), rng).tolist()
        self.times: list[float] = (
            cell.cost.iteration * np.exp(noise[0] * rng.standard_normal(n))
        ).tolist()
        drops = {round(place * n): 10.0**-k for k, place in enumerate(cell.curve.lr_drops, start=1)}
        self._lr = drops

    def run(self, make: Make, failures: Sequence[float] = (), *, hazard: Any = None) -> Outcome:
        """The job to its end. failures: times of it, increasing; after the last there is none.

        A failure takes the job, and the scheduler's state that was committed with it, back to the
        last commit that is durable: whose part in the background has been written. A new scheduler
        goes on. What the hazard model learned stays, and it is told.
        """
        clock = Clock()
        cost = self.cell.cost
        chance = np.random.default_rng(self._seed + 1)
        disk = Disk(clock, cost.blocking, cost.background, chance, self._noise)
        outcome = Outcome()
        n = self.cell.iterations
        history = _History(self.cell.rate)
        pending = iter([*failures, math.inf])
        failure = next(pending)
        while True:
            began = clock.now
            scheduler = make(targets={"disk": disk.commit}, clock=clock, total_steps=n)
            at, state = history.resume(clock.now)
            if state is not None:
                scheduler.restore(state)
            scheduler.learning_rate(
                min([lr for place, lr in self._lr.items() if place <= at], default=1.0)
            )
            while 0 <= at < n:
                at = self._iterate(scheduler, clock, disk, at, n, failure)
                if at == n and clock.now < failure and scheduler.targets[0].steps:
                    disk.commit()  # the end: the result is saved
                if at < 0 or clock.now >= failure:
                    at = -1
                else:
                    durable = max(clock.now, disk.busy_until)
                    history.commit(at, scheduler.state(), clock.now, durable)
            if at == n:
                break
            outcome.failures += 1
            clock.now = failure
            history.fail(failure)
            failure = next(pending)
            disk.busy_until = -math.inf
            if hazard is not None:  # of the time lived a store keeps nearly all
                hazard.expose(
                    clock.now - began - scheduler.elapsed_seconds - hazard.save_seconds / 2
                )
                hazard.failed()
        outcome.commits = history.commits
        outcome.wall = clock.now
        outcome.overhead = clock.now - sum(self.times)
        outcome.at_stake = outcome.overhead - history.lost + history.expected
        outcome.scheduler = scheduler
        return outcome

    def _iterate(
        self, scheduler: CommitScheduler, clock: Clock, disk: Disk, at: int, n: int, failure: float
    ) -> int:
        """To the next commit or the job's end; the number of iterations done, or -1 at a failure
        before it."""
        step, times, losses = scheduler.step, self.times, self.losses
        factor, lr = self._factor, self._lr
        slow = 1.0 / (1.0 - self.cell.cost.slowdown)
        while at < n:
            seconds = times[at]
            if clock.now < disk.busy_until:
                beside = min(disk.busy_until - clock.now, seconds * slow)
                seconds += beside * self.cell.cost.slowdown
            clock.now += seconds
            if clock.now >= failure:
                return -1
            if factor is not None:
                disk.factor = factor[at]
            at += 1
            if at in lr:
                scheduler.learning_rate(lr[at])
            if step(losses[at - 1]).target is not None:
                return at
        return at
