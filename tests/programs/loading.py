"""Loaders, samplers and data sets, and loops over them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import data as tud

import pmstore
import pmstore.torch

from .data import batches, classes, mlp, numbers
from .registry import State, program

mse = nn.functional.mse_loss
cross_entropy = nn.functional.cross_entropy


class Buckets(tud.Sampler[list[int]]):
    """Batches of neighbours, in an order that is drawn while the epoch runs."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.count // self.size):
            yield np.random.randint(0, self.count, self.size).tolist()

    def __len__(self) -> int:
        return self.count // self.size


class Shuffled(tud.Sampler[int]):
    """Without a state: Python's generator shuffles."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(120))
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 120


SAMPLERS: dict[str, Any] = {
    "weighted": lambda: batches(
        sampler=tud.WeightedRandomSampler(torch.arange(1.0, 121.0).tolist(), 120)
    ),
    "replaced": lambda: batches(
        sampler=tud.RandomSampler(numbers(), replacement=True, num_samples=100)
    ),
    "own-generator": lambda: batches(generator=torch.Generator().manual_seed(9)),
    "sampler-generator": lambda: batches(
        sampler=tud.RandomSampler(numbers(), generator=torch.Generator().manual_seed(9))
    ),
    "subset": lambda: batches(
        tud.random_split(numbers(), [90, 30], torch.Generator().manual_seed(1))[0], 9
    ),
    "concatenated": lambda: batches(
        tud.ConcatDataset([numbers(50), tud.Subset(numbers(), range(70))]), drop_last=True, size=11
    ),
    "python": lambda: batches(sampler=Shuffled()),
}


@program(*SAMPLERS)
def sampler(path: str, kind: str) -> State:
    model, loader = mlp(), SAMPLERS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program(plain="draws while the epoch runs, here from a stream of its own")
def batch_sampler(path: str) -> State:
    model, loader = mlp(), batches(batch_sampler=Buckets(120, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            x = x * float(np.random.uniform(0.9, 1.1))
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program(quick=True)
def distributed_epochs(path: str) -> State:
    """An order by epochs, as with several ranks, and a schedule by epochs."""
    model = mlp()
    order = tud.distributed.DistributedSampler(numbers(), num_replicas=2, rank=1, seed=3)
    loader = batches(sampler=order)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.3)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=loader, lr_scheduler=schedule
        )
        losses = store.list("losses")
        for epoch in run.epochs(6):
            order.set_epoch(epoch)
            for x, y in epoch:
                loss = mse(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append((loss.item(), optimizer.param_groups[0]["lr"]))
                run.log(loss=loss)
            schedule.step()
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


class Stream(tud.IterableDataset[Any]):
    """Numbers as they come, with noise from torch's generator; each worker has its share."""

    def __iter__(self) -> Iterator[Any]:
        info = tud.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        data = numbers()
        for index in range(first, 100, step):
            x, y = data[index]
            yield x + 0.01 * torch.randn(10), y


