"""A GAN learns to draw points of eight clusters on a ring: two models, two optimizers, and noise in
every step.

python -m examples.gan run.pm      # kill it at any moment, and start it again
"""

from __future__ import annotations

import math
import sys

import torch
from torch import nn
from torch.nn.functional import softplus

import pmstore
import pmstore.torch

NOISE = 16
ANGLES = torch.arange(8) * (math.pi / 4)
CENTRES = torch.stack([ANGLES.cos(), ANGLES.sin()], 1)


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 128), nn.LeakyReLU(0.2),
        nn.Linear(128, 128), nn.LeakyReLU(0.2),
        nn.Linear(128, outputs),
    )  # fmt: skip


def train(path: str, steps: int = 2500) -> tuple[float, int]:
    """Goes on from the last committed step, to so many in all. Returns: the share of generated
    points that lie in a cluster, and how many clusters have a share of at least 2 %."""
    torch.manual_seed(0)
    generator, critic = network(NOISE, 2), network(2, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.99))
    of_critic = torch.optim.Adam(critic.parameters(), lr=5e-4, betas=(0.5, 0.99))
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store,
            model={"generator": generator, "critic": critic},
            optimizer={"generator": of_generator, "critic": of_critic},
        )
        print(f"goes on after step {run.step}" if run.resumed else "a new run", flush=True)
        for _ in run.steps(steps):
            real = CENTRES[torch.randint(8, (128,))] + 0.05 * torch.randn(128, 2)
            fake = generator(torch.randn(128, NOISE))
            of_critic.zero_grad()
            critic_loss = (softplus(-critic(real)) + softplus(critic(fake.detach()))).mean()
            critic_loss.backward()
            of_critic.step()
            of_generator.zero_grad()
            generator_loss = softplus(-critic(fake)).mean()
            generator_loss.backward()
            of_generator.step()
            run.log(critic=critic_loss, generator=generator_loss)
        with torch.no_grad():
            distances, nearest = torch.cdist(generator(torch.randn(2000, NOISE)), CENTRES).min(1)
        inside = distances < 0.25
        clusters = int((nearest[inside].bincount(minlength=8) >= 0.02 * 2000).sum())
        share = float(inside.float().mean())
        print(f"step {run.step} committed, {share:.1%} in a cluster, {clusters} clusters of 8")
    return share, clusters


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else "gan.pm")
