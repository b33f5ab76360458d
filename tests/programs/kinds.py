"""Ten kinds of training with more to them than a model, an optimizer and a loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pmstore
import pmstore.torch

from .data import batches, images, mlp, numbers
from .registry import State, program

mse = nn.functional.mse_loss
cross_entropy = nn.functional.cross_entropy


@program()
def diffusion(path: str) -> State:
    """Learns the noise of points on a ring; samples are drawn now and then from the average of the
    weights."""
    angles = torch.rand(120, generator=torch.Generator().manual_seed(2)) * 6.3
    ring = torch.stack([angles.cos(), angles.sin()], 1)
    left = torch.linspace(0.99, 0.05, 20)
    net = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Dropout(0.05), nn.Linear(32, 2))
    mean = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model={"net": net, "mean": mean}, optimizer=optimizer, loader=ring.split(10)
        )
        losses, drawn = store.list("losses"), store.list("drawn")
        for points in run.batches(epochs=3):
            time = torch.randint(0, 20, (10,))
            noise, share = torch.randn_like(points), left[time][:, None]
            mixed = share.sqrt() * points + (1 - share).sqrt() * noise
            loss = mse(net(torch.cat([mixed, time[:, None] / 20], 1)), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean.update_parameters(net)
            if run.batch == 11:
                x = torch.randn(4, 2)
                with torch.no_grad():
                    for step in range(19, 0, -3):
                        x = x - 0.1 * mean(torch.cat([x, torch.full((4, 1), step / 20)], 1))
                        x = x + 0.05 * torch.randn_like(x)
                drawn.append(x.tolist())
            losses.append(loss.item())
            run.log(loss=loss)
        return {"net": net, "mean": mean, "o": optimizer, "l": list(losses), "d": list(drawn)}


class Experts(nn.Module):
    """Each sample goes to one of four experts, by a noisy router; how many went where is a
    buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(10, 4)
        self.experts = nn.ModuleList(mlp(10, 1, 8) for _ in range(4))
        self.register_buffer("load", torch.zeros(4, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.router(x) + 0.1 * torch.randn(len(x), 4)
        chances = logits.softmax(1)
        chosen = chances.argmax(1)
        out = x.new_zeros(len(x), 1)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows) > 1:  # else it has no gradients in this step
                out = out.index_add(0, rows, expert(x[rows]) * chances[rows, number, None])
        counts = torch.bincount(chosen, minlength=4)
        self.load += counts
        return out, 4 * (counts / len(x) * chances.mean(0)).sum()


@program()
def mixture_of_experts(path: str) -> State:
    model = Experts()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=batches(size=6))
        losses = store.list("losses")
        for x, y in run.batches(epochs=2):
            out, balance = model(x)
            loss = mse(out, y) + 0.01 * balance
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


