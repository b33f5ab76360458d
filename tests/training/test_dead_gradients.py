"""Gradients that optimizers have used: dead, unless another one or a later step uses them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import assert_same, contents

import pmstore
from pmstore.torch import Run, attach


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_gradient_is_dead_when_all_have_used_it(tmp_path: Path, kind: Any) -> None:
    """Two optimizers train one parameter, in turns, by one gradient."""

    def life(name: str, *ends: int) -> dict[str, Any]:
        for until in ends:
            torch.manual_seed(1)
            random.seed(1)
            net = nn.Linear(2, 2)
            optimizers = [kind(net.parameters(), lr=0.1), kind(net.parameters(), lr=0.2)]
            with pmstore.open(tmp_path / name) as store:
                run = attach(store, model=net, optimizer=optimizers)
                while run.step < until:
                    with run.next_step():
                        if run.step % 2 == 0:
                            net.zero_grad()
                            net(torch.randn(3, 2)).square().sum().backward()
                        optimizers[run.step % 2].step()
                    run.commit()
                run.detach()
                held = contents(store)
        return {name: what for name, what in held.items() if "gradients" not in name}

    assert_same(life("whole.pm", 6), life("pieces.pm", 1, 2, 3, 5, 6))


@pytest.mark.parametrize("how", ["again", "added", "clipped"])
@pytest.mark.parametrize("mirror", [None, True])
def test_a_dead_gradient_that_is_used_again_is_refused(
    tmp_path: Path, how: str, mirror: bool | None
) -> None:
    """Never silently zero: a commit does not keep it. zero_grad clears it either way."""

    def program(store: pmstore.Store) -> tuple[nn.Module, torch.optim.Optimizer, Run]:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return net, optimizer, attach(store, model=net, optimizer=optimizer, mirror=mirror)

    with pmstore.open(tmp_path / "run.pm") as store:
        net, optimizer, run = program(store)
        with run.next_step():
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        run.commit()
        run.detach()
    with pmstore.open(tmp_path / "run.pm") as store:
        net, optimizer, run = program(store)
        refused = pytest.raises(
            pmstore.TransactionError, match=r"call zero_grad\(\) before backward"
        )
        with refused, run.next_step():
            if how != "again":
                net(torch.ones(1, 2)).sum().backward()
            if how == "clipped":
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
        for to_none in (False, True):
            with run.next_step():
                optimizer.zero_grad(set_to_none=to_none)
                net(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            run.commit()
            run.rollback()
        assert all(bool(one.isfinite().all()) for one in net.parameters())
        with run.next_step():
            optimizer.zero_grad()
            net(torch.full((1, 2), torch.nan)).sum().backward()
            optimizer.step()  # the program's own NaN is its own
        run.rollback()


def test_a_gradient_that_was_changed_after_the_step_is_kept(path: Path) -> None:
    with pmstore.open(path) as store:
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        run = attach(store, optimizer=optimizer)
        with run.next_step():
            (3 * weight).sum().backward()
            optimizer.step()
            weight.grad.mul_(0.5)
        run.commit()
        run.rollback()
        assert weight.grad.tolist() == [1.5, 1.5]
        with run.next_step():
            optimizer.step()
        run.commit()
        assert weight.tolist() == pytest.approx([0.55, 0.55])


@pytest.mark.parametrize("how", ["scaler", "closure"])
def test_a_step_that_nobody_could_refuse_is_not_committed(tmp_path: Path, how: str) -> None:
    """A GradScaler leaves a step out in which it finds a NaN, and says nothing; with a closure the
    gradients are computed inside the step."""

    def life() -> None:
        torch.manual_seed(1)
        net = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        def backward() -> torch.Tensor:
            loss = net(torch.ones(1, 2)).sum()
            scaler.scale(loss).backward() if how == "scaler" else loss.backward()
            return loss

        with pmstore.open(tmp_path / "run.pm") as store:
            run = attach(store, model=net, optimizer=optimizer, scaler=scaler)
            with run.next_step():
                if how == "scaler":
                    backward()
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step(backward)
            run.commit()

    life()
    with pytest.raises(pmstore.TransactionError, match=r"call zero_grad\(\) before backward"):
        life()
