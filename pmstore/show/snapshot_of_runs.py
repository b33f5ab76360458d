"""Gathers what a store tells of its runs, for people who look: `pmstore info`, `pmstore top` and
`pmstore report`."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from pmstore._base.text import counted
from pmstore._engine.failures import lock_holders
from pmstore._engine.store_info import Info, SegmentUsage
from pmstore.course.logged import arrays_of, names_of
from pmstore.course.reader import Told, read
from pmstore.errors import CorruptStoreError, PmstoreError
from pmstore.objects.containers import Group
from pmstore.objects.job_record import stored_runs
from pmstore.show.series import LETTERS
from pmstore.show.units import moment, number, seconds

if TYPE_CHECKING:
    from pmstore.store import Store
    from pmstore.tiers._epochs.listing import EpochInfo


@dataclass(frozen=True)
class RunState:
    """A training run, as of the store's last commit.

    Attributes:
        steps, epochs: with how many the loop ends that the program is in; None: it does not say,
            or it is not known.
        logged: the newest value of each name that was logged lately.
        rates: the learning rates of the optimizers' groups, each once.
        epoch_batches: of a data epoch, as the loader's settings have it; None: not known.
        lives: processes that trained it. kills: of these, that were killed, as far as the store's
            newest openings tell; killed: their numbers, of those whose starts are known.
        stepped_at: when the last step ended that is committed, Unix time; nan: not known.
        between_seconds: the most that passed between two commits: a kill takes about as much work
            with it, at most; nan: not known.
        lately: the newest values of the names, oldest first.
        live: the process that attached it last has the store open for writing.
        course: None: the program's version of pmstore kept none.
    """

    name: str
    step: int
    data_epoch: int
    batch: int
    steps: int | None
    epochs: int | None
    logged: dict[str, float]
    rates: tuple[float, ...]
    epoch_batches: int | None
    lives: int
    kills: int
    killed: tuple[int, ...]
    stepped_at: float
    between_seconds: float
    live: bool
    lately: dict[str, list[float]]
    course: Told | None

    def facts(self, rate: float = float("nan")) -> list[str]:
        """Returns what a person wants to know first, each fact in a few words. rate: steps a
        second, as they were just seen; nan: those of the course."""
        told = [_of(f"step {self.step:,}", self.steps)]
        if rate != rate and self.course:
            rate = self.course.rate()
        still = time.time() - self.stepped_at
        if self.live and rate > 0.0 and still < max(_STILL_SECONDS, 10 / rate):
            told.append(f"{number(rate)} steps a second")
            if (left := self.seconds_left(rate)) > 0.0:
                told.append(f"about {seconds(left)} left")
        for name, value in self._figures():
            told.append(f"{name} {number(value) if math.isfinite(value) else value}")
        if self.rates:
            least, most = min(self.rates), max(self.rates)
            told.append(f"lr {number(least)}" + f" to {number(most)}" * (most > least))
        if self.data_epoch or self.batch or self.epochs is not None:
            told.append(_of(f"epoch {self.data_epoch:,}", self.epochs))
        if self.lives:
            lives = "life" if self.lives == 1 else "lives"
            told.append(f"{self.lives:,} {lives}, {counted(self.kills, 'kill')}")
        if self.between_seconds == self.between_seconds:
            told.append(f"at most {seconds(self.between_seconds)} between commits")
        if self.stepped_at == self.stepped_at:
            told.append(f"last step {moment(self.stepped_at)}")
        return told

    def seconds_left(self, rate: float = float("nan")) -> float:
        """Returns how long the loop still trains, if an epoch has as many steps as it had so far;
        nan: it is not known, or nobody trains. rate: as of `facts`."""
        if rate != rate and self.course:
            rate = self.course.rate()
        done = self.data_epoch + min(1.0, self.batch / (self.epoch_batches or math.inf))
        if not self.live or not rate > 0.0:
            return float("nan")
        if self.steps is not None:
            return (self.steps - self.step) / rate
        if self.epochs is None or not done or (self.batch and self.epoch_batches is None):
            return float("nan")
        return max(0.0, self.epochs - done) * self.step / done / rate

    def _figures(self) -> list[tuple[str, float]]:
        """Returns the loss, and what the program logged under the names that it used first. If it
        logged nothing, that is the loss that it gave."""
        names = sorted(self.logged, key=lambda name: name != "loss")
        found = {name: self.logged[name] for name in names if name != "lr"}
        if not found and self.course is not None:
            losses = [one.loss for one in self.course.whole() if one.loss == one.loss]
            return [("loss", losses[-1])] if losses else []
        return list(found.items())[:_FIGURES]

    def as_dict(self) -> dict[str, Any]:
        """Returns the facts for JSON: without the course. What is not known is None; a logged
        number that is not finite is text."""
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        del told["course"], told["killed"], told["lately"]
        told["seconds_left"] = self.seconds_left()
        told["rates"] = list(self.rates)
        told["logged"] = {
            name: value if math.isfinite(value) else str(value)
            for name, value in self.logged.items()
        }
        return {name: _finite(one) if isinstance(one, float) else one for name, one in told.items()}


_FIGURES = 3
_STILL_SECONDS = 10.0
"""A run that makes no step for so long, or for ten steps' time, has no rate."""
_MOST = 1 << 53


