"""Programs that hold batches which they have not trained on, or pass over some: killed at each
step, nothing is lost and nothing comes twice. Those that say otherwise than they do are refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import SAMPLES, Noisy, compare, looking_ahead
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import pmstore
from pmstore.errors import TransactionError
from pmstore.torch import LookaheadError, RolledBackError, Run, attach


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(SAMPLES):
            yield torch.full((3,), float(index)) + torch.rand(3) + random.random()


def quiet() -> TensorDataset:
    return TensorDataset(torch.arange(3.0 * SAMPLES).reshape(SAMPLES, 3) / 57)


def in_order(batches: int) -> list[torch.Tensor]:
    return list(torch.arange(3.0 * batches).reshape(batches, 1, 3) / 50)


LOADERS: dict[str, Callable[..., Any]] = {
    "noisy": lambda **given: DataLoader(Noisy(), batch_size=3, shuffle=True, **given),
    "quiet": lambda **given: DataLoader(quiet(), batch_size=4, shuffle=True, **given),
    "workers": lambda **given: DataLoader(Noisy(), 4, shuffle=True, num_workers=2, **given),
    "stream": lambda **given: DataLoader(Stream(), batch_size=4, **given),
    "short": lambda **given: DataLoader(Noisy(), batch_size=11, shuffle=True, **given),
    "list": lambda **given: in_order(5),
}
BY_EPOCH = pytest.mark.parametrize("by_epoch", [False, True], ids=["one loop", "epochs"])


@BY_EPOCH
@pytest.mark.parametrize("ahead", [None, 0, 1, 2, 3])
def test_killed_at_each_step(shm: Path, ahead: int | None, by_epoch: bool) -> None:
    compare(shm, lambda: LOADERS["noisy"](drop_last=by_epoch), ahead=ahead, by_epoch=by_epoch)


@BY_EPOCH
@pytest.mark.parametrize("every", [2, 3])
def test_killed_at_each_step_of_several_batches(shm: Path, every: int, by_epoch: bool) -> None:
    compare(shm, lambda: LOADERS["noisy"](drop_last=by_epoch), every=every, by_epoch=by_epoch)


@pytest.mark.pairwise
@BY_EPOCH
@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("kind", LOADERS)
def test_every_loader(shm: Path, kind: str, ahead: int, by_epoch: bool) -> None:
    compare(shm, LOADERS[kind], each=2, ahead=ahead, by_epoch=by_epoch)


@pytest.mark.parametrize("ahead", [2, 4])
@pytest.mark.parametrize("batches", [2, 3, 4])
def test_short_epochs(shm: Path, batches: int, ahead: int) -> None:
    """As many batches as are held, and fewer."""
    compare(shm, lambda: in_order(batches), ahead=ahead, by_epoch=True)


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("number", [0, 2, 5])
def test_a_batch_that_is_passed_over(shm: Path, number: int, ahead: int) -> None:
    """The first, one in the midst, the last."""
    compare(shm, lambda: in_order(6), ahead=ahead, skip=lambda run: run.step % 6 == number)


def begin(store: pmstore.Store, loader: Any = None) -> tuple[Run, Callable[[Any], None]]:
    """A run, and what trains on a batch."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = attach(store, model=model, optimizer=optimizer, loader=loader or in_order(8), policy=None)

    def train(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run, train


def number(batch: torch.Tensor) -> int:
    return round(batch.flatten()[0].item() * 50 / 3)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager", fullgraph=True)


DONE_WITH_A_BATCH: dict[str, Callable[[nn.Module, Run, torch.Tensor], object]] = {
    "a forward": lambda model, run, batch: model(batch),
    "by functional_call": lambda model, run, batch: torch.func.functional_call(
        model, dict(model.named_parameters()), (batch,)
    ),
    "wrapped": lambda model, run, batch: nn.Sequential(model)(batch),
    "compiled": lambda model, run, batch: compiled(model)(batch),
    "in a checkpoint": lambda model, run, batch: checkpoint(model, batch, use_reentrant=False),
    "gradients": lambda model, run, batch: setattr(model.weight, "grad", torch.ones(1, 3)),
    "a write": lambda model, run, batch: run.store.list("seen").append(batch.tolist()),
    "a log": lambda model, run, batch: run.log(mean=batch.mean()),
    "a commit": lambda model, run, batch: run.commit(),
    "nothing": lambda model, run, batch: None,
    "an evaluation": lambda model, run, batch: torch.no_grad()(model)(batch),
    "another model": lambda model, run, batch: nn.Linear(3, 1)(batch),
}


@pytest.mark.parametrize("what", DONE_WITH_A_BATCH)
def test_what_is_done_with_the_first_batch(store: pmstore.Store, what: str) -> None:
    """Then nothing of it is held: a loss that is not finite is left out."""
    run, train = begin(store)
    refused = what in ("nothing", "an evaluation", "another model")
    with pytest.raises(LookaheadError, match=r"ahead=0") if refused else nullcontext():
        for batch in run.batches():
            if run.batch == 0:
                DONE_WITH_A_BATCH[what](run._steps.pieces.modules[0], run, batch)
            else:
                train(batch)
    assert run.step == (0 if refused else 8)
    run.rollback()


@pytest.mark.parametrize("wrap", [nn.DataParallel, compiled])
def test_a_wrapper_that_is_attached(store: pmstore.Store, wrap: Callable[[nn.Module], Any]) -> None:
    """A forward of it is one of the model. (Without devices DataParallel calls the module.)"""
    model = wrap(nn.Linear(3, 1))
    run = attach(store, model=model, loader=in_order(3))
    for batch in run.batches():
        model(batch)
    assert run.step == 3


def test_without_a_model(store: pmstore.Store) -> None:
    """What is done with a batch is a write into the store, or it is passed over."""
    run = attach(store, loader=list(range(6)), policy=None)
    with pytest.raises(LookaheadError):
        list(run.batches())
    run.rollback()
    assert list(run.batches(ahead=0)) == [*range(6)]
    assert run.step == 6


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_held_batch_is_trained_on_in_a_step_by_hand(store: pmstore.Store, ahead: int) -> None:
    run, train = begin(store)
    with pytest.raises(TransactionError, match=r"outside of a step.*run\.next_step\(\)"):
        for batch in looking_ahead(run.batches(ahead=ahead), ahead):
            train(batch)
    assert run.step == 0


def test_left_and_begun_again(store: pmstore.Store) -> None:
    """What a loop held when it was left comes again."""
    run, train = begin(store)
    seen = []
    while run.data_epoch == 0:
        for batch in looking_ahead(run.batches(ahead=2), 2):
            with run.next_step():
                seen.append(number(batch))
                train(batch)
            if len(seen) % 3 == 0:
                break
    assert seen == list(range(8))


def test_a_roll_back_with_batches_that_are_held(store: pmstore.Store) -> None:
    run, train = begin(store)
    batches = looking_ahead(run.batches(ahead=1), 1)
    for _ in range(2):
        batch = next(batches)
        with run.next_step():
            train(batch)
    held = next(batches)
    with pytest.raises(RolledBackError, match="holds batches of later steps"):
        run.rollback()
    with pytest.raises(RuntimeError, match="begin the loop again"):
        next(batches)
    assert (run.step, number(held)) == (1, 2)
    seen = []
    for batch in looking_ahead(run.batches(ahead=1), 1):
        with run.next_step():
            seen.append(number(batch))
            train(batch)
    assert seen == [1, 2, 3, 4, 5, 6, 7]
