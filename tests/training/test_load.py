"""A stored model in a program of its own: nothing of it is in the store afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import MODELS, OPTIMIZERS, make_job, train

import pmstore
import pmstore.torch
from pmstore.torch import AttachError, MismatchError, attach, load

KINDS: list[dict[str, Any]] = [
    {},
    {"model": "conv"},
    {"model": "conv", "optimizer": "native-adamw"},
    {"model": "conv", "optimizer": "native-sgd"},
    {"mirror": True},
]


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    pairs = zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True)
    return all(one == two and torch.equal(a, b) for (one, a), (two, b) in pairs)


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "-".join(map(str, kinds.values())))
@pytest.mark.parametrize("opened", [False, True])
def test_a_model_comes_back(path: Path, kinds: dict[str, Any], opened: bool) -> None:
    kinds = dict(kinds)
    attach = {"mirror": True} if kinds.pop("mirror", False) else {}
    with pmstore.open(path) as store:
        job = make_job(**kinds)
        train(store, job, 3, 3, **attach)
    model = MODELS[kinds.get("model", "mlp")]().to(memory_format=torch.contiguous_format)
    before = [tensor.data_ptr() for tensor in model.state_dict().values()]
    if opened:
        with pmstore.open(path, mode="r") as store:
            load(store, model)
    else:
        load(path, model)
    assert same(model, job.model)
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == before
    with pmstore.open(path) as store:  # to be written, whoever has the model
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.zero_()
        again = MODELS[kinds.get("model", "mlp")]()
        load(store, again)
        assert same(again, job.model)


def test_into_another_dtype(path: Path) -> None:
    with pmstore.open(path) as store:
        job = make_job()
        train(store, job, 1, 1)
    model = MODELS["mlp"]().to(torch.bfloat16)
    load(path, model)
    assert same(model, job.model.to(torch.bfloat16))


def test_a_model_that_is_another(path: Path) -> None:
    with pmstore.open(path) as store:
        train(store, make_job(), 1, 1)
    other = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))
    before = [tensor.clone() for tensor in other.parameters()]
    with pytest.raises(MismatchError) as caught:
        load(path, other)
    assert "1.running_mean" in caught.value.missing
    assert caught.value.mismatched == (
        "1.weight: stored (16,), given (3, 16)",
        "1.bias: stored (16,), given (3,)",
    )
    assert all(map(torch.equal, before, other.parameters()))
    short = nn.Sequential(nn.Linear(8, 16))
    with pytest.raises(MismatchError):
        load(path, short)
    load(path, short, strict=False)
    with pmstore.open(path, mode="r") as store:
        assert torch.equal(short[0].weight, store["run/model/0.weight"])
    with pytest.raises(AttachError, match="no run 'walk'"):
        load(path, short, name="walk")
    with pytest.raises(MismatchError, match="one model: give it as it is"):
        load(path, {"g": short})
    with pytest.raises(FileNotFoundError):
        load(path.with_name("none.pm"), short)


def tied(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Module()
    model.first, model.second = nn.Linear(4, 4), nn.Linear(4, 4)
    model.second.weight = model.first.weight
    model.register_buffer("aside", torch.rand(3), persistent=False)
    return model


def test_ties_and_several_models(path: Path) -> None:
    first, second = tied(0), nn.Linear(8, 3)
    with pmstore.open(path) as store:
        optimizer = OPTIMIZERS["adamw"](first.parameters())
        models = {"a/b": first, "g": second}
        pmstore.torch.attach(store, model=models, optimizer=optimizer).detach()
        pmstore.torch.attach(store, loader=[1, 2], name="no model")
    ours, theirs = tied(1), nn.Linear(8, 3)
    load(path, {"a/b": ours, "g": theirs})
    assert same(ours, first)
    assert torch.equal(ours.aside, first.aside)
    assert same(theirs, second)
    alone = tied(2)
    alone.second.weight = nn.Parameter(torch.zeros(4, 4))  # not tied
    load(path, {"a/b": alone})
    assert same(alone, first)
    with pytest.raises(MismatchError, match="'a/b', 'g': give a dict"):
        load(path, theirs)
    with pytest.raises(MismatchError, match="'h'"):
        load(path, {"h": theirs})
    with pytest.raises(AttachError, match="has no model"):
        load(path, theirs, name="no model")


class Counted(nn.Linear):
    calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_extra_state(path: Path) -> None:
    model = Counted(2, 2)
    model.calls = 7
    with pmstore.open(path) as store:
        pmstore.torch.attach(store, model=model)
    other = Counted(2, 2)
    load(path, other)
    assert other.calls == 7


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x.detach().sum().reshape(1)])
        return self.linear(x)


@pytest.mark.parametrize("mirror", [None, True])
def test_a_buffer_that_grew(path: Path, mirror: bool | None) -> None:
    with pmstore.open(path) as store:
        model = Growing()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = attach(store, model=model, optimizer=optimizer, mirror=mirror)
        for _ in run.steps(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        trained = {name: one.clone() for name, one in model.state_dict().items()}
    fresh = Growing()
    load(path, fresh)
    assert fresh.seen.tolist() == [2, 2, 2]
    assert all(torch.equal(one, trained[name]) for name, one in fresh.state_dict().items())
    wrong = Growing()
    wrong.seen = torch.zeros(2)
    with pytest.raises(MismatchError, match=r"seen: stored \(3,\), given \(2,\)"):
        load(path, wrong)


def test_a_run_of_a_later_version(path: Path) -> None:
    with pmstore.open(path) as store:
        attach(store, model=Growing())
        store["run/about"] = {**store["run/about"], "format": 99}
        with pytest.raises(AttachError, match="has format 99"):
            load(store, Growing())
