"""Cases of crash tests: a kind and a seed say which one.

    python -m crashtests --seed 123                a case of some kind: the number draws which
    python -m crashtests --kind steps --seed 116   a case of that kind; what failed says this line
    python -m crashtests --kind steps              as many as `make nightly WHAT=steps` runs

A module of KINDS has what a kind does. A case follows from kind, seed and size, as far as threads
and times do; the seed goes round what there is of a kind (programs, domains), so that many cases in
a row are all of it.
"""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import local
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
KINDS = {
    "images": "crashtests.campaign:IMAGES",
    "kills": "crashtests.campaign:KILLED",
    "faults": "crashtests.campaign:FAULTS",
    "mixtures": "crashtests.mixtures:CASES",
    "tiers": "crashtests.tiers:CASES",
    "formats": "crashtests.formats:CASES",
    "stress": "crashtests.stress.lane:CASES",
    "steps": "tests.steps.harness:CASES",
    "programs": "tests.programs.harness:CASES",
    "jobs": "tests.jobs.harness:CASES",
    "dcp": "tests.dcp.dcp_kills:CASES",
    "saves": "tests.dcp.dcp_power:CASES",
}
Item = TypeVar("Item")


@dataclass
class Found:
    """counts: what was done. problems: sentences; none: it is right."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Kind:
    """size: how much is done in a case, and what that is. cases: how many a run has.

    draw: of seed and size: a case, and it in words. examine: of the case, the size, and the tool
    that a thread makes once."""

    size: int
    of: str
    cases: Callable[[], int]
    draw: Callable[[int, int], tuple[str, Any]]
    examine: Callable[[Any, int, Any], Found]
    tool: Callable[[], AbstractContextManager[Any]] = nullcontext


def load(name: str) -> Kind:
    """Raises: ModuleNotFoundError: it needs what is not installed, torch for example."""
    module, _, attribute = KINDS[name].partition(":")
    kind: Kind = getattr(importlib.import_module(module), attribute)
    return kind


def kind_of(seed: int) -> str:
    return random.Random(f"kind {seed}").choice(list(KINDS))


def turn(items: Sequence[Item], seed: int) -> tuple[Item, int]:
    """One of them, and how often they were gone through before."""
    return items[seed % len(items)], seed // len(items)


def command(name: str, seed: int, size: int) -> str:
    more = "" if size == load(name).size else f" --size {size}"
    return f"python -m crashtests --kind {name} --seed {seed}{more}"


def examine(name: str, seed: int, size: int, tool: Any = None) -> Found:
    """The last one of its problems says how to have them again."""
    kind = load(name)
    try:
        found = kind.examine(kind.draw(seed, size)[1], size, tool)
    except Exception:
        found = Found(problems=[traceback.format_exc()])
    if found.problems:
        found.problems.append(f"again: {command(name, seed, size)}")
    return found


def program(*words: str) -> Found:
    """A case that is a program of its own: it fails with another status than 0."""
    run = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    said = [(run.stdout + run.stderr)[-4000:]] if run.returncode else []
    return Found(Counter(programs=1), said)


@dataclass(frozen=True)
class Settings:
    kind: str | None = None
    """None: each seed draws one"""
    seed: int = 0
    cases: int | None = 1
    """None: as many as a run of the kind has"""
    size: int | None = None
    seconds: float | None = None
    """then no further one begins"""
    only: tuple[str, ...] = ()
    """those in whose words one of these is"""
    workers: int = 1


def run(s: Settings) -> int:
    """Cases from the seed on, with a line each and a last one. Returns 1 if something is wrong."""
    began, mine, kept = time.monotonic(), local(), ExitStack()

    def case(seed: int) -> Found | None:
        if s.seconds is not None and time.monotonic() - began > s.seconds:
            return None
        name = s.kind or kind_of(seed)
        try:
            kind = load(name)
        except ModuleNotFoundError as error:
            print(f"{name} {seed}: left out: {error}", flush=True)
            return None
        size = kind.size if s.size is None else s.size
        told = kind.draw(seed, size)[0]
        if s.only and not any(word in told for word in s.only):
            return None
        if s.cases == 1:
            print(f"{name}: {told}; {size} {kind.of}\n{command(name, seed, size)}", flush=True)
        tools = mine.__dict__.setdefault("tools", {})
        if name not in tools:
            tools[name] = kept.enter_context(kind.tool())
        started = time.monotonic()
        found = examine(name, seed, size, tools[name])
        verdict = "WRONG" if found.problems else "right"
        line = f"{name} {seed} ({told}): {words(found.counts)}, {time.monotonic() - started:.1f} s"
        print(f"{line}  {verdict}", *found.problems, sep="\n", flush=True)
        return found

    cases = load(s.kind or kind_of(s.seed)).cases() if s.cases is None else s.cases
    with kept, ThreadPoolExecutor(s.workers) as pool:
        done = [one for one in pool.map(case, range(s.seed, s.seed + cases)) if one is not None]
    wrong = [one.problems[-1] for one in done if one.problems]
    total = sum((one.counts for one in done), Counter[str]())
    said = f"{len(done)} cases in {time.monotonic() - began:.0f} s: {words(total)}"
    print(f"{said}; {len(wrong)} are wrong", *wrong, sep="\n")
    return int(bool(wrong))


def numbers(report: object) -> Counter[str]:
    """Those that a report holds."""
    held = {name: value for name, value in vars(report).items() if isinstance(value, int)}
    return Counter({name.replace("_", " "): value for name, value in held.items()})


def words(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.items())
