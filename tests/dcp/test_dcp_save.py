"""dcp.save, async_save and load through stores, of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_common import DTYPES, OF_DTYPE, QUIET, equal, load, save, state

import pmstore
from pmstore.dcp import StoreReader, StoreWriter

pytestmark = [pytest.mark.filterwarnings(QUIET), pytest.mark.filterwarnings(OF_DTYPE)]


@pytest.fixture(params=["process", "file"])
def folder(request: pytest.FixtureRequest, shm: Path, disk: Path) -> Path:
    return {"process": shm, "file": disk}[request.param] / "checkpoints"


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_comes_back(folder: Path, how: str) -> None:
    content = state(3)
    writer = StoreWriter(folder)
    if how == "save":
        dcp.save(content, storage_writer=writer)
    else:
        dcp.async_save(content, storage_writer=writer).result()
    assert equal(load(folder, content), content)  # out of the writer's own mapping
    writer.close()
    assert equal(load(folder, content), content)


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(shm: Path, name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    raw = torch.randint(0, 2 if name == "bool" else 256, (3, 32), dtype=torch.uint8)
    content = {"x": raw.view(dtype), "row": raw.view(dtype)[1]}
    writer = StoreWriter(shm)
    save(shm, content, writer)
    assert equal(load(shm, content), content)
    dcp.async_save(content, checkpoint_id=shm, storage_writer=writer).result()
    assert equal(load(shm, content), content)


def test_staged_is_what_it_was(folder: Path) -> None:
    """Writes after async_save has returned do not reach the checkpoint."""
    content: dict[str, Any] = state(1)
    writer = StoreWriter(folder)
    for seed in (1, 2, 3):
        content = state(seed)
        future = dcp.async_save(content, checkpoint_id=folder, storage_writer=writer)
        for tensor in (*content["model"].values(), content["scalar"], content["list"][0]):
            tensor.fill_(-1)
        content["list"][1] = -1
        future.result()
        assert equal(load(folder, state(seed)), state(seed))


def test_keep(folder: Path) -> None:
    writer = StoreWriter(folder, keep=2)
    sizes = []
    for seed in range(8):
        save(folder, state(seed), writer)
        sizes.append(os.stat(folder / "rank-00000.pm").st_size)
    assert StoreReader.numbers(folder) == [7, 8]
    assert equal(load(folder, state(7)), state(7))
    assert equal(load(folder, state(6), number=7), state(6))
    assert sizes[-1] == sizes[4]  # room of dropped parts is used again
    for seed in range(8, 22):
        dcp.async_save(state(seed), checkpoint_id=folder, storage_writer=writer).result()
        sizes.append(os.stat(folder / "rank-00000.pm").st_size)
    assert sizes[-1] == sizes[-6]
    writer.close()
    with pmstore.open(folder / "rank-00000.pm") as store:
        assert store.check().problems == ()
        assert len([name for name in store if name.startswith("part-")]) == 3


def test_a_save_takes_no_memory(disk: Path) -> None:
    """Tensors go to the disk from where they lie: whole pages and pieces or not; what has to be
    gathered first, or is small, goes through the heap."""
    whole = torch.arange(3 << 18, dtype=torch.float32)
    content = {
        "whole": whole,
        "odd": whole[: (5 << 16) + 7],
        "columns": whole.reshape(512, -1)[:, ::2],
        "small": whole[:9],
    }
    writer = StoreWriter(disk, domain="file")
    try:
        for seed in range(4):  # parts of freed ones' room, too
            whole += seed
            save(disk, content, writer)
            assert equal(load(disk, content), content)
        owner = writer._store
        assert owner is not None
        through_the_heap = 3 * content["columns"].nbytes
        assert owner.store.stats().own_bytes < through_the_heap + whole.nbytes // 2
    finally:
        writer.close()
    assert equal(load(disk, content), content)
