"""`pmstore dcp convert`: from and to everything that holds a checkpoint."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_runs import assert_same, model, optimizer, state_of
from typer.testing import CliRunner

import pmstore
from pmstore.commands.program import app
from pmstore.dcp import StoreReader
from pmstore.tiers import TierConfig

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run, its tier, and its state."""
    folder = tmp_path_factory.mktemp("convert")
    torch.manual_seed(0)
    made = model().to(torch.bfloat16)
    made.register_buffer("none", torch.empty(0, 3))
    by = optimizer(made)
    with pmstore.open(folder / "run.pm", size="8MiB") as store:
        run = pmstore.torch.attach(store, model=made, optimizer=by)
        for number in range(2):
            torch.manual_seed(number)
            by.zero_grad()
            made(torch.randn(4, 8, dtype=torch.bfloat16)).square().mean().backward()
            by.step()
            run.commit()
        store.add_tier("disk", TierConfig(folder / "tier"))
        store.flush("disk").wait()
        state = {**state_of(made, by), "step": 2}
        torch.save(state, folder / "state.pt")
        state = torch.load(folder / "state.pt")
    return folder, state


def converted(*words: Any) -> str:
    told = CliRunner().invoke(app, ["dcp", "convert", *map(str, words)], catch_exceptions=False)
    assert told.exit_code == 0, told.output
    return told.output


def refused(*words: Any) -> tuple[int, str]:
    told = CliRunner().invoke(app, ["dcp", "convert", *map(str, words)])
    return told.exit_code, told.stderr


def blank(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return torch.full_like(state, 7) if isinstance(state, torch.Tensor) else state


def test_round_about(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, state = trained
    told = converted(folder / "run.pm", tmp_path / "of-run")
    assert "tensors" in told
    for place, reader in (
        (tmp_path / "of-run", dcp.FileSystemReader(tmp_path / "of-run")),
        (tmp_path / "stores", StoreReader(tmp_path / "stores")),
    ):
        if not place.exists():
            converted(tmp_path / "of-run", place)
        found = blank(state)
        dcp.load(found, storage_reader=reader)
        assert_same(found, state)
    converted(folder / "tier", tmp_path / "of-tier", "--to", "store")
    for name, source in (
        ("1.pt", folder / "run.pm"),
        ("2.pt", tmp_path / "of-run"),
        ("3.pt", tmp_path / "stores"),
        ("4.pt", folder / "tier"),
        ("5.pt", tmp_path / "of-tier"),
        ("6.pt", folder / "state.pt"),
    ):
        converted(source, tmp_path / name)
        assert_same(torch.load(tmp_path / name), state)
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    converted(folder / "state.pt", tmp_path / "of-file", "--to", "torch")
    found = blank(state)
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "of-file"))
    assert_same(found, state)
    assert not [one for one in os.listdir(tmp_path) if one.startswith(".")]


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["EVIL"],)


def test_nothing_is_run(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file of torch.save, in torch's metadata, and in an object of a checkpoint."""
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    torch.save({"w": torch.zeros(2), "evil": Evil()}, tmp_path / "evil.pt")
    dcp.save({"w": torch.zeros(2), "evil": Evil()}, checkpoint_id=tmp_path / "object")
    folder = tmp_path / "metadata"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    for source in ("evil.pt", "object", "metadata"):
        code, told = refused(tmp_path / source, tmp_path / "made.pt")
        assert code == 2, told
        assert "--trusted" in told
        assert not (tmp_path / "evil").exists()
        assert not (tmp_path / "made.pt").exists()
    assert refused(tmp_path / "evil.pt", tmp_path / "made.pt", "--trusted")[0] == 0
    assert (tmp_path / "evil").exists()


def test_wrong_questions(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = trained
    (tmp_path / "there").mkdir()
    (tmp_path / "rubbish").write_bytes(b"rubbish" * 100)
    (tmp_path / "half.pt").write_bytes((folder / "state.pt").read_bytes()[:3000])
    for words, code, why in (
        ([folder / "run.pm"], 2, "FROM TO"),
        ([folder / "run.pm", tmp_path / "there"], 2, "something already"),
        ([folder / "run.pm", tmp_path / "no" / "folder"], 2, "no such directory"),
        ([tmp_path / "nothing.pm", tmp_path / "made"], 2, "no such file"),
        ([tmp_path / "no-*.pm", tmp_path / "made"], 2, "no store matches"),
        ([tmp_path / "there", tmp_path / "made"], 2, "no checkpoint and no epoch"),
        ([folder / "run.pm", tmp_path / "made", "--name", "other"], 2, "there is no run 'other'"),
        ([folder / "tier", tmp_path / "made", "--epoch", "77"], 2, "no such epoch"),
        ([tmp_path / "rubbish", tmp_path / "made"], 1, "rubbish"),
        ([tmp_path / "half.pt", tmp_path / "made"], 1, "half.pt"),
    ):
        assert refused(*words)[0] == code, refused(*words)
        assert why in refused(*words)[1]
        assert not (tmp_path / "made").exists()
