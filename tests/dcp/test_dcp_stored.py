"""Which keys and values a stored run has as a checkpoint, read from its store and from a tier."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_runs import assert_same, model, optimizer, state_of, step
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import pmstore
import pmstore.torch.optim
from pmstore.dcp import StoreReader
from pmstore.tiers import TierConfig

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized"
)


class Tied(nn.Module):
    """Parameters that are tied, a buffer that grows, one that no state dict has, and extra
    state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.seen = torch.cat([self.seen, x.detach().sum().reshape(1)])
        return self.second(self.first(x))

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def nothing(state: Any) -> Any:
    """The same state dict with other values."""
    if isinstance(state, dict):
        return {key: nothing(value) for key, value in state.items()}
    if isinstance(state, list) and state and isinstance(state[0], dict):
        return [nothing(one) for one in state]
    if isinstance(state, torch.Tensor):
        return torch.full_like(state, 7)
    return type(state)() if isinstance(state, (int, float, str)) else state


Trained = tuple[dict[str, Any], Any, dict[str, Any]]  # what attach was given, state dict, options


def in_place(store: pmstore.Store) -> Trained:
    made = model()
    by = optimizer(made)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(by, 0.1, total_steps=100)
    scaler = torch.amp.GradScaler("cpu")
    generator = torch.Generator().manual_seed(3)
    given = {
        "model": made,
        "optimizer": by,
        "lr_scheduler": scheduler,
        "scaler": scaler,
        "stateful": {"draws": generator},
    }
    run = pmstore.torch.attach(store, **given)
    for number in range(3):
        with run.next_step():
            step(made, by, number)
            scheduler.step()
        run.commit()
    parts = {"lr_scheduler": scheduler.state_dict(), "scaler": scaler.state_dict()}
    return given, {**state_of(made, by), **parts, "step": 3}, {}


def flattened(store: pmstore.Store) -> Trained:
    """As torchtitan asks for it; on slots."""
    made = model()
    by = pmstore.torch.optim.AdamW(made.parameters(), lr=1e-2)
    run = pmstore.torch.attach(store, model=made, optimizer=by)
    for number in range(3):
        with run.next_step():
            step(made, by, number)
        run.commit()
    options = torch.distributed.checkpoint.state_dict.StateDictOptions(
        flatten_optimizer_state_dict=True
    )
    weights = get_model_state_dict(made)
    state = get_optimizer_state_dict(made, by, options=options)
    return {"model": made}, {**weights, "optimizer": state}, {"model": "", "optimizer": "optimizer"}


def mirrored(store: pmstore.Store) -> Trained:
    made = model()
    by = optimizer(made)
    run = pmstore.torch.attach(store, model=made, optimizer=by, mirror=True)
    for number in range(3):
        with run.next_step():
            step(made, by, number)
        run.commit()
    return (
        {"model": made},
        {"app": state_of(made, by)},
        {"model": "app.model", "optimizer": "app.optim"},
    )


def several(store: pmstore.Store) -> Trained:
    models = {"a/b": Tied(), "g": model()}
    by = {"first": torch.optim.SGD(models["a/b"].parameters(), lr=0.1, momentum=0.9)}
    by["second"] = optimizer(models["g"])
    run = pmstore.torch.attach(store, model=models, optimizer=by)
    for number in range(2):
        with run.next_step():
            for one in by.values():
                one.zero_grad()
            models["a/b"](torch.full((2, 4), float(number))).sum().backward()
            by["first"].step()
            step(models["g"], by["second"], number)
        run.commit()
    weights = {key: get_model_state_dict(one) for key, one in models.items()}
    assert "second.weight" in weights["a/b"]
    assert weights["a/b"]["_extra_state"] == {"count": 2}
    assert weights["a/b"]["seen"].shape == (3,)
    state = {
        "first": get_optimizer_state_dict(models["a/b"], by["first"]),
        "second": get_optimizer_state_dict(models["g"], by["second"]),
    }
    return {"model": models}, {"model": weights, "optim": state}, {}


@pytest.mark.parametrize("train", [in_place, flattened, mirrored, several])
def test_keys_and_values_are_those_of_get_state_dict(
    train: Callable[[pmstore.Store], Trained], tmp_path: Path
) -> None:
    with pmstore.open(tmp_path / "run.pm", size="8MiB") as store:
        _, state, options = train(store)
        state = copy.deepcopy(state)
        store.add_tier("disk", TierConfig(tmp_path / "tier"))
        store.flush("disk").wait()
        beside = StoreReader.of_run(tmp_path / "run.pm", **options)
        readers = {"beside": beside}
        for reader in readers.values():
            found = nothing(state)
            dcp.load(found, storage_reader=reader)
            assert_same(found, state)
    alone = StoreReader.of_run(tmp_path / "run.pm", **options)
    for reader in (alone, StoreReader.of_epoch(tmp_path / "tier", **options)):
        found = nothing(state)
        dcp.load(found, storage_reader=reader)
        assert_same(found, state)