def _of(text: str, whole: int | None) -> str:
    return text if whole is None else f"{text} of {whole:,}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class TierContent:
    """A tier that the store remembers, with its epochs, newest first, if they were listed;
    otherwise with the reason why not."""

    name: str
    url: str
    every: int | None
    epochs: tuple[EpochInfo, ...]
    problem: str


@dataclass(frozen=True)
class Gathered:
    """What one store tells of itself and of its runs."""

    info: Info
    usage: tuple[SegmentUsage, ...]
    runs: tuple[RunState, ...]
    permissions: int
    """The permissions of the file: what is told of it is for nobody else."""


def gather(store: Store) -> Gathered:
    """Gathers what the store tells of itself and of its runs.

    Raises: CorruptStoreError, SnapshotLostError.
    """
    info = store.info()
    found = tuple(run_states(store, info))
    return Gathered(info, store.usage(), found, store._core.pool.info.permissions)


def run_states(store: Store, info: Info) -> list[RunState]:
    """Reads what the store tells of its runs. info: of the store. What is damaged is left out.

    Raises: CorruptStoreError, SnapshotLostError.
    """
    courses = {name: read(store, name) for name in stored_runs(store)}
    killed, older = _killed(courses, info)
    writers = lock_holders(info.path, writing=True) if info.recovery.live else []
    found = []
    for name, course in courses.items():
        step, data_epoch, batch, _ = (int(number) for number in store[f"{name}/progress"])
        steps, epochs = _ends(store, name, step, data_epoch)
        lately = _lately(store, name)
        starts = course.starts if course else ()
        last = next(reversed(list(course.whole())), None) if course else None
        found.append(
            RunState(
                name,
                step,
                data_epoch,
                batch,
                steps,
                epochs,
                {one: values[-1] for one, values in lately.items()},
                _rates(store, f"{name}/optimizer"),
                _epoch_batches(store, name),
                starts[-1].number if starts else 0,
                older[name] + len(killed[name]),
                tuple(killed[name]),
                last.time if last else float("nan"),
                course.stake_seconds if course else float("nan"),
                bool(starts) and starts[-1].pid in writers,
                lately,
                course,
            )
        )
    return found


