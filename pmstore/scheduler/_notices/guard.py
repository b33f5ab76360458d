"""Uses the time between a preemption notice and the end."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from pmstore.scheduler._notices.sources import Look, Source, SourceName, source_of
from pmstore.scheduler.warning import tell

if TYPE_CHECKING:
    from pmstore.scheduler._models.cost import CostModel
    from pmstore.scheduler._models.timer import IterationTimer
    from pmstore.scheduler.target import Target

_LATE_SECONDS = 60.0
_FAILURES = 3  # failures in a row after which they are told
_FAR_SECONDS = 600.0  # no notice that a machine is taken away comes so early
_SIGNALLED_SECONDS = 1800.0  # a signal at most so long before the known end tells of that end
_PLANNED_SECONDS = 60.0
"""How long before an end that is known ahead a program stops, at least."""


class PreemptionGuard:
    """Notices that this process is about to be taken away, so that the scheduler commits now, goes
    on, and commits in time.

    SIGTERM is a notice, whatever the source. Other notices depend on the source:

    * "sigterm": nothing else. Kubernetes and torchrun give 30 seconds.
    * "slurm": SIGUSR1 (`--signal=USR1@120`), and the end of the job's time, from a minute ahead or
      as long as the last commit needs.
    * "aws", "gcp": spot machines; their metadata service is asked, in a thread of its own, every 5
      seconds and every second.
    * "file:<path>": a file appears. It holds the time of the end, in seconds since 1970, or
      nothing: then it is `notice_seconds` away.
    * a callable that returns the seconds left, or None. It is called once a second, in the thread
      that trains or, while the guard is entered, in another one.

    The commits happen in `CommitScheduler.step`, and `scheduler.stopping` tells the loop that the
    last one has been made: a signal handler only notes the notice. A process that is still there a
    minute after the end that it was told of goes on as if it had not been told.

        with PreemptionGuard("slurm") as guard:
            scheduler = CommitScheduler(store=store, guard=guard)
            for batch in batches:
                scheduler.step(train(batch))
                if scheduler.stopping:
                    break

    Args:
        source: of notices.
        notice_seconds: from a signal to the end. None: 30, with "aws" 120. Say it where there is
            more or less: terminationGracePeriodSeconds of Kubernetes, GraceTime of Slurm.
        signals: that are notices; none outside the main thread. None: those of the source. The
            handlers of before come back when the block is left.
        target: to commit to; None: the highest whose commits are known to fit into the time.
        margin: what the last commit may take beyond the slowest seen, as a share of it.

    Attributes:
        first: nothing was done about the notice yet. finished: the last commit has been made.
        planned: the end was known long before.

    Raises: TypeError, ValueError: no source.
    """

    def __init__(
        self,
        source: SourceName | str | Look = "sigterm",
        *,
        notice_seconds: float | None = None,
        signals: Iterable[int] | None = None,
        target: str | None = None,
        margin: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if notice_seconds is not None:
            notice_seconds = _not_negative(notice_seconds, "notice_seconds")
        self.source: Source = source_of(source, notice_seconds)
        self.notice_seconds: float = (
            self.source.notice_seconds if notice_seconds is None else notice_seconds
        )
        self.target = target
        self.margin = margin
        self.first: bool = True
        self.finished: bool = False
        self.planned: bool = False
        self._signals = self.source.signals if signals is None else tuple(signals)
        self._clock = clock
        self._reserve = 0.0  # seconds that a step and the last commit may take, as measured
        self._told = False  # it was said that they do not fit
        self._watch: _Watch | None = None
        self._process = os.getpid()
        self._ends: float | None = None
        self._old: dict[int, Any] = {}
        self._looked = -math.inf
        self._polls = self.source.look is not None and not self.source.remote
        self._expired = self._passed = False

    # ---- notices

    def notify(self, seconds_left: float | None = None, *, planned: bool = False) -> None:
        """Takes in a notice: the end comes in so many seconds. planned: it was known long before.
        It is safe in a signal handler. A second notice changes nothing, unless the first was of an
        end that is far."""
        now = self._clock()
        if self._ends is None or self.time_left(now) > self._far():
            self.planned = planned
            self._expired = self._passed = False
            self._ends = now + (self.notice_seconds if seconds_left is None else seconds_left)

    def noticed(self) -> bool:
        """Returns whether a notice has come, and the end is near. It is cheap: it is called in
        every step."""
        if self._ends is None and self._polls and self._watch is None:
            self._look()
        return self._near()

    def _near(self) -> bool:
        """Returns whether the end is near. An end that is far, as that of an allocation whose first
        hour has just begun, is planned: it is no reason to commit or to stop yet. An end that has
        not come expires."""
        if self._ends is None:
            return False
        left = self.time_left(self._clock())
        if left > self._far():
            self.planned = True
            return False
        if left < -_LATE_SECONDS:
            self._expire()
        return left >= -_LATE_SECONDS

    def _far(self) -> float:
        return max(_FAR_SECONDS, 2.0 * self._reserve)

    def _expire(self) -> None:
        """Notes that the end did not come. A source that goes on telling of it has nothing new to
        say."""
        self._ends = None
        self.first, self.finished, self.planned = True, False, False
        self._expired = True

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked >= self.source.every_seconds:
            self._looked = now
            self.look()

    def look(self) -> bool:
        """Asks the source. Returns whether the end is near. Raises: what the source raises."""
        left = self.source.look() if self.source.look is not None else None
        if left is None or (self.source.planned and left > self._ahead()):
            self._expired = self._passed = False
        elif not self._expired or (self._passed and left > 0.0):
            self.notify(left, planned=self.source.planned)
        else:  # the end that did not come; one that is set anew counts again
            self._passed = self._passed or left <= 0.0
        return self._near()

    def _ahead(self) -> float:
        """Returns how many seconds before a planned end it becomes a notice."""
        return max(_PLANNED_SECONDS, self.notice_seconds, 2.0 * self._reserve)

    def time_left(self, now: float) -> float:
        """Returns the seconds to the end; infinite without a notice."""
        return math.inf if self._ends is None else self._ends - now

    # ---- what fits

    def needed(self, timer: IterationTimer, cost: CostModel) -> float:
        """Returns the seconds that one more iteration and the last commit may take. If fewer are
        left, the commit is due."""
        return max(timer.p99, timer.largest) * 1.1 + self.last_commit(cost)

    def last_commit(self, cost: CostModel) -> float:
        """Returns the seconds to set aside for a commit: the slowest seen and a margin, its
        background part included."""
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

    def fits(self, timer: IterationTimer, cost: CostModel) -> None:
        """Says so, once, if a step and a commit do not fit, as far as they were measured."""
        if self._ends is None and timer.warm and cost.count:
            self.measured(max(timer.p99, timer.largest), self.last_commit(cost))

    def measured(self, step_seconds: float, commit_seconds: float) -> None:
        """Notes how long a step and a commit may take. Says so, once, if that is longer than the
        time from a notice to the end."""
        self._reserve = step_seconds + commit_seconds
        if self._reserve <= self.notice_seconds or self._told:
            return
        self._told = True
        tell(
            f"a step takes up to {step_seconds:.3g} s and the commit after it {commit_seconds:.3g} "
            f"s: more than the {self.notice_seconds:g} s from a notice to the end "
            f"(PreemptionGuard, source {self.source.name}), so what is not committed by then is "
            "lost. Commit a smaller state or to a faster place, take shorter steps, or get more "
            "time and give it as notice_seconds= (terminationGracePeriodSeconds of Kubernetes, "
            "GraceTime or --signal of Slurm; torchrun always ends its processes after 30 s)"
        )

    # ---- signals, and sources that are asked in a thread

    def enter(self) -> bool:
        """Enters the guard as its block does. Returns False if it was entered already. `__exit__`
        ends it."""
        if self._watch is not None:
            return False
        self.__enter__()
        return True

    def __enter__(self) -> PreemptionGuard:
        if self.source.about:
            tell(self.source.about)
        answers = not self.source.remote or self._try_source()
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._old[number] = signal.signal(number, self._on_signal)
        elif self._signals:
            tell(
                "a PreemptionGuard is entered outside the main thread, so signals are no notices: "
                "enter it, or call attach(guard=...), in the main thread, or give signals=()"
            )
        self._process = os.getpid()
        self._watch = _Watch(self, told=not answers)
        return self

    def __exit__(self, *_: object) -> None:
        if self._watch is not None and self._process == os.getpid():
            self._watch.close()
        self._watch = None
        if threading.current_thread() is not threading.main_thread():
            return  # the signals are the main thread's
        for number, old in self._old.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)
        self._old.clear()

    def _try_source(self) -> bool:
        """Asks a service once, so that one that is not there is heard of at the start. Returns
        whether it answers."""
        try:
            self.look()
        except OSError as error:
            tell(
                f"PreemptionGuard({self.source.name!r}): {error}. So no notice will come from it, "
                "unless it answers later; signals still count"
            )
            return False
        return True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        left = self._left_at(number)
        self.notify(left, planned=left is not None)

    def _left_at(self, number: int) -> float | None:
        """Returns the seconds that are left at that signal, which Slurm may send ahead of the end
        (`--signal`); None: it says nothing of the end."""
        end = self.source.ends_at
        if end is None or number == signal.SIGTERM:
            return None
        left = end - time.time()
        if not 0.0 < left <= _SIGNALLED_SECONDS:
            return None  # it was sent for another reason
        return left


class _Watch:
    """Asks the source of a guard that is entered, in a thread, if that can be asked."""

    def __init__(self, guard: PreemptionGuard, *, told: bool = False) -> None:
        """Starts the thread. told: it is known, and was said, that the source does not answer
        now."""
        self._guard = weakref.ref(guard)
        self._failures = _FAILURES if told else 0  # in a row
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if guard.source.look is not None:
            self._thread = threading.Thread(target=self._ask, name="pmstore-notices", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(10.0)

    def _ask(self) -> None:
        while True:
            guard = self._guard()
            if guard is None:
                return
            every = guard.source.every_seconds
            try:
                guard.look()
                self._failures = 0
            except Exception as error:  # the source can be anything
                self._failures += 1
                if self._failures == _FAILURES:
                    tell(f"a source of notices fails ({guard.source.name}): {error!r}")
            del guard
            if self._closed.wait(every):
                return


def _not_negative(value: float, what: str) -> float:
    try:
        fits = 0.0 <= value < math.inf
    except TypeError:
        raise TypeError(f"{what} is a number of seconds, not {value!r}") from None
    if not fits:
        raise ValueError(f"{what} is a number of seconds, not {value!r}")
    return float(value)
