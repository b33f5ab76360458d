"""Loaders that say where they are by a state_dict: killed at each step, nothing is gone through
again."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import Noisy, compare, looking_ahead
from torch import nn

import pmstore
from pmstore.torch import ChangedError, MismatchError, Resume, RolledBackError, Run, attach


class Own:
    """Goes on where its state says, with an order of its own each epoch, and draws noise."""

    def __init__(self, batches: int = 5) -> None:
        self.batches = batches
        self.place = {"epoch": 0, "next": 0}
        self.chance = torch.Generator().manual_seed(3)
        self.loaded: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        place = self.place
        order = random.Random(place["epoch"]).sample(range(self.batches), self.batches)
        while place["next"] < self.batches:
            index = order[place["next"]]
            place["next"] += 1
            self.loaded.append((place["epoch"], index))
            noise = torch.rand(2, 3) + random.random() + torch.rand(2, 3, generator=self.chance)
            yield index / 5 + 0.1 * noise
        place["epoch"] += 1
        place["next"] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.place  # as many do: the one that it goes on with

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state


def stateful(data: Any, **given: Any) -> Callable[[], Any]:
    def make() -> Any:
        dataloader = pytest.importorskip("torchdata.stateful_dataloader")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates what torchdata calls
            return dataloader.StatefulDataLoader(data, batch_size=4, **given)

    return make


KINDS: dict[str, Callable[[], Any]] = {"own": Own, "torchdata": stateful(Noisy(), shuffle=True)}


@pytest.mark.pairwise
@pytest.mark.parametrize("by_epoch", [False, True], ids=["one loop", "a loop an epoch"])
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_each_step(shm: Path, kind: str, ahead: int, by_epoch: bool) -> None:
    if kind != "own":
        pytest.importorskip("torchdata")
    compare(shm, KINDS[kind], 2, ahead=ahead, by_epoch=by_epoch)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers(shm: Path, persistent: bool) -> None:
    pytest.importorskip("torchdata")
    data = torch.arange(57.0).reshape(19, 3) / 57
    make = stateful(data, shuffle=True, num_workers=2, persistent_workers=persistent)
    compare(shm, make, 3, ahead=1)


def begin(store: pmstore.Store, loader: Any, **more: Any) -> tuple[Run, Callable[[Any], None]]:
    """A run, and what trains on a batch."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = attach(store, model=model, optimizer=optimizer, loader=loader, **more)

    def train(batch: Any) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run, train


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("done", range(8))
def test_nothing_is_loaded_twice(path: Path, done: int, ahead: int) -> None:
    """But for what is held; after a roll back too."""
    with pmstore.open(path) as store:
        run, train = begin(store, Own())
        batches = looking_ahead(run.batches(epochs=2, ahead=ahead), ahead)
        for _ in range(done):
            batch = next(batches)
            with run.next_step() if ahead else nullcontext():
                train(batch)
            run.commit()
        expected = next(batches).clone()
        with pytest.raises(RolledBackError) if ahead else nullcontext():
            run.rollback()
        batches = looking_ahead(run.batches(epochs=2, ahead=ahead), ahead)
        assert torch.equal(next(batches), expected)
        with suppress(RolledBackError):
            run.rollback()
    with pmstore.open(path) as store:
        loader = Own()
        run, _ = begin(store, loader)
        rest = list(run.batches(epochs=2, ahead=0))
        assert torch.equal(rest[0], expected)
        assert len(rest) == len(loader.loaded) == 10 - done


def test_another_loader(path: Path) -> None:
    with pmstore.open(path) as store:
        run, train = begin(store, Own())
        for _, batch in zip(range(2), run.batches(), strict=False):
            train(batch)
        run.end_step()
    plain = [torch.ones(2, 3)] * 5
    with pmstore.open(path) as store, pytest.raises((ChangedError, MismatchError)):
        begin(store, plain)
    with pmstore.open(path) as store:
        run, _ = begin(store, Own(), resume=Resume(data="next epoch"))
        assert run.step == 2
        assert len(list(run.batches(epochs=2, ahead=0))) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_at_an_epochs_first_batch(shm: Path, kind: str) -> None:
    def train(name: str, until: tuple[int, int] | None) -> list[float]:
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with pmstore.open(shm / name) as store:
            run = attach(store, model=model, optimizer=optimizer, loader=KINDS[kind](), policy=None)
            for epoch in run.epochs(3):
                for batch in epoch:
                    loss = model(batch).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    run.log(loss=loss)
                    if (epoch, run.batch) == until:
                        raise KeyError(until)
            losses: list[float] = run.history("loss")[1].tolist()
            return losses

    whole = train("whole.pm", None)
    with pytest.raises(KeyError):
        train("ended.pm", (1, 0))
    assert train("ended.pm", None) == whole
