"""Networks of the common kinds, each with its own way of having state."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import pmstore
import pmstore.torch

from .data import batches, classes, images, mlp, numbers, words
from .registry import State, program

mse = nn.functional.mse_loss
cross_entropy = nn.functional.cross_entropy


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels, momentum=None),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.path(x))


@program("plain", "channels-last")
def resnet(path: str, kind: str) -> State:
    """Batch statistics, exponential and cumulative; images turned and shifted at random."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), Residual(4), Residual(4), nn.Flatten(), nn.Linear(256, 2)
    )
    if kind == "channels-last":
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=batches(images())
        )
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            if random.random() < 0.5:
                x = x.flip(3)
                y = 1 - y
            x = x.roll(int(torch.randint(-1, 2, ())), 2)
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


class Last(nn.Module):
    """A recurrent network, and a line from its last output."""

    def __init__(self, network: nn.RNNBase, width: int) -> None:
        super().__init__()
        self.embed, self.network = nn.Embedding(20, 12), network
        self.out = nn.Linear(width, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.network(self.embed(tokens))[0][:, -1])


@program("rnn", "lstm", "gru")
def recurrent(path: str, kind: str) -> State:
    """Predicts the last token. The LSTM has a dropout of its own, the GRU two directions."""
    network: nn.RNNBase = {
        "rnn": lambda: nn.RNN(12, 16, batch_first=True),
        "lstm": lambda: nn.LSTM(12, 16, 2, dropout=0.2, batch_first=True, proj_size=8),
        "gru": lambda: nn.GRU(12, 8, bidirectional=True, batch_first=True),
    }[kind]()
    model = Last(network, 8 if kind == "lstm" else 16)
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=batches(words()))
        losses = store.list("losses")
        for (tokens,) in run.batches(epochs=3):
            loss = cross_entropy(model(tokens[:, :-1]), tokens[:, -1])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program(quick=True)
def carried_state(path: str) -> State:
    """A long text in pieces: the recurrent state goes from step to step, in the store."""
    network, out = nn.LSTM(10, 16, batch_first=True), nn.Linear(16, 1)
    model = nn.ModuleList([network, out])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    text = numbers(400)[:]
    pieces = [(text[0][i : i + 10], text[1][i : i + 10]) for i in range(0, 400, 10)]
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=pieces)
        carried = store.require("carried", (2, 1, 1, 16), torch.float32)
        losses = store.list("losses")
        for x, y in run.batches():
            outputs, state = network(x[None], (carried[0].clone(), carried[1].clone()))
            loss = mse(out(outputs)[0], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            carried[0] = state[0].detach()
            carried[1] = state[1].detach()
            losses.append(loss.item())
            run.log(loss=loss)
        kept = carried.clone()
        return {"model": model, "optimizer": optimizer, "c": kept, "losses": list(losses)}


class Language(nn.Module):
    """A small GPT; the weights of its two ends are one."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(20, 16), nn.Parameter(torch.zeros(9, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(16, 20, bias=False)
        self.out.weight = self.embed.weight
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens) + self.place[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        if not self.recompute:
            return self.out(self.layers(x, mask, is_causal=True))
        for layer in self.layers.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, mask, use_reentrant=False)
        return self.out(x)


@program("tied", "recomputed")
def language(path: str, kind: str) -> State:
    """Warm-up and decay; "recomputed" forgets activations and makes them again, with the same
    dropout."""
    model = Language(kind == "recomputed")
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 8, (32 - step) / 24)
    )
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store,
            model=model,
            optimizer=optimizer,
            lr_scheduler=schedule,
            loader=batches(words(), drop_last=True),
        )
        losses = store.list("losses")
        for (tokens,) in run.batches(epochs=4):
            logits = model(tokens[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


class Coder(nn.Module):
    def __init__(self, variational: bool) -> None:
        super().__init__()
        self.variational = variational
        self.down = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.GELU(), nn.Linear(24, 8))
        self.up = nn.Sequential(nn.Linear(4, 24), nn.GELU(), nn.Linear(24, 64), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, spread = self.down(x).chunk(2, 1)
        if not self.variational:
            return self.up(mean), mean.new_zeros(())
        code = mean + torch.randn_like(mean) * (spread / 2).exp()
        return self.up(code), -0.5 * (1 + spread - mean.square() - spread.exp()).mean()


@program("variational", "denoising")
def autoencoder(path: str, kind: str) -> State:
    model = Coder(kind == "variational")
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=batches(images())
        )
        losses = store.list("losses")
        for x, _ in run.batches(epochs=3):
            noisy = x if kind == "variational" else x + 0.1 * torch.randn_like(x)
            made, divergence = model(noisy)
            loss = nn.functional.binary_cross_entropy(made, x.flatten(1)) + 0.1 * divergence
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append((loss.item(), divergence.item()))
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program("spectral", "weight", "orthogonal", "old-spectral", "old-weight")
def parametrized(path: str, kind: str) -> State:
    """Weights that are computed from others, some with vectors that move in each forward."""
    wrap = {
        "spectral": parametrizations.spectral_norm,
        "weight": parametrizations.weight_norm,
        "orthogonal": parametrizations.orthogonal,
        "old-spectral": nn.utils.spectral_norm,
        "old-weight": nn.utils.weight_norm,
    }[kind]
    model = nn.Sequential(wrap(nn.Linear(10, 10)), nn.Tanh(), nn.Linear(10, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=batches())
        losses = store.list("losses")
        for x, y in run.batches(epochs=2):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program()
def pruned(path: str) -> State:
    """From the start half of the weights are masked, and at each data epoch's end some more."""
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
    prune.l1_unstructured(model[0], "weight", 0.5)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=batches())
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if run.batch == 11:
                size = model[0].weight_orig.abs().masked_fill(model[0].weight_mask == 0, 9.0)
                model[0].weight_mask.view(-1)[size.view(-1).topk(10, largest=False).indices] = 0
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program("sparse-adam", "sgd", "adagrad")
def embeddings(path: str, kind: str) -> State:
    """Sparse gradients: two optimizers in one class are not needed, all weights are embeddings."""
    model = nn.ModuleList([nn.EmbeddingBag(20, 8, sparse=True), nn.Embedding(20, 8, sparse=True)])
    optimizer: torch.optim.Optimizer = {
        "sparse-adam": lambda: torch.optim.SparseAdam(model.parameters(), 1e-2),
        "sgd": lambda: torch.optim.SGD(model.parameters(), 0.5),
        "adagrad": lambda: torch.optim.Adagrad(model.parameters(), 0.1),
    }[kind]()
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=batches(words()))
        losses = store.list("losses")
        for (tokens,) in run.batches(epochs=3):
            context, wrong = model[0](tokens[:, :-1]), torch.randint(0, 20, (len(tokens),))
            right = (context * model[1](tokens[:, -1])).sum(1)
            loss = nn.functional.softplus((context * model[1](wrong)).sum(1) - right).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program()
