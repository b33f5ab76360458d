"""What `dcp.load` and `dcp.save` may be asked of one process: casts, other keys, a part alone,
objects with state, stagers. What torch's own storage does is what ours does."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_states import differences, values
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import (
    AsyncStager,
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from pmstore.dcp import StoreReader, StoreWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
    pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def save(folder: Path, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=StoreWriter(folder))


def load(folder: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=StoreReader(folder), **options)
    return state


# ---- casts ----

SAVED_AS = ("float32", "float64", "bfloat16", "float16", "int64", "uint8")
LOADED_AS = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "complex64")


def test_values_are_cast_to_the_dtype_of_the_target(folder: Path) -> None:
    """As `copy_` does it, also by halves of a large tensor."""
    saved = {name: values(1, 700, 500, dtype=getattr(torch, name)) for name in SAVED_AS}
    save(folder, saved)
    for dtype in LOADED_AS:
        found = load(
            folder, {name: torch.zeros(700, 500, dtype=getattr(torch, dtype)) for name in SAVED_AS}
        )
        for name in SAVED_AS:
            assert differences(found[name], saved[name].to(getattr(torch, dtype))) == []


def test_a_target_may_lie_in_memory_in_any_order(folder: Path) -> None:
    saved = values(3, 600, 500)
    save(folder, {"tensor": saved})
    places = [
        torch.zeros(500, 600).t(),
        torch.zeros(1200, 1500)[::2, ::3],
        torch.zeros(600, 500, 1).squeeze(2),
        torch.zeros(600 * 500 + 3)[3:].view(600, 500),
        nn.Parameter(torch.zeros(600, 500)),
        torch._neg_view(torch.zeros(600, 500)),
    ]
    for place in places:
        load(folder, {"tensor": place})
        assert torch.equal(place.detach(), saved)


def test_values_that_numbers_cannot_say_are_kept(folder: Path) -> None:
    bits = torch.tensor([0x7FC00001, -1, 0x7F800000, -(2**31), 1], dtype=torch.int32)
    floats = bits.view(torch.float32)  # a NaN with a payload, another, infinity, -0.0, denormal
    save(folder, {"floats": floats})
    found = load(folder, {"floats": torch.zeros(5)})
    assert found["floats"].view(torch.int32).tolist() == bits.tolist()


@pytest.mark.parametrize("shape", [(4, 2), (9,), (8, 1), ()])
def test_another_shape_is_refused(folder: Path, shape: tuple[int, ...]) -> None:
    save(folder, {"a": values(0, 8)})
    with pytest.raises(CheckpointException, match="a"):
        load(folder, {"a": torch.zeros(shape)})


# ---- other keys ----


def test_a_missing_key_is_refused_by_name_and_nothing_is_changed(folder: Path) -> None:
    save(folder, {"a": values(1, 4)})
    state = {"a": torch.zeros(4), "absent": torch.zeros(3)}
    with pytest.raises(CheckpointException, match="absent"):
        load(folder, state)
    assert state["a"].count_nonzero() == 0


def test_a_missing_key_is_left_alone_where_that_is_asked_for(folder: Path) -> None:
    save(folder, {"a": values(1, 4), "here": {"x": 1}})
    state = {"a": torch.zeros(4), "absent": torch.ones(3), "here": {"x": 0, "y": 5}}
    load(folder, state, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(state["a"], values(1, 4))  # type: ignore[arg-type]
    assert torch.equal(state["absent"], torch.ones(3))  # type: ignore[arg-type]
    assert state["here"] == {"x": 1, "y": 5}


def test_more_keys_than_are_asked_for(folder: Path) -> None:
    save(folder, {"model": {"w": values(1, 4), "b": values(2, 2)}, "step": 3})
    assert (
        differences(load(folder, {"model": {"b": torch.zeros(2)}})["model"]["b"], values(2, 2))
        == []
    )


def test_keys_by_their_beginning(folder: Path) -> None:
    saved = {"model": {"w": values(1, 4)}, "optimizer": {"state": [values(2, 3)], "lr": 0.5}}
    save(folder, saved)
    found = _load_state_dict_from_keys("optimizer", storage_reader=StoreReader(folder))
    assert differences(found, {"optimizer": saved["optimizer"]}) == []
    assert differences(_load_state_dict_from_keys(storage_reader=StoreReader(folder)), saved) == []


def test_keys_that_look_alike(folder: Path) -> None:
    """Dots, slashes, nothing, other scripts: names of the store's own kind would clash."""
    names = [
        "a.b",
        "a/b",
        "a",
        "b.",
        ".b",
        "",
        "ä",
        "a b",
        "0",
        "a\n",
        "..",
        "\x00",
        "'",
        "x" * 300,
    ]
    state = {name: values(i, 3) for i, name in enumerate(names)}
    save(folder, state)
    assert differences(load(folder, {name: torch.zeros(3) for name in names}), state) == []


def test_one_thousand_small_tensors(folder: Path) -> None:
    state = {f"{i}": values(i, 1 + i % 5) for i in range(1000)}
    save(folder, state)
    found = load(folder, {name: torch.zeros_like(tensor) for name, tensor in state.items()})
    assert differences(found, state) == []


