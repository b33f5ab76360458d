"""Models that no optimizer trains: averages of weights, targets, copies."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from gan import Gan, in_heap, same
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from training import assert_same, contents

import pmstore
import pmstore.torch.optim
from pmstore.torch import AttachError, attach


@pytest.mark.parametrize("how", ["module", "by hand", "data", "parameters", "swapped"])
@pytest.mark.parametrize("native", [False, True])
def test_averages_of_weights(tmp_path: Path, how: str, native: bool) -> None:
    """However they are computed; in plain torch, in one life, and in several."""

    def update(net: nn.Module, average: Any) -> None:
        if how == "module":
            average.update_parameters(net)
            return
        for (name, one), ours in zip(
            list(average.named_parameters()), net.parameters(), strict=True
        ):
            if how in ("by hand", "swapped"):
                one.data.mul_(0.9).add_(ours.data, alpha=0.1)
            elif how == "data":
                one.data = 0.9 * one.data + 0.1 * ours.data
            else:
                setattr(
                    average.get_submodule(name.rpartition(".")[0]),
                    name.rpartition(".")[2],
                    nn.Parameter(0.9 * one.detach() + 0.1 * ours.detach()),
                )
        if how == "swapped":  # trains the average from here on, and averages what was trained
            for one, ours in zip(average.parameters(), net.parameters(), strict=True):
                one.data, ours.data = ours.data, one.data

    def program() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        average: nn.Module = AveragedModel(net) if how == "module" else copy.deepcopy(net)
        kind: Any = pmstore.torch.optim.AdamW if native else torch.optim.AdamW
        return net, average, kind(net.parameters(), lr=1e-2)

    def step(net: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        net(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        update(net, average)

    def finish(average: nn.Module) -> None:
        update_bn([torch.randn(4, 3) for _ in range(3)], average)

    plain = program()
    for _ in range(6):
        step(*plain)
    finish(plain[1])
    for until in (1, 2, 5, 6):
        with pmstore.open(tmp_path / "run.pm") as store:
            net, average, optimizer = program()
            run = attach(store, model={"net": net, "average": average}, optimizer=optimizer)
            while run.step < until:
                with run.next_step():
                    step(net, average, optimizer)
                run.commit()
                for name, one in average.state_dict().items():
                    assert in_heap(store, f"run/model/average/{name}", one)
            with run.next_step():
                step(net, average, optimizer)
            run.rollback()
    with pmstore.open(tmp_path / "run.pm") as store:
        net, average, optimizer = program()
        run = attach(store, model={"net": net, "average": average}, optimizer=optimizer)
        with run.next_step():
            finish(average)
        run.commit()
        assert same(plain[1].state_dict(), average.state_dict())
        assert same(plain[0].state_dict(), net.state_dict())


@pytest.mark.parametrize("native", [False, True])
def test_ties_made_or_cut_by_data_are_refused(store: pmstore.Store, native: bool) -> None:
    """`target.data = net.data` ties the two for good, which the store cannot follow."""
    net, target = nn.Linear(2, 2), nn.Linear(2, 2)
    kind: Any = pmstore.torch.optim.SGD if native else torch.optim.SGD
    run = attach(store, model=[net, target], optimizer=kind(net.parameters(), 0.1))
    held = target.weight.detach().clone()
    with run.next_step():
        target.weight.data = net.weight.data
    with pytest.raises(AttachError, match=r"share memory|given tied to 0/weight"):
        run.commit()
    run.rollback()
    assert torch.equal(target.weight, held)
    with run.next_step():
        target.weight.data.copy_(net.weight.data)
    run.commit()
    assert torch.equal(target.weight, net.weight)


@pytest.mark.parametrize("native", [False, True])
def test_a_deep_copy_after_attach_has_memory_of_its_own(tmp_path: Path, native: bool) -> None:
    with pmstore.open(tmp_path / "run.pm") as store:
        gan = Gan(native=native)
        run = gan.attach(store)
        with run.next_step():
            gan.step(0)
        run.commit()
        copies = copy.deepcopy({"g": gan.g, "average": gan.average})
        before = contents(store)
        for module in copies.values():
            for tensor in module.state_dict().values():
                tensor.fill_(7)
            module(torch.randn(4, 4))
        run.rollback()
        assert_same(before, contents(store))
        assert all(bool((one == 7).all()) for one in copies["g"].parameters())
    for module in copies.values():
        module.train()(torch.randn(4, 4)).sum().backward()
