"""Which jobs there are."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from programs.registry import State, with_moments

import pmstore.torch

JOB: dict[str, Any] = {"job": pmstore.torch.Job("world", 20)}
"""What each program gives attach."""


@dataclass(frozen=True)
class Job:
    """One job, or one variant of it."""

    name: str
    function: Callable[..., State]
    variant: tuple[str, ...]
    world: int
    alike: tuple[str, ...]
    """What all ranks hold alike, bit for bit, after each commit: model, optimizer."""
    memory: bool
    """Its stores have to lie in memory."""
    guarded: bool
    """SIGTERM at one rank stops all of them, and they end with status 0."""
    quick: bool
    faulty: bool
    """It is wrong by itself, and the harness must find it."""


JOBS: dict[str, Job] = {}


def job(
    *variants: str,
    worlds: tuple[int, ...] = (2,),
    alike: tuple[str, ...] = ("model", "optimizer"),
    memory: bool = False,
    guarded: bool = False,
    quick: bool = False,
    faulty: bool = False,
) -> Callable[[Callable[..., State]], Callable[..., State]]:
    """See the package's docstring. quick: its first variant, with the fewest ranks, is in the short
    choice."""

    def register(function: Callable[..., State]) -> Callable[..., State]:
        made = with_moments(function)
        short = quick
        for variant in variants or (None,):
            base = function.__name__.replace("_", "-")
            for world in worlds:
                name = "-".join([base, *([variant] if variant else []), str(world)])
                assert name not in JOBS, name
                given = () if variant is None else (variant,)
                JOBS[name] = Job(name, made, given, world, alike, memory, guarded, short, faulty)
                short = False
        return made

    return register


def load() -> dict[str, Job]:
    """Those that must be right."""
    importlib.import_module(f"{__package__}.training")
    return {name: one for name, one in JOBS.items() if not one.faulty}
