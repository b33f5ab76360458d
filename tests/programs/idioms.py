"""Ordinary programs, each of which resumes wrong where a library keeps points and not steps. They
are right here, or refused in their first steps, with what to write."""

from __future__ import annotations

import itertools
import queue
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import data as tud

import pmstore
import pmstore.torch
from pmstore.scheduler import EveryN

from .data import batches, mlp, numbers
from .registry import State, program

mse = nn.functional.mse_loss


# ---- what stands behind the update, and behind the batches


@program("every", "seldom", quick=["seldom"])
def validated(path: str, kind: str) -> State:
    """At an epoch's end a schedule, and a validation by a loader that draws an order."""
    model, held = mlp(), batches(numbers(40), 20)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store,
            model=model,
            optimizer=optimizer,
            lr_scheduler=schedule,
            loader=batches(size=20),
            policy=EveryN(4) if kind == "seldom" else None,
        )
        losses, missed = store.list("losses"), store.list("missed")
        for epoch in run.epochs(5):
            model.train()
            for x, y in epoch:
                loss = mse(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.log(loss=loss)
                losses.append(loss.item())
            schedule.step()
            model.eval()
            with torch.no_grad():
                missed.append(sum(mse(model(x), y).item() for x, y in held))
            if kind == "every":
                run.commit()
        told = {"losses": list(losses), "missed": list(missed), "schedule": schedule}
        return {"model": model, "optimizer": optimizer, **told}


@program()
def behind_the_end(path: str) -> State:
    """What follows `run.end_step()` in a step is kept with it; a commit then counts no step."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=batches(), policy=EveryN(100)
        )
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            run.end_step()
            losses.append(loss.item())
            if run.step % 10 == 4:
                run.commit()
        return {"model": model, "optimizer": optimizer, "losses": list(losses), "step": run.step}


@program()
def two_updates(path: str) -> State:
    """On each batch."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=batches())
        losses = store.list("losses")
        for x, y in run.batches(epochs=2):
            for _ in range(2):
                loss = mse(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return {"model": model, "optimizer": optimizer, "losses": list(losses), "step": run.step}


@program()
def plain_values(path: str) -> State:
    """A weight that the loop changes, and the outputs of the step before."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=batches())
        state = run.state
        for x, y in run.batches(epochs=3):
            state["weight"] = 0.9 * state.get("weight", 1.0)
            out = model(x)
            loss = mse(out, y) + state["weight"] * out.mean() * state.get("before", torch.zeros(()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state["before"] = out.detach().mean()
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "state": dict(run.state)}


# ---- batches that are held


def _copies(batches: Iterator[Any]) -> Iterator[Any]:
    """One ahead, as prefetchers to a device make them."""
    following = None
    for batch in batches:
        current, following = following, [one.clone() for one in batch]
        if current is not None:
            yield current
    if following is not None:
        yield following


def _chunks(batches: Iterator[Any]) -> Iterator[Any]:
    while chunk := list(itertools.islice(batches, 6)):
        yield from chunk


def _buffer(batches: Iterator[Any]) -> Iterator[Any]:
    held = []
    for batch in batches:
        held.append(batch)
        if len(held) > 8:
            yield held.pop(random.randrange(len(held)))
    yield from held


def _pool(batches: Iterator[Any]) -> Iterator[Any]:
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(lambda batch: batch, batches)


HOLDING = {"copies": _copies, "chunks": _chunks, "list": list, "buffer": _buffer, "pool": _pool}


@program(*HOLDING, refused="LookaheadError")
def held_batches(path: str, kind: str) -> State:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=batches())
        for x, y in HOLDING[kind](run.batches(epochs=2)):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {"model": model}


@program("chunks", "copies")
def held_in_order(path: str, kind: str) -> State:
    """The same, said so, and a step by hand for each. (After a resume chunks begin elsewhere, so
    that loading one must not draw numbers.)"""
    model, (x, y) = mlp(), numbers()[:]
    loader: Any = list(zip(x.split(10), y.split(10), strict=True))
    if kind == "copies":
        loader = batches()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        losses = store.list("losses")
        for x, y in HOLDING[kind](run.batches(epochs=2, ahead=6)):
            with run.next_step():
                loss = mse(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program(refused="ahead=0")
def first_batch_kept(path: str) -> State:
    model = mlp()
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, loader=batches())
        steps = run.batches(epochs=2)
        pictures = next(steps)
        for x, _ in steps:
            model(x + pictures[0]).mean().backward()
        return {"model": model}


@program()
def batches_kept(path: str) -> State:
    """The first is passed over, and kept for pictures."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=batches())
        pictures = store.require("pictures", (10, 10), torch.float32)
        steps = run.batches(epochs=2, ahead=0)
        if not run.step:
            pictures.copy_(next(steps)[0])
        for x, y in steps:
            loss = mse(model(x + 0.01 * pictures.mean()), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer, "step": run.step}


# ---- what attach was not given


@program(refused="lr_scheduler=")
def scheduler_not_given(path: str) -> State:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=batches())
        for x, y in run.batches(epochs=2):
            mse(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return {"model": model}


@program(refused="optimizer=")
def optimizer_not_given(path: str) -> State:
    """Another one from the second epoch on."""
    model = mlp()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=batches())
        for x, y in run.batches(epochs=2):
            if run.data_epoch == 1 and isinstance(optimizer, torch.optim.Adam):
                optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
            mse(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {"model": model}


@program(refused="trained nothing that is attached")
def model_made_again(path: str) -> State:
    """A notebook's cell of the model is run twice, that of attach once."""
    with pmstore.open(path) as store:
        model = nn.Linear(10, 1)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer)
        model = nn.Linear(10, 1)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in run.steps(20):
            model(torch.randn(8, 10)).mean().backward()
            optimizer.step()
        return {"model": model}


# ---- state at places where nobody looks


class Preconditioned(torch.optim.Optimizer):
    """Its state of a parameter is a list of tensors."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                state, slope = self.state[one], one.grad
                if not state:
                    state["left"] = [torch.eye(n) for n in one.shape]
                for place, n in enumerate(one.shape):
                    flat = slope.transpose(0, place).reshape(n, -1)
                    state["left"][place] += flat @ flat.T
                    turned = torch.linalg.solve(state["left"][place], flat)
                    slope = turned.reshape(slope.transpose(0, place).shape).transpose(0, place)
                one -= group["lr"] * slope


@program()
def lists_in_optimizer_state(path: str) -> State:
    model = mlp()
    optimizer = Preconditioned(model.parameters(), 0.1)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=batches())
        for x, y in run.batches(epochs=2):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        return {"model": model, "left": [one["left"] for one in optimizer.state.values()]}


class Snapshot:
    """Of the weights, as they are when they are asked for: tensors that require gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.take()

    def take(self) -> None:
        self.weights = [one.clone() for one in self.model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


@program()
def snapshot(path: str) -> State:
    model = mlp()
    optimizer, kept = torch.optim.Adam(model.parameters(), 1e-2), Snapshot(model)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=batches(), stateful={"kept": kept}
        )
        for x, y in run.batches(epochs=2):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kept.take()
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "kept": kept}


