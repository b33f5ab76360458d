"""Gathers what a store tells of its runs, for people who watch: `pmstore top` and `pmstore
report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pmstore._engine.reports import Info, SegmentUsage
from pmstore.course.reader import Told, read
from pmstore.errors import CorruptStoreError, PmstoreError
from pmstore.objects.job_record import stored_runs

if TYPE_CHECKING:
    from pmstore.store import Store
    from pmstore.tiers._epochs.listing import EpochInfo


@dataclass(frozen=True)
class RunState:
    """A training run, as of the store's last commit. course: None: the program's version of pmstore
    kept none."""

    name: str
    step: int
    data_epoch: int
    batch: int
    course: Told | None


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
    """Gathers what the store tells of itself and of its runs. Raises: CorruptStoreError,
    SnapshotLostError."""
    found = tuple(_run(store, name) for name in runs(store))
    return Gathered(store.info(), store.usage(), found, store._core.pool.info.permissions)


def runs(store: Store) -> list[str]:
    """Returns the names of the store's training runs."""
    return stored_runs(store)


def _run(store: Store, name: str) -> RunState:
    step, data_epoch, batch, _ = (int(number) for number in store[f"{name}/progress"])
    return RunState(name, step, data_epoch, batch, read(store, name))


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