def test_tensors_that_share_memory(folder: Path) -> None:
    """Each is saved with its own part of it."""
    whole = values(1, 6, 4)
    save(folder, {"whole": whole, "row": whole[2], "column": whole[:, 1], "again": whole})
    state = {
        "whole": torch.zeros(6, 4),
        "row": torch.zeros(4),
        "column": torch.zeros(6),
        "again": torch.zeros(6, 4),
    }
    load(folder, state)
    expected = {"whole": whole, "row": whole[2], "column": whole[:, 1], "again": whole}
    assert differences(state, expected) == []


# ---- objects with state ----


class Counter:
    """A `Stateful` with tensors, numbers and words."""

    def __init__(self, number: int) -> None:
        self.count = number
        self.history = values(number, 5)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "history": self.history, "name": f"counter {self.count}"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["name"] == f"counter {state['count']}"
        self.count, self.history = state["count"], state["history"]


def test_objects_with_state(folder: Path) -> None:
    torch.manual_seed(1)
    saved = {"counter": Counter(7), "model": nn.Linear(3, 2), "step": 7}
    save(folder, saved)
    found = load(folder, {"counter": Counter(1), "model": nn.Linear(3, 2), "step": 0})
    assert (found["counter"].count, found["step"]) == (7, 7)
    assert torch.equal(found["counter"].history, values(7, 5))
    assert differences(found["model"].state_dict(), saved["model"].state_dict()) == []  # type: ignore[attr-defined]


# ---- stagers ----


def _default(**options: bool) -> DefaultStager:
    off = dict.fromkeys(("use_pinned_memory", "use_shared_memory", "use_async_staging"), False)
    return DefaultStager(StagingOptions(**{**off, "use_non_blocking_copy": False, **options}))


STAGERS: dict[str, Callable[[], AsyncStager | None]] = {
    "ours": lambda: None,
    "blocking": BlockingAsyncStager,
    "default": _default,
    "shared": lambda: _default(use_shared_memory=True),
    "in a thread": lambda: _default(use_async_staging=True),
}


@pytest.mark.parametrize("kind", STAGERS)
def test_a_stager_and_its_kept_memory(folder: Path, kind: str) -> None:
    """Values are those of the call, whatever the program does to its tensors afterwards."""
    stager, writer = STAGERS[kind](), StoreWriter(folder)
    tensors = {"a": torch.zeros(300, 100), "b": torch.zeros(7), "view": torch.zeros(4, 6).t()}
    for number in range(3):
        for tensor in tensors.values():
            tensor.copy_(values(number, *tensor.shape))
        state = {**tensors, "step": number}
        future = dcp.async_save(
            state, checkpoint_id=folder, storage_writer=writer, async_stager=stager
        )
        if isinstance(future, AsyncSaveResponse):
            future.staging_completion.result(60)
            future = future.upload_completion
        for tensor in tensors.values():
            tensor.fill_(-1)
        future.result(60)
        found = load(
            folder, {name: torch.zeros_like(t) for name, t in tensors.items()} | {"step": -1}
        )
        expected = {name: values(number, *t.shape) for name, t in tensors.items()}
        assert differences(found, expected | {"step": number}) == []
    if stager is not None:
        stager.close()


def test_a_state_dict_that_was_staged_by_hand(folder: Path) -> None:
    stager = StateDictStager()
    tensor = torch.zeros(50, 3)
    for number in range(3):
        tensor.copy_(values(number, 50, 3))
        staged = stager.stage({"a": tensor, "row": tensor[3], "step": number})
        tensor.zero_()
        save(folder, staged)
        found = load(folder, {"a": torch.zeros(50, 3), "row": torch.zeros(3), "step": -1})
        expected = {"a": values(number, 50, 3), "row": values(number, 50, 3)[3], "step": number}
        assert differences(found, expected) == []
    stager.close()


# ---- an error of one's own in each phase ----

PHASES = (
    "set_up_planner",
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "resolve_data",
)


def failing(phase: str) -> dcp.DefaultSavePlanner:
    planner = dcp.DefaultSavePlanner()

    @functools.wraps(getattr(planner, phase))  # torch looks at the names of parameters
    def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError(f"the program's own, in {phase}")

    setattr(planner, phase, fail)
    return planner


@pytest.mark.parametrize("background", [False, True], ids=["save", "async_save"])
@pytest.mark.parametrize("phase", PHASES)
def test_an_error_in_a_phase_leaves_the_old_checkpoint(
    folder: Path, phase: str, background: bool
) -> None:
    writer = StoreWriter(folder)
    shown = {"a": values(0, 50, 20), "step": 0}
    for number in range(3):
        old, new = ({"a": values(n, 50, 20), "step": n} for n in (number, number + 1))
        dcp.save(old, checkpoint_id=folder, storage_writer=writer)
        saving = dcp.async_save if background else dcp.save
        with pytest.raises(CheckpointException, match=re.escape(f"the program's own, in {phase}")):
            done = saving(new, checkpoint_id=folder, storage_writer=writer, planner=failing(phase))
            done.result(60)
        load(folder, shown)
        assert differences(shown, old) == []