@program(plain="draws while the epoch runs, here from a stream of its own")
def stream(path: str) -> State:
    model, loader = mlp(), batches(Stream(), shuffle=False, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


class Augmented(tud.Dataset[Any]):
    """Noise from all three default generators."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Any:
        x, y = numbers()[index]
        x = x + 0.01 * torch.randn(10) + 0.01 * random.random() + 0.01 * float(np.random.rand())
        return x, y


@program("two", "persistent", "stream", plain="each batch has a seed of its own")
def workers(path: str, kind: str) -> State:
    """Two processes load. Epochs are short: persistent workers live over several."""
    model = mlp()
    data = Stream() if kind == "stream" else Augmented()
    loader = batches(
        data,
        shuffle=kind != "stream",
        num_workers=2,
        persistent_workers=kind == "persistent",
        prefetch_factor=1,
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


def collate(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Puts the samples together, some of their features dropped by numpy's generator."""
    x = torch.stack([sample[0] for sample in samples])
    keep = torch.from_numpy(np.random.rand(*x.shape) > 0.1)
    return x * keep, torch.stack([sample[1] for sample in samples])


@program()
def collated(path: str) -> State:
    model, loader = mlp(10, 3), batches(classes(), collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


class Endless:
    """Iterable again, no length, draws as it goes."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(9):
            x = torch.randn(10, 10)
            yield x, x.sum(1, keepdim=True)


@program(
    "list", "generator", plain="the class draws while the epoch runs, here from its own stream"
)
def no_loader_class(path: str, kind: str) -> State:
    """Batches that are a list, or come from a class of the program's own."""
    x, y = numbers()[:]
    loader = list(zip(x.split(10), y.split(10), strict=True)) if kind == "list" else Endless()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program()
def no_loader(path: str) -> State:
    """Batches are drawn in the loop, by torch's generator and one of the program's own."""
    x, y = numbers()[:]
    drawn = torch.Generator().manual_seed(4)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, stateful={"drawn": drawn}
        )
        losses = store.list("losses")
        for _ in run.steps(40):
            chosen = torch.randint(0, 120, (10,), generator=drawn)
            loss = mse(model(x[chosen] + 0.01 * torch.randn(10, 10)), y[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        state = drawn.get_state()
        return {"model": model, "optimizer": optimizer, "drawn": state, "losses": list(losses)}


@program()
def own_generators(path: str) -> State:
    """No loader, and one generator of each kind, all given as stateful."""
    x, y = numbers()[:]
    first, second = np.random.default_rng(1), np.random.RandomState(2)
    third, fourth = random.Random(3), torch.Generator().manual_seed(4)
    given = {"first": first, "second": second, "third": third, "fourth": fourth}
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, stateful=given)
        losses = store.list("losses")
        for _ in run.steps(30):
            chosen = torch.from_numpy(first.permutation(120)[:10])
            noise = torch.randn(10, 10, generator=fourth) * float(second.normal())
            loss = mse(model(x[chosen] + 0.01 * noise), y[chosen]) * third.uniform(0.9, 1.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        drawn = [first.random(), second.rand(), third.random(), fourth.get_state()]
        return {"model": model, "optimizer": optimizer, "losses": list(losses), "drawn": drawn}


class Noisy(tud.Dataset[Any]):
    """With a generator of its own, as many tutorials write it."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Any:
        x, y = numbers()[index]
        return x + 0.1 * torch.from_numpy(self.rng.standard_normal(10, dtype=np.float32)), y


class Growing(tud.Sampler[int]):
    """Takes more samples each epoch; its generator and its count live in it."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)
        self.rounds = 0

    def __iter__(self) -> Iterator[int]:
        self.rounds += 1
        return iter(self.rng.permutation(120)[: 40 + 20 * self.rounds].tolist())

    def __len__(self) -> int:
        return 40 + 20 * max(1, self.rounds)

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state, "rounds": self.rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]
        self.rounds = state["rounds"]


class Drawn(tud.IterableDataset[Any]):
    """A stream whose generator goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.rng = random.Random(8)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(90):
            x = torch.tensor([self.rng.gauss(0, 1) for _ in range(10)])
            yield x, x.sum()[None]


def seed_worker(number: int) -> None:
    info = tud.get_worker_info()
    info.dataset.rng = np.random.default_rng(info.seed)


GENERATORS: dict[str, Any] = {
    "data-set": lambda: batches(Noisy()),
    "workers": lambda: batches(Noisy(), num_workers=2, worker_init_fn=seed_worker),
    "sampler": lambda: batches(sampler=Growing()),
    "stream": lambda: batches(Drawn(), shuffle=False),
}


@program("data-set", "sampler", "stream", quick=["data-set"])
def generators(path: str, kind: str) -> State:
    """Generators that nobody gave to attach."""
    model, loader = mlp(), GENERATORS[kind]()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program(plain="each batch has a seed of its own")
def generators_of_workers(path: str) -> State:
    """Made in worker_init_fn, as torch's notes on randomness say."""
    model, loader = mlp(), GENERATORS["workers"]()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


def ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """Holds one batch more than it gives, as prefetchers do."""
    held = next(batches, None)
    for batch in batches:
        yield held
        held = batch
    if held is not None:
        yield held


@program(quick=True)
def prefetched(path: str) -> State:
    model, loader = mlp(), batches()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        losses = store.list("losses")
        for x, y in ahead(run.batches(epochs=3, ahead=1)):
            with run.next_step():
                loss = mse(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}
