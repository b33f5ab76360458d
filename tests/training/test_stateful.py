"""State beside tensors: modules' extra state, generators and other objects of the program's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pmstore
import pmstore.torch
from pmstore.torch import AttachError, MismatchError


class Counting(nn.Module):
    """Scales by a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.weight * (1 + self.calls / 10)

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def _program(
    seed: int,
) -> tuple[nn.Sequential, torch.optim.SGD, torch.Generator, torch.optim.swa_utils.AveragedModel]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), Counting())
    generator = torch.Generator()
    generator.manual_seed(seed)
    averaged = torch.optim.swa_utils.AveragedModel(model, use_buffers=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), generator, averaged


def _train(path: Path, seed: int, steps: int) -> tuple[int, list[float]]:
    """Trains to the given step; returns where it was when it started, and the parameters at the
    end."""
    with pmstore.open(path, size="8MiB") as store:
        model, optimizer, generator, averaged = _program(seed)
        stateful = {"noise": generator, "averaged/model": averaged}
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, stateful=stateful)
        begun = run.step
        for _ in run.steps(steps):
            loss = model(torch.randn(4, 3, generator=generator)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            averaged.update_parameters(model)
        assert model[1].calls == steps  # type: ignore[union-attr]
        everything = [
            *model.parameters(),
            *averaged.parameters(),
            torch.rand(2, generator=generator),
        ]
        return begun, torch.cat([one.detach().flatten() for one in everything]).tolist()


def test_a_resumed_run_has_it_all(shm: Path) -> None:
    whole = _train(shm / "whole.pm", 1, 6)
    first = _train(shm / "parts.pm", 1, 2)
    last = _train(shm / "parts.pm", 99, 6)
    assert (whole[0], first[0], last[0]) == (0, 0, 2)
    assert last[1] == whole[1]


def test_roll_back_takes_it_back(store: pmstore.Store) -> None:
    model, optimizer, generator, _ = _program(1)
    run = pmstore.torch.attach(
        store, model=model, optimizer=optimizer, stateful={"noise": generator}
    )
    before = generator.get_state()
    model(torch.randn(4, 3, generator=generator))
    run.rollback()
    assert model[1].calls == 0  # type: ignore[union-attr]
    assert torch.equal(generator.get_state(), before)


def test_other_objects_are_refused(store: pmstore.Store) -> None:
    model, optimizer, generator, _ = _program(1)
    wrong: Any = {"metric": object()}
    with pytest.raises(AttachError, match=r"stateful\['metric'\] is a object: it must be"):
        pmstore.torch.attach(store, model=model, optimizer=optimizer, stateful=wrong)
    run = pmstore.torch.attach(
        store, model=model, optimizer=optimizer, stateful={"noise": generator}
    )
    run.detach()
    with pytest.raises(MismatchError, match="stateful/noise"):
        pmstore.torch.attach(store, model=model, optimizer=optimizer)


def test_a_detached_optimizer_has_no_hooks(store: pmstore.Store) -> None:
    model, optimizer, _, _ = _program(1)
    beside = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks: list[dict[int, Any]] = [
        getattr(one, f"_optimizer_step_{when}_hooks")
        for one in (optimizer, beside)
        for when in ("pre", "post")
    ]
    run = pmstore.torch.attach(store, model=model, optimizer=optimizer, stateful={"beside": beside})
    assert all(hooks)
    run.detach()
    assert not any(hooks)


class Basis:
    """Has matrices as `eigh` gives them and convolutions keep them: not in C order."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.rotate(0)

    def rotate(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        square = torch.randn(6, 6, generator=generator)
        images = torch.randn(2, 3, 4, 4, generator=generator)
        self.state = {
            "vectors": torch.linalg.eigh(square + square.T)[1],
            "images": images.to(memory_format=torch.channels_last),
            "columns": np.asfortranarray(square.numpy()),
            "swapped": images.numpy().transpose(1, 0, 3, 2),
            "every other": square[:, ::2],
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_arrays_in_any_order_follow_each_step(shm: Path) -> None:
    """Those of the first step are where the later ones are copied to."""
    path, basis = shm / "run.pm", Basis()
    for steps in (1, 4):
        with pmstore.open(path, size="8MiB") as store:
            model, optimizer, *_ = _program(1)
            found = Basis()
            run = pmstore.torch.attach(
                store, model=model, optimizer=optimizer, stateful={"basis": found}
            )
            for name, one in found.state.items():
                assert np.array_equal(one, basis.state[name]), name
            while run.step < steps:
                with run.next_step():
                    basis.rotate(run.step)
                    found.state = basis.state
                run.commit()
            found.state = {}
            run.rollback()
            for name, one in found.state.items():
                assert np.array_equal(one, basis.state[name]), name
    assert len(found.state) == len(basis.state)
