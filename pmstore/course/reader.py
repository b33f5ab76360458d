"""Reads the course of a run out of its store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pmstore.course import records
from pmstore.course.buckets import Rows, filled, width_of
from pmstore.course.records import (
    CHANGES_MAX,
    COMMAND_MAX,
    CURVE,
    DECISIONS,
    LIVES,
    REWINDS,
    STARTS,
    STEPS,
    TIERS,
    TOTALS,
    WORDS,
    Bucket,
    Decision,
    Rewind,
    Step,
    Total,
)
from pmstore.course.records import Start as Column

if TYPE_CHECKING:
    from pmstore.store import Store


@dataclass(frozen=True, slots=True)
class Decided:
    """A commit that a scheduler decided; see `pmstore.scheduler.Decision`. time: since 1970."""

    step: int
    time: float
    target: str
    reason: str
    risk: float
    cost: float
    hazard: float
    weight: float
    predicted_overhead: float


@dataclass(frozen=True, slots=True)
class Start:
    """A process that attached the run, or went on with it, after so many steps. number: counts
    from 1. opens, unclean_opens: of the store, up to then. life: what is known of it."""

    number: int
    step: int
    time: float
    pid: int
    opens: int
    unclean_opens: int
    life: Life


@dataclass(frozen=True, slots=True)
class Life:
    """What a process was that trained the run; "" and None stand for what is not known.

    Attributes:
        after: when the step was committed that it went on behind.
        revision: of its program, in git.
        resume: the `Resume` that it gave. changed: settings that were others than before: what,
            the stored and the given value, and which choice answered that.
    """

    after: float | None = None
    command: str = ""
    host: str = ""
    revision: str = ""
    python: str = ""
    torch: str = ""
    pmstore: str = ""
    resume: str = ""
    changed: tuple[tuple[str, str, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Rewound:
    """The run was taken from a step back to an earlier one."""

    step: int
    to: int
    time: float


@dataclass(frozen=True, slots=True)
class Tier:
    """Says how far flushes to a tier were, at that time; see `Store.tier_states`."""

    name: str
    epoch: int
    seconds: float
    under_way: int | None
    share: float
    failed: bool
    time: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some neighbouring steps. loss: the mean of their losses, nan where none was given; loss_min
    and loss_max: the least and the greatest. bad: losses that were nan or infinite. time: since
    1970, of the last step."""

    first: int
    last: int
    time: float
    loss: float
    loss_min: float
    loss_max: float
    bad: int
    commits: int
    seconds: float
    """The seconds that their commits took; `slowest`: those of the slowest one."""
    slowest: float
    bytes: float


@dataclass(frozen=True)
class Told:
    """The course of one run, as of the store's last commit.

    Attributes:
        curve: the whole run, oldest first; the newest steps are `steps`' alone.
        width: steps of a stretch in `curve`.
        steps: the newest, oldest first: rows with the columns `pmstore.course.records.Step`.
        decisions, starts, rewinds: oldest first.
        seconds: that a program was attached, as of the newest rows; nan: not known.
        stake_seconds, stake_steps: the most that passed from one commit to the next; nan.
    """

    run: str
    width: int
    curve: tuple[Stretch, ...]
    steps: Rows
    decisions: tuple[Decided, ...]
    starts: tuple[Start, ...]
    rewinds: tuple[Rewound, ...]
    tiers: tuple[Tier, ...]
    seconds: float
    stake_seconds: float
    stake_steps: float

    def commit_share(self) -> float:
        """Returns the share of the time of all the run's processes that commits took; nan where
        that is not known."""
        spent = sum(one.seconds for one in self.whole())
        return spent / self.seconds if self.seconds > 0.0 else float("nan")

    def whole(self) -> Iterator[Stretch]:
        """Yields the whole run: `curve`, then the newest steps one by one."""
        yield from self.curve
        last = self.curve[-1].last if self.curve else -1
        for row in self.steps[self.steps[:, Step.STEP] > last]:
            yield _stretch_of(row)

    def rate(self) -> float:
        """Returns the steps a second lately; nan where fewer than two steps are known of this
        process."""
        began = self.starts[-1].time if self.starts else 0.0
        rows = self.steps[self.steps[:, Step.TIME] >= began]
        if len(rows) < 2:
            return float("nan")
        steps, seconds = (float(rows[-1, at] - rows[0, at]) for at in (Step.STEP, Step.TIME))
        return steps / seconds if seconds > 0.0 else float("nan")


def read(store: Store, run: str) -> Told | None:
    """Reads the course of a run. Returns None if nothing was written, as by an earlier version.
    What is damaged is left out."""
    group = records.place(run)
    curve, steps = array_of(store, group, CURVE), array_of(store, group, STEPS)
    if curve is None or steps is None:
        return None
    steps = _sound(steps, Step.STEP, Step.TIME)
    steps = steps[(steps[:, Step.STEP] >= 1)]
    steps = steps[np.argsort(steps[:, Step.STEP], kind="stable")]
    buckets = curve[filled(curve)]
    buckets = _sound(buckets, *(one for one in Bucket if one not in _MAY_BE_INFINITE))
    width = width_of(curve)
    words: Any = store.get(f"{group}/{WORDS}")
    targets, reasons, tiers = (
        (words[name] for name in records.WORDS_OF) if records.are_words(words) else ([], [], [])
    )
    lives = _lives(store.get(f"{group}/{LIVES}"))
    return Told(
        run,
        width,
        tuple(_stretch(row, width) for row in buckets.tolist()),
        steps,
        tuple(
            Decided(
                int(row[Decision.STEP]),
                row[Decision.TIME],
                _word(targets, row[Decision.TARGET]),
                _word(reasons, row[Decision.REASON]),
                *row[Decision.RISK :],
            )
            for row in _ring(store, group, DECISIONS)
        ),
        tuple(
            Start(
                int(row[Column.NUMBER]),
                int(row[Column.STEP]),
                row[Column.TIME],
                int(row[Column.PID]),
                int(row[Column.OPENS]),
                int(row[Column.UNCLEAN]),
                lives.get(int(row[Column.NUMBER]), Life()),
            )
            for row in _ring(store, group, STARTS)
        ),
        tuple(
            Rewound(int(row[Rewind.FROM]), int(row[Rewind.TO]), row[Rewind.TIME])
            for row in _ring(store, group, REWINDS)
        ),
        tuple(_tiers(tiers, array_of(store, group, TIERS))),
        *_totals(array_of(store, group, TOTALS)),
    )


