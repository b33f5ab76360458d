"""Tensors that share memory with what `attach` moves, and stay behind: it warns of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pmstore
from pmstore.torch import attach

Net = Any
Taken = Callable[[Net], Any]
STALE: dict[str, Taken] = {
    "data": lambda net: [one.data for one in net.parameters()],
    "state_dict": lambda net: net.state_dict(),
    "view": lambda net: net[0].weight.detach()[0],
    "numpy": lambda net: net[0].weight.detach().numpy(),
    "an attribute": lambda net: setattr(net, "left", net[0].weight.data),
    "buffer": lambda net: net[1].running_mean.view(-1),
}
RIGHT: dict[str, Taken] = {
    "nothing": lambda net: None,
    "a copy": lambda net: copy.deepcopy(net.state_dict()),
    "parameters": lambda net: dict(net.named_parameters()),
    "a buffer that is a view": lambda net: net.register_buffer("part", torch.ones(8)[:3]),
    "forward": lambda net: net(torch.ones(4, 3)).sum(),
    "a view in a module": lambda net: setattr(net, "left", net[0].weight.detach().view(-1)),
    "sparse": lambda net: setattr(net, "graph", torch.eye(3).to_sparse()),
    "sparse, a view": lambda net: setattr(net, "graph", torch.eye(3).to_sparse().t()),
    "sparse, its values": lambda net: net.register_buffer("part", values()),
    "spectral_norm": lambda net: torch.nn.utils.spectral_norm(net[0]),
    "garbage": lambda net: cycle(net),
}


def values() -> torch.Tensor:
    return torch.eye(3).to_sparse().coalesce().values()


def cycle(net: Net) -> None:
    """Leaves a view in a cycle that nobody refers to."""
    held: list[Any] = [net[0].weight.data]
    held.append(held)


def attached(path: Path, taken: Taken) -> list[str]:
    """What is told at `attach`."""
    net = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))
    held = taken(net)
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as caught, pmstore.open(path) as store:
        warnings.simplefilter("always")
        attach(store, model=net, optimizer=sgd).detach()
    del held
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("name", STALE)
def test_what_stays_behind_is_told(shm: Path, name: str) -> None:
    for _ in range(2):  # a new run, and a resumed one
        (told,) = attached(shm / "a.pm", STALE[name])
        what = "buffer 1.running_mean" if name == "buffer" else "parameter 0.weight"
        assert told.startswith(f"the {what} shared its memory with another tensor")


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_told(shm: Path, name: str) -> None:
    assert attached(shm / "a.pm", RIGHT[name]) == []
