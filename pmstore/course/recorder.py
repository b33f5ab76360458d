"""Writes the course of a run into its store, a batch of steps at a time."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from pmstore._engine.inspection import written_bytes
from pmstore.course import records
from pmstore.course.buckets import Curve
from pmstore.course.lives import Lives, append
from pmstore.course.records import DECISIONS, STEPS, TIERS, TOTALS, WORDS, WORDS_MAX, Step, Total
from pmstore.course.stake import Stake
from pmstore.errors import StoreFullError
from pmstore.scheduler._models.losses import DeviceLoss

if TYPE_CHECKING:
    from pmstore import Store
    from pmstore.scheduler import Decision as Decided
    from pmstore.tiers._flush.flush import TierState

BATCH = 256
"""Steps between two writes into the store at most, and seconds:"""
FRESH_SECONDS = 0.5
_DEVICE_SECONDS = 0.05
"""The time between two losses that are read from an accelerator: to copy one costs the training 10
us, and it waits for none."""

_RATE_SECONDS = 5.0
"""The time over which steps a second are counted."""
_NAN = math.nan
_STEP, _TIME, _SECONDS = int(Step.STEP), int(Step.TIME), int(Step.SECONDS)

clock: Callable[[], float] = time.perf_counter


class Course:
    """Writes the course of one run, in the process that trains it.

    Each step is a row. Rows wait in memory and go into the store in batches, before the commit of
    the step at which that is due: the writes are then part of that commit. So the store's last
    commit lacks at most the rows of the newest 256 steps or half a second, whichever is less; of a
    young run less than an eighth of its steps.

    How long a step's commit took is known after it. So the newest row is written again.
    """

    def __init__(self, store: Store, run: str, step: int = 0) -> None:
        """Begins the course of a run; writes nothing. step: the newest that is committed."""
        self.last_step: int | None = None
        """The step that ends the run, as far as is known: its row does not wait for others."""
        self.commit_seconds: float = 0.0
        """The seconds that commits of this process took."""
        self._began = clock()
        self.stake: Stake = Stake(self._began, step)
        self._marks: deque[tuple[float, int]] = deque(maxlen=16)
        self._newest: dict[str, float] = {}  # what `latest` tells of rows that are in the store
        self._store = store
        self._place = records.place(run)
        self._rows: list[list[float]] = []  # not in the store; the newest may be, without its end
        self._safe: list[list[float]] = []  # in the store, of committed steps, but not committed
        self._epoch = -1  # epoch of the store when these rows were written
        self._rollbacks = -1  # roll backs of the store when its arrays were looked up
        self._due = 1  # rows at which they are written
        self._count = 0
        self._written = -math.inf
        self._bytes = written_bytes(store._core.pool)
        self._decided: list[tuple[float, Decided]] = []
        self._safe_decided: list[tuple[float, Decided]] = []  # as `_safe`
        self._before: list[float] | None = None  # `totals` of the processes before this one
        self._launched: tuple[float, int] | None = None  # a commit under way: when, of which step
        self._device: DeviceLoss | None = None
        self._device_at = -math.inf
        self._full = False
        self.lives: Lives = Lives(store, self._place)

    # ---- what a run calls

    def add(self, step: int, loss: Any, now: float) -> None:
        """Notes a step that is about to be committed, or left pending. now: by `clock`."""
        if loss.__class__ is not float:
            loss = self._number(step, loss, now)
        rows = self._rows
        if loss is None:
            rows.append([step, now, _NAN, _NAN, 0.0, 0.0])
        else:
            rows.append([step, now, loss, _NAN, 0.0, 1.0])
        if len(rows) > self._due or now - self._written >= FRESH_SECONDS or step == self.last_step:
            self._flush(now)

    def committed(self, began: float, decision: Decided | None, step: int, under_way: bool) -> None:
        """Notes that a commit of all steps up to this one has been made, or has begun (under_way).
        It began at that moment by `clock`. decision: of a scheduler, if one made it."""
        now = clock()
        seconds = now - began
        self.commit_seconds += seconds
        if self._rows:
            row = self._rows[-1]
            before = row[_SECONDS]  # it was committed already, and more was written since
            row[_SECONDS] = seconds if before != before else before + seconds
            self.stake.see(row[_TIME] + seconds, int(row[_STEP]))
        if decision is not None and decision.target and len(self._decided) < BATCH:
            self._decided.append((time.time(), decision))
        self._launched = (now, step) if under_way else None
        if not under_way:
            self.stake.end(now, step)

    def landed(self) -> None:
        """Notes that the commit that was under way is over."""
        if self._launched is not None:
            self.stake.see(clock(), self._launched[1])
            self.stake.end(*self._launched)
            self._launched = None

    @property
    def seconds(self) -> float:
        """The seconds since attach."""
        return clock() - self._began

    def rolled_back(self, step: int) -> None:
        """Notes that the store went back to its last commit, which holds so many steps."""
        if self._store.epoch != self._epoch:
            self._safe, self._safe_decided = [], []
        rows, decided = (*self._safe, *self._rows), (*self._safe_decided, *self._decided)
        self._safe, self._rows = [], [row for row in rows if row[Step.STEP] <= step]
        self._safe_decided, self._decided = [], [one for one in decided if one[1].step <= step]
        self._newest.pop("loss", None)
        self._count, self._due, self._launched = 0, 1, None
        self.stake.end(clock(), step)

    # ---- what is known in this process

    def latest(self) -> dict[str, float]:
        """Returns numbers about the newest steps: loss, commit_seconds, steps_per_second;
        commit_share of the time since attach, and the most that was at stake. What is not known is
        left out."""
        elapsed, stake = self.seconds, self.staked()
        found: dict[str, float] = {
            "stake_seconds_most": stake.seconds,
            "stake_steps_most": stake.steps,
            **self._newest,
            **self._of_rows(),
        }
        if elapsed > 0.0:
            found["commit_share"] = self.commit_seconds / elapsed
        if self._rows and self._marks:
            step, now = self._rows[-1][:2]
            then, first = next(
                (one for one in self._marks if now - one[0] < _RATE_SECONDS), self._marks[-1]
            )
            if now > then:
                found["steps_per_second"] = (step - first) / (now - then)
        return found

    def _of_rows(self) -> dict[str, float]:
        """Returns the newest loss and the newest cost of a commit among the rows that are not in
        the store."""
        found = {}
        for row in self._rows:
            if row[Step.GIVEN]:
                found["loss"] = row[Step.LOSS]
            if row[Step.SECONDS] == row[Step.SECONDS]:
                found["commit_seconds"] = row[Step.SECONDS]
        return found

    def staked(self) -> Stake:
        """Returns the most that was at stake, up to the end of the newest step."""
        if self._rows:
            self.stake.see(self._rows[-1][Step.TIME], int(self._rows[-1][Step.STEP]))
        return self.stake

    # ---- losses

    def _number(self, step: int, loss: Any, now: float) -> float | None:
        """Returns the loss as a number; None if there is none, or not yet: a loss on a device
        arrives later."""
        if loss is None:
            return None
        try:
            if loss.is_cpu:
                return float(loss.item())
        except AttributeError:  # no tensor
            with suppress(TypeError, ValueError, OverflowError):
                return float(loss)
            return None
        except (TypeError, RuntimeError):  # it is complex, or has several elements
            return None
        if loss.is_cuda and loss.numel() == 1 and now - self._device_at >= _DEVICE_SECONDS:
            self._device_at = now
            self._device = self._device or DeviceLoss()
            if (arrived := self._device.poll()) is not None:
                self._arrived(*arrived)
            self._device.offer(step, loss)
        return None

    def _arrived(self, step: int, loss: float) -> None:
        """Takes in the loss of an earlier step. If that step's row is in the store already, the
        newest row takes it: a few steps late."""
        for row in (*(row for row in self._rows if row[Step.STEP] == step), *self._rows[-1:]):
            row[Step.LOSS], row[Step.GIVEN] = loss, True
            return

    # ---- into the store

    def _flush(self, now: float) -> None:
        self._written = now
        self._marks.append((now, int(self._rows[-1][Step.STEP])))
        self._count += len(self._rows)
        self._due = min(BATCH, 1 + self._count // 8)
        self._newest |= self._of_rows()
        if not self._full:
            try:
                self._write(now)
            except StoreFullError as error:
                self._full = True
                warnings.warn(
                    f"no room for the course of the run (losses, times, decisions): {error}",
                    RuntimeWarning,
                    stacklevel=5,
                )
        self._rows = self._rows[-1:]

    def _write(self, now: float) -> None:
        store = self._store
        first = int(self._rows[0][Step.STEP])
        if self._rollbacks != store.rollbacks:
            self._open(first)
        if self._epoch != store.epoch:
            self._safe, self._safe_decided = [], []  # they are committed
        rows = np.array(self._rows)
        rows[:, Step.TIME] += time.time() - clock()
        done = np.flatnonzero(rows[:, Step.SECONDS] == rows[:, Step.SECONDS])
        if done.size:  # what was safe before is committed
            self._safe = self._rows[: min(int(done[-1]) + 1, len(self._rows) - 1)]
            total = written_bytes(store._core.pool)
            rows[done, Step.BYTES] = (total - self._bytes) / done.size
            self._bytes = total
        self._epoch = store.epoch
        store.will_write(self._steps)
        self._steps[rows[:, Step.STEP].astype(np.intp) % len(self._steps)] = rows
        if len(rows) > 1:
            self._curve.add(rows[:-1])
        assert self._before is not None
        stake = self.staked()
        self._totals[0] = (
            self._before[Total.SECONDS] + now - self._began,
            max(self._before[Total.STAKE], stake.seconds),
            max(self._before[Total.STAKE_STEPS], stake.steps),
            rows[-1, Step.STEP],
        )
        states = store.tier_states()
        if self._decided or states:
            self._write_coded(states)

    def _open(self, first: int) -> None:
        """Finds or makes the arrays in the store. first: of the steps that come. What the store has
        of it and of later steps belongs to another run of that name, and is forgotten."""
        self._rollbacks = self._store.rollbacks
        self._steps = self._array(STEPS)
        steps = self._steps[:, Step.STEP]
        self._steps[steps >= first] = 0.0
        self.lives.write(self._array, first - 1)
        self._curve = Curve(self._store, self._array(records.CURVE), first)
        self._totals = self._array(TOTALS)
        if self._before is None:
            row = self._totals[0].tolist()
            sound = all(map(math.isfinite, row)) and row[Total.STEP] < first
            self._before = row if sound else [0.0] * len(Total)
        # the newest one waited for its end, which did not come
        late = np.array(self._steps[(steps > self._curve.last) & (steps < first)])
        if len(late):
            self._curve.add(late[np.argsort(late[:, Step.STEP])])

    def _array(self, what: tuple[str, tuple[int, int]]) -> Any:
        name, shape = what
        path = f"{self._place}/{name}"
        stored = self._store.get(path)
        if stored is not None and (
            not isinstance(stored, np.ndarray)
            or stored.shape != shape
            or stored.dtype != np.float64
        ):
            del self._store[path]  # an array of another version
        return self._store.require(path, shape, "float64")

    def _write_coded(self, states: list[TierState]) -> None:
        """Writes decisions, and how far tiers are. Their words are written as places in `words`."""
        path = f"{self._place}/{WORDS}"
        words: Any = copy.deepcopy(self._store.get(path))
        if not records.are_words(words):
            words = {name: [] for name in records.WORDS_OF}
        targets, reasons, tiers = (words[name] for name in records.WORDS_OF)
        known = len(targets) + len(reasons) + len(tiers)
        coded: list[tuple[float, ...]] = [
            (
                *(one.step, at, _place(targets, one.target or ""), _place(reasons, one.reason)),
                *(one.risk, one.cost, one.hazard, one.weight, one.predicted_overhead),
            )
            for at, one in self._decided
        ]
        if coded:
            append(self._array(DECISIONS), coded)
        for one in states[: TIERS[1][0]]:
            self._array(TIERS)[_place(tiers, one.name) % TIERS[1][0]] = (
                *(one.epoch, one.seconds, one.under_way or 0, one.share, one.failed, time.time()),
            )
        if len(targets) + len(reasons) + len(tiers) != known:
            self._store[path] = words
        self._safe_decided += self._decided
        self._decided = []


def _place(words: list[str], word: str) -> int:
    """Returns the place of a word. A new word is added if there is room; otherwise it is the last
    one, "another"."""
    word = word[: records.WORD_MAX]
    if word not in words:
        if len(words) >= WORDS_MAX - 1:
            word = "another"
        if word not in words:
            words.append(word)
    return words.index(word)