def compiled(path: str) -> State:
    """torch.compile; the model that is attached is the one inside."""
    model = mlp()
    fast = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=batches())
        losses = store.list("losses")
        for x, y in run.batches(epochs=2):
            loss = mse(fast(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program()
def lazy(path: str) -> State:
    """Layers that take their widths from the first batch, before the store sees them."""
    model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))
    model(torch.zeros(4, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=batches(classes())
        )
        losses = store.list("losses")
        for x, y in run.batches(epochs=2):
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program()
def multi_task(path: str) -> State:
    """Two heads whose losses weigh what was learned; one of them trains a part of the steps."""
    trunk, line, kind = mlp(10, 8), nn.Linear(8, 1), nn.Linear(8, 3)
    weights = nn.Parameter(torch.zeros(2))
    model = nn.ModuleDict({"trunk": trunk, "line": line, "kind": kind})
    model.register_parameter("weights", weights)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    data = torch.utils.data.TensorDataset(*numbers()[:], classes()[:][1])
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=batches(data))
        losses = store.list("losses")
        for x, number, label in run.batches(epochs=3):
            seen = trunk(x)
            first, second = mse(line(seen), number), cross_entropy(kind(seen), label)
            loss = first * (-weights[0]).exp() + weights[0]
            if random.random() < 0.6:
                loss = loss + second * (-weights[1]).exp() + weights[1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append((first.item(), second.item()))
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program()
def distillation(path: str) -> State:
    """A frozen teacher beside the pupil; it is made again from the seed in each life."""
    teacher, model = mlp(10, 3, 32).eval().requires_grad_(False), mlp(10, 3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=batches(classes())
        )
        losses = store.list("losses")
        for x, y in run.batches(epochs=3):
            with torch.no_grad():
                told = teacher(x)
            out = model(x)
            loss = cross_entropy(out, y) + nn.functional.kl_div(
                out.log_softmax(1), told.log_softmax(1), log_target=True, reduction="batchmean"
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}


@program()
def graph(path: str) -> State:
    """All nodes in each step, no loader: the number of steps says when it ends."""
    drawn = torch.Generator().manual_seed(5)
    nodes = torch.randn(40, 6, generator=drawn)
    edges = (torch.rand(40, 40, generator=drawn) < 0.1).float() + torch.eye(40)
    edges = (edges / edges.sum(1, keepdim=True)).to_sparse()
    labels = nodes[:, :3].argmax(1)
    model = nn.ModuleList([nn.Linear(6, 16), nn.Linear(16, 3)])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=5e-4)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer)
        losses = store.list("losses")
        for _ in run.steps(40):
            hidden = torch.relu(torch.sparse.mm(edges, model[0](nodes)))
            hidden = nn.functional.dropout(hidden, 0.3)
            loss = cross_entropy(torch.sparse.mm(edges, model[1](hidden)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        return {"model": model, "optimizer": optimizer, "losses": list(losses)}
