"""Parameters that change places while a run goes on: state goes with them, as without a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interrupter import LineInterrupter
from torch import nn
from training import FOLLOWING

import pmstore
import pmstore.torch.optim
from pmstore.torch import MismatchError, Run, attach

KINDS = ("heap", "slots", "mirrored")
X = torch.arange(12.0).reshape(4, 3) / 5


def make(kind: str, *, bias: bool = True) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(3, 3, bias) for _ in range(3)))
    slots: Any = pmstore.torch.optim.AdamW
    optimizer = (slots if kind == "slots" else torch.optim.AdamW)(model.parameters(), lr=1e-2)
    return model, optimizer


def update(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(X).square().mean().backward()
    optimizer.step()


def swap(model: nn.Sequential) -> None:
    one, other = model[0], model[1]
    one.weight, other.weight = other.weight, one.weight


def turn(model: nn.Sequential) -> None:
    one, other, third = (layer.weight for layer in model)
    model[0].weight, model[1].weight, model[2].weight = other, third, one


def exchange(model: nn.Sequential) -> None:
    model[0], model[1] = model[1], model[0]


def replace(model: nn.Module) -> None:
    state = {key: one.detach().clone() for key, one in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def values(model: nn.Module) -> list[Any]:
    return [one.tolist() for one in model.parameters()]


def started(store: pmstore.Store, kind: str, **how: Any) -> tuple[nn.Sequential, Any, Run]:
    model, optimizer = make(kind, **how)
    run = attach(store, model=model, optimizer=optimizer, mirror=kind == "mirrored")
    return model, optimizer, run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [swap, turn, exchange])
def test_state_goes_with_its_tensor(shm: Path, change: Any, kind: str) -> None:
    model, optimizer = make(kind)
    for step in range(6):
        if step == 3:
            change(model)
        update(model, optimizer)
    want = values(model)
    for resumed in (6, 4):
        path = shm / f"{resumed}.pm"
        with pmstore.open(path, size="8MiB") as store:
            model, optimizer, run = started(store, kind)
            for step in range(resumed):
                with run.next_step():
                    if step == 3:
                        change(model)
                    update(model, optimizer)
                run.commit()
            held = values(model)
        with pmstore.open(path) as store:
            model, optimizer, run = started(store, kind)
            assert (run.step, values(model)) == (resumed, held)
            for _ in range(resumed, 6):
                with run.next_step():
                    update(model, optimizer)
                run.commit()
            assert values(model) == want


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [swap, exchange])
@pytest.mark.parametrize("noticed", [True, False])
def test_a_roll_back_undoes_it(store: pmstore.Store, change: Any, kind: str, noticed: bool) -> None:
    model, optimizer, run = started(store, kind)
    with run.next_step():
        update(model, optimizer)
    run.commit()
    with torch.no_grad():
        held = model(X).tolist()
    with run.next_step():
        change(model)
        if noticed:
            update(model, optimizer)
    with torch.no_grad():
        assert model(X).tolist() != held
    run.rollback()
    with torch.no_grad():
        assert model(X).tolist() == held
    with run.next_step():
        update(model, optimizer)
    run.commit()
    want, reference = make(kind)
    for _ in range(2):
        update(want, reference)
    assert values(model) == values(want)


@pytest.mark.parametrize("kind", KINDS)
def test_another_group_is_refused(store: pmstore.Store, kind: str) -> None:
    model, whole = make(kind)
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 1e-3}]
    optimizer = type(whole)(groups, lr=1e-2)
    model = nn.Sequential(model[0], model[1])
    run = attach(store, model=model, optimizer=optimizer, mirror=kind == "mirrored")
    with run.next_step():
        update(model, optimizer)
    run.commit()
    held = [[*map(id, group["params"])] for group in optimizer.param_groups]
    with run.next_step():
        swap(model)
    for _ in range(2):
        with pytest.raises(MismatchError, match="changed places"):
            run.commit()
    assert [[*map(id, group["params"])] for group in optimizer.param_groups] == held
    swap(model)
    run.commit()
    with run.next_step():
        update(model, optimizer)
    run.commit()
    assert run.committed == 3


@pytest.mark.parametrize("kind", ["heap", "slots"])
@pytest.mark.parametrize(("first", "later"), [(swap, None), (swap, swap), (replace, replace)])
def test_an_interrupt_while_places_change(
    store: pmstore.Store, kind: str, first: Any, later: Any
) -> None:
    """later: what the program does before it ends the step again; to swap once more undoes it. One
    run goes on past all interrupts: it is compared with one that has no store after each."""
    reference, alone = make(kind, bias=False)
    model, optimizer, run = started(store, kind, bias=False)
    for _ in range(2):
        update(reference, alone)
        with run.next_step():
            update(model, optimizer)
    line, interrupted = 1, True
    while interrupted:
        if later is None:
            first(reference)
        with run.next_step():
            first(model)
            interrupted = LineInterrupter(line, FOLLOWING).run(run._steps.pieces.follow)
            if later is not None:
                later(model)
            update(model, optimizer)
        with run.next_step():
            update(model, optimizer)
        run.commit()
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        assert held == {*map(id, model.parameters())} == {*map(id, optimizer.state)}
        for _ in range(2):
            update(reference, alone)
        assert values(model) == values(reference), f"interrupted at line {line}"
        line += 1
    assert line > 80
