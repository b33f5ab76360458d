"""Learns how often the job fails, across restarts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pmstore._engine.history import LEVELS_MAX, Announced, Past
from pmstore.scheduler._models.estimate import Evidence

if TYPE_CHECKING:
    from pmstore import Store

TARGETS_MAX = LEVELS_MAX
COUNTS = 2 + TARGETS_MAX
_SHARE = 0.15


class HazardModel:
    """Estimates the failures per second of running, from what was counted
    (`pmstore.scheduler._models.estimate`).

    A failure is an end that loses work. With a store the counts live in the store's history
    record, which no roll back touches: a failure is exactly what a roll back must not make forget.
    A run that is found without a clean-exit mark when the store is opened again was a failure, and
    so is one that closed the store by an exception (see `Uptime`). One whose end was `announced` is
    none; a run that closed the store in order adds exposure only.

    Attributes:
        announced: what will end the present run, and all work was committed before it. A preemption
            is counted apart; an end that was planned is not counted.

    Where there are several targets, a failure has the target that it needed for the restart. The
    default share of failures that need the next one is 15 %, until counts say otherwise. Failures
    of the process are noticed without being told, and so is a store that was restored from a tier
    (by `adopt`).

    Args:
        store: open for writing; None: counts live in this object.

    Source: share of failures that a node's own storage does not survive: Moody et al., SC 2010
        (SCR).
    """

    def __init__(self, store: Store | None = None) -> None:
        self._history = store.history if store is not None else None
        past = self._history.read() if self._history is not None else Past()
        self.exposure_seconds: float = past.exposure_seconds
        self.preemptions: float = past.preemptions
        self.failures: list[float] = past.failures
        self.announced: Announced = past.announced
        self._costs = past.costs
        self.found: bool = past.found
        """Whether the store had a history."""
        self._evidence = Evidence(*past.evidence)
        if past.run_ended:
            self.begin_run()
        self._saved_at = -math.inf
        self._patience = 0.0
        if self._history is not None and not self._history.read_only:
            self.save(now=True)

    # ---- what it says

    def rate(self, target: int = 0, targets: int = 1) -> float:
        """Returns the expected failures per second that need target number `target` of `targets`
        for the restart (0: the first, fastest)."""
        total = self._evidence.rate(sum(self.failures), self.exposure_seconds)
        return total * self.share(target, targets)

    def share(self, target: int, targets: int) -> float:
        """Returns the share of all failures that need target number `target` of `targets`. The
        shares sum to 1."""
        weight = 2.0  # of the default, in failures
        shares = default_shares(targets)
        counts = [
            sum(self.failures[i:]) if i == targets - 1 else self.failures[i] for i in range(targets)
        ]
        return (weight * shares[target] + counts[target]) / (weight + sum(counts))

    # ---- what it is told

    def expose(self, seconds: float) -> None:
        """Counts time that the job has run."""
        if 0.0 < seconds < math.inf:
            self.exposure_seconds += seconds

    def begin_run(self) -> None:
        """Notes that another run begins, which may have another rate. (The first model of an
        opening of a store calls it itself.)"""
        self._evidence.take(sum(self.failures), self.exposure_seconds, run_ended=True)

    def failed(self, target: int = 0) -> None:
        """Counts a failure, after which the job was restarted from what that target had."""
        self.failures[max(0, min(target, TARGETS_MAX - 1))] += 1.0
        self._evidence.take(sum(self.failures), self.exposure_seconds)

    def counts(self) -> list[float]:
        """Returns the seconds of exposure, the preemptions, and the failures by target."""
        return [self.exposure_seconds, self.preemptions, *self.failures]

    def adopt(self, counts: Sequence[float]) -> None:
        """Goes on from the counts of a store that this one was restored from: the failure that made
        it necessary needed a tier. Counts that are all zero, or damaged, are ignored."""
        if any(counts) and all(0.0 <= value < math.inf for value in counts):
            self.exposure_seconds, self.preemptions, *self.failures = counts
            self.failed(1)
            self.save(now=True)

    def announce(self, end: Announced) -> None:
        """Notes that this end is no failure. Call it when all work is committed; call it again with
        NOTHING if that end does not come."""
        if end is not self.announced:
            self.announced = end
            self.save(now=True)

    # ---- what a crash must not take back either

    def cost(self, key: int) -> float | None:
        """Returns the seconds that the last commit to a target took, in this run of the program or
        one before it; None: not known. key: not 0, stands for the target."""
        return self._costs.get(key)

    def keep_cost(self, key: int, seconds: float) -> None:
        """Keeps the seconds that a commit to a target took. They are in the store with the next
        `save`; at once if they are the first."""
        if 0.0 <= seconds < math.inf:
            first = key not in self._costs
            self._costs.pop(key, None)  # the last that were kept stay
            self._costs = dict([*self._costs.items(), (key, seconds)][-TARGETS_MAX:])
            self.save(now=first)

    # ---- in the store

    @property
    def save_seconds(self) -> float:
        """The running time that a kill may make the model forget: a twentieth of the time between
        two failures, a minute at most."""
        return min(0.05 / self.rate(), 60.0)

    def save(self, *, now: bool = False) -> None:
        """Writes the counts to the store's history record, unless it was done a short while ago:
        less than half of `save_seconds`, or so that more than a hundredth of the time would be
        spent on writing (a record costs 2 us, or a sync of the disk in domain "file").
        """
        if self._history is None:
            return
        began = time.monotonic()
        if not now and began - self._saved_at < self._patience:
            return
        self._history.write(
            Past(
                self.exposure_seconds,
                self.preemptions,
                self.failures,
                self.announced,
                self._costs,
                evidence=self._evidence.values(),
            )
        )
        self._saved_at = time.monotonic()
        self._patience = max(100.0 * (self._saved_at - began), 0.5 * self.save_seconds)

    def __repr__(self) -> str:
        return (
            f"<HazardModel {sum(self.failures):g} failures, {self.preemptions:g} preemptions in "
            f"{self.exposure_seconds / 3600:.2f} h: one in {1 / self.rate() / 3600:.2f} h>"
        )


def default_shares(targets: int) -> list[float]:
    """Returns the shares of all failures that need each target, where nothing is known.

    >>> [round(share, 4) for share in default_shares(3)]
    [0.85, 0.1275, 0.0225]
    """
    return [_SHARE**i - (_SHARE ** (i + 1) if i < targets - 1 else 0.0) for i in range(targets)]
