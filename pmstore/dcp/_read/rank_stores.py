"""Opens the stores of a run's ranks for reading, at one state of the run."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from pmstore.errors import MixedStoresError, StoreLockedError
from pmstore.objects.generations import Key, Member, explain, newest_common
from pmstore.objects.job_record import members, stored_runs
from pmstore.opening import open as open_store
from pmstore.opening import open_before
from pmstore.store import Store
from pmstore.torch.run_errors import AttachError

WAIT_SECONDS = 60.0
"""How long ranks that train meanwhile are looked at, until all are seen at one generation."""

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def find(paths: Paths) -> list[str]:
    """Returns the paths of stores. They are given as one path, a pattern (`run-*.pm`), or several
    of either. Those of a pattern are in the order of their names.

    Raises: FileNotFoundError: nothing is there; ValueError: a store is named twice.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    found: list[str] = []
    for one in (os.fspath(path) for path in given):
        if os.path.isdir(one):
            raise IsADirectoryError(
                21,
                "it is a folder: give the stores of the run, as 'run-*.pm'; for the folder of a "
                "StoreWriter: StoreReader(folder); for a tier: StoreReader.of_epoch",
                one,
            )
        if os.path.exists(one) or not glob.has_magic(one):
            found.append(one)
            continue
        matching = sorted(glob.glob(one))
        if not matching:
            raise FileNotFoundError(f"no store matches {one!r}")
        found += matching
    if not found:
        raise ValueError("no stores were given: give the paths of all ranks' stores")
    seen: dict[str, str] = {}
    for one in found:
        real = os.path.realpath(one)
        if real in seen:
            raise ValueError(f"{one} and {seen[real]} are one store: give each rank's once")
        seen[real] = one
    return found


class Ranks:
    """The stores of all ranks of a run, each open at the same generation.

    Attributes:
        stores: in the order of ranks.
        mark: which state of the run it is.
    """

    def __init__(self, paths: Sequence[str], name: str) -> None:
        """Opens the stores, and takes them to one state. Raises: AttachError: a store has no such
        run; MixedStoresError: they do not belong together, or a rank's store is missing; what
        `pmstore.open` raises."""
        with ExitStack() as stack:
            opened = [stack.enter_context(_Rank.open(path)) for path in paths]
            self.mark: str = _agree(opened, name)
            opened.sort(key=lambda one: one.number(name))
            self.stores: list[Store] = [one.store for one in opened]
            self._open = stack.pop_all()

    def close(self) -> None:
        self._open.close()


class _Rank:
    """A rank's store, and whether somebody writes to it."""

    def __init__(self, store: Store, live: bool) -> None:
        self.store = store
        self.live = live

    @classmethod
    @contextmanager
    def open(cls, path: str) -> Iterator[_Rank]:
        """Opens a rank's store. Where nobody else has it open, nothing is copied into memory, and
        nobody writes meanwhile."""
        try:
            store, live = open_store(path, "r", lock=True), False
        except StoreLockedError:
            store, live = open_store(path, "r"), True
            store.refresh(keep=True)
        rank = cls(store, live)
        try:
            yield rank
        finally:
            rank.store.close()

    def member(self, name: str) -> Member:
        path = self.store.path
        found = members(self.store, path).get(name)
        if found is None:
            there = ", ".join(map(repr, stored_runs(self.store))) or "none"
            raise AttachError(f"{path}: there is no run {name!r} in the store; it has {there}")
        return replace(found, held=found.held and not self.live)

    def go_back(self) -> None:
        """Shows the version before the last commit, which it holds."""
        self.store.close()
        self.store = open_before(self.store.path)

    def number(self, name: str) -> int:
        record = self.member(name).record
        return record.rank if record is not None else 0


def _agree(ranks: Sequence[_Rank], name: str) -> str:
    """Takes all ranks to one state. Ranks that train meanwhile are looked at again until they are
    at it.

    Returns: which state it is. Raises: MixedStoresError.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        shown = [rank.member(name) for rank in ranks]
        if len(shown) > 1:
            _refuse_strangers(shown)
        common = newest_common(shown)
        if common is not None:
            _go_back(ranks, shown, common)
            return mark_of(shown, common)
        newest = max(one.keys[0].number for one in shown)
        behind = [
            rank
            for rank, one in zip(ranks, shown, strict=True)
            if rank.live and one.keys[0].number < newest
        ]
        if not behind or time.monotonic() > deadline:
            raise _mixed(ranks, shown)
        for rank in behind:
            rank.store.refresh(keep=True)
        time.sleep(0.001)


def _go_back(ranks: Sequence[_Rank], shown: Sequence[Member], common: Key) -> None:
    """Takes back those ranks that have committed one generation more than the others."""
    for rank, one in zip(ranks, shown, strict=True):
        if len(shown) > 1 and one.keys[0] != common:
            rank.go_back()


def mark_of(shown: Sequence[Member], common: Key) -> str:
    of = shown[0].uuid if len(shown) == 1 else common.job
    return f"{common}, {of}, {common.mark}"


def _refuse_strangers(shown: Sequence[Member]) -> None:
    alone = [one.name for one in shown if one.record is None]
    if len(alone) == len(shown):
        raise MixedStoresError(
            f"{', '.join(alone)} are of runs that were trained without a job: nothing says that "
            "they belong together. Attach with process_group='world' where ranks train one model; "
            "or give one store"
        )


def _mixed(ranks: Sequence[_Rank], shown: Sequence[Member]) -> MixedStoresError:
    live = [rank.store.path for rank in ranks if rank.live]
    running = (
        f". {', '.join(live)} {'is' if len(live) == 1 else 'are'} being written to: the version "
        "before can be read when nobody has the store open"
    )
    return MixedStoresError("; ".join(explain(shown)) + (running if live else ""))
