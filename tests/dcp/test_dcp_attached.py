"""Tensors of an attached run go through torch.distributed.checkpoint, and stay in the heap."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import pythons
import torch.distributed.checkpoint as dcp
from dcp_attached import OPTIMIZERS, begin, expected, in_heap, plain
from dcp_runs import assert_same, state_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized"
)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs of each optimizer saved, loaded, committed and were killed."""
    folder = tmp_path_factory.mktemp("attached")
    program = ["-W", "ignore", str(Path(__file__).with_name("dcp_attached.py")), str(folder)]
    ended = pythons.run(program, timeout=600)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == 5 * len(OPTIMIZERS)
    assert [line for line in lines if not line.endswith(": True")] == []
    return folder


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_was_loaded_is_committed_and_resumed(killed: Path, kind: str) -> None:
    for path in (killed / f"{kind}.pm", killed / f"{kind}-other.pm"):
        store, run, made, by = begin(path, kind)
        with store:
            assert run.resumed
            assert in_heap(store, made, by)
            assert_same(state_of(made, by), expected(kind))
            assert store.check().problems == ()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_was_saved_is_as_it_was_then(killed: Path, kind: str) -> None:
    """async_save too, beside which the run went on."""
    for folder in (killed / kind, killed / f"{kind}-async"):
        state = state_of(*plain(kind, 1))
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
        assert_same(state, state_of(*plain(kind, 3)))
