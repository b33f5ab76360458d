"""Buffers that change their size while they train, and those that are assigned anew."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import nn
from training import assert_same, contents

import pmstore
import pmstore.torch.optim
from pmstore.testing import ForkServer
from pmstore.torch import MismatchError, Resume, attach

STEPS = 12


class Seen(nn.Module):
    """Buffers that grow, by assignment and in place."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("assigned", "empty"):
            self.register_buffer(name, torch.zeros(0))
        for name in ("resized", "queue"):
            self.register_buffer(name, torch.zeros(2))
        self.register_buffer("hidden", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            drawn = x.detach().sum().reshape(1)
            self.assigned = torch.cat([self.assigned, drawn])
            self.queue = torch.cat([self.queue[-4:], drawn])
            if self.empty.numel():
                self.empty.add_(drawn)
            else:
                torch.mul(drawn, 2, out=self.empty)
            count = self.resized.numel() + 1
            self.resized.resize_(count)[-1] = drawn[0]
            self.hidden.add_(1)
        return x + self.assigned[-1] * 1e-3


def quantized() -> nn.Module:
    from torch.ao import quantization

    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        return quantization.prepare_qat(model.train())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "qat": quantized,
    "growing": lambda: nn.Sequential(nn.Linear(6, 5), Seen(), nn.BatchNorm1d(5), nn.Linear(5, 1)),
}


