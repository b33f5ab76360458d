"""A small training program whose every setting can be changed. Tests and their children import
it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset, random_split

import pmstore
import pmstore.torch
from pmstore.torch import Resume, Run


def cosine(length: int) -> Callable[[Any], Any]:
    return lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length)


def steps(length: int) -> Callable[[Any], Any]:
    return lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, length)


def program(
    *,
    width: int = 16,
    outputs: int = 1,
    extra: bool = False,
    bias: bool = True,
    norm: bool = False,
    dtype: torch.dtype = torch.float32,
    lr: Any = 1e-2,
    weight_decay: float = 0.01,
    kind: Any = torch.optim.AdamW,
    groups: int = 1,
    frozen: tuple[str, ...] = (),
    schedule: Callable[[Any], Any] | None = None,
    samples: int = 100,
    batch_size: int = 20,
    shuffle: bool = True,
    split: int | None = None,
    loader: bool = True,
    stateful: dict[str, Any] | None = None,
    seed: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """The arguments of `attach`. split: seed of an order of the samples. more: of the loader."""
    torch.manual_seed(seed)
    features = torch.randn(samples, 10, generator=torch.Generator().manual_seed(7))
    data: Any = TensorDataset(torch.arange(samples), features)
    if split is not None:
        chosen = torch.Generator().manual_seed(split)
        data = ConcatDataset([random_split(data, [samples], chosen)[0]])
    model = nn.Module()
    model.body = nn.Linear(10, width, bias=bias)
    if norm:
        model.norm = nn.BatchNorm1d(width)
    if extra:
        model.extra = nn.Linear(width, width)
    model.head = nn.Linear(width, outputs)
    model.to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    parameters: Any = list(model.parameters())
    if groups == 2:
        parameters = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": lr / 10}]
    settings = {"weight_decay": weight_decay} if kind is torch.optim.AdamW else {}
    optimizer = kind(parameters, lr=lr, **settings)
    given: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if schedule is not None:
        given["lr_scheduler"] = schedule(optimizer)
    if loader:
        given["loader"] = DataLoader(data, batch_size=batch_size, shuffle=shuffle, **more)
    if stateful is not None:
        given["stateful"] = stateful
    return given


def forward(model: nn.Module, features: torch.Tensor) -> torch.Tensor:
    hidden = model.body(features.to(model.body.weight.dtype))
    for name in ("norm", "extra"):
        if hasattr(model, name):
            hidden = getattr(model, name)(hidden)
    return model.head(torch.tanh(hidden))


def step(given: dict[str, Any], run: Run, features: torch.Tensor) -> None:
    loss = (forward(given["model"], features).float().mean(1) - features.sum(1)).square().mean()
    given["optimizer"].zero_grad()
    loss.backward()
    given["optimizer"].step()
    if "lr_scheduler" in given:
        given["lr_scheduler"].step()
    run.log(loss=loss)


def train(
    store: pmstore.Store,
    given: dict[str, Any],
    most: int,
    *,
    epochs: int = 2,
    resume: Resume | None = None,
) -> tuple[Run, list[list[int]]]:
    """Attaches, and trains so many steps, which are committed. Returns the samples of each."""
    run = pmstore.torch.attach(store, **given, resume=resume)
    seen: list[list[int]] = []
    if most and "loader" in given:
        for numbers, features in run.batches(epochs=epochs):
            step(given, run, features)
            seen.append(numbers.tolist())
            if len(seen) == most:
                run.commit()
                break
    elif most:
        for _ in range(most):
            with run.next_step():
                step(given, run, torch.ones(4, 10))
        run.commit()
    return run, seen


def go_on(run: Run, given: dict[str, Any], until: int) -> None:
    """Trains until so many steps have ended."""
    for _, features in run.batches(epochs=9):
        step(given, run, features)
        if run.step + 1 == until:
            run.end_step()
            break
