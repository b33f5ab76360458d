"""Gathers what a store tells of its runs, for people who look: `pmstore info`, `pmstore top` and
`pmstore report`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from pmstore._base.text import counted
from pmstore._engine.reports import Info, SegmentUsage
from pmstore.course.reader import Told, read
from pmstore.errors import CorruptStoreError, PmstoreError
from pmstore.objects.containers import Group
from pmstore.objects.job_record import stored_runs
from pmstore.show.units import moment, number, seconds

if TYPE_CHECKING:
    from pmstore.store import Store
    from pmstore.tiers._epochs.listing import EpochInfo


@dataclass(frozen=True)
class RunState:
    """A training run, as of the store's last commit.

    Attributes:
        steps, epochs: with how many the loop ends that the program is in; None: it does not say.
        logged: the newest value of each name that the program logs.
        rates: the learning rates of the optimizer's groups, each once.
        lives: processes that trained it. kills: of these, that died.
        stepped_at: when the last step ended that is committed, Unix time; nan: not known.
        between_seconds: the most that passed between two commits: a kill takes about as much work
            with it, at most; nan: not known.
        live: a process has the store open for writing.
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
    lives: int
    kills: int
    stepped_at: float
    between_seconds: float
    live: bool
    course: Told | None

    def facts(self, rate: float = float("nan")) -> list[str]:
        """Returns what a person wants to know first, each fact in a few words. rate: steps a
        second, as they were just seen; nan: those of the course."""
        told = [_of(f"step {self.step:,}", self.steps)]
        if rate != rate and self.course:
            rate = self.course.rate()
        if self.live and rate == rate:
            told.append(f"{number(rate)} steps a second")
        told += [f"{name} {number(value)}" for name, value in self._figures()]
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

    def _figures(self) -> list[tuple[str, float]]:
        """What the program logged first, and last of all its loss."""
        found = {name: value for name, value in self.logged.items() if name != "lr"}
        if not found and self.course is not None:
            losses = [one.loss for one in self.course.whole() if one.loss == one.loss]
            return [("loss", losses[-1])] if losses else []
        return list(found.items())[:_FIGURES]

    def as_dict(self) -> dict[str, Any]:
        """Returns the facts for JSON: without the course; nan is None."""
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        del told["course"]
        told["rates"] = list(self.rates)
        told["logged"] = {name: _finite(value) for name, value in self.logged.items()}
        return {name: _finite(one) if isinstance(one, float) else one for name, one in told.items()}


_FIGURES = 3


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
    found = tuple(run_state(store, name, info) for name in runs(store))
    return Gathered(info, store.usage(), found, store._core.pool.info.permissions)


def runs(store: Store) -> list[str]:
    """Returns the names of the store's training runs."""
    return stored_runs(store)


def run_state(store: Store, name: str, info: Info) -> RunState:
    """Reads what the store tells of a run. info: of the store. What is damaged is left out.

    Raises: CorruptStoreError, SnapshotLostError.
    """
    step, data_epoch, batch, _ = (int(number) for number in store[f"{name}/progress"])
    course = read(store, name)
    steps, epochs = _ends(store.get(f"{name}/loops"))
    starts = course.starts if course else ()
    # Starts that are no longer known may have been of the store's first life.
    before = starts[0].unclean_opens if starts and starts[0].number == 1 else 0
    recovery = info.recovery
    dead = not (recovery.live or recovery.clean or recovery.created)
    times = [one.time for one in course.whole()] if course else []
    return RunState(
        name,
        step,
        data_epoch,
        batch,
        steps,
        epochs,
        _logged(store, f"{name}/log"),
        _rates(store, f"{name}/optimizer"),
        starts[-1].number if starts else 0,
        max(0, info.unclean_opens - before) + dead,
        times[-1] if times else float("nan"),
        course.stake_seconds if course else float("nan"),
        recovery.live,
        course,
    )


def _ends(loops: Any) -> tuple[int | None, int | None]:
    """Returns with how many steps and epochs the newest loop ends, as `<run>/loops` has it."""
    try:
        (kind, _, count, base, _), known = loops["loops"][-1], len(loops["loops"])
        end = int(count) + int(base)
    except (LookupError, TypeError, ValueError):
        return None, None
    if kind == "steps":  # it counts its own
        return (end if known == 1 else None), None
    return None, end if kind in ("batches", "epochs") else None


def _logged(store: Store, place: str) -> dict[str, float]:
    """Returns the newest value of each name, in the order of first use, as `<run>/log` has it."""
    names, group = store.get(f"{place}/names"), store.get(place)
    if not isinstance(group, Group) or not isinstance(names, list):
        return {}
    found: dict[int, float] = {}
    newest = sorted((int(name) for name in group if name.isdecimal()), reverse=True)
    for at in newest[:_LOOKS]:
        rows = store.get(f"{place}/{at}")
        if isinstance(rows, np.ndarray) and rows.dtype == np.float64 and rows.shape[1:] == (3,):
            for _, name, value in rows[::-1].tolist():
                if 1.0 <= name <= len(names):
                    found.setdefault(int(name), value)
        if len(found) == len(names):
            break
    return {str(name): found[at] for at, name in enumerate(names, 1) if at in found}


_LOOKS = 8
"""Arrays of the log that are looked through for a name that is logged seldom."""


def _rates(store: Store, place: str) -> tuple[float, ...]:
    """Returns the learning rates of an optimizer, or of several under keys."""
    group = store.get(place)
    if not isinstance(group, Group):
        return ()
    places = [place] if f"{place}/groups" in store else [f"{place}/{name}" for name in group]
    found: list[float] = []
    for one in places:
        groups = store.get(f"{one}/groups/value")
        for settings in groups if isinstance(groups, list) else ():
            rate = settings.get("lr") if isinstance(settings, dict) else None
            if isinstance(rate, float) and math.isfinite(rate):
                found.append(rate)
    return tuple(dict.fromkeys(found))


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
