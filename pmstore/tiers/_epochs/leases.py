"""Leases: a reader says in the tier which epoch it reads, and the writer's `keep` leaves that epoch
for a while.

A lease is an empty file, `EPOCH.RUN.WORLD.TOKEN.lease`. Its reader renews it by its time alone.
Ages are told by the place's own clock: the lease's time against that of the file that was written
there last. So no two clocks are compared. It delays forgetting, and nothing else, for so many
epochs and so long: anybody may have written it.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from pmstore._base.workers import Worker
from pmstore.tiers._epochs.manifest import GENERATION_MOST, ManifestName
from pmstore.tiers._places.place import Place, Source

RENEW_SECONDS = 15.0
LEASE_SECONDS = 120.0
"""A lease that was not renewed for so long is a dead reader's, and is deleted."""
WHOLE_SECONDS = 24 * 3600.0
"""A writer honours no lease for longer, whoever renews it."""
LEASES_MOST = 64
"""So many leases of a run a writer looks at."""
EPOCHS_MOST = 16
"""So many epochs a writer leaves for leases."""
_END_SECONDS = 5.0

_NAME = re.compile(
    r"(\d{12,20})\.([A-Za-z0-9_-]{1,64})\.(\d{1,20})\.([0-9a-f]{16})\.lease", re.ASCII
)
_SUFFIX = ".lease"


class LeaseName(NamedTuple):
    epoch: int
    run: str
    world_size: int
    token: str
    """16 hexadecimal digits, drawn by the reader."""

    def __str__(self) -> str:
        return f"{self.epoch:012d}.{self.run}.{self.world_size}.{self.token}.lease"

    @classmethod
    def parse(cls, name: str) -> LeaseName | None:
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        made = cls(int(match[1]), match[2], int(match[3]), match[4])
        return made if made.epoch <= GENERATION_MOST and str(made) == name else None


class Lease:
    """A lease that is held while its `with` lasts, where the reader may write; elsewhere nothing
    happens: what it reads may then be forgotten."""

    def __init__(self, place: Source, epoch: int, run: str, world_size: int) -> None:
        self._place = place
        self._name = str(LeaseName(epoch, run, world_size, secrets.token_hex(8)))
        self._ended = threading.Event()
        self._worker: Worker | None = None

    def __enter__(self) -> Lease:
        # Reading goes on without: TierError is an OSError, RuntimeError is of a thread that could
        # not be started.
        with suppress(OSError, RuntimeError):
            self._place.touch(self._name)
            self._worker = Worker("pmstore lease", self._renew)
            self._worker.start()
        return self

    def _renew(self) -> None:
        with suppress(OSError, RuntimeError):
            while not self._ended.wait(RENEW_SECONDS):
                self._place.touch(self._name)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._worker is not None:
            self._worker.join(_END_SECONDS)  # a place that hangs is not waited for
            with suppress(OSError, RuntimeError):
                self._place.delete(self._name)


class Leases:
    """The leases of one run, as its writer sees them."""

    def __init__(self, place: Place, own: ManifestName) -> None:
        self._place, self._own = place, own
        self._seen: dict[str, float] = {}  # when it was, by this process's clock

    def look(self, names: Iterable[str], fresh: str) -> tuple[set[int], list[str]]:
        """Returns the epochs that are held, and names of leases that are over. fresh: a file that
        has just been written, whose time is now."""
        found = [
            lease
            for lease in (LeaseName.parse(name) for name in names if name.endswith(_SUFFIX))
            if lease is not None
            and (lease.run, lease.world_size) == (self._own.run, self._own.world_size)
        ]
        found = sorted(found, reverse=True)[:LEASES_MOST]
        self._seen = {str(one): self._seen.get(str(one), time.monotonic()) for one in found}
        now = self._place.modified(fresh) if found else None
        held: set[int] = set()
        over: list[str] = []
        for one in found:
            if not self._lives(str(one), now):
                over.append(str(one))
            elif len(held) < EPOCHS_MOST:
                held.add(one.epoch)
        return held, over

    def _lives(self, name: str, now: float | None) -> bool:
        known = time.monotonic() - self._seen[name]
        try:
            renewed = self._place.modified(name)
        except FileNotFoundError:
            return False
        if now is None or renewed is None:  # the place tells no times
            return known < LEASE_SECONDS
        return known < WHOLE_SECONDS and abs(now - renewed) < LEASE_SECONDS
