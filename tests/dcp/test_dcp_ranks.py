"""Saves of several ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_common import QUIET, equal, load, save
from ranks import launch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from pmstore.dcp import StoreReader, StoreWriter

pytestmark = pytest.mark.filterwarnings(QUIET)

WHOLE = torch.arange(7 * 10, dtype=torch.float32).reshape(7, 10)


def sharded(step: float, placement: Any = None) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placed = [Shard(0) if placement is None else placement]
    return {
        "sharded": distribute_tensor(WHOLE + step, mesh, placed),
        "one_row": distribute_tensor(WHOLE[:1] + step, mesh, [Shard(0)]),  # of rank 1 nothing
        "replica": distribute_tensor(WHOLE - step, mesh, [Replicate()]),
        "plain": torch.full((5,), step),
        f"of rank {dist.get_rank()}": torch.full((3,), step + dist.get_rank()),
        "step": int(step),
    }


def plain(content: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in content.items()
    }


def saves(folder: Path, rank: int, found: dict[str, Any]) -> None:
    writer = StoreWriter(folder / "c")
    for step in range(3):
        save(folder / "c", sharded(step), writer)
    for step in range(3, 6):
        content = sharded(step)
        future = dcp.async_save(content, checkpoint_id=folder / "c", storage_writer=writer)
        content["plain"].fill_(-1)
        content["sharded"].to_local().fill_(-1)
        future.result()
    for placement in (Shard(0), Shard(1), Replicate()):
        made = sharded(99, placement)
        dcp.load(made, storage_reader=StoreReader(folder / "c"))
        found[str(placement)] = equal(plain(made), plain(sharded(5, placement)))


def async_twice(folder: Path, rank: int, found: dict[str, Any]) -> None:
    """The second waits for the first: checkpoints of two saves are never mixed."""
    writer = StoreWriter(folder / "c", keep=9)
    contents = [sharded(step) for step in range(6)]
    futures = [
        dcp.async_save(content, checkpoint_id=folder / "c", storage_writer=writer)
        for content in contents
    ]
    for future in futures:
        future.result()
    found["good"] = []
    dist.barrier()
    for number in StoreReader.numbers(folder / "c"):
        made = sharded(99)
        dcp.load(made, storage_reader=StoreReader(folder / "c", number=number))
        found["good"].append(equal(plain(made), plain(sharded(number - 1))))


def alone(folder: Path, rank: int, found: dict[str, Any]) -> None:
    """Without collectives: each rank has metadata of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4):
            writer = StoreWriter(folder / "c")
            dcp.save(
                {"x": torch.full((4,), step + 10.0 * rank), "who": rank},
                storage_writer=writer,
                use_collectives=False,
            )
        made = {"x": torch.zeros(4), "who": -1}
        dcp.load(made, storage_reader=StoreReader(folder / "c"))
    found["x"] = made["x"].tolist()
    found["who"] = made["who"]
    found["files"] = sorted(path.name for path in (folder / "c").iterdir())


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, launch([saves, async_twice, alone], folder, 2)


def test_two_ranks(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, found = ran
    assert found["saves"] == [{"S(0)": True, "S(1)": True, "R": True}] * 2
    # one process reads what two have written
    made = load(folder / "saves/c", {"sharded": WHOLE, "of rank 1": torch.zeros(3)})
    assert equal(made, {"sharded": WHOLE + 5, "of rank 1": torch.full((3,), 6.0)})


def test_async_saves_take_turns(ran: tuple[Path, dict[str, Any]]) -> None:
    assert ran[1]["async_twice"] == [{"good": [True] * 6}] * 2


def test_without_collectives(ran: tuple[Path, dict[str, Any]]) -> None:
    for rank, found in enumerate(ran[1]["alone"]):
        assert found["x"] == [3 + 10.0 * rank] * 4
        assert found["who"] == rank
        assert found["files"] == [
            *("index-00000.pm", "index-00001.pm", "rank-00000.pm", "rank-00001.pm")
        ]
