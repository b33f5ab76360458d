"""What drives or feeds a run and was not given to attach: kept, or refused with what to write."""

from __future__ import annotations

import copy
import random
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as schedules
from torch.optim.optimizer import _global_optimizer_pre_hooks

import pmstore
from pmstore.torch import AttachError

BATCHES = 6


def data(batches: int = BATCHES) -> torch.utils.data.TensorDataset:
    drawn = torch.Generator().manual_seed(1)
    features = torch.randn(batches * 10, 4, generator=drawn)
    return torch.utils.data.TensorDataset(features, features.sum(1, keepdim=True))


def attach(store: pmstore.Store, **given: Any) -> Any:
    """Each step commits."""
    return pmstore.torch.attach(store, policy=None, **given)


@contextmanager
def refused(run: Any, match: str) -> Iterator[None]:
    with pytest.raises(AttachError, match=match):
        yield
    run.rollback()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))


def adam(model: nn.Module) -> Adam:
    return Adam(model.parameters(), 1e-2)


Update = Callable[[torch.Tensor], object]


def update_of(optimizer: Optimizer) -> Update:
    def update(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return update


_loops: WeakKeyDictionary[Any, Iterator[Any]] = WeakKeyDictionary()


def next_batch(run: Any) -> Any:
    """Of the one loop that the run has."""
    if run not in _loops:
        _loops[run] = run.batches(epochs=None)
    return next(_loops[run])


def train(run: Any, model: nn.Module, update: Update, steps: int, after: Any = None) -> None:
    """So many steps more. after: called at the end of each."""
    for _ in range(steps):
        features, targets = next_batch(run)
        loss = F.mse_loss(model(features), targets)
        update(loss)
        if after is not None:
            after()
        run.log(loss=loss)
        run.commit()


@pytest.fixture
def loader() -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(data(), batch_size=10, shuffle=True)


# ---- schedulers

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 30),
    "step": lambda optimizer: schedules.StepLR(optimizer, 100),
    "plateau": lambda optimizer: schedules.ReduceLROnPlateau(optimizer),
    "sequential": lambda optimizer: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, total_iters=5), schedules.ExponentialLR(optimizer, 0.9)],
        [5],
    ),
    "chained": lambda optimizer: schedules.ChainedScheduler(
        [schedules.LinearLR(optimizer, total_iters=5), schedules.ExponentialLR(optimizer, 0.9)]
    ),
}


