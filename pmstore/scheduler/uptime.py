"""Counts the time that one process lived, and whether its end lost work."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pmstore._engine.history import Announced
from pmstore.errors import PmstoreError
from pmstore.objects.guards import Guard
from pmstore.scheduler._models.hazard import HazardModel
from pmstore.scheduler.target import Target

if TYPE_CHECKING:
    from pmstore import Store

_DAY = 86400.0


class Uptime(Guard):
    """Counts the time of the process that a scheduler is in, and tells the hazard model.

    With a store it is a guard of that (`pmstore.objects.guards.Guard`), so that it sees how the
    store is closed. What loses work is a failure, however the program ends: by an exception,
    Control-C, `sys.exit(1)`, or a `close` with steps that nobody committed. (A process that is
    killed closes nothing: the store's next opening counts that.) An end that a notice has announced
    is none, as soon as the work is committed: see `HazardModel.announced`.

    Attributes:
        spared: the program ends, and loses nothing: finished steps are kept then, whenever it is.
        finished: the job is at its end: an exception after that interrupts no training.
    """

    def __init__(
        self,
        store: Store | None,
        hazard: HazardModel,
        targets: Sequence[Target],
        clock: Callable[[], float],
    ) -> None:
        self.finished = False
        self.spared = False
        self._store = store
        self._hazard = hazard
        self._targets = targets
        self._clock = clock
        self._counted_to = clock()
        self._worked = False
        if store is not None:
            store._guard_commits(self)

    def lived(self, now: float) -> float:
        """Counts the time up to now, whatever the process did in it. Returns its seconds."""
        seconds = now - self._counted_to
        self._counted_to = now
        if not 0.0 < seconds < math.inf:
            return 0.0
        self._worked = True
        self._hazard.expose(seconds)
        return seconds

    def jumped(self, seconds: float) -> None:
        """Leaves out a jump of the clock. Between two steps the clock moved by more than an
        iteration takes. The process may well have lived meanwhile (an evaluation), but not for more
        than a day: then the clock was set. (`time.monotonic` stands still while the machine is
        suspended.)"""
        if math.isfinite(seconds) and not 0.0 <= seconds <= _DAY:
            self._counted_to += seconds

    def _loses(self, raising: bool) -> bool:
        assert self._store is not None
        if self._targets[0].steps and self._store.written():
            return True
        # Right after a commit there is no whole step to be lost. But the next end of this kind
        # will come at another time.
        return raising and self._worked and not self.finished

    # ---- the store asks (see `pmstore.objects.guards.Guard`)

    def ending(self, kept: bool, raising: bool) -> None:
        loses = not (kept or self.spared) and self._loses(raising)
        self.lived(self._clock())
        if loses and not self._hazard.announced:
            self._hazard.failed()
            self._hazard.announced = Announced.COUNTED  # also if closing is killed
        # A store that cannot be written says so elsewhere.
        with contextlib.suppress(OSError, PmstoreError):
            self._hazard.save(now=True)