class Poles:
    """Carts that fall to one side unless they are pushed; many at once. Their states lie in arrays
    that are given."""

    def __init__(self, states: Any, ages: Any) -> None:
        self.states, self.ages = states, ages

    def step(self, pushed: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        place, speed = self.states[:, 0], self.states[:, 1]
        speed += 0.1 * place + np.where(pushed, 0.1, -0.1) + np.random.normal(0, 0.01, len(place))
        place += speed
        self.ages += 1
        fallen = (np.abs(place) > 1) | (self.ages > 30)
        self.states[fallen] = np.random.normal(0, 0.1, (fallen.sum(), 2))
        self.ages[fallen] = 0
        return np.where(fallen, -1.0, 1.0).astype(np.float32)


@program()
def actor_critic(path: str) -> State:
    """Eight environments, whose states are arrays of the store; an optimizer for each network."""
    actor, critic = mlp(2, 2), mlp(2, 1)
    act = torch.optim.Adam(actor.parameters(), 1e-2)
    judge = torch.optim.RMSprop(critic.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store,
            model={"actor": actor, "critic": critic},
            optimizer={"actor": act, "critic": judge},
        )
        poles = Poles(store.require("states", (8, 2), "float32"), store.require("ages", (8,), "i8"))
        rewards = store.list("rewards")
        for _ in run.steps(25):
            logs, values, gains = [], [], []
            for _ in range(4):
                seen = torch.from_numpy(poles.states.copy())
                choice = torch.distributions.Categorical(logits=actor(seen))
                action = choice.sample()
                logs.append(choice.log_prob(action))
                values.append(critic(seen)[:, 0])
                gains.append(torch.from_numpy(poles.step(action.numpy() == 1)))
            returns = torch.stack(gains).flip(0).cumsum(0).flip(0)
            better = returns - torch.stack(values)
            act.zero_grad()
            judge.zero_grad()
            (-(better.detach() * torch.stack(logs)).mean() + better.square().mean()).backward()
            act.step()
            judge.step()
            rewards.append(returns[0].mean().item())
        kept = [poles.states.copy(), poles.ages.copy()]
        networks = {"actor": actor, "critic": critic, "act": act, "judge": judge}
        return {**networks, "poles": kept, "rewards": list(rewards)}


class Contrast(nn.Module):
    """Two encoders, one trained and one that follows it, and a queue of keys (MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = mlp(10, 8), mlp(10, 8)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", nn.functional.normalize(torch.randn(8, 40), dim=0))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def keys(self, x: torch.Tensor) -> torch.Tensor:
        for followed, one in zip(self.query.parameters(), self.key.parameters(), strict=True):
            one.lerp_(followed, 0.05)
        return nn.functional.normalize(self.key(x), dim=1)

    @torch.no_grad()
    def enqueue(self, keys: torch.Tensor) -> None:
        place = int(self.place)
        self.queue[:, place : place + len(keys)] = keys.T
        self.place.copy_((self.place + len(keys)) % 40)


@program()
def contrastive(path: str) -> State:
    model = Contrast()
    optimizer = torch.optim.SGD(model.query.parameters(), 0.1, momentum=0.9)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=batches())
        losses = store.list("losses")
        for x, _ in run.batches(epochs=3):
            asked = nn.functional.normalize(model.query(x + 0.1 * torch.randn_like(x)), dim=1)
            keys = model.keys(x + 0.1 * torch.randn_like(x))
            same = (asked * keys).sum(1, keepdim=True)
            logits = torch.cat([same, asked @ model.queue.clone()], 1) / 0.2
            loss = cross_entropy(logits, torch.zeros(len(x), dtype=torch.int64))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.enqueue(keys)
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program(quick=True)
def adversarial(path: str) -> State:
    """A GAN with gradient penalty: two models, two optimizers, three critic steps for one of the
    generator."""
    maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    critic = nn.Sequential(nn.Linear(10, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    make = torch.optim.Adam(maker.parameters(), 2e-3, betas=(0.0, 0.9))
    judge = torch.optim.Adam(critic.parameters(), 2e-3, betas=(0.0, 0.9))
    slower = [torch.optim.lr_scheduler.ExponentialLR(one, 0.95) for one in (make, judge)]
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store,
            model={"maker": maker, "critic": critic},
            optimizer={"maker": make, "critic": judge},
            lr_scheduler=slower,
            loader=batches(),
        )
        losses = store.list("losses")
        for real, _ in run.batches(epochs=3):
            made = maker(torch.randn(len(real), 4))
            share = torch.rand(len(real), 1)
            between = (share * real + (1 - share) * made.detach()).requires_grad_()
            slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
            loss = critic(made.detach()).mean() - critic(real).mean()
            loss = loss + 10 * (slope.norm(dim=1) - 1).square().mean()
            judge.zero_grad()
            loss.backward()
            judge.step()
            if run.batch % 3 == 2:
                make.zero_grad()
                (-critic(made).mean()).backward()
                make.step()
                for one in slower:
                    one.step()
            losses.append(loss.item())
            run.log(loss=loss)
        networks = {"maker": maker, "critic": critic, "make": make, "judge": judge}
        return {**networks, "slower": slower, "losses": list(losses)}


@program()
def meta_learning(path: str) -> State:
    """MAML: one step on each of five tasks by torch.func, and the step through them."""
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def loss_of(weights: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse(functional_call(model, weights, (x,)), y)

    def adapted(weights: Any, task: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = task
        slopes = grad(loss_of)(weights, x[:5], y[:5])
        moved = {name: weights[name] - 0.1 * slopes[name] for name in weights}
        return loss_of(moved, x[5:], y[5:])

    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer)
        losses = store.list("losses")
        for _ in run.steps(30):
            x, phase = torch.rand(5, 10, 1) * 4 - 2, torch.rand(5, 1, 1) * 3
            weights = dict(model.named_parameters())
            loss = vmap(adapted, (None, 0))(weights, (x, torch.sin(x + phase))).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


class Masked(nn.Module):
    """Sees a quarter of the patches, and says what the others are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(4, 16), nn.Parameter(torch.randn(16, 16) * 0.02)
        self.hidden = nn.Parameter(torch.zeros(16))
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.decoder = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.out = nn.Linear(16, 4)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        order = torch.rand(patches.shape[:2]).argsort(1)
        index = order[:, :4, None].expand(-1, -1, 16)
        seen = self.encoder((self.embed(patches) + self.place).gather(1, index))
        full = self.hidden.expand(len(patches), 16, 16).scatter(1, index, seen)
        missed = (self.out(self.decoder(full + self.place)) - patches).square().mean(2)
        return missed.gather(1, order[:, 4:]).mean()


@program()
def masked_autoencoder(path: str) -> State:
    model = Masked()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=batches(images())
        )
        losses = store.list("losses")
        for x, _ in run.batches(epochs=3):
            patches = nn.functional.unfold(x, 2, stride=2).transpose(1, 2)
            loss = model(patches)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


class Harder(torch.utils.data.Dataset[Any]):
    """Short and easy at first: each stage has more samples, and more noise."""

    stage = 0

    def __len__(self) -> int:
        return 40 + 20 * self.stage

    def __getitem__(self, index: int) -> Any:
        x, y = numbers()[index]
        drawn = torch.Generator().manual_seed(100 * index + self.stage)
        return x + 0.05 * self.stage * torch.randn(10, generator=drawn), y


@program()
def curriculum(path: str) -> State:
    """The loader is another one in each epoch: longer, in larger batches, harder."""
    data, model = Harder(), mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    class Stages:
        """The loader of the stage, chosen when it is iterated."""

        def __iter__(self) -> Iterator[Any]:
            return iter(batches(data, 5 + 5 * data.stage))

    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=Stages())
        losses = store.list("losses")
        for stage in run.epochs(4):
            data.stage = int(stage)
            for x, y in stage:
                loss = mse(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append((len(x), loss.item()))
                run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program()
def quantization_aware(path: str) -> State:
    """Observers whose buffers change their sizes at the first step; frozen in the last epoch."""
    import torch.ao.quantization as quantization

    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1)).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    quantization.prepare_qat(model, inplace=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=batches())
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            if run.data_epoch == 2:
                model.apply(quantization.disable_observer)
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}