class Holder:
    """A program's own, which keeps what it holds."""

    def __init__(self, **held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self.held.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, one in self.held.items():
            one.load_state_dict(state[name])


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_forgotten_scheduler_is_refused(store: pmstore.Store, kind: str) -> None:
    model = net()
    optimizer = adam(model)
    schedule = SCHEDULERS[kind](optimizer)
    with pytest.raises(AttachError, match=r"attach\(..., lr_scheduler=schedule\)"):
        attach(store, model=model, optimizer=optimizer)
    assert "run" not in store
    attach(store, model=model, optimizer=optimizer, lr_scheduler=schedule)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_one_that_is_forgotten_when_a_run_goes_on_is_refused(
    store: pmstore.Store, kind: str
) -> None:
    """Before the next commit at the latest."""
    model = net()
    optimizer = adam(model)
    run = attach(store, model=model, optimizer=optimizer)
    with run.next_step():
        update_of(optimizer)(model(torch.ones(2, 4)).sum())
    run.commit()
    run.detach()
    schedule = SCHEDULERS[kind](optimizer)
    told = r"attach\(..., lr_scheduler=schedule\)"
    if kind != "plateau":  # torch has marked what the others drive
        with pytest.raises(AttachError, match=told):
            attach(store, model=model, optimizer=optimizer)
    else:
        run = attach(store, model=model, optimizer=optimizer)
        for _ in range(3):  # a program that goes on after an error
            with pytest.raises(AttachError, match=told):
                with run.next_step():
                    update_of(optimizer)(model(torch.ones(2, 4)).sum())
                run.commit()
    store.rollback()
    assert int(store["run/progress"][0]) == 1
    del schedule


class _Unhashable(type):
    def __eq__(cls, other: object) -> bool:
        return cls is other

    __hash__ = None  # type: ignore[assignment]


def test_classes_without_a_hash_are_nothing_to_attach(store: pmstore.Store) -> None:
    made = _Unhashable("Made", (), {})()
    model = net()
    optimizer = adam(model)
    run = attach(store, model=model, optimizer=optimizer)
    with run.next_step():
        update_of(optimizer)(model(torch.ones(2, 4)).sum())
    assert made is not None


def test_a_scheduler_that_is_gone_is_not(store: pmstore.Store, loader: Any) -> None:
    """It has left its marks: `initial_lr`, and a step that it wrapped."""
    model = net()
    optimizer = adam(model)
    warmup: Any = schedules.LinearLR(optimizer, total_iters=2)
    for _ in range(2):
        optimizer.step()
        warmup.step()
    warmup.myself = warmup  # a cycle, which the collector alone ends
    del warmup
    run = attach(store, model=model, optimizer=optimizer, loader=loader)
    train(run, model, update_of(optimizer), 3)


def test_a_checkpoint_with_initial_lr_is_not(store: pmstore.Store, loader: Any) -> None:
    old = adam(net())
    schedules.StepLR(old, 3)
    model = net()
    optimizer = adam(model)
    optimizer.load_state_dict(old.state_dict())
    assert "initial_lr" in optimizer.param_groups[0]
    run = attach(store, model=model, optimizer=optimizer, loader=loader)
    train(run, model, update_of(optimizer), 3)


def test_one_that_drives_another_optimizer_is_not(store: pmstore.Store) -> None:
    model, other = net(), net()
    others = adam(other)
    schedule = schedules.StepLR(others, 3)
    attach(store, model=model, optimizer=adam(model))
    assert schedule.optimizer is others


GIVEN: dict[str, Callable[[Any], dict[str, Any]]] = {
    "as it is": lambda one: {"lr_scheduler": one},
    "in a dict": lambda one: {"lr_scheduler": {"a": one}},
    "stateful": lambda one: {"stateful": {"schedule": one}},
    "held by what is given": lambda one: {"stateful": {"mine": Holder(schedule=one)}},
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("kind", ["cosine", "sequential", "chained"])
def test_one_that_is_given_is_kept(
    store: pmstore.Store, loader: Any, kind: str, given: str
) -> None:
    """With the schedulers in it."""
    model = net()
    optimizer = adam(model)
    schedule = SCHEDULERS[kind](optimizer)
    run = attach(store, model=model, optimizer=optimizer, loader=loader, **GIVEN[given](schedule))
    train(run, model, update_of(optimizer), 8, schedule.step)


def test_one_made_after_attach_is_refused_in_the_first_step(
    store: pmstore.Store, loader: Any
) -> None:
    model = net()
    optimizer = adam(model)
    run = attach(store, model=model, optimizer=optimizer, loader=loader)
    schedule = schedules.StepLR(optimizer, 100)
    with refused(run, "Make it before attach and give it"):
        train(run, model, update_of(optimizer), 3, schedule.step)
    assert run.step == 0


def test_a_second_one_is_refused_when_it_steps(store: pmstore.Store, loader: Any) -> None:
    """Not before: it may be one that the program has replaced, and which a notebook's `Out` or the
    last traceback still holds."""
    model = net()
    optimizer = adam(model)
    replaced = schedules.StepLR(optimizer, 100)
    schedule = schedules.CosineAnnealingLR(optimizer, 30)
    run = attach(store, model=model, optimizer=optimizer, loader=loader, lr_scheduler=schedule)
    train(run, model, update_of(optimizer), 4, schedule.step)
    with refused(run, r"a StepLR drives"):
        train(run, model, update_of(optimizer), 4, replaced.step)
    assert run.step == 4


# ---- scalers


def scaled(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> Update:
    def update(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()

    return update


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_forgotten_scaler_is_refused_at_the_first_update(
    store: pmstore.Store, loader: Any, fused: bool, scheduled: bool
) -> None:
    model = net()
    optimizer = Adam(model.parameters(), 1e-2, fused=fused)
    schedule = schedules.StepLR(optimizer, 3) if scheduled else None
    before = copy.deepcopy(model.state_dict())
    run = attach(store, model=model, optimizer=optimizer, loader=loader, lr_scheduler=schedule)
    with refused(run, r"attach\(..., scaler=scaler\)"):
        train(run, model, scaled(torch.amp.GradScaler("cpu"), optimizer), 3)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize("given", ["scaler", "stateful"])
def test_a_scaler_that_is_given_is_not(store: pmstore.Store, loader: Any, given: str) -> None:
    model = net()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu")
    how: Any = {"scaler": scaler} if given == "scaler" else {"stateful": {"amp": Holder(s=scaler)}}
    run = attach(store, model=model, optimizer=optimizer, loader=loader, **how)
    train(run, model, scaled(scaler, optimizer), 3)


def test_a_scaler_that_does_nothing_is_not(store: pmstore.Store, loader: Any) -> None:
    model = net()
    optimizer = adam(model)
    run = attach(store, model=model, optimizer=optimizer, loader=loader)
    train(run, model, scaled(torch.amp.GradScaler("cpu", enabled=False), optimizer), 3)


# ---- optimizers


def test_another_optimizer_of_attached_parameters_is_refused(
    store: pmstore.Store, loader: Any
) -> None:
    model = net()
    optimizer = adam(model)
    run = attach(store, model=model, optimizer=optimizer, loader=loader)
    train(run, model, update_of(optimizer), 2)
    before = copy.deepcopy(model.state_dict())
    other = SGD(model.parameters(), 1e-2, momentum=0.9)
    with refused(run, r"a SGD that was not given to attach steps '0.weight'"):
        train(run, model, update_of(other), 2)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    train(run, model, update_of(optimizer), 2)
    assert run.step == 4
    run.detach()
    other.step()


def test_several_optimizers_that_are_given_are_not(store: pmstore.Store, loader: Any) -> None:
    model = net()
    first, second = adam(model), SGD(model.parameters(), 1e-2, momentum=0.9)
    run = attach(store, model=model, optimizer={"first": first, "second": second}, loader=loader)
    train(run, model, update_of(first), 3)
    train(run, model, update_of(second), 3)


class Around(Optimizer):
    """As SAM: it steps the optimizer that it holds, with whose groups it works."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_an_optimizer_around_the_attached_one_is_not(store: pmstore.Store, loader: Any) -> None:
    model = net()
    around = Around(adam(model))
    run = attach(store, model=model, optimizer=around.inner, loader=loader)
    train(run, model, update_of(around), 3)


def test_steps_of_another_model_alone_are_refused(store: pmstore.Store) -> None:
    """A notebook's cell that makes the model was run again, and that with attach was not."""
    model = net()
    run = attach(store, model=model, optimizer=adam(model))
    again = net()
    update = update_of(adam(again))
    with refused(run, "trained nothing that is attached"):
        by_hand(run, again, update, 1)
    assert run.step == 0


def by_hand(run: Any, model: nn.Module, update: Update, steps: int) -> None:
    for _ in range(steps):
        with run.next_step():
            update((model(torch.randn(8, 4)) - 1).square().mean())
        run.commit()


def test_another_model_beside_the_attached_one_is_not(store: pmstore.Store) -> None:
    """A discriminator, a probe, that the program does not keep."""
    model, other = net(), net()
    optimizer, others = update_of(adam(model)), update_of(adam(other))
    run = attach(store, model=model, optimizer=adam(model))
    run.detach()
    kept = adam(model)
    optimizer = update_of(kept)
    run = attach(store, model=model, optimizer=kept)

    def both(loss: torch.Tensor) -> None:
        optimizer(loss)
        others(other(torch.randn(8, 4)).square().mean())

    def one_alone(loss: torch.Tensor) -> None:
        """The generator was asked for samples, and is not trained in this step."""
        others((other(torch.randn(8, 4)) - loss.detach()).square().mean())

    by_hand(run, model, both, 3)
    by_hand(run, model, one_alone, 3)
    probe = net()
    for _ in range(3):  # between two steps
        update_of(adam(probe))(probe(torch.randn(8, 4)).square().mean())
    by_hand(run, model, both, 3)


def test_another_model_that_is_kept_by_what_is_given_is_not(store: pmstore.Store) -> None:
    model, other = net(), net()
    others = adam(other)
    run = attach(
        store, model=model, optimizer=adam(model), stateful={"other": Holder(m=other, o=others)}
    )
    by_hand(run, other, update_of(others), 3)


def test_two_runs_do_not_meet(tmp_path: Path) -> None:
    first, second = net(), net()
    optimizers = adam(first), adam(second)
    with pmstore.open(tmp_path / "a.pm") as a, pmstore.open(tmp_path / "b.pm") as b:
        run_a = attach(a, model=first, optimizer=optimizers[0])
        run_b = attach(b, model=second, optimizer=optimizers[1])
        for _ in range(3):
            by_hand(run_a, first, update_of(optimizers[0]), 1)
            by_hand(run_b, second, update_of(optimizers[1]), 1)


def hooks() -> int:
    return len(_global_optimizer_pre_hooks)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = hooks()
    model = net()
    with pmstore.open(tmp_path / "a.pm") as store:
        run = attach(store, model=model, optimizer=adam(model))
        assert hooks() == before + 1
        run.detach()
        assert hooks() == before
        attach(store, model=model, optimizer=adam(model))
    assert hooks() == before


# ---- data sets and samplers


class Numbered(torch.utils.data.Dataset[Any]):
    """With the number of each item."""

    def __init__(self) -> None:
        self.data = data()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return (index, *self.data[index])


class Hard(torch.utils.data.Sampler[int]):
    """It draws what was hard more often."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights
        self.rng = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        weights = np.asarray(self.weights)
        return iter(self.rng.choice(60, 60, p=weights / weights.sum()).tolist())

    def __len__(self) -> int:
        return 60


class Stated(Hard):
    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights[:] = state["weights"]
        self.rng.bit_generator.state = state["rng"]


class Counting(torch.utils.data.IterableDataset[Any]):
    """It orders each epoch by its number."""

    def __init__(self) -> None:
        self.data = data()
        self.epoch = -1

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        order = list(range(len(self.data)))
        random.Random(self.epoch).shuffle(order)
        for index in order:
            yield (index, *self.data[index])


class Resuming(Counting):
    """As those of torchdata: a state that is loaded is where the next iteration begins."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0
        self.begins = 0

    def __iter__(self) -> Iterator[Any]:
        begin, self.begins = self.begins, 0
        if not begin:
            self.epoch += 1
        order = list(range(len(self.data)))
        random.Random(self.epoch).shuffle(order)
        for position in range(begin, len(order)):
            self.at = position + 1
            yield (order[position], *self.data[order[position]])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        self.begins = self.at = state["at"]


class Labels(Numbered):
    """Labels that the program corrects, in a table; what it has corrected, in a list and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(60)
        self.corrected: list[int] = []
        self.times: dict[str, int] = {}

    def correct(self, indices: torch.Tensor) -> None:
        for index in indices.tolist():
            self.table[index] += 1
            self.corrected = [*self.corrected, index][-5:]
            self.times[str(index)] = self.times.get(str(index), 0) + 1

    def __getitem__(self, index: int) -> Any:
        number, features, target = super().__getitem__(index)
        shift = self.table[index] + len(self.times) + sum(self.corrected) / 100
        return number, features, target + shift


def batched(dataset: Any, **how: Any) -> Any:
    return torch.utils.data.DataLoader(dataset, batch_size=10, **how)


class Remembering(Numbered):
    """Each sample depends on what was given out before, in collections of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.given = np.float64(1.0), Counter[int]()
        self.last: deque[int] = deque([0], maxlen=3)
        self.seen: set[int] = set()
        self.times: defaultdict[int, list[int]] = defaultdict(list)

    def __getitem__(self, index: int) -> Any:
        number, features, target = super().__getitem__(index)
        self.factor = self.factor * np.float64(1.001)
        self.given[index % 7] += 1
        self.seen.add(index % 11)
        self.times[index % 5].append(self.last[0])
        self.last.append(index)
        told = self.given[index % 7] + len(self.seen) + sum(self.times[index % 5][-2:])
        return number, features, target * float(self.factor) + told / 100


def weighted(weights: Any) -> Any:
    return torch.utils.data.WeightedRandomSampler(weights, 60)


LOADERS: dict[str, Callable[[], Any]] = {
    "an array of a sampler": lambda: batched(Numbered(), sampler=Hard(np.ones(60))),
    "a tensor of a sampler": lambda: batched(Numbered(), sampler=Hard(torch.ones(60).double())),
    "torch's own sampler": lambda: batched(Numbered(), sampler=weighted([1.0] * 60)),
    "a sampler with a state": lambda: batched(Numbered(), sampler=Stated(np.ones(60))),
    "a counter of an iterable": lambda: batched(Counting()),
    "a state of an iterable": lambda: batched(Resuming()),
    "collections of a data set": lambda: batched(Remembering()),
    "a data set": lambda: batched(Labels(), shuffle=True),
    "a data set in another": lambda: batched(
        torch.utils.data.Subset(Labels(), list(range(60))), shuffle=True
    ),
    "with workers": lambda: batched(Numbered(), sampler=Hard(np.ones(60)), num_workers=1),
}


def learn(store: pmstore.Store, make: Callable[[], Any], until: int) -> None:
    """Trains until so many steps were made. What is hard is drawn more often."""
    torch.manual_seed(3)
    model = net()
    optimizer = adam(model)
    update, loader = update_of(optimizer), make()
    sampler, dataset = loader.sampler, getattr(loader.dataset, "dataset", loader.dataset)
    run = attach(store, model=model, optimizer=optimizer, loader=loader)
    losses = store.list("losses")
    if run.step == until:
        return
    for indices, features, targets in run.batches(epochs=None):
        each = F.mse_loss(model(features), targets, reduction="none")[:, 0]
        update(each.mean())
        if hasattr(sampler, "weights"):
            sampler.weights[indices] = each.detach().to(torch.float64)
        if isinstance(dataset, Labels):
            dataset.correct(indices[:3])
        losses.append(each.mean().item())
        if run.step == until - 1:
            run.commit()
            break


@pytest.mark.parametrize("kind", LOADERS)
def test_what_data_sets_and_samplers_change_is_kept(tmp_path: Path, kind: str) -> None:
    """The run is left within data epochs, at their ends, and goes on from there."""
    with pmstore.open(tmp_path / "whole.pm") as store:
        learn(store, LOADERS[kind], 4 * BATCHES)
        whole = list(store.list("losses"))
    for until in (2, BATCHES, BATCHES + 1, 2 * BATCHES + 3, 3 * BATCHES, 4 * BATCHES):
        with pmstore.open(tmp_path / "pieces.pm") as store:
            learn(store, LOADERS[kind], until)
            assert list(store.list("losses")) == whole[:until]


def test_a_roll_back_takes_their_changes_back(store: pmstore.Store) -> None:
    """In the objects that they are in: the program may hold these too."""
    dataset = Labels()
    table, times = dataset.table, dataset.times
    loader = batched(dataset)
    model = net()
    run = attach(store, model=model, optimizer=adam(model), loader=loader)
    with run.next_step():
        dataset.correct(torch.tensor([1, 2]))
    run.commit()
    dataset.correct(torch.tensor([1, 3]))
    dataset.late = 7  # type: ignore[attr-defined]
    run.rollback()
    assert dataset.table is table
    assert table.nonzero().flatten().tolist() == [1, 2]
    assert dataset.times is times
    assert times == {"1": 1, "2": 1}
    assert dataset.corrected == [1, 2]
    assert not hasattr(dataset, "late")


def test_what_a_data_set_opens_late_stays(store: pmstore.Store) -> None:
    """An object in the place of a value: a file, a connection."""
    dataset: Any = Numbered()
    dataset.file = None
    model = net()
    optimizer = adam(model)
    run = attach(store, model=model, optimizer=optimizer, loader=batched(dataset))
    dataset.file = opened = object()
    one_step(run, model, update_of(optimizer))
    run.rollback()
    assert dataset.file is opened


LARGE: dict[str, Callable[[], Any]] = {
    "array": lambda: np.ones(200_000),
    "tensor": lambda: torch.ones(200_000, dtype=torch.float64),
    "tensors": lambda: (torch.ones(200_000, dtype=torch.float64),),
}


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_change_of_what_is_large_is_refused(store: pmstore.Store, kind: str, how: str) -> None:
    dataset: Any = Numbered()
    dataset.weights = LARGE[kind]()
    model = net()
    optimizer = adam(model)
    run = attach(store, model=model, optimizer=optimizer, loader=batched(dataset))
    one_step(run, model, update_of(optimizer))
    if how == "replaced":
        dataset.weights = LARGE[kind]()
    else:
        (dataset.weights[0] if kind == "tensors" else dataset.weights)[:] = 2
    with refused(run, r"dataset.weights has changed.*state_dict\(\) and load_state_dict\(\)"):
        one_step(run, model, update_of(optimizer))


def one_step(run: Any, model: nn.Module, update: Update) -> None:
    _, features, targets = next_batch(run)
    update(F.mse_loss(model(features), targets))
    run.commit()


def test_a_cache_that_grows_large_is_told_of(store: pmstore.Store) -> None:
    """It is kept while it is small. To refuse it would be to refuse all that cache."""
    dataset: Any = Numbered()
    dataset.cache = {}
    model = net()
    optimizer = adam(model)
    run = attach(store, model=model, optimizer=optimizer, loader=batched(dataset))
    dataset.cache[0] = torch.ones(100_000)
    one_step(run, model, update_of(optimizer))
    dataset.cache[1] = torch.ones(1_000_000)
    with pytest.warns(RuntimeWarning, match=r"dataset.cache has changed.*more than a cache"):
        one_step(run, model, update_of(optimizer))
    dataset.cache[2] = torch.ones(1_000_000)
    one_step(run, model, update_of(optimizer))  # and told of once
    assert run.step == 3


# ---- loaders


class Noisy(torch.utils.data.Dataset[Any]):
    def __init__(self, batches: int = BATCHES) -> None:
        self.data = data(batches)
        self.rng = np.random.default_rng(4)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        features, target = self.data[index]
        return features + torch.from_numpy(self.rng.standard_normal(4, dtype=np.float32)), target


def background(batches: Iterator[Any]) -> Iterator[Any]:
    """As `BackgroundGenerator` of prefetch_generator."""
    queue: Queue[Any] = Queue(3)
    end = object()

    def work() -> None:
        for batch in batches:
            queue.put(batch)
        queue.put(end)

    threading.Thread(target=work, daemon=True).start()
    while (batch := queue.get()) is not end:
        yield batch


class Threaded(torch.utils.data.DataLoader[Any]):
    def __iter__(self) -> Any:
        return background(super().__iter__())


class OneAhead(torch.utils.data.DataLoader[Any]):
    def __iter__(self) -> Any:
        batches = super().__iter__()
        following = next(batches, None)
        while following is not None:
            batch, following = following, next(batches, None)
            yield batch


class Moving(torch.utils.data.DataLoader[Any]):
    """It copies each batch, as those do that move them to a device."""

    def __iter__(self) -> Any:
        for features, targets in super().__iter__():
            yield features.clone(), targets.clone()


@pytest.mark.parametrize("kind", [Threaded, OneAhead])
def test_a_loader_that_reads_ahead_of_a_generator_is_refused(
    store: pmstore.Store, kind: type[torch.utils.data.DataLoader[Any]]
) -> None:
    model = net()
    optimizer = adam(model)
    loader = kind(Noisy(), batch_size=10, shuffle=True)
    run = attach(store, model=model, optimizer=optimizer, loader=loader)
    with pytest.raises(AttachError, match="Give a plain DataLoader"):
        train(run, model, update_of(optimizer), 3)
    assert run.step == 0


def test_one_over_an_iterable_that_draws_is_refused_at_attach(store: pmstore.Store) -> None:
    """Nothing tells how far it was read."""
    dataset: Any = Counting()
    Threaded(dataset, batch_size=10)
    model = net()
    optimizer = adam(model)
    attach(store, model=model, optimizer=optimizer, loader=Threaded(dataset)).detach()
    dataset.rng = np.random.default_rng(4)
    with pytest.raises(AttachError, match="Give a plain DataLoader"):
        attach(store, model=model, optimizer=optimizer, loader=Threaded(dataset), name="second")


@pytest.mark.parametrize("kind", [Moving, Threaded, OneAhead])
def test_other_loaders_with_a_loop_of_their_own_are_not(
    tmp_path: Path, kind: type[torch.utils.data.DataLoader[Any]]
) -> None:
    """One that reads in turn; and those that read ahead from what draws nothing."""

    def some(store: pmstore.Store, until: int) -> Any:
        torch.manual_seed(3)
        model = net()
        optimizer = adam(model)
        noisy = kind is Moving
        loader = kind(Noisy() if noisy else data(), batch_size=10, shuffle=noisy)
        run = attach(store, model=model, optimizer=optimizer, loader=loader)
        train(run, model, update_of(optimizer), until - run.step)
        return model[0].weight.detach().tolist()  # type: ignore[index]

    with pmstore.open(tmp_path / "whole.pm") as store:
        whole = some(store, 8)
    for until in (3, 8):
        with pmstore.open(tmp_path / "pieces.pm") as store:
            pieces = some(store, until)
    assert pieces == whole


def test_a_loader_is_no_stateful(store: pmstore.Store, loader: Any) -> None:
    """As torchdata's, whose state was documented to go there."""
    loader.state_dict = loader.load_state_dict = dict
    model = net()
    with pytest.raises(AttachError, match="give it as loader="):
        attach(store, model=model, optimizer=adam(model), stateful={"data": loader})
