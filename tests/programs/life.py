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
from .moments import Life

registry.load()


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