def _killed(
    courses: Mapping[str, Told | None], info: Info
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Returns the lives of each run that were killed; and how many that are no longer known. A life
    ended by a kill if there was one before the next life of any run of the store. So one of a run
    that is not known takes its place."""
    found: dict[str, list[int]] = {name: [] for name in courses}
    older = dict.fromkeys(courses, 0)
    lives: dict[int, dict[str, int]] = defaultdict(dict)  # by the opening of the store
    before: dict[int, int] = {}  # kills of its writers, up to that opening
    for name, course in courses.items():
        starts = course.starts if course else ()
        for start in starts:
            lives[start.opens][name] = start.number
            before[start.opens] = start.unclean_opens
        if len(courses) == 1 and starts and starts[0].number > 1:
            older[name] = starts[0].unclean_opens
    recovery = info.recovery
    now = info.unclean_opens + (not (recovery.live or recovery.clean or recovery.created))
    openings = sorted(lives)
    for opening, following in zip(openings, [*openings[1:], None], strict=False):
        if (now if following is None else before[following]) > before[opening]:
            for name, life in lives[opening].items():
                found[name].append(life)
    return found, older


def _count(value: object) -> int:
    """Returns a stored count. Raises: ValueError: it is none."""
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError("no count")
    return value


def _ends(store: Store, name: str, step: int, data_epoch: int) -> tuple[int | None, int | None]:
    """Returns with how many steps and epochs of the run its newest loop ends."""
    loops: Any = store.get(f"{name}/loops")
    try:
        kind, _, count, base, _ = loops["loops"][-1]
        if kind == "steps":
            steps = _count(count)  # it counts its own
            scopes = store.get(f"{name}/scopes")
            alone = isinstance(scopes, np.ndarray) and scopes.shape == (4,) and scopes[2] == step
            return (steps if alone and steps >= step else None), None
        epochs = _count(base) + _count(count)
        known = kind in ("batches", "epochs") and epochs >= data_epoch
        return None, epochs if known else None
    except (LookupError, TypeError, ValueError):
        return None, None


def settings(store: Store, run: str) -> dict[str, str]:
    """Returns the settings that the program gave to the run last, by name."""
    given: Any = store.get(f"{run}/given")
    pieces = given.get("settings") if isinstance(given, dict) else None
    found: dict[str, str] = {}
    for piece, held in pieces.items() if isinstance(pieces, dict) else ():
        if not isinstance(held, dict):
            continue
        if piece == "trainable":
            frozen = sum(one is False for one in held.values())
            found["frozen tensors"] = f"{frozen:,} of {len(held):,}"
            continue
        groups = held.get("groups")
        for group in groups if isinstance(groups, list) else ():
            for name, value in group.items() if isinstance(group, dict) else ():
                if value is not None and name != "initial_lr":
                    told = found.get(f"{piece}.{name}", "").split(", ")
                    several = dict.fromkeys([*filter(None, told), _short(value)])
                    found[f"{piece}.{name}"] = ", ".join(several)
        for name, value in held.items():
            if name != "groups":
                found[f"{piece}.{name}"] = _short(value)
    return {name[:LETTERS]: found[name] for name in islice(found, _SETTINGS)}


_SETTINGS = 256
"""Settings that are told, at most."""


def _short(value: object) -> str:
    try:
        return str(value)[:LETTERS]
    except ValueError:  # a number of thousands of digits
        return "?"


def _epoch_batches(store: Store, run: str) -> int | None:
    told = settings(store, run)
    try:
        if "loader.length" in told:
            return int(told["loader.length"]) or None
        samples, size = (int(told[f"loader.{name}"]) for name in _SIZES)
        whole = told.get("loader.drop_last") == "True"
        return (samples // size if whole else -(-samples // size)) or None
    except (KeyError, ValueError, ZeroDivisionError):
        return None


_SIZES = ("samples of a data epoch", "batch_size")


def _lately(store: Store, run: str) -> dict[str, list[float]]:
    """Returns the newest values of each name, oldest first, in the order of first use."""
    names = names_of(store, run)
    found: dict[int, list[float]] = {}
    for rows in islice(arrays_of(store, run, newest=True), _LOOKS):
        for place in np.unique(rows[:, 1]).tolist():
            if 1.0 <= place <= len(names):
                values = rows[rows[:, 1] == place, 2].tolist()
                found[int(place)] = values + found.get(int(place), [])
    return {name[:LETTERS]: found[at] for at, name in enumerate(names, 1) if at in found}


_LOOKS = 8
"""Arrays of the log that are looked through."""


def _rates(store: Store, place: str) -> tuple[float, ...]:
    """Returns the learning rates of an optimizer, or of several under keys; none if one is not
    known."""
    group = store.get(place)
    if not isinstance(group, Group):
        return ()
    alone = f"{place}/groups/value" in store
    places = [place] if alone else [f"{place}/{name}" for name in group]
    found: list[float] = []
    for one in places:
        groups = store.get(f"{one}/groups/value")
        for settings in groups if isinstance(groups, list) else ():
            rate = settings.get("lr") if isinstance(settings, dict) else None
            if isinstance(rate, dict):  # a tensor
                rate = store.get(f"{one}/groups/{rate.get('index')}")
            try:
                found.append(float(rate))  # type: ignore[arg-type]
            except (TypeError, ValueError, OverflowError, RuntimeError):
                return ()
    return tuple(dict.fromkeys(found)) if all(map(math.isfinite, found)) else ()


def tier_contents(store: Store) -> list[TierContent]:
    """Returns the tiers that the store remembers. The epochs of a tier are listed only if it is in
    a local directory and this file had it added here: a store that came from elsewhere names
    places, and nobody is to go there because of that."""
    try:
        strange, tiers = store._open_tiers().strange, store.tiers
    except (PmstoreError, CorruptStoreError) as error:
        return [TierContent("?", "", None, (), str(error))]
    found = []
    for name, tier in tiers.items():
        url, problem = str(tier.url), ""
        epochs: tuple[EpochInfo, ...] = ()
        if "://" in url:
            problem = f"not listed, as it is remote: pmstore epochs {url}"
        elif name in strange:
            problem = f"not listed, as it was not added here: pmstore epochs {url}"
        else:
            epochs, problem = _epochs(url)
        found.append(TierContent(name, url, tier.every, epochs, problem))
    return found


def _epochs(url: str) -> tuple[tuple[EpochInfo, ...], str]:
    from pmstore.tiers import epochs

    try:
        return tuple(epochs(url)), ""
    except (PmstoreError, OSError) as error:
        return (), str(error)
