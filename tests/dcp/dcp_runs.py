"""Programs of ranks, for the tests of `StoreReader.of_run`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pmstore
from pmstore.dcp import StoreReader
from pmstore.dcp._read import rank_stores
from pmstore.tiers import TierConfig

STEPS = 3


def model() -> nn.Module:
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    made.append(nn.Linear(3, 3))
    made[4].weight = nn.Parameter(made[4].weight.detach().clone())
    return made


def optimizer(of: nn.Module) -> torch.optim.Optimizer:
    grouped = [{"params": list(of[0].parameters()), "lr": 1e-2}]
    grouped.append({"params": [one for layer in list(of)[1:] for one in layer.parameters()]})
    made = torch.optim.AdamW(grouped, lr=1e-3)
    for group in made.param_groups:
        group["initial_lr"] = group["lr"]  # as a scheduler does
    return made


def step(of: Any, by: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(100 + number)
    by.zero_grad()
    of(torch.randn(4, 8)).square().mean().backward()
    by.step()


def trained(steps: int = STEPS) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What a run is after so many steps; every rank has the same batches."""
    made = model()
    by = optimizer(made)
    for number in range(steps):
        step(made, by, number)
    return made, by


def state_of(made: nn.Module, by: torch.optim.Optimizer, **options: Any) -> dict[str, Any]:
    """As a program gives it to dcp."""
    of_model, of_optimizer = get_state_dict(made, by, **options)
    return {"model": of_model, "optim": of_optimizer}


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(state, dict):
        return {prefix: state}
    return {k: v for key, one in state.items() for k, v in flat(one, f"{prefix}.{key}").items()}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    first, second = flat(ours), flat(theirs)
    assert first.keys() == second.keys()
    for key, one in first.items():
        if isinstance(one, torch.Tensor):
            assert one.dtype == second[key].dtype, key
            assert torch.equal(one, second[key]), key
        else:
            assert one == second[key], key


def _attach(folder: Path, rank: int, made: nn.Module, by: torch.optim.Optimizer) -> Any:
    store = pmstore.open(folder / f"run-{rank}.pm", size="8MiB")
    scheduler = torch.optim.lr_scheduler.StepLR(by, 100)
    return (
        store,
        scheduler,
        pmstore.torch.attach(
            store, model=made, optimizer=by, lr_scheduler=scheduler, process_group="world"
        ),
    )


def train_ddp(folder: Path, rank: int, found: dict[str, Any]) -> None:
    made = model()
    wrapped = DistributedDataParallel(made)
    by = optimizer(made)
    store, scheduler, run = _attach(folder, rank, made, by)
    with store:
        together = {"rank": rank, "world_size": 2, "run": "job"}
        store.add_tier("together", TierConfig(folder / "tier", **together))
        store.add_tier("alone", TierConfig(folder / f"tier-{rank}"))
        for number in range(STEPS):
            with run.next_step():
                step(wrapped, by, number)
                scheduler.step()
            run.commit()
        for tier in store.tiers:
            store.flush(tier).wait()


def train_fsdp(folder: Path, rank: int, found: dict[str, Any]) -> None:
    """Parts that are not even; the whole model's state is the same as without ranks."""
    made = fully_shard(model())
    by = optimizer(made)
    store, scheduler, run = _attach(folder, rank, made, by)
    with store:
        for number in range(STEPS):
            with run.next_step():
                step(made, by, number)
                scheduler.step()
            run.commit()
    whole = state_of(made, by, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(whole, folder / "whole.pt")


def kill_ahead(folder: Path, rank: int, found: dict[str, Any]) -> None:
    """The first rank is killed when it has committed one step more than the second."""
    made = model()
    wrapped = DistributedDataParallel(made)
    by = optimizer(made)
    _, scheduler, run = _attach(folder, rank, made, by)
    for number in range(STEPS):
        with run.next_step():
            step(wrapped, by, number)
            scheduler.step()
        run.commit()
    dist.barrier()
    stores = f"{folder}/run-*.pm"
    if rank == 0:  # beside both, which are open for writing
        state = state_of(*trained(1))
        dcp.load(state, storage_reader=StoreReader.of_run(stores), no_dist=True)
        assert_same(state, state_of(*trained()))
    with run.next_step():
        step(wrapped, by, STEPS)
    if rank == 0:
        run.commit()
        rank_stores.WAIT_SECONDS = 0.1
        with pytest.raises(CheckpointException, match="are being written to"):
            dcp.load(state, storage_reader=StoreReader.of_run(stores), no_dist=True)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _load(folder: Path, program: str, made: Any, by: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for one in made.parameters():
            one.zero_()
    state = state_of(made, by)
    dcp.load(state, storage_reader=StoreReader.of_run(f"{folder.parent}/{program}/run-*.pm"))
    set_state_dict(made, by, model_state_dict=state["model"], optim_state_dict=state["optim"])


def load_resharded(folder: Path, rank: int, found: dict[str, Any]) -> None:
    """Another number of ranks loads what two ranks trained."""
    for program in ("train_ddp", "kill_ahead"):
        made = model()
        wrapped = DistributedDataParallel(made)
        by = optimizer(made)
        _load(folder, program, wrapped, by)
        assert_same(state_of(made, by), state_of(*trained()))
        step(made, by, STEPS)
        assert_same(state_of(made, by), state_of(*trained(STEPS + 1)))
    theirs = torch.load(folder.parent / "train_fsdp" / "whole.pt")
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for program, mesh in (
        ("train_fsdp", None),
        ("train_fsdp", init_device_mesh("cpu", (3, 1), mesh_dim_names=("data", "part"))),
    ):
        made = fully_shard(model(), mesh=mesh)  # another mesh: replicated, and parts of 1
        by = optimizer(made)
        _load(folder, program, made, by)
        ours = state_of(made, by, options=whole)
        if rank == 0:
            assert_same(ours, theirs)
    found["same"] = True
