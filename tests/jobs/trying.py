"""Runs jobs of `bad.py`, and looks at what they leave."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from programs.bits import Bits, bits_of

import pmstore

from .server import JobServer, Ranks

SLACK_SECONDS = 120.0
"""Beyond the timeout: a machine may be busy."""
_PATIENT_SECONDS = 60.0


@dataclass(frozen=True)
class Outcome:
    """What one rank got. kinds: the names of what it raised, and of its bases; none: it ended."""

    kinds: tuple[str, ...]
    said: str
    seconds: float


class Try:
    """A job in a folder, one store a rank, tried again and again."""

    def __init__(
        self, server: JobServer, folder: Path, world: int = 2, timeout: float = 20
    ) -> None:
        self.server = server
        self.folder = folder
        self.world = world
        self.timeout = timeout

    def start(self, case: str, timeout: float | None = None, **more: Any) -> Ranks:
        """timeout: that the ranks give attach; None: that of the job."""
        for name in ("outcome*", "journal*", "go"):
            for file in self.folder.glob(name):
                file.unlink()
        given = [[case, str(self.folder), timeout or self.timeout]] * self.world
        return self.server.start("bad:attempt", self.folder, given, **more)

    def run(self, case: str, timeout: float | None = None) -> list[Outcome | None]:
        """By rank; None: it was killed. Nobody hangs."""
        ranks = self.start(case, timeout)
        self.go()
        try:
            assert ranks.wait(6 * (timeout or self.timeout) + SLACK_SECONDS), self.said()
        finally:
            ranks.end()
        return [self.outcome(rank) for rank in range(self.world)]

    def right(self, case: str) -> list[int]:
        """A job that has to end well. Returns the step at which each rank joined."""
        for rank, outcome in enumerate(self.run(case, _PATIENT_SECONDS)):
            assert outcome is not None, f"rank {rank} died: {self.said()}"
            assert not outcome.kinds, f"rank {rank}: {self.said()}"
        return [self.steps(rank)[0] for rank in range(self.world)]

    def outcome(self, rank: int) -> Outcome | None:
        file = self.folder / f"outcome{rank}"
        if not file.exists():
            return None
        told = json.loads(file.read_text())
        return Outcome(tuple(told["kinds"]), told["said"], told["seconds"])

    def raised(self, rank: int) -> Outcome:
        """What a rank that has not been lost gets, within the timeout."""
        end = time.monotonic() + self.timeout + SLACK_SECONDS
        while (outcome := self.outcome(rank)) is None:
            assert time.monotonic() < end, self.said()
            time.sleep(0.02)
        return outcome

    def steps(self, rank: int) -> list[int]:
        """At which it joined, and those that it committed then."""
        file = self.folder / f"journal{rank}"
        lines = file.read_text().splitlines() if file.exists() else []
        return [int(line.split()[1]) for line in lines]

    def until(self, rank: int, step: int) -> None:
        """Waits until that rank has committed that step."""
        end = time.monotonic() + SLACK_SECONDS
        while not self.steps(rank) or self.steps(rank)[-1] < step:
            assert time.monotonic() < end, self.said()
            time.sleep(0.005)

    def go(self) -> None:
        """Lets the ranks go past `bad.HELD`."""
        (self.folder / "go").touch()

    def said(self) -> str:
        files = sorted(self.folder.glob("stderr*"))
        return "\n".join(f"{one.name}: {one.read_text()[-2500:]}" for one in files)

    def trained(self) -> list[Bits]:
        """What the last commit of each store holds of models and optimizers."""
        places = ("/run/model", "/run/optimizer")
        return [
            {path: one for path, one in found.items() if path.startswith(places)}
            for found in self.content()
        ]

    # ---- stores

    def store(self, rank: int) -> Path:
        return self.folder / f"run{rank}.pm"

    def copies(self, name: str) -> list[Path]:
        """Of all stores, as they are."""
        made = []
        for rank in range(self.world):
            made.append(self.folder / f"{name}{rank}.copy")
            shutil.copyfile(self.store(rank), made[-1])
        return made

    def put(self, rank: int, copy: Path) -> None:
        """A copy in the place of a rank's store."""
        shutil.copyfile(copy, self.store(rank))

    def content(self) -> list[Bits]:
        """Of the last commit of each store."""
        return [content(self.store(rank)) for rank in range(self.world)]


def content(path: Path) -> Bits:
    """Of a store's last commit; empty if there is no store, or nothing in it."""
    if not path.exists():
        return {}
    with pmstore.open(path, mode="r") as store:
        assert not store.check().problems
        return bits_of(_plain(store)) if len(store) else {}


def _plain(item: object) -> object:
    if isinstance(item, pmstore.Slots):
        return item.current
    if isinstance(item, pmstore.List):
        return list(item)
    if isinstance(item, (pmstore.Store, pmstore.Group)):
        return {name: _plain(item[name]) for name in item}
    return item
