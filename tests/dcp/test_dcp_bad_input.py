"""What cannot be saved or loaded is refused by name; what is damaged is never loaded as something
else; and a save that fails leaves the checkpoint before it, and a writer that can be used."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_common import QUIET, equal, load, save, state
from torch.distributed.checkpoint import DefaultSavePlanner, LoadPlan
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import pmstore
from pmstore.dcp import StoreReader, StoreWriter
from pmstore.dcp._format import folder_layout
from pmstore.dcp._write import storage_writer
from pmstore.errors import PmstoreError

pytestmark = pytest.mark.filterwarnings(QUIET)


class Opaque:
    """torch.load refuses it with weights_only=True."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque)

    __hash__ = None  # type: ignore[assignment]


def async_save(folder: Path, content: dict[str, Any], writer: StoreWriter) -> None:
    dcp.async_save(content, checkpoint_id=folder, storage_writer=writer).result()


SAVES: list[Callable[..., None]] = [save, async_save]


def damage(path: Path, what: bytes, to: bytes) -> None:
    data = path.read_bytes()
    assert what in data
    path.write_bytes(data.replace(what, to))


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, "2"])
def test_keep(shm: Path, keep: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        StoreWriter(shm, keep=keep)


def test_arguments(shm: Path) -> None:
    with pytest.raises(ValueError, match="domain='disk'"):
        StoreWriter(shm, domain="disk")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="folder"):
        StoreWriter(b"bytes")  # type: ignore[arg-type]
    assert StoreWriter.validate_checkpoint_id(shm / "new/folder")
    assert not StoreWriter.validate_checkpoint_id("s3://bucket/run")
    (shm / "file").write_text("")
    assert not StoreWriter.validate_checkpoint_id(shm / "file")
    assert not StoreReader.validate_checkpoint_id(shm)


