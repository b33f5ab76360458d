"""What a schedule costs, exactly, and the schedule that costs least, by dynamic programming over
iterations.

A schedule is the list of iterations after which a commit is made; the last iteration always ends
with one. Between two commits the job is in a renewal process: a failure takes it back to the commit
before, and it tries again. A commit is durable only when its part in the background has been
written, P later: a failure before takes the job back to the commit before that. So every segment is
done e^(lambda P) times as often as without. (The interval that costs least is the same.)

Four metrics, each a sum over segments (a, b] between commits:

* "time": wall time beyond the work: (e^(lambda L) - 1) / lambda - n d, with L = n d + C; C itself
  is in it.
* "value": C, and the progress (in seconds of mean progress) that failures destroy, each time it is
  destroyed.
* "progress": as "value", but a commit's seconds are priced at the progress that could have been
  made in them (COCI's metric: everything is counted in loss).
* "termination": C, lost seconds after failures, and the progress that is lost for good when the
  user ends the job between two commits; of the jobs, 60 % end early at a time that is uniform over
  the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from pmstore_lab.simulation.cells import Cell
from pmstore_lab.simulation.curves import Floats

Metric = Literal["time", "value", "progress", "termination"]
Ints = np.ndarray[Any, np.dtype[np.int64]]
EARLY = 0.6
"""Share of jobs that the user ends early."""


class Segments:
    """Costs of segments of a cell's job in one metric.

    price: C_eff of a commit after 0, 1, ... iterations; None: the cell's.
    """

    def __init__(self, cell: Cell, metric: Metric, price: Floats | None = None) -> None:
        n, d = cell.iterations, cell.cost.iteration
        self.iterations = n
        self._d = d
        self._rate = cell.rate
        self._metric = metric
        self._again = float(np.expm1(cell.rate * cell.cost.background))
        self._price = np.full(n + 1, cell.cost.price) if price is None else price
        self._value = cell.value()
        middle = (self._value[1:] + self._value[:-1]) / 2.0
        k = np.arange(n + 1)
        self._alive = 1.0 - EARLY * k / n
        if metric in ("value", "progress"):
            # Integrals of the density of the first failure times the progress there, iteration by
            # iteration.
            self._decay = np.exp(-cell.rate * d * k)
            # From the end: each sum is as small as the decay that it will be divided by.
            self._sums = np.append(np.cumsum((-np.diff(self._decay) * middle)[::-1])[::-1], 0.0)
        elif metric == "termination":
            alive = (self._alive[1:] + self._alive[:-1]) / 2.0
            time = (k[1:] - 0.5) * d
            self._alive_sums = np.concatenate([[0.0], np.cumsum(alive * d)])
            self._time_sums = np.concatenate([[0.0], np.cumsum(alive * time * d)])
            self._sums = np.concatenate([[0.0], np.cumsum(EARLY / n * middle)])
        density = np.diff(self._value) / d
        self._density = np.append(density, density[-1])

    def cost(self, a: Any, b: Any) -> Floats:
        """Expected seconds lost by segments from iteration a (a commit) to b (the next one)."""
        gained = (b - a) * self._d if self._metric == "time" else self._value[b] - self._value[a]
        once = self._cost(a, b, gained)
        # of early ends little is known of when they would have come: those of the background are
        # left out
        again = self._again if self._metric != "termination" else 0.0
        return np.asarray(once + again * (once + gained))

    def _cost(self, a: Any, b: Any, gained: Any) -> Floats:
        """Where a commit is durable at once."""
        price, rate, d = self._price[b], self._rate, self._d
        if self._metric == "time":
            return np.asarray(np.expm1(rate * ((b - a) * d + price)) / rate - gained)
        if self._metric == "termination":
            lost_seconds = rate * (
                self._time_sums[b]
                - self._time_sums[a]
                - a * d * (self._alive_sums[b] - self._alive_sums[a])
            )
            lost_value = (
                self._sums[b] - self._sums[a] - self._value[a] * EARLY / self.iterations * (b - a)
            )
            return np.asarray(self._alive[b] * price + lost_seconds + lost_value)
        before = np.exp(-rate * (b - a) * d)
        lost = (self._sums[a] - self._sums[b]) / self._decay[a] - self._value[a] * (1.0 - before)
        lost = lost + gained * before * -np.expm1(-rate * price)  # in the commit itself
        tries = np.exp(rate * ((b - a) * d + price))
        paid = price * self._density[b] if self._metric == "progress" else price
        return np.asarray(paid + lost * tries)

    def total(self, commits: Sequence[int]) -> float:
        """Of a whole schedule."""
        ends = np.unique(np.append(np.asarray(commits, dtype=np.int64), self.iterations))
        ends = ends[(ends > 0) & (ends <= self.iterations)]
        starts = np.concatenate([[0], ends[:-1]])
        return float(self.cost(starts, ends).sum())


def optimum(segments: Segments) -> tuple[float, list[int]]:
    """The least total, and its schedule.

    Exact: for each b the best last commit a is looked for from the best one of b - 1 on (it never
        moves back, because the cost of a segment satisfies the quadrangle inequality; `tests`
        compare with a search that does not use this).
    """
    n = segments.iterations
    best = np.zeros(n + 1)
    last: Ints = np.zeros(n + 1, np.int64)
    low = 0
    for b in range(1, n + 1):
        a = np.arange(low, b)
        totals = best[low:b] + segments.cost(a, b)
        at = int(totals.argmin())
        best[b] = totals[at]
        low = last[b] = low + at
    commits = [n]
    while last[commits[-1]]:
        commits.append(int(last[commits[-1]]))
    return float(best[n]), commits[::-1]


def best_integer(price: float, rate: float, iteration: float, limit: int = 1_000_000) -> int:
    """The number of iterations between commits that costs least per second of work, found by trying
    all: (e^(lambda (n d + C)) - 1) / (lambda n d)."""
    n = np.arange(1, limit + 1, dtype=float)
    with np.errstate(over="ignore"):
        cost = np.expm1(rate * (n * iteration + price)) / n
    return int(cost.argmin()) + 1