@program()
def sparse_beside(path: str) -> State:
    """An optimizer of sparse gradients, given as something stateful."""
    rows, head = nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 1)
    sparse = torch.optim.SparseAdam(rows.parameters(), 1e-2)
    dense = torch.optim.Adam(head.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store,
            model=nn.ModuleDict({"rows": rows, "head": head}),
            optimizer=dense,
            stateful={"sparse": sparse},
        )
        for _ in run.steps(24):
            loss = head(rows(torch.randint(0, 50, (8, 3)))).square().mean()
            sparse.zero_grad()
            dense.zero_grad()
            loss.backward()
            sparse.step()
            dense.step()
            run.log(loss=loss)
        return {"rows": rows, "head": head, "dense": dense, "sparse": sparse}


@program()
def flat_gradients(path: str) -> State:
    """Gradients are views of one buffer, which an update by hand reads, three batches an update."""
    model = mlp()
    parameters = list(model.parameters())
    flat = torch.zeros(sum(one.numel() for one in parameters))
    views, place = [], 0
    for one in parameters:
        one.grad = flat[place : place + one.numel()].view_as(one)
        views.append(one.grad)
        place += one.numel()
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=torch.optim.SGD(parameters, 0.05), loader=batches()
        )
        for x, y in run.batches(epochs=3):
            mse(model(x), y).backward()
            if run.batch % 3 == 2:
                with torch.no_grad():
                    for one, view in zip(parameters, views, strict=True):
                        one.sub_(0.05 * view)
                flat.zero_()
        return {"model": model, "flat": flat}


