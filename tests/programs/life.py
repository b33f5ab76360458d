"""One life of a program: in a forked child, until it ends, or is killed or stopped where its plan
says."""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first optimizer imports it: here once, before the forks

import pmstore
import pmstore.torch
from pmstore.testing import kill_at_primitive, primitives_seen

from . import plain, registry
from .bits import bits_of

registry.load()


class Boom(Exception):
    """What is raised in the middle of a step."""


class Life:
    """Counts moments of the program and calls of Python functions, and does what is planned.

    unit, at: when: at that moment, call, or persistence primitive. deed: kill, term, raise,
    interrupt, break.
    """

    def __init__(self, journal: int, unit: str, at: int, deed: str) -> None:
        self.counts = {"moment": 0, "call": 0}
        self._journal = journal
        self._unit, self._at, self._deed = unit, at, deed
        self._stopped = False
        self._begun = False

    def note(self, *words: object) -> None:
        """A line that outlives a SIGKILL."""
        os.write(self._journal, (" ".join(map(str, words)) + "\n").encode())

    def moment(self, begun: bool) -> bool:
        """Before each statement. Returns whether the loop is to be left."""
        self._begun = begun
        if not self._stopped:
            self._count("moment")
        return self._stopped

    def call(self, frame: object, event: str, argument: object) -> None:
        """A function for sys.setprofile."""
        if event == "call":
            self._count("call")

    def _count(self, unit: str) -> None:
        self.counts[unit] += 1
        if unit == self._unit and self.counts[unit] == self._at:
            self.note("fired", self._deed, int(self._begun))
            self._do()

    def _do(self) -> None:
        if self._deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._deed == "term":
            signal.raise_signal(signal.SIGTERM)
        elif self._deed == "raise":
            raise Boom
        elif self._deed == "interrupt":
            raise KeyboardInterrupt
        else:
            self._stopped = True

    def reached(self, step: int) -> None:
        """The program's state is there: what follows are steps."""
        counts = {**self.counts, "primitive": primitives_seen()}
        self.note("reached", step, *counts.values())


def live(_: Callable[[int], None], name: str, folder: str, plan: dict[str, Any]) -> None:
    """What the fork server runs. Leaves `journal`, `stderr` and, if it ends, `result` in folder."""
    torch.set_num_threads(1)
    chosen = registry.PROGRAMS[name]
    here = Path(folder)
    journal = os.open(here / "journal", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    errors = os.open(here / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(errors, 2)
    life = Life(journal, plan.get("unit", ""), plan.get("at", 0), plan.get("deed", ""))
    space = chosen.function.__globals__
    space["__moment__"] = life.moment
    if plan.get("plain"):
        space["pmstore"] = plain
    else:
        _watch(life, plan.get("domain", "auto"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    kill_at_primitive(plan["at"] if plan.get("unit") == "primitive" else 0)
    if plan.get("unit") == "call":
        sys.setprofile(life.call)
    os.register_at_fork(after_in_child=_harmless)
    try:
        result = chosen.function(f"{folder}/run.pm", *chosen.variant)
    except SystemExit as stopped:
        life.note("exit", stopped.code)
    except BaseException as error:
        sys.setprofile(None)
        life.note("raised", type(error).__name__)
        traceback.print_exc()
    else:
        sys.setprofile(None)
        generators = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
        found = bits_of({**result, "generators": generators})
        (here / "result").write_bytes(pickle.dumps(found))
        life.note("ended", *life.counts.values(), primitives_seen())


def _harmless() -> None:
    """In a process of the program's own, such as a loader's worker."""
    sys.setprofile(None)
    kill_at_primitive(0)


def _watch(life: Life, domain: str) -> None:
    """Notes how far the stored run is when a program gets it."""
    really_open, really_attach = pmstore.open, pmstore.torch.attach

    def opened(path: str, *arguments: Any, **options: Any) -> pmstore.Store:
        store = really_open(path, *arguments, **{"domain": domain, **options})
        life.reached(store.epoch)
        return store

    def attached(*arguments: Any, **options: Any) -> Any:
        run = really_attach(*arguments, **options)
        life.reached(run.step)
        return run

    pmstore.open, pmstore.torch.attach = opened, attached  # type: ignore[assignment]
