"""Modules and buffers that `attach` cannot keep: it says which, and what to give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pmstore
from pmstore.torch import AttachError, attach


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(3, 1), nn.BatchNorm1d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.inner(x))
        return result


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_module_of_jit_is_refused_and_the_one_that_it_was_made_of_is_kept(shm: Path) -> None:
    model = Scripted()
    scripted: Any = torch.jit.script(model)
    with pmstore.open(shm / "a.pm") as store:
        with pytest.raises(AttachError, match=r"the model is a module of torch\.jit\. Give attach"):
            attach(store, model=scripted)
        with pytest.raises(
            AttachError, match=r"the model has '1', which is a module of torch\.jit"
        ):
            attach(store, model=nn.Sequential(nn.Linear(3, 3), scripted))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = attach(store, model=model, optimizer=optimizer)
        for _ in run.steps(3):
            scripted(torch.rand(4, 3)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert int(store["run/model/norm.num_batches_tracked"]) == 3
        assert torch.equal(scripted.inner.weight, model.inner.weight)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
def test_a_nested_buffer_is_refused(shm: Path) -> None:
    model = nn.Linear(3, 1)
    model.register_buffer("rows", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    with (
        pmstore.open(shm / "a.pm") as store,
        pytest.raises(AttachError, match=r"buffer rows is torch\.strided and nested"),
    ):
        attach(store, model=model)