def job(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = MODELS[kind]()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()


def work(ack: Callable[[int], None], path: str, domain: str, kind: str, mirror: bool) -> None:
    """One process's life. Runs in a child of the fork server."""
    torch.set_num_threads(1)
    with pmstore.open(path, domain=domain, size="8MiB") as store:
        model, optimizer = job(kind)
        run = attach(store, model=model, optimizer=optimizer, mirror=mirror)
        while run.step < STEPS:
            with run.next_step():
                step(model, optimizer)
            run.commit()
            ack(run.step)
        torch.save(model.state_dict(), f"{path}.state")


def plain(kind: str) -> dict[str, torch.Tensor]:
    """What torch alone computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            model, optimizer = job(kind)
            for _ in range(STEPS):
                step(model, optimizer)
    finally:
        torch.set_num_threads(threads)
    return dict(model.state_dict())


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("domain", ["file", "process"])
def test_killed_and_resumed(
    tmp_path: Path, server: ForkServer, domain: str, kind: str, mirror: bool
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # shown if it fails
    chance = random.Random(seed)
    whole, killed = tmp_path / "whole.pm", tmp_path / "killed.pm"
    arguments: list[Any] = [domain, kind, mirror]
    assert server.run("test_resized:work", [str(whole), *arguments]).exit_code == 0
    kills = 0
    for _ in range(40):
        run = server.run(
            "test_resized:work", [str(killed), *arguments], kill_at=chance.randrange(150, 700)
        )
        kills += run.killed
        if not run.killed:
            break
    assert server.run("test_resized:work", [str(killed), *arguments]).exit_code == 0
    assert kills
    with pmstore.open(whole, mode="r") as ours, pmstore.open(killed, mode="r") as theirs:
        assert_same(contents(ours), contents(theirs))
        assert theirs.check().problems == ()
    ended = torch.load(f"{killed}.state")
    expected = plain(kind)
    assert ended.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ended[name], tensor), name
        assert ended[name].shape == tensor.shape


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("kind", list(MODELS))
def test_rolled_back(store: pmstore.Store, kind: str, mirror: bool) -> None:
    model, optimizer = job(kind)
    run = attach(store, model=model, optimizer=optimizer, mirror=mirror)

    def held() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in model.named_buffers()}

    def assert_held(expected: dict[str, torch.Tensor]) -> None:
        found = held()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].shape == tensor.shape, name
            assert torch.equal(found[name], tensor), name

    before = held()
    with run.next_step():
        step(model, optimizer)
    run.rollback()  # to the shapes of the beginning
    assert_held(before)
    for _ in range(2):
        with run.next_step():
            step(model, optimizer)
        run.commit()
    before = held()
    model(torch.randn(4, 6))
    run.rollback()
    assert_held(before)
    # a step that is in the store, and not committed
    with pytest.raises(ZeroDivisionError), run.next_step():
        step(model, optimizer)
        run.store.list("else").append(1)
        1 / 0
    assert_held(before)
    with run.next_step():
        step(model, optimizer)
    run.commit()
    if not mirror:
        for name, tensor in model.named_buffers():
            assert torch.equal(store[f"run/model/{name}"], tensor), name


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_a_roll_back_takes_back_what_was_assigned(
    store: pmstore.Store, mirror: bool, native: bool
) -> None:
    """Found with buffers that grow: another object kept its values, and the next commit took them
    in."""
    if native and mirror:
        pytest.skip("optimizers on slots are not mirrored")
    model = nn.Linear(3, 3)
    model.register_buffer("seen", torch.zeros(3))
    kind: Any = pmstore.torch.optim.SGD if native else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    run = attach(store, model=model, optimizer=optimizer, mirror=mirror)
    with run.next_step():
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    run.commit()
    weight, seen = model.weight, model.seen
    before = weight.detach().clone()
    model.seen = torch.ones(3)
    model.weight = nn.Parameter(torch.zeros(3, 3))
    run.rollback()
    assert model.weight is weight
    assert model.seen is seen
    assert torch.equal(model.weight, before)
    assert model.seen.tolist() == [0, 0, 0]
    run.commit()
    run.rollback()
    assert torch.equal(model.weight, before)


def test_a_resume_takes_the_first_shape_or_the_last(tmp_path: Path) -> None:
    """And no other: a program that asks for another size is not given the stored one in silence."""
    path = tmp_path / "run.pm"

    def model(size: int) -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_buffer("seen", torch.zeros(size))
        return module

    with pmstore.open(path) as store:
        mine = model(2)
        run = attach(store, model=mine)
        with run.next_step():
            mine.seen = torch.arange(5.0)
        run.commit()
        with run.next_step():
            mine.seen = torch.arange(7.0)
        run.commit()
    for size in (2, 7):
        with pmstore.open(path) as store:
            mine = model(size)
            attach(store, model=mine)
            assert mine.seen.tolist() == [0, 1, 2, 3, 4, 5, 6]
    with (
        pmstore.open(path) as store,
        pytest.raises(MismatchError, match=r"seen: stored buffer \(7,\) .* given buffer \(5,\)"),
    ):
        attach(store, model=model(5))


def test_what_does_not_fit_is_refused(store: pmstore.Store) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("seen", torch.zeros(3))
    model.register_buffer("twin", model.seen)
    run = attach(store, model=model)
    for wrong in (torch.zeros(4, dtype=torch.float64), torch.zeros(4)):  # dtype, no longer tied
        with run.next_step():
            model.seen = wrong
        with pytest.raises(MismatchError, match="seen"):
            run.commit()
        run.rollback()
        assert model.seen is model.twin
    with run.next_step():
        model.seen = model.twin = torch.ones(4)
    run.commit()
    assert model.seen is model.twin
    assert store["run/model/seen"].tolist() == [1, 1, 1, 1]
    assert "twin" not in store["run/model"]


def test_a_partial_resume_keeps_what_grew(tmp_path: Path) -> None:
    path = tmp_path / "run.pm"

    class Longer(nn.Module):
        def __init__(self, size: int, more: bool) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.register_buffer("seen", torch.zeros(size))
            if more:
                self.second = nn.Linear(2, 2)

    with pmstore.open(path) as store:
        mine = Longer(2, False)
        run = attach(store, model=mine)
        with run.next_step():
            mine.seen = torch.arange(5.0)
        run.commit()
    for _ in range(2):
        with pmstore.open(path) as store:
            mine = Longer(2, True)
            attach(store, model=mine, resume=Resume(model="partial"))
            assert mine.seen.tolist() == [0, 1, 2, 3, 4]
    with pmstore.open(path) as store:
        attach(store, model=Longer(2, True))
