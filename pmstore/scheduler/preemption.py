"""Using the time between a preemption notice and the end."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pmstore.scheduler.cost import CostModel
    from pmstore.scheduler.target import Target
    from pmstore.scheduler.timer import IterationTimer


class PreemptionGuard:
    """Notices that this process is about to be taken away, so that the scheduler commits now, goes
    on, and commits in time.

    A notice is a signal (SIGTERM), a deadline file (holding seconds since the epoch, or nothing:
    then `notice_seconds` from when it is seen), or a callable that returns the seconds left, or
    None. The signal handler only notes the time; the commits happen in `CommitScheduler.step`, and
    `scheduler.stopping` tells the loop that the last one has been made.

        with PreemptionGuard(notice_seconds=30) as guard:
            scheduler = CommitScheduler(store=store, guard=guard)
            for batch in batches:
                scheduler.step(train(batch))
                if scheduler.stopping:
                    break

    Args:
        notice_seconds: from a signal to the end.
        signals: to take; none outside the main thread. The handlers of before come back when the
            block is left.
        deadline_file, deadline: looked at once a second at most.
        target: to commit to; None: the highest whose commits are known to fit into the time.
        margin: what the last commit may take beyond the slowest seen, as a share of it.
    """

    def __init__(
        self,
        notice_seconds: float = 30.0,
        *,
        signals: Iterable[int] = (signal.SIGTERM,),
        deadline_file: str | os.PathLike[str] | None = None,
        deadline: Callable[[], float | None] | None = None,
        target: str | None = None,
        margin: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.notice_seconds = notice_seconds
        self.target = target
        self.margin = margin
        self.first = True
        self.finished = False
        self._signals = tuple(signals)
        self._file = deadline_file
        self._ask = deadline
        self._clock = clock
        self._ends: float | None = None
        self._old: dict[int, Any] = {}
        self._looked = -math.inf
        self._known = (-1, 0.0)
        self._polls = deadline_file is not None or deadline is not None

    # ---- notices

    def notify(self, seconds_left: float | None = None) -> None:
        """A notice: the end comes in so many seconds. Safe in a signal handler; a second one
        changes nothing."""
        if self._ends is None:
            self._ends = self._clock() + (
                self.notice_seconds if seconds_left is None else seconds_left
            )

    def noticed(self) -> bool:
        """Whether a notice has come. Cheap: called in every step."""
        if self._ends is not None:
            return True
        return self._polls and self._look()

    def _look(self) -> bool:
        now = self._clock()
        if now - self._looked < 1.0:
            return False
        self._looked = now
        left = self._ask() if self._ask is not None else None
        if left is None and self._file is not None:
            left = _seconds_left(self._file, self.notice_seconds)
        if left is not None:
            self.notify(left)
        return left is not None

    def time_left(self, now: float) -> float:
        """Seconds to the end; infinite without a notice."""
        return math.inf if self._ends is None else self._ends - now

    # ---- what fits

    def needed(self, timer: IterationTimer, cost: CostModel) -> float:
        """Seconds that one more iteration and the last commit may take: less than these left, the
        commit is due."""
        if cost.count != self._known[0]:  # what was seen is sorted once a commit, not once a step
            worst = max(timer.p99, timer.largest) * 1.1
            self._known = (cost.count, worst + self.last_commit(cost))
        return self._known[1]

    def last_commit(self, cost: CostModel) -> float:
        """Seconds to set aside for a commit: the slowest seen and a margin, its background part
        included."""
        return max(cost.p99, cost.largest) * (1.0 + self.margin) + cost.background

    def target_for(self, targets: Sequence[Target], now: float) -> Target:
        for target in reversed(targets):
            if self.target is not None:
                if target.name == self.target:
                    return target
            elif (
                target.handle is None
                and target.cost.count
                and self.last_commit(target.cost) <= self.time_left(now)
            ):
                return target
        return targets[0]

    # ---- signals

    def enter(self) -> bool:
        """As the block does, unless it was entered already: then False. `__exit__` ends it."""
        if self._old:
            return False
        self.__enter__()
        return True

    def __enter__(self) -> PreemptionGuard:
        for number in (
            self._signals if threading.current_thread() is threading.main_thread() else ()
        ):
            self._old[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # the signals are the main thread's
        for number, old in self._old.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)
        self._old.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.notify()


def _seconds_left(path: str | os.PathLike[str], default: float) -> float | None:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            text = file.read(64).strip()
    except OSError:
        return None
    try:
        left = float(text) - time.time()
    except ValueError:
        return default
    return left if -math.inf < left < math.inf else default
