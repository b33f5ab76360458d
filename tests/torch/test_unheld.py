"""A function that trains returns in the middle of a step, and what attach gave it goes with it: the
half is never committed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import pmstore
from pmstore.errors import TransactionError
from pmstore.scheduler import EverySeconds
from pmstore.torch import attach


class Program:
    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(8, 4)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        self.backward()
        self.optimizer.step()


def train(store: pmstore.Store, leave: Callable[[Program], object]) -> None:
    """A step that is committed, two that are not; then the function is left."""
    program = Program()
    run = attach(store, model=program.model, optimizer=program.optimizer, policy=EverySeconds(1000))
    program.update()
    run.commit()
    for _ in range(2):
        program.update()
        run.end_step()
    leave(program)


def collect(store: pmstore.Store, leave: Callable[[Program], object]) -> None:
    train(store, leave)
    gc.collect()


half = pytest.mark.parametrize("leave", [Program.update, Program.backward])


@half
def test_leaving_the_store_takes_the_half_back(
    path: Path, leave: Callable[[Program], object]
) -> None:
    with (
        pytest.warns(RuntimeWarning, match=r"'run' was left in the middle .* nothing holds"),
        pmstore.open(path) as store,
    ):
        collect(store, leave)
    with pmstore.open(path) as store:
        program = Program()
        assert attach(store, model=program.model, optimizer=program.optimizer).step == 1


@half
def test_no_commit_takes_it_until_it_is_taken_back(
    store: pmstore.Store, leave: Callable[[Program], object]
) -> None:
    collect(store, leave)
    for commit in (store.commit, store.transaction().__enter__):
        with pytest.raises(TransactionError, match=r"store\.rollback\(\)"):
            commit()
    program = Program()
    with pytest.raises(TransactionError, match=r"store\.rollback\(\)"):
        attach(store, model=program.model, optimizer=program.optimizer)
    store.rollback()
    run = attach(store, model=program.model, optimizer=program.optimizer)
    assert run.step == 1
    program.update()
    run.commit()
    assert run.committed == 2


def test_between_two_steps_nothing_is_half(path: Path) -> None:
    with pmstore.open(path) as store:
        collect(store, lambda program: None)
        store["extra"] = 1
        store.commit()
    with pmstore.open(path) as store:
        program = Program()
        assert attach(store, model=program.model, optimizer=program.optimizer).step == 3


def test_a_run_that_was_detached_is_not_asked(store: pmstore.Store) -> None:
    program = Program()
    run = attach(store, model=program.model, optimizer=program.optimizer)
    program.model(torch.randn(8, 4))
    run.detach()
    del run, program
    gc.collect()
    store.commit()


def test_a_forward_that_wrote_nothing_takes_no_finished_step(path: Path) -> None:
    """As one whose loss a function returns at its end."""

    def train(store: pmstore.Store) -> None:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = attach(store, model=model, optimizer=optimizer, policy=EverySeconds(1000))
        for _ in range(3 - run.step):
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
            run.end_step()
        assert run.step == 3
        model(torch.randn(8, 4)).sum()

    for _ in range(2):
        with pmstore.open(path) as store:
            train(store)
            gc.collect()


def test_what_was_taken_back_before_is_not_asked(store: pmstore.Store) -> None:
    def train() -> None:
        program = Program()
        run = attach(store, model=program.model, optimizer=program.optimizer)
        program.update()
        run.commit()
        program.update()
        store.rollback()

    train()
    gc.collect()
    store["extra"] = 1
    store.commit()


@pytest.mark.parametrize("policy", [None, EverySeconds(1000)])
def test_a_training_that_raised_is_tried_again(
    store: pmstore.Store, policy: EverySeconds | None
) -> None:
    def train(fails_at: int) -> None:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = attach(store, model=model, optimizer=optimizer, policy=policy)
        for step in range(run.step, 4):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).sum().backward()
            if step == fails_at:
                raise OSError
            optimizer.step()
            run.end_step()
        run.commit()

    for fails_at in (1, 3):
        with pytest.raises(OSError):
            train(fails_at)
        gc.collect()
    train(-1)
    store.commit()
