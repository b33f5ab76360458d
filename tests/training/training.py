"""A small training job in several variants, and comparison of stored runs. Tests and their children
import it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pmstore
import pmstore.torch.optim
from pmstore.torch import Run
from pmstore.torch._state.model import ModelBinding
from pmstore.torch._state.optimizer import OptimizerBinding
from pmstore.torch._state.replaced import Replacing
from pmstore.torch.parts import Pieces

FOLLOWING = (
    *(ModelBinding.follow, ModelBinding._follow, ModelBinding.followed, ModelBinding._scan),
    *(ModelBinding._find, ModelBinding._replaced, OptimizerBinding.replace, Pieces.follow),
    *(Replacing.__init__, Replacing.put),
)
"""What a step's end does about parameters that are other objects, or in other places."""
BATCHES = 7  # an epoch


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
    )


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 4)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(60, 3),
    ).to(memory_format=torch.channels_last)


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "conv": conv}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "adam-amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "adam-tensor-lr": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(1e-2)),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "sgd-momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=1e-2, momentum=0.9, nesterov=True
    ),
    "rmsprop": lambda parameters: torch.optim.RMSprop(
        parameters, lr=1e-3, momentum=0.5, centered=True
    ),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-3),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=1e-3),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=1e-3),
    "native-adamw": lambda parameters: pmstore.torch.optim.AdamW(parameters, lr=1e-2),
    "native-sgd": lambda parameters: pmstore.torch.optim.SGD(
        parameters, lr=1e-2, momentum=0.9, nesterov=True
    ),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=1e-2, max_iter=3, history_size=4),
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
    "multistep": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9]),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "onecycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=100
    ),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.95**step
    ),
    "cyclic": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(
        optimizer, 1e-3, 1e-2, step_size_up=4, cycle_momentum=False
    ),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        [5],
    ),
}


@dataclass
class Job:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler | None
    loader: Any

    def attach(self, store: pmstore.Store, **more: Any) -> Run:
        return pmstore.torch.attach(
            store,
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            scaler=self.scaler,
            loader=self.loader,
            **more,
        )

    def step(self, batch: Any) -> float:
        features, labels, _ = batch
        # A little of every generator, as augmentation would use them.
        features = features + 0.01 * random.random() + 0.01 * float(np.random.rand())

        def loss_of() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(features), labels)
            (self.scaler.scale(loss) if self.scaler else loss).backward()
            return loss

        if isinstance(self.optimizer, torch.optim.LBFGS):
            loss = self.optimizer.step(loss_of)
        else:
            loss = loss_of()
            if self.scaler:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return float(loss.detach())


def data() -> TensorDataset:
    drawn = torch.Generator().manual_seed(5)
    features = torch.randn(BATCHES * 6, 8, generator=drawn)
    labels = torch.randint(0, 3, (BATCHES * 6,), generator=drawn)
    return TensorDataset(features, labels, torch.arange(BATCHES * 6))


def make_job(
    model: str = "mlp",
    optimizer: str = "adamw",
    scheduler: str | None = None,
    scaler: bool = False,
    seed: int = 1,
    **loader: Any,
) -> Job:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    module = MODELS[model]()
    made = OPTIMIZERS[optimizer](module.parameters())
    return Job(
        module,
        made,
        SCHEDULERS[scheduler](made) if scheduler else None,
        torch.amp.GradScaler("cpu", growth_interval=3) if scaler else None,
        DataLoader(data(), batch_size=6, shuffle=True, **loader),
    )


def train(
    store: pmstore.Store, job: Job, until: int, total: int, *, half: bool = False, **attach: Any
) -> Run:
    """Attaches and trains until so many steps have ended; losses and batch order are in the store.
    Every step is committed, unless a policy is given. half: the step behind is left open."""
    run = job.attach(store, **{"policy": None} | attach)
    losses = store.require("losses", (total,), "float64")
    order = store.require("order", (total, 6), "int64")
    if run.step == until and not half:
        return run
    for batch in run.batches(epochs=None):
        place = run.step
        losses[place] = job.step(batch)
        order[place] = batch[2].numpy()
        run.log(loss=losses[place])
        if place == until:
            break
        if place + 1 == until and not half:
            run.commit()
            break
    return run


def contents(group: Any, prefix: str = "") -> dict[str, tuple[str, bytes]]:
    """Every name below a store or group, with a description and the bytes of what it holds; without
    what was measured of its runs."""
    found = _leaves(group, prefix)
    measured = ("pmstore.course/", "pmstore.scheduler/")
    return {name: held for name, held in found if not name.startswith(measured)}


def _leaves(group: Any, prefix: str) -> Iterator[tuple[str, tuple[str, bytes]]]:
    for name in group:
        item = group[name]
        if isinstance(item, pmstore.Slots):
            item = item.current
        if isinstance(item, torch.Tensor):
            flat = item.detach().contiguous().reshape(-1)
            bits = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            yield prefix + name, (f"{tuple(item.shape)} {item.dtype}", bits)
        elif isinstance(item, np.ndarray):
            yield prefix + name, (f"{item.shape} {item.dtype}", item.tobytes())
        elif hasattr(item, "keys") and not isinstance(item, dict):
            yield from _leaves(item, f"{prefix}{name}/")
        else:
            yield prefix + name, ("value", repr(item).encode())


def assert_same(ours: dict[str, tuple[str, bytes]], theirs: dict[str, tuple[str, bytes]]) -> None:
    assert ours.keys() == theirs.keys()
    differ = [name for name in ours if ours[name] != theirs[name]]
    assert not differ, differ


def undisturbed(path: Path, steps: int, **kinds: Any) -> dict[str, tuple[str, bytes]]:
    """The store's contents after a run that nothing disturbed."""
    with pmstore.open(path) as store:
        train(store, make_job(**kinds), steps, steps).detach()
        return contents(store)
