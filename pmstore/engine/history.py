"""How the runs that had a store open ended, in the record of its file that no roll back touches."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

from pmstore.engine.constants import HISTORY_BYTES
from pmstore.engine.pool import Pool

LEVELS_MAX = 8
_MAGIC = b"PMSHAZ1\0"
_RECORD = struct.Struct(f"<8sQQIIdd{LEVELS_MAX}d")
_NOTICED = 1
assert _RECORD.size <= HISTORY_BYTES


@dataclass(slots=True)
class Past:
    """What is counted over all runs."""

    exposure_seconds: float = 0.0
    """That runs had the store open."""
    preemptions: float = 0.0
    """Runs that were taken away after a notice: no failures."""
    failures: list[float] = field(default_factory=lambda: [0.0] * LEVELS_MAX)
    """By what was needed to go on: 0 is the store itself."""
    noticed: bool = False
    """The present run was told that it will be taken away."""
    found: bool = False
    """Whether the store had a record."""

    def sane(self) -> bool:
        values = (self.exposure_seconds, self.preemptions, *self.failures)
        return all(0.0 <= value < math.inf for value in values)


class History:
    """Of one open store."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @property
    def read_only(self) -> bool:
        return bool(self._pool.info.read_only)

    def read(self) -> Past:
        """What was recorded, with the end of the run before: one that is found without a clean-exit
        mark failed, unless it had been noticed."""
        info = self._pool.info
        magic, opens, unclean, flags, _, exposure, preemptions, *failures = _RECORD.unpack_from(
            self._pool.read_history()
        )
        past = Past(exposure, preemptions, failures, bool(flags & _NOTICED), True)
        if magic != _MAGIC or not past.sane():
            return Past()
        if opens != info.opens:  # of an earlier opening of the file
            if past.noticed:
                past.preemptions += 1.0
            elif info.unclean_opens > unclean:
                past.failures[0] += 1.0
            past.noticed = False
        return past

    def write(self, past: Past) -> None:
        """Survives as a commit does. Raises: OSError."""
        info = self._pool.info
        record = _RECORD.pack(
            _MAGIC,
            info.opens,
            info.unclean_opens,
            _NOTICED if past.noticed else 0,
            0,
            past.exposure_seconds,
            past.preemptions,
            *past.failures,
        )
        self._pool.write_history(record)

    def hand_over(self, heir: History) -> None:
        """To the store that takes this one's place, if there is a record."""
        if self._pool.read_history().startswith(_MAGIC):
            past = self.read()
            self.write(past)
            past.noticed = False
            heir.write(past)