class Noise(nn.Module):
    """Its strength is a number, and it has a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = 1.0
        self.drawn = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.strength *= 0.95
        return x + 0.1 * self.strength * torch.randn(x.shape, generator=self.drawn)


@program()
def attributes_of_modules(path: str) -> State:
    """Numbers and generators in modules, and a part that stands still from the second epoch on."""
    model, noise = mlp(), Noise()
    net = nn.Sequential(noise, model)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=net, optimizer=optimizer, loader=batches())
        for x, y in run.batches(epochs=3):
            if (run.data_epoch, run.batch) == (1, 0):
                model[1].eval()
            loss = mse(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        told = {"strength": noise.strength, "drawn": noise.drawn.get_state()}
        return {"net": net, "optimizer": optimizer, "frozen": model[1].training, **told}


# ---- data that change


class Hard(tud.Sampler[int]):
    """Draws by weights, which the loop changes."""

    def __init__(self) -> None:
        self.weights, self.rng = np.ones(60), np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        chances = self.weights / self.weights.sum()
        return iter(self.rng.choice(60, 60, p=chances).tolist())

    def __len__(self) -> int:
        return 60


class HardSaid(Hard):
    """And says so."""

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = np.array(state["weights"])
        self.rng.bit_generator.state = state["rng"]


class Numbered(tud.Dataset[Any]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return (index, *numbers(60)[index])


@program("attributes", "state")
def hard_examples(path: str, kind: str) -> State:
    model, order = mlp(), HardSaid() if kind == "state" else Hard()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=batches(Numbered(), sampler=order)
        )
        for index, x, y in run.batches(epochs=4):
            missed = mse(model(x), y, reduction="none")[:, 0]
            optimizer.zero_grad()
            missed.mean().backward()
            optimizer.step()
            order.weights[index.numpy()] = missed.detach().numpy() + 0.01
        return {"model": model, "optimizer": optimizer, "weights": order.weights.copy()}


class Rounds(tud.IterableDataset[Any]):
    """Counts its epochs, and shuffles by their number."""

    def __init__(self) -> None:
        self.round = -1

    def __iter__(self) -> Iterator[Any]:
        self.round += 1
        order = list(range(60))
        random.Random(self.round).shuffle(order)
        for index in order:
            yield numbers(60)[index]


@program()
def rounds_of_the_data(path: str) -> State:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=batches(Rounds(), shuffle=False)
        )
        losses = store.list("losses")
        for x, y in run.batches(epochs=4):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


class Noisy(tud.Dataset[Any]):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(4)

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        x, y = numbers(100)[index]
        return x + 0.1 * torch.from_numpy(self.rng.standard_normal(10, dtype=np.float32)), y


class Background(tud.DataLoader[Any]):
    """A thread fills its iterator."""

    def __iter__(self) -> Any:
        waiting: queue.Queue[Any] = queue.Queue(3)
        loads = super().__iter__()

        def work() -> None:
            for batch in loads:
                waiting.put(batch)
            waiting.put(None)

        threading.Thread(target=work, daemon=True).start()
        return iter(waiting.get, None)


@program(refused="DataLoader")
def thread_behind_the_loader(path: str) -> State:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        loader = Background(Noisy(), batch_size=10, shuffle=True)
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        for x, y in run.batches(epochs=2):
            mse(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {"model": model}


@program(needs="torchdata.stateful_dataloader", plain="draws a seed for each epoch")
def stateful_data_loader(path: str) -> State:
    """Of torchdata, given as the loader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    loader = StatefulDataLoader(numbers(60), batch_size=10, shuffle=True)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        losses = store.list("losses")
        for epoch in run.epochs(4):
            for x, y in epoch:
                loss = mse(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


# ---- values of the store


@program("list", "dict", refused="store.list()|store[")
def value_changed(path: str, kind: str) -> State:
    """A value is a copy each time it is looked up."""
    with pmstore.open(path) as store:
        store["history"] = [] if kind == "list" else {}
        if kind == "list":
            store["history"].append(1)
        else:
            store["history"]["seen"] = 1
        return {"history": store["history"]}
