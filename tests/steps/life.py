"""One life of a drawn program, or of one rank of it: until it ends, or where its plan says."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import fake_cuda
import torch
import torch._dynamo  # the first optimizer imports it: here once, before the forks
import torch.distributed as dist
from programs.bits import bits_of
from programs.moments import Life

from pmstore.testing import kill_at_primitive, primitives_seen

from . import program as programs
from .drawing import draw


def live(seed: int, stage: int, folder: str, plan: dict[str, Any]) -> None:
    """stage: -1: all of them, on plain torch. plan: unit, at, deed, as `Life` has them; forgets,
    as of the program.

    Leaves `journal{rank}` in folder, what its logger was told in `told{rank}`, and, if it ends, a
    list of results in `result{rank}`."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    drawn = replace(draw(seed), forgets=plan.get("forgets", False))
    here, number = Path(folder), int(os.environ["RANK"])
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    life = Life(
        os.open(here / f"journal{number}", flags, 0o600),
        plan.get("unit", ""),
        plan.get("at", 0),
        plan.get("deed", ""),
    )
    told = os.open(here / f"told{number}", flags, 0o600)
    born = time.time()

    def tell(values: dict[str, float], step: int) -> None:
        os.write(told, (json.dumps([born, step, values]) + "\n").encode())

    rank = programs.Rank(folder, number, lambda: _ignore(life.moment(False)), tell)
    if drawn.world > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=2 * programs.TIMEOUT_SECONDS))
    if not drawn.guard:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    kill_at_primitive(plan["at"] if plan.get("unit") == "primitive" else 0)
    if plan.get("unit") == "call":
        sys.setprofile(life.call)
    os.register_at_fork(after_in_child=_harmless)
    try:
        if drawn.device and stage >= 0:
            fake_cuda.install(late=False)
        if stage < 0:
            states = programs.on_plain_torch(drawn, rank)
        else:
            states = [programs.on_pmstore(drawn, stage, rank)]
    except SystemExit as stopped:
        life.note("exit", stopped.code)
    except BaseException as error:
        sys.setprofile(None)
        life.note("raised", type(error).__name__)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the end of gloo may wait for ranks that are gone
    else:
        sys.setprofile(None)
        (here / f"result{number}").write_bytes(pickle.dumps([bits_of(one) for one in states]))
        life.note("ended", *life.counts.values(), primitives_seen())
    sys.setprofile(None)
    if drawn.world > 1:
        dist.destroy_process_group()


def _ignore(_: bool) -> None: ...


def _harmless() -> None:
    """In a process of the program's own, such as a loader's worker."""
    sys.setprofile(None)
    kill_at_primitive(0)