@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize(
    ("what", "make"),
    [
        ("meta", lambda: torch.empty(3, device="meta")),
        ("layout torch.sparse_coo", lambda: torch.eye(3).to_sparse()),
        ("quantized", lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_tensors_that_are_refused(
    shm: Path, saves: Callable[..., None], what: str, make: Callable[[], torch.Tensor]
) -> None:
    one = StoreWriter(shm)
    saves(shm, state(1), one)
    with pytest.raises((TypeError, CheckpointException), match=rf"model\.odd.*{what}"):
        saves(shm, {"model": {"odd": make(), "x": torch.ones(3)}}, one)
    assert equal(load(shm, state(1)), state(1))
    saves(shm, state(2), one)
    assert equal(load(shm, state(2)), state(2))


def test_objects_pass_a_gate(shm: Path) -> None:
    save(shm, {"x": torch.ones(3), "odd": Opaque()})
    with pytest.raises(CheckpointException, match=r"'odd' is an object.*trusted=True"):
        load(shm, {"x": torch.ones(3), "odd": Opaque()})
    assert load(shm, {"x": torch.ones(3), "odd": Opaque()}, trusted=True)["odd"] == Opaque()
    assert equal(load(shm, {"x": torch.ones(3)}), {"x": torch.ones(3)})  # one that is not asked for


@pytest.mark.parametrize("domain", ["process", "file"])
def test_corrupt_part(shm: Path, domain: str) -> None:
    marked = torch.full((1_000_000,), 1.0)
    marked[700_000:700_002] = torch.tensor([12345.678, 8765.4321])
    one = StoreWriter(shm, domain=domain)  # type: ignore[arg-type]
    save(shm, {"x": marked, "y": torch.ones(10)}, one)
    one.close()
    what = marked[700_000:700_002].numpy().tobytes()
    damage(shm / "rank-00000.pm", what, bytes([what[0] ^ 1]) + what[1:])
    with pytest.raises(CheckpointException, match=r"rank-00000.pm: 'x' is damaged"):
        load(shm, {"x": marked})
    assert equal(load(shm, {"y": torch.ones(10)}), {"y": torch.ones(10)})


def test_corrupt_index(shm: Path) -> None:
    one = StoreWriter(shm)
    save(shm, {"needle": torch.ones(10)}, one)
    one.close()
    damage(shm / "index.pm", b"needle", b"nettle")
    with pytest.raises(CheckpointException, match=r"index.pm: checkpoint 1: the checksum is wrong"):
        load(shm, {"nettle": torch.ones(10)})
    with pytest.raises(CheckpointException, match=r"index.pm"):  # nor is its part thrown away
        save(shm, {"needle": torch.ones(10)})


def test_truncated_files(shm: Path) -> None:
    one = StoreWriter(shm)
    save(shm, state(1), one)
    one.close()
    for name in ("index.pm", "rank-00000.pm"):
        whole = (shm / name).read_bytes()
        (shm / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CheckpointException, match=name):
            load(shm, state(1))
        (shm / name).write_bytes(whole)
    assert equal(load(shm, state(1)), state(1))


def test_copied_by_half(shm: Path) -> None:
    one = StoreWriter(shm / "a")
    save(shm / "a", state(1), one)
    one.close()
    shutil.copytree(shm / "a", shm / "old")
    save(shm / "a", state(2), one)
    one.close()
    shutil.copy(shm / "a/index.pm", shm / "old/index.pm")
    with pytest.raises(CheckpointException, match=r"rank-00000.pm: it does not have part-"):
        load(shm / "old", state(2))
    (shm / "a/rank-00000.pm").unlink()
    with pytest.raises(CheckpointException, match=r"rank-00000\.pm"):
        load(shm / "a", state(2))
    save(shm / "b", state(3))
    shutil.copy(shm / "b/rank-00000.pm", shm / "a/rank-00000.pm")
    with pytest.raises(CheckpointException, match="another store than the one"):
        load(shm / "a", state(2))


def test_an_index_names_no_store_outside_of_its_folder(shm: Path) -> None:
    """A stranger's may name the part of any store by its path, and its uuid."""
    mine, strange = shm / "mine", shm / "strange"
    save(mine, {"x": torch.arange(1000.0)})
    shutil.copytree(mine, strange)
    (strange / "rank-x").mkdir()
    (strange / "rank-00000.pm").unlink()
    with pmstore.open(strange / "index.pm") as index:
        (number,) = folder_layout.numbers_in(index)
        entry = folder_layout.entry_in(index, number, "index.pm")
    for rank in ("x/../../mine/rank-00000", -1, True, 0.0, None):
        with pmstore.open(strange / "index.pm") as index:
            (part,) = entry.parts
            forged = replace(entry, parts=(replace(part, rank=rank),))  # type: ignore[arg-type]
            index[folder_layout.entry_name(number)] = folder_layout.sealed_entry(forged)
        with pytest.raises((PmstoreError, CheckpointException), match="a part has the rank"):
            load(strange, {"x": torch.zeros(1000)})


@pytest.mark.parametrize("name", ["rank-00000.pm", "index.pm"])
def test_a_link_leads_out_of_no_folder(shm: Path, name: str) -> None:
    mine, strange = shm / "mine", shm / "strange"
    save(mine, {"x": torch.arange(1000.0)})
    shutil.copytree(mine, strange)
    (strange / name).unlink()
    (strange / name).symlink_to(mine / name)
    with pytest.raises((PmstoreError, CheckpointException), match=f"{name}: a link"):
        load(strange, {"x": torch.zeros(1000)})
    if name == "rank-00000.pm":
        with pytest.raises((PmstoreError, CheckpointException), match=f"{name}: a link"):
            save(strange, {"x": torch.zeros(1000)})
    assert equal(load(mine, {"x": torch.zeros(1000)}), {"x": torch.arange(1000.0)})


def test_torchs_own_folder(shm: Path) -> None:
    """It is read by torch's reader, saved with ours, and read back by either."""
    content = {"x": torch.arange(1000.0), "n": {"a": torch.ones(3, dtype=torch.bfloat16)}}
    dcp.save(content, checkpoint_id=shm / "theirs", no_dist=True)
    with pytest.raises((FileNotFoundError, CheckpointException), match="FileSystemReader"):
        load(shm / "theirs", content)
    read = {"x": torch.zeros(1000), "n": {"a": torch.zeros(3, dtype=torch.bfloat16)}}
    dcp.load(read, storage_reader=dcp.FileSystemReader(shm / "theirs"), no_dist=True)
    save(shm / "ours", read)
    again = load(shm / "ours", {"x": torch.zeros(1000), "n": {"a": torch.zeros(3).bfloat16()}})
    torch.save(again, shm / "model.pt")
    assert equal(torch.load(shm / "model.pt"), content)


def test_no_checkpoint(shm: Path) -> None:
    with pytest.raises(CheckpointException, match="there is no checkpoint"):
        load(shm, state(1))
    save(shm, state(1))
    with pytest.raises(CheckpointException, match=r"no checkpoint 7 in it: it has \[1\]"):
        load(shm, state(1), number=7)


def test_folder_of_something_else(shm: Path) -> None:
    with pmstore.open(shm / "rank-00000.pm") as store:
        store.zeros("weights", 10)
    with pytest.raises(CheckpointException, match="a store of something else"):
        save(shm, state(1))
    with pmstore.open(shm / "rank-00000.pm") as store:
        assert list(store) == ["weights"]


def test_missing_and_extra_keys(shm: Path) -> None:
    save(shm, {"x": torch.ones(3), "more": torch.ones(3)})
    with pytest.raises(CheckpointException, match="Missing key"):
        load(shm, {"x": torch.ones(3), "y": torch.ones(3)})
    assert equal(load(shm, {"x": torch.ones(3)}), {"x": torch.ones(3)})


def test_used_twice_without_an_id(shm: Path) -> None:
    one = StoreWriter(shm)
    dcp.save(state(1), storage_writer=one)
    with pytest.raises(CheckpointException, match="checkpoint_id="):
        dcp.save(state(2), storage_writer=one)
    assert StoreReader.numbers(shm) == [1]
    dcp.save(state(2), checkpoint_id=shm, storage_writer=one)
    assert equal(load(shm, state(2)), state(2))


def test_other_process_writes(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_layout, "LOCK_SECONDS", 0.1)
    save(shm, state(1))
    program = (
        "import sys, pmstore; s = pmstore.open(sys.argv[1]); print('open', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(shm / "rank-00000.pm")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline()
        try:
            one = StoreWriter(shm)
            for saves in SAVES:
                with pytest.raises(CheckpointException, match=rf"process {other.pid}"):
                    saves(shm, state(2), one)
            assert equal(load(shm, state(1)), state(1))  # beside it
        finally:
            other.communicate(b"\n")
    save(shm, state(2), one)
    assert equal(load(shm, state(2)), state(2))


def test_two_writers_of_one_process(shm: Path) -> None:
    one, other = StoreWriter(shm, keep=3), StoreWriter(shm, keep=3)
    futures = [
        dcp.async_save(state(seed), checkpoint_id=shm, storage_writer=each)
        for seed, each in enumerate((one, other, one))
    ]
    for future in futures:
        future.result()
    for number in (1, 2, 3):
        assert equal(load(shm, state(number - 1), number=number), state(number - 1))


def test_processes_are_refused(shm: Path) -> None:
    one = StoreWriter(shm)
    for what in (one, one.stage({"x": torch.ones(3)})):
        with pytest.raises(TypeError, match=r"AsyncCheckpointerType.PROCESS does not work"):
            pickle.dumps(what)
    assert AsyncCheckpointerType.PROCESS  # by its name in the message


class Failing(DefaultSavePlanner):
    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase = phase

    def _maybe(self, phase: str) -> None:
        if phase == self.phase:
            raise RuntimeError(f"failed on purpose in {phase}")

    def create_local_plan(self) -> Any:
        self._maybe("local plan")
        return super().create_local_plan()

    def create_global_plan(self, plans: Any) -> Any:
        self._maybe("global plan")
        return super().create_global_plan(plans)

    def finish_plan(self, plan: Any) -> Any:
        self._maybe("finish plan")
        return super().finish_plan(plan)

    def resolve_data(self, item: Any) -> Any:
        if item.index.fqn == "step":
            self._maybe("write")
        return super().resolve_data(item)


@pytest.mark.parametrize("how", ["save", "async_save"])
@pytest.mark.parametrize("phase", ["local plan", "global plan", "finish plan", "write", "finish"])
def test_failures(shm: Path, how: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = StoreWriter(shm)
    sizes = []
    for seed in range(6):
        save(shm, state(seed), one)
        with monkeypatch.context() as patch:
            if phase == "finish":

                def fail(*_: Any) -> None:
                    raise RuntimeError("failed on purpose in finish")

                patch.setattr(storage_writer, "publish", fail)
            with pytest.raises(CheckpointException, match=f"failed on purpose in {phase}"):
                planner = Failing(phase)
                if how == "save":
                    dcp.save(state(99), checkpoint_id=shm, storage_writer=one, planner=planner)
                else:
                    dcp.async_save(
                        state(99), checkpoint_id=shm, storage_writer=one, planner=planner
                    ).result()
        assert equal(load(shm, state(seed)), state(seed))
        sizes.append((shm / "rank-00000.pm").stat().st_size)
    assert sizes[-1] == sizes[-2]
    save(shm, state(7), one)
    assert equal(load(shm, state(7)), state(7))


def test_old_torch_is_told_of_once(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.1.0")
    monkeypatch.setattr(storage_writer, "_warned", [])
    with pytest.warns(UserWarning, match=r"2\.1\.0") as told:
        StoreWriter(shm)
    assert len(told) == 1
    StoreWriter(shm)  # warnings are errors here


def save_of_rank_1(folder: Path, seen: Path, content: dict[str, Any]) -> None:
    """Rank 1 writes to a folder, the coordinator publishes in the one that it sees."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(content, is_coordinator=True)
    plan = planner.create_local_plan()
    (plan,), metadata = planner.create_global_plan([plan])
    one = StoreWriter(folder)
    one.set_up_storage_writer(False, rank=1, use_collectives=True)
    results = one.write_data(planner.finish_plan(plan), planner).wait()
    coordinator = StoreWriter(seen)
    coordinator.set_up_storage_writer(True, rank=0, use_collectives=True)
    coordinator.finish(metadata, [results])


def test_ranks_that_do_not_see_one_folder(shm: Path) -> None:
    content = {"w": torch.arange(10.0)}
    save_of_rank_1(shm / "a", shm / "a", content)  # it can be told from what is right
    made = {"w": torch.zeros(10)}
    dcp.load(made, storage_reader=StoreReader(shm / "a"))
    assert equal(made, content)
    for other in ("missing", "another"):
        if other == "another":
            save_of_rank_1(shm / other, shm / other, content)
        with pytest.raises(PmstoreError, match=r"rank-00001\.pm: rank 1 wrote its part"):
            save_of_rank_1(shm / "b", shm / other, content)


def test_checkpoints_of_other_folders_have_other_marks(shm: Path) -> None:
    """Ranks that load compare them: each may have a folder of its own by that name."""
    for folder in ("a", "b"):
        save(shm / folder, state(), StoreWriter(shm / folder))
    marks = set()
    for folder in ("a", "b"):
        reader = StoreReader(shm / folder)
        reader.read_metadata()
        marks.add(reader.prepare_local_plan(LoadPlan([])).storage_data)
        reader.reset()
    assert len(marks) == 2


def test_a_save_in_inference_mode_does_not_spoil_later_ones(shm: Path) -> None:
    """An evaluation callback saves first: what stands in for its tensors is for it alone."""
    content = {"w": torch.arange(3000.0)}
    writer = StoreWriter(shm, keep=2)
    with torch.inference_mode():
        async_save(shm, content, writer)
    async_save(shm, {"w": content["w"] + 1}, writer)
    writer.close()
    there = {"w": torch.zeros(3000)}
    dcp.load(there, storage_reader=StoreReader(shm))
    assert torch.equal(there["w"], content["w"] + 1)


@pytest.mark.parametrize("domain", ["process", "file"])
def test_a_save_that_died_when_it_had_made_the_index(
    shm: Path, domain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = folder_layout.open_store

    def dies(path: str, *args: Any, **options: Any) -> pmstore.Store:
        store = made(path, *args, **options)
        if path.endswith("index.pm"):
            store.close()
            raise KeyboardInterrupt
        return store

    content = {"w": torch.arange(3000.0)}
    writer = StoreWriter(shm, domain=domain)
    with monkeypatch.context() as dying:
        dying.setattr(folder_layout, "open_store", dies)
        with pytest.raises((KeyboardInterrupt, CheckpointException)):
            save(shm, content, writer)
    writer.close()
    with pytest.raises(CheckpointException, match="none was published"):
        dcp.load({"w": torch.zeros(3000)}, storage_reader=StoreReader(shm))
    writer = StoreWriter(shm, domain=domain)
    save(shm, content, writer)
    writer.close()
    there = {"w": torch.zeros(3000)}
    dcp.load(there, storage_reader=StoreReader(shm))
    assert torch.equal(there["w"], content["w"])
