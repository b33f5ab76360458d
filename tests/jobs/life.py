"""One life of one rank: until it ends, is killed from outside, or where its plan says.

    torchrun --nproc-per-node 2 -m jobs.life NAME FOLDER

runs it as torchrun starts it; the plan of the nth start of a rank is then in `plan{rank}.{n}`.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from programs.bits import bits_of
from programs.moments import Life

import pmstore
import pmstore.torch
from pmstore.objects.generations import NO_RUN, decode
from pmstore.testing import kill_at_primitive, primitives_seen

from . import registry

registry.load()


class RankLife(Life):
    """Kills where its plan says, and notes what this rank knows to be committed.

    unit: moment, primitive, or joining and joining-primitive: calls of Python functions, and
        primitives, since attach began.
    """

    def __init__(self, journal: int, plan: dict[str, Any], acknowledged: Path) -> None:
        super().__init__(journal, plan.get("unit", ""), plan.get("at", 0), "kill")
        self.counts["joining"] = 0
        self._acknowledged = acknowledged

    def joins(self, frame: object, event: str, argument: object) -> None:
        """A function for sys.setprofile, while attach runs."""
        if event == "call":
            self._count("joining")

    def acknowledge(self, step: int) -> None:
        """Outside the store, and durable."""
        file = os.open(self._acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(file, f"{step}\n".encode())
        os.fsync(file)
        os.close(file)


def live(name: str, folder: str, plan: dict[str, Any]) -> None:
    """What each rank runs, as soon as the environment says which it is. Leaves `journal{rank}` and,
    if it ends, `result{rank}` in folder."""
    torch.set_num_threads(1)
    chosen, here, rank = registry.JOBS[name], Path(folder), os.environ["RANK"]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    journal = os.open(here / f"journal{rank}", flags, 0o600)
    life = RankLife(journal, plan, here / f"acknowledged{rank}")
    chosen.function.__globals__["__moment__"] = life.moment
    _watch(life, plan)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    kill_at_primitive(plan["at"] if plan.get("unit") == "primitive" else 0)
    try:
        # longer than attach's: who is late is told by pmstore
        dist.init_process_group("gloo", timeout=timedelta(seconds=plan.get("gloo_timeout", 40)))
        life.note("met")
        result = chosen.function(folder, *chosen.variant)
    except SystemExit as stopped:
        life.note("exit", stopped.code)
    except BaseException as error:
        life.note("raised", type(error).__name__)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # gloo's own end may wait for those that are gone
    else:
        generators = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
        found = bits_of({**result, "generators": generators})
        (here / f"result{rank}").write_bytes(pickle.dumps(found))
        life.note("ended", life.counts["moment"], primitives_seen(), life.counts["joining"])
    dist.destroy_process_group()


def _watch(life: RankLife, plan: dict[str, Any]) -> None:
    """Notes what a program gets, and what its commits promised."""
    really_open, really_attach = pmstore.open, pmstore.torch.attach

    def opened(path: str, *arguments: Any, **options: Any) -> pmstore.Store:
        return really_open(path, *arguments, **{"domain": plan["domain"], **options})

    def attached(store: pmstore.Store, **options: Any) -> Any:
        before = primitives_seen()
        life.note("joining", life.counts["moment"], before)
        if plan.get("unit") == "joining-primitive":
            kill_at_primitive(plan["at"])
        sys.setprofile(life.joins)
        try:
            run = really_attach(store, **options)
        finally:
            sys.setprofile(None)
        if plan.get("unit") == "joining-primitive":
            kill_at_primitive(0)
        _note_joined(life, store, run, options)
        _note_commits(life, run)
        return run

    pmstore.open, pmstore.torch.attach = opened, attached


def _note_joined(life: RankLife, store: pmstore.Store, run: Any, given: dict[str, Any]) -> None:
    numbers = store.get("run/job")
    key = NO_RUN if numbers is None else decode(numbers).key
    counts = (life.counts["moment"], primitives_seen())
    digests = (_digest(given["model"]), _digest(given["optimizer"]))
    life.note("joined", run.step, *counts, *digests, key.term, key.number)


def _digest(piece: Any) -> str:
    """Of its state without batch statistics, which are each rank's own."""
    found = hashlib.sha256()
    for path, (_, content) in sorted(bits_of(piece).items()):
        if not path.endswith(("running_mean", "running_var", "num_batches_tracked")):
            found.update(path.encode() + content)
    return found.hexdigest()[:16]


def _note_commits(life: RankLife, run: Any) -> None:
    """A step is noted when its commit has returned, or is known to be over."""
    noted: list[int] = []
    really = run.commit

    def tell(values: dict[str, float], step: int) -> None:
        if run.committed not in noted:
            noted.append(run.committed)
            life.note("committed", run.committed)
        if run.agreed_step is not None:
            life.note("agreed", run.agreed_step)

    def commit(*, agree: bool = False) -> None:
        really(agree=agree)
        if agree:
            life.acknowledge(run.step)

    run.log_to(tell, name="notes")
    run.commit = commit


def main() -> None:
    name, folder = sys.argv[1:]
    rank, start = os.environ["RANK"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    plans = json.loads(Path(folder, "plans").read_text())
    live(name, folder, plans.get(f"{rank}.{start}", plans["any"]))


if __name__ == "__main__":
    main()
