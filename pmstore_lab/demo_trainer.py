"""The training job of `pmstore demo`, in a process of its own:
`python -m pmstore_lab.demo_trainer config.json`.

It tells what it does on standard output, a JSON object a line, and is killed without warning.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pmstore
import pmstore.torch
from pmstore import testing
from pmstore.opening import Domain

HELD_OUT = 1000
BATCH = 64


@dataclass(frozen=True, slots=True)
class Config:
    """What the demo tells a trainer."""

    data: str  # folder with images.npy and labels.npy
    store: str | None  # a store's path; None: plain torch, saved to `save`
    save: str | None
    domain: Domain
    steps: int
    seed: int
    threads: int
    die_at_step: int | None = None  # kill itself inside this step's commit
    die_at_fraction: float = 0.0  # of the primitives that a commit makes


@dataclass(slots=True)
class Job:
    """Model, optimizer, scheduler and data: the same in every process of a demo."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    loader: DataLoader[Any]
    test: tuple[torch.Tensor, torch.Tensor]


def make_job(config: Config) -> Job:
    torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(config.seed)
    random.seed(config.seed)
    np.random.seed(config.seed)
    images = torch.from_numpy(np.load(Path(config.data) / "images.npy"))
    labels = torch.from_numpy(np.load(Path(config.data) / "labels.npy"))
    numbers = torch.arange(len(images))
    train = TensorDataset(images[HELD_OUT:], labels[HELD_OUT:], numbers[HELD_OUT:])
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config.steps)
    loader = DataLoader(train, batch_size=BATCH, shuffle=True, drop_last=True)
    return Job(model, optimizer, scheduler, loader, (images[:HELD_OUT], labels[:HELD_OUT]))


def train_step(job: Job, batch: Any) -> float:
    images, labels, _ = batch
    job.optimizer.zero_grad()
    loss = nn.functional.cross_entropy(job.model(images), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    job.optimizer.step()
    job.scheduler.step()
    return loss.item()


def accuracy(job: Job) -> float:
    images, labels = job.test
    job.model.eval()
    with torch.no_grad():
        right = (job.model(images).argmax(dim=1) == labels).sum().item()
    return float(right) / len(labels)


def tell(event: str, **what: Any) -> None:
    print(json.dumps({"event": event, **what}), flush=True)


def train_in_store(config: Config, job: Job) -> None:
    """Every step is a commit. A process that finds a stored run goes on with it."""
    assert config.store is not None
    began = time.monotonic()
    with pmstore.open(config.store, domain=config.domain) as store:
        opened = time.monotonic()
        run = pmstore.torch.attach(
            store,
            model=job.model,
            optimizer=job.optimizer,
            lr_scheduler=job.scheduler,
            loader=job.loader,
        )
        losses = store.require("losses", (config.steps,), "float64")
        order = store.require("order", (config.steps, BATCH), "int64")
        # when the last commit was begun; not part of what is compared
        clock = store.require("clock", (1,), "float64")
        tell(
            "ready",
            step=run.step,
            resumed=run.resumed,
            domain=store.domain,
            open_seconds=opened - began,
            attach_seconds=time.monotonic() - opened,
            last_commit_at=float(clock[0]) if run.resumed else None,
            at=time.monotonic(),
        )
        primitives = _train(config, job, run, losses, order, clock)
        state = sum(p.numel() * p.element_size() for p in job.model.parameters()) * 3
        tell("done", accuracy=accuracy(job), state_bytes=state, primitives=primitives)


def _train(
    config: Config, job: Job, run: pmstore.torch.Run, losses: Any, order: Any, clock: Any
) -> int:
    """Steps and commits to the end, or to the kill. Returns the number of engine writes of the last
    commit."""
    primitives = 0
    end = time.monotonic()
    for batch in run.batches(epochs=None):
        start = end
        step = run.step
        losses[step] = train_step(job, batch)
        order[step] = batch[2].numpy()
        trained = time.monotonic()
        clock[0] = trained
        if config.die_at_step is not None and step + 1 >= config.die_at_step and primitives:
            # A commit is not the same number of primitives every time: go for ever earlier ones
            # until it hits.
            late = step + 1 - config.die_at_step
            chosen = 1 + int(config.die_at_fraction * primitives * 0.5**late)
            tell("armed", primitive=chosen, of=primitives, at=trained)
            testing.kill_at_primitive(chosen)
        else:
            testing.kill_at_primitive(0)  # count
        run.log(loss=losses[step])
        run.commit()
        primitives = testing.primitives_seen()
        end = time.monotonic()
        tell("step", step=run.step, train_seconds=trained - start, commit_seconds=end - trained)
        if run.step == config.steps:
            break
    return primitives


def train_with_save(config: Config, job: Job) -> None:
    """The same job with a checkpoint file at every step: written whole, synced, renamed over the
    old one."""
    assert config.save is not None
    target = Path(config.save)
    losses: list[float] = []
    tell("ready", step=0, resumed=False, at=time.monotonic())
    end = time.monotonic()
    for batch in itertools.chain.from_iterable(itertools.repeat(job.loader)):
        start = end
        losses.append(train_step(job, batch))
        trained = time.monotonic()
        state = {
            "model": job.model.state_dict(),
            "optimizer": job.optimizer.state_dict(),
            "scheduler": job.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "step": len(losses),
        }
        fresh = target.with_suffix(".new")
        with open(fresh, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, target)
        folder = os.open(target.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        end = time.monotonic()
        tell("step", step=len(losses), train_seconds=trained - start, commit_seconds=end - trained)
        if len(losses) == config.steps:
            break
    np.save(target.with_suffix(".losses.npy"), np.array(losses))
    tell("done", accuracy=accuracy(job), state_bytes=target.stat().st_size)


def main(path: str) -> None:
    config = Config(**json.loads(Path(path).read_text(encoding="utf-8")))
    job = make_job(config)
    if config.store is not None:
        train_in_store(config, job)
    else:
        train_with_save(config, job)


if __name__ == "__main__":
    main(sys.argv[1])