def _lives(stored: Any) -> dict[int, Life]:
    """Returns the lives by their numbers. Of what a stranger may have written, texts are cut short,
    and what is of another kind is left out."""
    found = {}
    for one in stored[-STARTS[1][0] :] if isinstance(stored, list) else ():
        if not isinstance(one, dict) or type(number := one.get("number")) is not int:
            continue
        after, changed = one.get("after"), one.get("changed")
        found[number] = Life(
            after if type(after) is float and 0.0 < after < 2.0**53 else None,
            changed=tuple(
                (_text(each[0]), _text(each[1]), _text(each[2]), _text(each[3]))
                for each in (changed[:CHANGES_MAX] if isinstance(changed, list) else ())
                if isinstance(each, list) and len(each) == 4
            ),
            command=_text(one.get("command"), COMMAND_MAX),
            **{name: _text(one.get(name)) for name in _TEXTS},
        )
    return found


_TEXTS = ("host", "revision", "python", "torch", "pmstore", "resume")


def _text(value: Any, most: int = records.WORD_MAX) -> str:
    return value[:most] if isinstance(value, str) else ""


def _totals(rows: Rows | None) -> tuple[float, float, float]:
    """Returns the run's seconds, and the most time and the most steps at stake; nan where nothing
    sound was written."""
    if rows is None or not np.isfinite(rows).all() or not (rows >= 0.0).all():
        return (float("nan"),) * 3
    row = rows[0].tolist()
    return row[Total.SECONDS], row[Total.STAKE], row[Total.STAKE_STEPS]


def _tiers(names: list[str], rows: Rows | None) -> Iterator[Tier]:
    for name, row in zip(names, rows if rows is not None else (), strict=False):
        if np.isfinite(row).all() and (np.abs(row) < 2.0**53).all():
            epoch, seconds, under_way, share, failed, time = row.tolist()
            yield Tier(name, int(epoch), seconds, int(under_way) or None, share, bool(failed), time)


_MAY_BE_INFINITE = (Bucket.LOSS_SUM, Bucket.LOSS_MIN, Bucket.LOSS_MAX)


def array_of(store: Store, group: str, what: tuple[str, tuple[int, int]]) -> Rows | None:
    """Returns a copy of an array of the group; None if it is not there, or has another shape or
    dtype."""
    name, shape = what
    found = store.get(f"{group}/{name}")
    if isinstance(found, np.ndarray) and (found.shape, found.dtype) == (shape, np.float64):
        return np.array(found)
    return None


def _sound(rows: Rows, *columns: int) -> Rows:
    """Returns the rows with numbers that a count or a time can be."""
    with np.errstate(all="ignore"):
        return rows[(np.abs(rows[:, list(columns)]) < 2.0**53).all(axis=1)]


def _ring(store: Store, group: str, what: tuple[str, tuple[int, int]]) -> list[list[float]]:
    """Returns the rows of a ring, oldest first. Each begins with its number."""
    rows = array_of(store, group, what)
    if rows is None:
        return []
    columns = range(5) if what is DECISIONS else range(rows.shape[1])
    rows = _sound(rows, *columns)
    rows = rows[rows[:, 0] >= 1]
    return list(rows[np.argsort(rows[:, 0], kind="stable")].tolist())


def _word(words: list[str], number: float) -> str:
    return words[int(number)] if 0 <= number < len(words) else "?"


def _stretch(row: list[float], width: int) -> Stretch:
    losses, last = int(row[Bucket.LOSSES]), int(row[Bucket.LAST])
    nan = float("nan")
    return Stretch(
        first=max(last // width * width, 1),
        last=last,
        time=row[Bucket.TIME],
        loss=row[Bucket.LOSS_SUM] / losses if losses else nan,
        loss_min=row[Bucket.LOSS_MIN] if losses else nan,
        loss_max=row[Bucket.LOSS_MAX] if losses else nan,
        bad=int(row[Bucket.BAD]),
        commits=int(row[Bucket.COMMITS]),
        seconds=row[Bucket.SECONDS],
        slowest=row[Bucket.SLOWEST],
        bytes=row[Bucket.BYTES],
    )


def _stretch_of(row: Any) -> Stretch:
    step, time, loss, seconds, bytes_, given = row.tolist()
    committed, good = seconds == seconds, np.isfinite(loss)
    return Stretch(
        first=int(step),
        last=int(step),
        time=time,
        loss=loss if good else float("nan"),
        loss_min=loss if good else float("nan"),
        loss_max=loss if good else float("nan"),
        bad=int(given == 1.0 and not good),
        commits=int(committed),
        seconds=seconds if committed else 0.0,
        slowest=seconds if committed else 0.0,
        bytes=bytes_,
    )
