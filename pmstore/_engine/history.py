"""Records how the runs that had a store open ended. No roll back touches the record, which is in
the store's file."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from enum import IntEnum

from pmstore._engine.constants import HISTORY_BYTES
from pmstore._engine.pool import Pool

LEVELS_MAX = 8
_MAGIC = b"PMSHAZ1\0"
_EVIDENCE = 4
_RECORD = struct.Struct(f"<8sQQIIdd{LEVELS_MAX}d{LEVELS_MAX}I{LEVELS_MAX}d{_EVIDENCE}d")
assert _RECORD.size <= HISTORY_BYTES


class Announced(IntEnum):
    """Says what will end the present run without being a failure that is yet to be counted: its
    work was committed in time."""

    NOTHING = 0
    PREEMPTION = 1
    PLANNED = 2
    """It was known long before, as the end of an allocation is."""
    COUNTED = 3
    """It is a failure, which is among `failures`."""


@dataclass(slots=True)
class Past:
    """The counts over all runs of a store."""

    exposure_seconds: float = 0.0
    """The time that runs had the store open."""
    preemptions: float = 0.0
    """Runs that were taken away after a notice: no failures."""
    failures: list[float] = field(default_factory=lambda: [0.0] * LEVELS_MAX)
    """The failures, by what was needed to go on: 0 is the store itself."""
    announced: Announced = Announced.NOTHING
    costs: dict[int, float] = field(default_factory=dict)
    """Seconds that the last commit to a target took, by a number that stands for the target."""
    found: bool = False
    """Whether the store had a record."""
    run_ended: bool = False
    """The run that wrote it has ended since."""
    evidence: list[float] = field(default_factory=lambda: [0.0] * _EVIDENCE)
    """What of the counts still says something: `pmstore.scheduler._models.estimate.Evidence`."""

    def sane(self) -> bool:
        values = (self.exposure_seconds, self.preemptions, *self.failures, *self.costs.values())
        values += (*self.evidence,)
        return all(0.0 <= value < math.inf for value in values)


class History:
    """The record of one open store."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @property
    def read_only(self) -> bool:
        return bool(self._pool.info.read_only)

    def read(self, *, taken_back: bool = False) -> Past:
        """Returns what was recorded, with the end of the run before. A run that left no clean-exit
        mark has failed, unless its end had been announced.

        taken_back: its last commit was, so that it lost work however it ended."""
        info = self._pool.info
        magic, opens, unclean, flags, _, exposure, preemptions, *rest = _RECORD.unpack_from(
            self._pool.read_history()
        )
        if magic != _MAGIC or flags not in {*Announced}:
            return Past()
        failures, keys, seconds, evidence = (
            rest[i : i + LEVELS_MAX] for i in range(0, 4 * LEVELS_MAX, LEVELS_MAX)
        )
        costs = {key: one for key, one in zip(keys, seconds, strict=True) if key}
        past = Past(
            exposure, preemptions, failures, Announced(flags), costs, True, evidence=evidence
        )
        if not past.sane():
            return Past()
        if opens != info.opens:  # the record is of an earlier opening of the file
            end, past.announced = past.announced, Announced.NOTHING
            killed = end is Announced.NOTHING and info.unclean_opens > unclean
            if killed or (taken_back and end is not Announced.COUNTED):
                past.failures[0] += 1.0
            elif end is Announced.PREEMPTION:
                past.preemptions += 1.0
            past.run_ended = True
        return past

    def write(self, past: Past) -> None:
        """Replaces the record. It survives as a commit does. Raises: OSError."""
        info = self._pool.info
        costs = [*past.costs.items()][:LEVELS_MAX]
        costs += [(0, 0.0)] * (LEVELS_MAX - len(costs))
        record = _RECORD.pack(
            _MAGIC,
            info.opens,
            info.unclean_opens,
            past.announced,
            0,
            past.exposure_seconds,
            past.preemptions,
            *past.failures,
            *(key for key, _ in costs),
            *(seconds for _, seconds in costs),
            *past.evidence,
        )
        self._pool.write_history(record)

    def took_back(self) -> None:
        """Notes that the last commit of the run before was taken back: that run lost work."""
        past = self.read(taken_back=True)
        if past.found:
            self.write(past)

    def hand_over(self, heir: History) -> None:
        """Gives the record to the store that takes this one's place, if there is a record."""
        if self._pool.read_history().startswith(_MAGIC):
            past = self.read()
            self.write(past)
            past.announced = Announced.NOTHING
            heir.write(past)
