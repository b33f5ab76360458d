"""What people do around the loop: averages, evaluation, early stops, parts that are frozen, several
models, buffers of experience."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

import pmstore
import pmstore.torch
from pmstore.scheduler import EveryN

from .data import batches, classes, mlp, numbers
from .registry import State, program

mse = nn.functional.mse_loss
cross_entropy = nn.functional.cross_entropy


@program()
def average_beside(path: str) -> State:
    """An exponential average of the weights, written by hand and given as something stateful."""
    model = mlp()

    class Average:
        def __init__(self) -> None:
            self.kept = {name: value.clone() for name, value in model.state_dict().items()}

        def update(self) -> None:
            for name, value in model.state_dict().items():
                if value.is_floating_point():
                    self.kept[name].lerp_(value, 0.1)

        def state_dict(self) -> dict[str, Any]:
            return self.kept

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.kept = {name: value.clone() for name, value in state.items()}

    average = Average()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=batches(), stateful={"average": average}
        )
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "o": optimizer, "average": average.kept, "losses": list(losses)}


@program(quick=True)
def averaged_in_the_end(path: str) -> State:
    """SWA: after two epochs the weights are averaged; statistics for them are made at the end."""
    model = mlp()
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = SWALR(optimizer, 0.02, anneal_epochs=10)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store,
            model={"model": model, "average": average},
            optimizer=optimizer,
            lr_scheduler=schedule,
            loader=batches(),
        )
        losses = store.list("losses")
        for epoch in run.epochs(4):
            for x, y in epoch:
                loss = mse(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if epoch >= 2:
                    average.update_parameters(model)
                    schedule.step()
                losses.append(loss.item())
                run.log(loss=loss)
            if epoch == 3:
                update_bn(numbers()[:][0].split(20), average)
        return {"model": model, "average": average, "o": optimizer, "losses": list(losses)}


@program()
def evaluated(path: str) -> State:
    """Looks at other data between steps, by a loader of its own; keeps the best weights."""
    model, held = mlp(10, 3), batches(classes(40), 20)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=batches(classes())
        )
        losses, scores = store.list("losses"), store.list("scores")
        best = store.require("best", (sum(one.numel() for one in model.parameters()),), "float32")
        for x, y in run.batches(epochs=3):
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if run.batch % 6 == 5:
                model.eval()
                with torch.no_grad():
                    right = sum(int((model(a).argmax(1) == b).sum()) for a, b in held)
                model.train()
                if right >= max(scores, default=0):
                    best[:] = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
                scores.append(right)
            run.log(loss=loss)
        told = {"best": best.copy(), "scores": list(scores), "losses": list(losses)}
        return {"model": model, "optimizer": optimizer, **told}


class Patience:
    """Says when the loss has not become better for some time."""

    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def done(self) -> bool:
        return self.bad >= self.patience

    def see(self, loss: float) -> None:
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "bad": self.bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.bad = state["best"], state["bad"]


@program()
def early_stop(path: str) -> State:
    model, patience = mlp(), Patience(8)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store,
            model=model,
            optimizer=optimizer,
            loader=batches(),
            stateful={"patience": patience},
        )
        losses = store.list("losses")
        for x, y in run.batches(epochs=None):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            patience.see(loss.item())
            losses.append(loss.item())
            run.log(loss=loss)
            if patience.done():
                run.stop()
        return {"model": model, "o": optimizer, "p": patience, "losses": list(losses)}


class Confusion:
    """A metric with a tensor that grows over an epoch."""

    def __init__(self) -> None:
        self.counts, self.seen = torch.zeros(3, 3, dtype=torch.int64), 0

    def update(self, out: torch.Tensor, labels: torch.Tensor) -> None:
        self.counts.index_put_((out.argmax(1), labels), torch.tensor(1), accumulate=True)
        self.seen += len(labels)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts, self.seen = state["counts"].clone(), state["seen"]


@program()
def metrics(path: str) -> State:
    model, confusion = mlp(10, 3), Confusion()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store,
            model=model,
            optimizer=optimizer,
            loader=batches(classes()),
            stateful={"confusion": confusion},
        )
        shares = store.list("shares")
        for x, y in run.batches(epochs=3):
            out = model(x)
            loss = cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            confusion.update(out, y)
            if run.batch == 11:
                shares.append(confusion.counts.diagonal().sum().item() / confusion.seen)
                confusion.load_state_dict(Confusion().state_dict())
            run.log(loss=loss)
        return {"model": model, "o": optimizer, "c": confusion, "shares": list(shares)}


@program(quick=True)
def unfrozen(path: str) -> State:
    """A body that stands still in the first epoch, and again in the third."""
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=batches())
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            if run.batch == 0:
                model[0].requires_grad_(run.data_epoch == 1)
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program()
def group_added(path: str) -> State:
    """The head is trained alone at first; the store says when the body has its group."""
    model = mlp()
    optimizer = torch.optim.Adam(model[4].parameters(), 1e-2)
    body = {"params": list(model[:4].parameters()), "lr": 1e-3}
    with pmstore.open(path) as store:
        added = store.get("added", False)
        if added:
            optimizer.add_param_group(body)
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=batches())
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            if run.data_epoch == 1 and not added:
                optimizer.add_param_group(body)
                store["added"] = added = True
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program()
def private_gradients(path: str) -> State:
    """A gradient for each sample by torch.func, clipped, with noise, and set by hand."""
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_of(weights: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse(functional_call(model, weights, (x[None],)), y[None])

    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=batches())
        norms = store.list("norms")
        for x, y in run.batches(epochs=2):
            weights = {name: one.detach() for name, one in model.named_parameters()}
            slopes = vmap(grad(loss_of), (None, 0, 0))(weights, x, y)
            sizes = torch.stack([one.flatten(1).norm(dim=1) for one in slopes.values()])
            shrink = (1.0 / sizes.norm(dim=0)).clamp(max=1.0)
            for name, one in model.named_parameters():
                total = torch.einsum("b...,b->...", slopes[name], shrink)
                one.grad = (total + 0.1 * torch.randn_like(one)) / len(x)
            optimizer.step()
            norms.append(sizes.mean().item())
        return {"model": model, "optimizer": optimizer, "norms": list(norms)}


@program(quick=True)
def experience(path: str) -> State:
    """Q-learning on a line of nine places: a ring of experience in the store's arrays, a target
    network, and Python's generator for the moves."""
    online, target = mlp(9, 2), mlp(9, 2)
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.RMSprop(online.parameters(), 1e-2)
    places = torch.eye(9)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model={"online": online, "target": target}, optimizer=optimizer
        )
        ring = store.require("ring", (64, 4), "int64")
        counts = store.require("counts", (2,), "int64")  # moves, and the place
        losses = store.list("losses")
        for _ in run.steps(40):
            for _ in range(8):
                moves, place = (int(number) for number in counts)
                online.eval()
                with torch.no_grad():
                    wise = int(online(places[place : place + 1]).argmax())
                online.train()
                move = random.randrange(2) if random.random() < 0.3 else wise
                next_place = min(8, max(0, place + (1 if move else -1)))
                ring[moves % 64] = (place, move, next_place == 8, next_place)
                counts[:] = (moves + 1, 0 if next_place == 8 else next_place)
            held = ring[np.random.randint(0, min(64, counts[0]), 16)]
            before, move, gain, after = torch.from_numpy(held).T
            with torch.no_grad():
                wanted = gain + 0.9 * (1 - gain) * target.eval()(places[after]).amax(1)
            loss = mse(online(places[before]).gather(1, move[:, None])[:, 0], wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if run.step % 10 == 9:
                target.load_state_dict(online.state_dict())
            losses.append(loss.item())
            run.log(loss=loss)
        kept = {"ring": ring.copy(), "counts": counts.copy(), "losses": list(losses)}
        return {"online": online, "target": target, "optimizer": optimizer, **kept}


@program()
def mirrored(path: str) -> State:
    """Tensors that stay where they are, and are copied while the next step goes on."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=batches(), mirror=True
        )
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
def commit_seldom(path: str) -> State:
    """Only every fourth step is committed; the others are done again after a stop."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=batches(), policy=EveryN(1000)
        )
        losses = store.list("losses")
        for x, y in run.batches(epochs=4):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
            if run.batch % 4 == 3:
                run.commit()
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program()
def stepped_in_backward(path: str) -> State:
    """An optimizer for each parameter, which steps as soon as the gradient is there."""
    model = mlp()
    optimizers = {
        name: torch.optim.SGD([one], 0.05, momentum=0.9) for name, one in model.named_parameters()
    }

    def step_now(name: str) -> Any:
        def step(one: torch.Tensor) -> None:
            optimizers[name].step()
            optimizers[name].zero_grad()

        return step

    for name, one in model.named_parameters():
        one.register_post_accumulate_grad_hook(step_now(name))
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizers, loader=batches())
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            loss = mse(model(x), y)
            loss.backward()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizers": optimizers, "losses": list(losses)}
