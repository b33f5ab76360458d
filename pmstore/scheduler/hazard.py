"""How often the job fails, learned across restarts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pmstore.engine.history import LEVELS_MAX, Past

if TYPE_CHECKING:
    from pmstore import Store

TARGETS_MAX = LEVELS_MAX
COUNTS = 2 + TARGETS_MAX
_SHARE = 0.15


class HazardModel:
    """Failures per second of running, as a Gamma posterior: (a + failures) / (b + exposure).

    With a store its counts live in the store's history record, which no roll back touches: a
    failure is exactly what a roll back must not make forget. A run that is found without a
    clean-exit mark when the store is opened again was a failure, unless a preemption notice had
    come (then it is counted apart); a run that closed the store adds exposure only.

    Where there are several targets, a failure has the target that it needed for the restart. The
    default share of failures that need the next one is 15 %, until counts say otherwise. Failures
    of the process are noticed without being told, and so is a store that was restored from a tier
    (by `adopt`).

    Args:
        prior_failures, prior_seconds: a and b. The default, half a failure in four hours, is weak:
            ten failures outweigh it.
        store: open for writing; None: counts live in this object.

    Source: share of failures that a node's own storage does not survive: Moody et al., SC 2010
        (SCR).
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        prior_failures: float = 0.5,
        prior_seconds: float = 4 * 3600.0,
    ) -> None:
        self.prior_failures = prior_failures
        self.prior_seconds = prior_seconds
        self._history = store.history if store is not None else None
        past = self._history.read() if self._history is not None else Past()
        self.exposure_seconds = past.exposure_seconds
        self.preemptions = past.preemptions
        self.failures = past.failures
        self.noticed = past.noticed
        self.found = past.found
        """Whether the store had a history."""
        self._saved_at = -math.inf
        self._patience = 0.0
        if self._history is not None and not self._history.read_only:
            self.save(now=True)

    # ---- what it says

    def rate(self, target: int = 0, targets: int = 1) -> float:
        """Expected failures per second that need target number `target` of `targets` for the
        restart (0: the first, fastest)."""
        total = (self.prior_failures + sum(self.failures)) / (
            self.prior_seconds + self.exposure_seconds
        )
        return total * self.share(target, targets)

    def share(self, target: int, targets: int) -> float:
        """Of all failures, those that need target number `target` of `targets`. They sum to 1."""
        weight = 2.0  # of the default, in failures
        shares = default_shares(targets)
        counts = [
            sum(self.failures[i:]) if i == targets - 1 else self.failures[i] for i in range(targets)
        ]
        return (weight * shares[target] + counts[target]) / (weight + sum(counts))

    # ---- what it is told

    def expose(self, seconds: float) -> None:
        """Time that the job has run."""
        if 0.0 < seconds < math.inf:
            self.exposure_seconds += seconds

    def failed(self, target: int = 0) -> None:
        """A failure, restarted from what that target had."""
        self.failures[max(0, min(target, TARGETS_MAX - 1))] += 1.0

    def counts(self) -> list[float]:
        """Seconds of exposure, preemptions, failures by target."""
        return [self.exposure_seconds, self.preemptions, *self.failures]

    def adopt(self, counts: Sequence[float]) -> None:
        """Goes on from the counts of a store that this one was restored from: the failure that made
        it necessary needed a tier. Counts that are all zero, or damaged, are ignored."""
        if any(counts) and all(0.0 <= value < math.inf for value in counts):
            self.exposure_seconds, self.preemptions, *self.failures = counts
            self.failed(1)
            self.save(now=True)

    def preempted(self) -> None:
        """A preemption notice came: what ends this run is no failure."""
        self.noticed = True
        self.save(now=True)

    # ---- in the store

    def save(self, *, now: bool = False) -> None:
        """Writes the counts to the store's history record, unless it was done a short while ago.

        So a failure forgets at most a twentieth of the time between two failures (a minute at
        most), and no more than a hundredth of the time is spent on writing (a record costs 2 us, or
        a sync of the disk in domain "file").
        """
        if self._history is None:
            return
        began = time.monotonic()
        if not now and began - self._saved_at < self._patience:
            return
        self._history.write(
            Past(self.exposure_seconds, self.preemptions, self.failures, self.noticed)
        )
        self._saved_at = time.monotonic()
        self._patience = max(100.0 * (self._saved_at - began), min(0.05 / self.rate(), 60.0))

    def __repr__(self) -> str:
        return (
            f"<HazardModel {sum(self.failures):g} failures, {self.preemptions:g} preemptions in "
            f"{self.exposure_seconds / 3600:.2f} h: one in {1 / self.rate() / 3600:.2f} h>"
        )


def default_shares(targets: int) -> list[float]:
    """Of all failures, those that need each target, where nothing is known.

    >>> [round(share, 4) for share in default_shares(3)]
    [0.85, 0.1275, 0.0225]
    """
    return [_SHARE**i - (_SHARE ** (i + 1) if i < targets - 1 else 0.0) for i in range(targets)]
