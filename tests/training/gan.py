"""A program with several models, optimizers and schedulers, and what tests of such share."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pmstore
import pmstore.torch.optim
from pmstore.torch import Run, attach


def in_heap(store: pmstore.Store, name: str, tensor: torch.Tensor) -> bool:
    return bool(store[name].data_ptr() == tensor.data_ptr())


class Gan:
    """A Wasserstein GAN: the critic steps in every step, the generator in every second; an average
    of the generator's weights. The critic keeps the gradients of the generator's loss until its own
    next step."""

    def __init__(
        self, native: bool = False, critic_native: bool | None = None, mirror: bool | None = None
    ) -> None:
        torch.manual_seed(3)
        random.seed(3)
        self.mirror = mirror
        self.g = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
        )
        self.d = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
        self.average = AveragedModel(
            self.g, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True
        )
        critic_native = native if critic_native is None else critic_native
        kinds: Any = {False: torch.optim.AdamW, True: pmstore.torch.optim.AdamW}
        self.of_g = kinds[native](self.g.parameters(), lr=1e-2)
        self.of_d = kinds[critic_native](self.d.parameters(), lr=2e-2)
        self.schedulers = [
            torch.optim.lr_scheduler.StepLR(self.of_g, 3, gamma=0.5),
            torch.optim.lr_scheduler.CosineAnnealingLR(self.of_d, 20),
        ]

    def attach(self, store: pmstore.Store) -> Run:
        return attach(
            store,
            model={"g": self.g, "d": self.d, "average": self.average},
            optimizer={"g": self.of_g, "d": self.of_d},
            lr_scheduler=self.schedulers,
            mirror=self.mirror,
            policy=None,
        )

    def step(self, number: int) -> None:
        noise, real = torch.randn(6, 4), torch.randn(6, 3) + 2
        made = self.g(noise)
        if number % 4 != 3:  # else the generator's gradients are in these too
            self.of_d.zero_grad()
        (self.d(made.detach()).mean() - self.d(real).mean()).backward()
        self.of_d.step()
        self.schedulers[1].step()
        if number % 2 == 0:
            self.of_g.zero_grad()
            (-self.d(made).mean()).backward()
            self.of_g.step()
            self.schedulers[0].step()
            self.average.update_parameters(self.g)

    def train(self, store: pmstore.Store, until: int) -> None:
        run = self.attach(store)
        for number in run.steps(until):
            self.step(number)
        run.detach()

    def state(self) -> dict[str, Any]:
        """What plain torch would save."""
        pieces = {"g": self.g, "d": self.d, "average": self.average}
        pieces |= {"of_g": self.of_g, "of_d": self.of_d}
        return {name: piece.state_dict() for name, piece in pieces.items()}


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)
