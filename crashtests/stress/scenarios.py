"""Which actors meet in a store. The first one runs in the main thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from crashtests.stress.actors import (
    Assigner,
    Churner,
    Copier,
    Counter,
    Flusher,
    Forker,
    Racer,
    Undoer,
    UndoRacer,
)
from crashtests.stress.actors_blocks import Holder, Tasks, Writer
from crashtests.stress.actors_held import Beside, Rewinder
from crashtests.stress.actors_moved import Mover
from crashtests.stress.unit import TORCH

if TYPE_CHECKING:
    from collections.abc import Callable

    from crashtests.stress.life import Life

DOMAINS = ("process", "file", "emulated")


@dataclass(frozen=True)
class Scenario:
    """traits: of `Plan`, those that hold."""

    name: str
    actors: tuple[Callable[[Life, int], Any], ...]
    traits: tuple[str, ...] = field(default=())
    needs_torch: bool = False

    def make(self, life: Life) -> list[Any]:
        return [make(life, index) for index, make in enumerate(self.actors)]


_scratching = partial(Churner, scratches=True)
_hasty = partial(Counter, waits=False)

ALL = (
    Scenario("counters", (Counter, Counter, Counter)),
    Scenario("races", (Racer, UndoRacer)),
    Scenario("blocks", (Writer, Writer, Writer)),
    Scenario("assignments", (Assigner, Assigner, Writer)),
    Scenario("rollbacks", (Writer, Counter, Counter, Assigner, Undoer), ("rollbacks",)),
    Scenario("pending", (_hasty, _hasty, Writer, Writer)),
    Scenario("signals", (Churner,), ("signals",)),
    Scenario("finalizers", (_scratching,), ("finalizers",)),
    Scenario("names", (_scratching, Churner, Churner, Writer), ("signals", "finalizers")),
    Scenario("interrupts", (Writer, Churner, Counter), ("signals",)),
    Scenario("forks", (Writer, Writer, Forker)),
    Scenario("tasks", (Tasks, Writer)),
    Scenario("generators", (Holder, Writer)),
    Scenario("closing", (Writer, Writer, Counter), ("reopen",)),
    Scenario("copies", (Writer, Writer, Copier)),
    Scenario("tiers", (Writer, Counter, Flusher)),
    Scenario("held", (Rewinder,), ("hold", "compacts")),
    Scenario("beside", (Rewinder, Beside, Beside), ("hold", "compacts")),
    Scenario("held copies", (Rewinder, Copier, Beside), ("hold",)),
    Scenario("tensors", (Mover, Writer), (), True),
    Scenario(
        "mix",
        (
            Writer,
            Writer,
            Counter,
            Racer,
            _hasty,
            Churner,
            _scratching,
            Assigner,
            Undoer,
            Forker,
            Tasks,
            Holder,
            Copier,
            Flusher,
            *((Mover,) if TORCH else ()),
        ),
        ("rollbacks", "signals", "finalizers", "reopen"),
    ),
)


def named(names: list[str]) -> list[Scenario]:
    """Those, or all. Raises: ValueError."""
    known = {scenario.name: scenario for scenario in ALL if TORCH or not scenario.needs_torch}
    for name in names:
        if name not in known:
            raise ValueError(f"no scenario {name!r}: there are {', '.join(known)}")
    return [known[name] for name in names or known]
