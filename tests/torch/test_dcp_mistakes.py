"""What a newcomer gets wrong with pmstore.dcp: each message says what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from typer.testing import CliRunner

import pmstore
from pmstore.commands.program import app
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


def test_a_conversion_says_what_it_does_not_know(tmp_path: Path) -> None:
    def told(*words: object) -> str:
        result = CliRunner().invoke(app, ["dcp", "convert", *map(str, words)])
        assert result.exit_code == 2
        return result.output

    empty, file = tmp_path / "empty", tmp_path / "model.pt"
    empty.mkdir()
    torch.save({"w": torch.ones(3)}, file)
    assert "no checkpoint and no epoch" in told(empty, tmp_path / "out")
    assert "pmstore export" in told(file, tmp_path / "out.safetensors")
    assert "is an address" in told(file, "s3://bucket/out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "model.pt"]


@pytest.mark.filterwarnings("error:torch.distributed is disabled")
def test_a_conversion_does_not_speak_of_ranks(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    words = ["dcp", "convert", str(tmp_path / "model.pt"), str(tmp_path / "out")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "torch.distributed" not in result.output
