"""An attached run as a checkpoint of torch.distributed.checkpoint: `StoreReader.of_run`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_runs import (
    assert_same,
    kill_ahead,
    load_resharded,
    model,
    optimizer,
    state_of,
    train_ddp,
    train_fsdp,
    trained,
)
from ranks import launch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan

import pmstore
import pmstore.torch.optim
from pmstore.dcp import StoreReader
from pmstore.errors import PmstoreError

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized"
)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders in which two ranks trained."""
    folder = tmp_path_factory.mktemp("jobs")
    launch([train_ddp, train_fsdp, kill_ahead], folder, 2, killed=True)
    (folder / "rendezvous").unlink()
    return folder


def fresh() -> dict[str, Any]:
    made = model()
    return state_of(made, optimizer(made))


def load(stores: Any, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=StoreReader.of_run(stores, **options))
    return state


def why(stores: Any, state: dict[str, Any] | None = None, **options: Any) -> str:
    with pytest.raises(CheckpointException) as failed:
        load(stores, fresh() if state is None else state, **options)
    (error,) = {str(one[0]) for one in failed.value.failures.values()}
    return error


def test_jobs_of_two_are_loaded_by_one_and_by_three(jobs: Path) -> None:
    assert_same(load(f"{jobs}/train_ddp/run-*.pm", fresh()), state_of(*trained()))
    whole = torch.load(jobs / "train_fsdp" / "whole.pt")
    assert_same(load(f"{jobs}/train_fsdp/run-*.pm", fresh()), whole)
    assert launch([load_resharded], jobs, 3) == {"load_resharded": [{"same": True}] * 3}


def test_ranks_that_are_one_generation_apart(jobs: Path) -> None:
    stores = sorted(jobs.glob("kill_ahead/run-*.pm"))
    before = [store.read_bytes() for store in stores]
    steps = []
    for store in stores:
        with pmstore.open(store, "r") as opened:
            steps.append(int(opened["run/progress"][0]))
    assert steps == [4, 3]
    state = {**fresh(), "step": 0}
    load(stores, state)
    assert state.pop("step") == 3
    assert_same(state, state_of(*trained()))
    assert [store.read_bytes() for store in stores] == before


def test_stores_that_do_not_belong_together(jobs: Path, tmp_path: Path) -> None:
    first, second = sorted(jobs.glob("train_ddp/run-*.pm"))
    other = jobs / "train_fsdp" / "run-1.pm"
    assert "the stores of 1 are missing" in why(first)
    assert "of different jobs" in why([first, other])
    copy = tmp_path / "copy.pm"
    shutil.copy(first, copy)
    assert "have copies of one store, that of rank 0" in why([first, copy])
    assert "are one store: give each" in why([first, second, first])
    assert "no store matches" in why(f"{jobs}/nothing-*.pm")
    with pytest.raises(CheckpointException, match="no store matches 'elsewhere-"):
        reader = StoreReader.of_run([first, second])
        dcp.load(fresh(), checkpoint_id="elsewhere-*.pm", storage_reader=reader)
    assert "there is no run 'other' in the store; it has 'run'" in why(
        [first, second], name="other"
    )
    for number in range(2):
        with pmstore.open(tmp_path / f"alone-{number}.pm", size="8MiB") as store:
            made = model()
            pmstore.torch.attach(store, model=made, optimizer=optimizer(made)).commit()
    assert "trained without a job" in why(f"{tmp_path}/alone-*.pm")


def test_tiers_of_a_job(jobs: Path, tmp_path: Path) -> None:
    folder = jobs / "train_ddp"
    state = fresh()
    dcp.load(state, storage_reader=StoreReader.of_epoch(folder / "tier"))
    assert_same(state, state_of(*trained()))
    with pytest.raises(CheckpointException, match="the stores of 1 are missing"):
        dcp.load(state, storage_reader=StoreReader.of_epoch(folder / "tier-0"))
    shutil.copytree(folder / "tier", tmp_path / "tier")
    for file in tmp_path.glob("tier/*.chunks"):
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointException, match="its checksum is wrong"):
        dcp.load(state, storage_reader=StoreReader.of_epoch(tmp_path / "tier"))


def test_ranks_that_found_different_states() -> None:
    reader = StoreReader.of_run("run-*.pm")
    plans = [LoadPlan([], storage_data=f"generation {number}") for number in (7, 8)]
    assert reader.prepare_global_plan(plans[:1] * 2) == plans[:1] * 2
    with pytest.raises(PmstoreError, match="generation 7, generation 8"):
        reader.prepare_global_plan(plans)
