"""What a newcomer gets wrong with pmstore.dcp: each message says what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import pmstore
from pmstore.dcp import StoreReader, StoreWriter

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized"
)


def told_by_load(reader: StoreReader) -> str:
    state: dict[str, Any] = {"w": torch.zeros(3)}
    with pytest.raises(CheckpointException) as raised:
        dcp.load(state, storage_reader=reader)
    assert torch.equal(state["w"], torch.zeros(3))
    return str(raised.value)


def test_an_address_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = "s3://bucket/checkpoints"
    with pytest.raises(ValueError, match=r"is an address.*a folder that all ranks see"):
        StoreWriter(url)
    with pytest.raises(ValueError, match="is an address"):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=url, storage_writer=StoreWriter("c"))
    writer = StoreWriter("c")
    failed = dcp.async_save({"w": torch.ones(3)}, checkpoint_id=url, storage_writer=writer)
    with pytest.raises(ValueError, match="is an address"):
        failed.result()
    dcp.async_save({"w": torch.ones(3)}, checkpoint_id="c", storage_writer=writer).result()
    for make in (StoreReader, StoreReader.of_run):
        with pytest.raises(ValueError, match=r"is an address.*StoreReader\.of_epoch"):
            make(url)
    assert not (tmp_path / "s3:").exists()


def test_a_reader_is_given_another_thing_than_a_writers_folder(tmp_path: Path) -> None:
    torchs, ours, file = tmp_path / "torchs", tmp_path / "ours", tmp_path / "model.pt"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=torchs)
    writer = StoreWriter(ours)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=ours, storage_writer=writer)
    writer.close()
    torch.save({"w": torch.ones(3)}, file)
    run = tmp_path / "run.pm"
    pmstore.open(run).close()
    assert "FileSystemReader" in told_by_load(StoreReader(torchs))
    assert "is a file" in told_by_load(StoreReader(file))
    assert "StoreReader.of_run" in told_by_load(StoreReader(run))
    assert "none was published" in told_by_load(StoreReader(tmp_path / "nowhere"))
    assert "number is '1'" in told_by_load(StoreReader(ours, number="1"))  # type: ignore[arg-type]
    for folder in (ours, torchs, tmp_path):
        assert "is a folder" in told_by_load(StoreReader.of_run(folder))
