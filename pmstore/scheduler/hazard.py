"""How often the job fails, learned across restarts."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pmstore.engine.constants import HISTORY_BYTES

if TYPE_CHECKING:
    from pmstore import Store

__all__ = ["COUNTS", "TIERS_MAX", "HazardModel", "default_shares", "hand_over"]

TIERS_MAX = 8
COUNTS = 2 + TIERS_MAX
_MAGIC = b"PMSHAZ1\0"
_RECORD = struct.Struct(f"<8sQQIIdd{TIERS_MAX}d")
_NOTICED = 1
_SHARE = 0.15


class HazardModel:
    """Failures per second of running, as a Gamma posterior: (a + failures) / (b + exposure).

    With a store its counts live in the store's history record, which no roll back touches: a
    failure is exactly what a roll back must not make forget. A run that is found without a
    clean-exit mark when the store is opened again was a failure, unless a preemption notice had
    come (then it is counted apart); a run that closed the store adds exposure only.

    Where several tiers exist, a failure has the tier that it needed for the restart. The default
    share of failures that need the next tier is 15 %, until counts say otherwise. Failures of the
    process are noticed without being told, and so is a store that was restored from a tier (by
    `adopt`).

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
        self.exposure_seconds = 0.0
        self.preemptions = 0.0
        self.failures = [0.0] * TIERS_MAX
        self.noticed = False
        self.found = False
        """Whether the store had a history."""
        self._pool = store._core.pool if store is not None else None
        self._opens = self._unclean = 0
        self._saved_at = -math.inf
        self._patience = 0.0
        if self._pool is not None:
            self._take_over()

    # ---- what it says

    def rate(self, tier: int = 0, tiers: int = 1) -> float:
        """Expected failures per second that need tier number `tier` of `tiers` for the restart (0:
        the first, fastest)."""
        total = (self.prior_failures + sum(self.failures)) / (
            self.prior_seconds + self.exposure_seconds
        )
        return total * self.share(tier, tiers)

    def share(self, tier: int, tiers: int) -> float:
        """Of all failures, those that need tier number `tier` of `tiers`. They sum to 1."""
        weight = 2.0  # of the default, in failures
        shares = default_shares(tiers)
        counts = [
            sum(self.failures[i:]) if i == tiers - 1 else self.failures[i] for i in range(tiers)
        ]
        return (weight * shares[tier] + counts[tier]) / (weight + sum(counts))

    # ---- what it is told

    def expose(self, seconds: float) -> None:
        """Time that the job has run."""
        if 0.0 < seconds < math.inf:
            self.exposure_seconds += seconds

    def failed(self, tier: int = 0) -> None:
        """A failure, restarted from that tier."""
        self.failures[max(0, min(tier, TIERS_MAX - 1))] += 1.0

    def counts(self) -> list[float]:
        """Seconds of exposure, preemptions, failures by tier."""
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
        if self._pool is None:
            return
        began = time.monotonic()
        if not now and began - self._saved_at < self._patience:
            return
        flags = _NOTICED if self.noticed else 0
        record = _RECORD.pack(
            _MAGIC,
            self._opens,
            self._unclean,
            flags,
            0,
            self.exposure_seconds,
            self.preemptions,
            *self.failures,
        )
        self._pool.write_history(record)
        self._saved_at = time.monotonic()
        self._patience = max(100.0 * (self._saved_at - began), min(0.05 / self.rate(), 60.0))

    def _take_over(self) -> None:
        assert self._pool is not None
        info = self._pool.info
        raw = self._pool.read_history()
        magic, opens, unclean, flags, _, exposure, preemptions, *failures = _RECORD.unpack_from(raw)
        self._opens, self._unclean = info.opens, info.unclean_opens
        self.found = magic == _MAGIC and all(
            0.0 <= value < math.inf for value in (exposure, preemptions, *failures)
        )
        if self.found:
            self.exposure_seconds, self.preemptions, self.failures = (
                exposure,
                preemptions,
                list(failures),
            )
            self.noticed = bool(flags & _NOTICED)
            if opens != info.opens:  # of an earlier opening of the file
                if self.noticed:
                    self.preemptions += 1.0
                elif info.unclean_opens > unclean:
                    self.failures[0] += 1.0
                self.noticed = False
        if not info.read_only:
            self.save(now=True)

    def __repr__(self) -> str:
        return (
            f"<HazardModel {sum(self.failures):g} failures, {self.preemptions:g} preemptions in "
            f"{self.exposure_seconds / 3600:.2f} h: one in {1 / self.rate() / 3600:.2f} h>"
        )


def hand_over(old: Store, new: Store) -> None:
    """Gives a copy of a store the history of the store that it was made from, if there is one."""
    if old._core.pool.read_history().startswith(_MAGIC):
        source, target = HazardModel(old), HazardModel(new)
        target.exposure_seconds, target.preemptions, target.failures = (
            source.exposure_seconds,
            source.preemptions,
            source.failures,
        )
        target.save(now=True)


def default_shares(tiers: int) -> list[float]:
    """Of all failures, those that need each tier, where nothing is known.

    >>> [round(share, 4) for share in default_shares(3)]
    [0.85, 0.1275, 0.0225]
    """
    return [_SHARE**i - (_SHARE ** (i + 1) if i < tiers - 1 else 0.0) for i in range(tiers)]


assert _RECORD.size <= HISTORY_BYTES
