"""Checkpoints that some ranks save and others load: programs for `ranks.launch`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_states as of
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from pmstore.dcp import StoreReader, StoreWriter

WORLDS = (1, 2, 3, 4, 1)
"""Numbers of ranks, stage by stage: each loads what the one before saved."""


def _stage(folder: Path) -> int:
    return int(folder.parent.name)


def _place(folder: Path, stage: int, apart: bool) -> Path:
    """Where a stage saves. apart: each in a folder of its own; else all in one."""
    place = folder.parent.parent / folder.name
    return place / str(stage) if apart else place


def _reshard(
    folder: Path, found: dict[str, Any], make: Callable[[int], dict[str, Any]], apart: bool
) -> None:
    stage = _stage(folder)
    found["wrong"] = []
    if stage:
        state = make(stage + 4)
        dcp.load(state, storage_reader=StoreReader(_place(folder, stage - 1, apart)))
        found["wrong"] = of.differences(state, make(stage - 1))
    dcp.save(make(stage), storage_writer=StoreWriter(_place(folder, stage, apart)))


def plain(folder: Path, rank: int, found: dict[str, Any]) -> None:
    _reshard(folder, found, of.plain, apart=False)


def sharded(folder: Path, rank: int, found: dict[str, Any]) -> None:
    _reshard(folder, found, of.sharded, apart=False)


def changing(folder: Path, rank: int, found: dict[str, Any]) -> None:
    _reshard(folder, found, of.changing, apart=True)


def twice_sharded(folder: Path, rank: int, found: dict[str, Any]) -> None:
    _reshard(folder, found, of.twice_sharded, apart=True)


def _retrain(
    folder: Path, found: dict[str, Any], make: Callable[[int], of.Trained], apart: bool
) -> None:
    """The same for a model and its optimizer."""
    stage = _stage(folder)
    found["wrong"] = []
    if stage:
        trained = make(stage + 4)
        loaded = of.states(trained)
        dcp.load(loaded, storage_reader=StoreReader(_place(folder, stage - 1, apart)))
        of.take(trained, loaded)
        found["wrong"] = of.differences(of.states(trained), of.states(make(stage - 1)))
    saved = of.states(make(stage))
    dcp.save(saved, storage_writer=StoreWriter(_place(folder, stage, apart)))


def fsdp(folder: Path, rank: int, found: dict[str, Any]) -> None:
    _retrain(folder, found, of.fsdp, apart=False)


def hsdp(folder: Path, rank: int, found: dict[str, Any]) -> None:
    _retrain(folder, found, of.hsdp, apart=True)


def parallel(folder: Path, rank: int, found: dict[str, Any]) -> None:
    _retrain(folder, found, of.parallel, apart=True)


# ---- two ranks ----

PHASES = {
    "set_up_planner": (0, 1),
    "create_local_plan": (0, 1),
    "create_global_plan": (0,),
    "finish_plan": (0, 1),
    "resolve_data": (0, 1),
}
"""Of a save, and the ranks that take part in them."""


class Faulty(dcp.DefaultSavePlanner):
    """Fails in one phase, at one rank."""

    def __init__(self, phase: str) -> None:
        super().__init__()

        @functools.wraps(getattr(self, phase))  # torch looks at the names of parameters
        def fail(*arguments: Any, **options: Any) -> Any:
            raise RuntimeError(f"the program's own, in {phase}")

        setattr(self, phase, fail)


def _one(number: int) -> dict[str, Any]:
    return {**of.sharded(number), "number": number}


def fail_in_phases(folder: Path, rank: int, found: dict[str, Any]) -> None:
    """An error at one rank is an error at both; what was published before stays, and the next save
    is as any other."""
    found["wrong"] = []
    writer = StoreWriter(folder)
    number = 0
    for phase, ranks in PHASES.items():
        for bad in ranks:
            for saving in (dcp.save, dcp.async_save):
                dcp.save(_one(number), checkpoint_id=folder, storage_writer=writer)
                planner = Faulty(phase) if rank == bad else dcp.DefaultSavePlanner()
                what = f"{saving.__name__}, {phase} at rank {bad}"
                try:
                    done: Any = saving(
                        _one(number + 1),
                        checkpoint_id=folder,
                        storage_writer=writer,
                        planner=planner,
                    )
                    done.result(60)
                    found["wrong"].append(f"{what}: no error")
                except CheckpointException as error:
                    if f"the program's own, in {phase}" not in str(error):
                        found["wrong"].append(f"{what}: {error}")
                shown = _one(number + 5)
                dcp.load(shown, storage_reader=StoreReader(folder))
                found["wrong"] += of.differences(shown, _one(number), what)
                number += 1


def two_at_once(folder: Path, rank: int, found: dict[str, Any]) -> None:
    """Two saves by one writer, the second begun before the first has ended; with our stager, with
    torch's, with one of each."""
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    writer = StoreWriter(folder)
    found["wrong"] = []
    for number in range(0, 24, 2):
        stagers = [BlockingAsyncStager() if number >> i & 2 else None for i in range(2)]
        futures: list[Any] = [
            dcp.async_save(
                _one(number + i),
                checkpoint_id=folder,
                storage_writer=writer,
                process_group=groups[i],
                async_stager=stagers[i],
            )
            for i in range(2)
        ]
        for future in futures:
            future.result(60)
        dist.barrier()
        shown = {**of.sharded(number + 5), "number": -1}
        dcp.load(shown, storage_reader=StoreReader(folder))
        if shown["number"] not in (number, number + 1):
            found["wrong"].append(f"{number}: {shown['number']}")
        found["wrong"] += of.differences(shown, _one(shown["number"]), f"{number}")
        dist.barrier()


def without_collectives(folder: Path, rank: int, found: dict[str, Any]) -> None:
    """Each rank saves and loads its own, with metadata of its own."""
    found["wrong"] = []
    writer = StoreWriter(folder)
    for number in range(3):
        saved = {"own": of.values(number + rank, 5, 3), "rank": rank}
        dcp.save(saved, checkpoint_id=folder, storage_writer=writer, use_collectives=False)
        dist.barrier()
        shown = {"own": torch.zeros(5, 3), "rank": -1}
        dcp.load(shown, storage_reader=StoreReader(folder))
        found["wrong"] += of.differences(shown, saved, f"{number}")
        dist.barrier()
