"""A diffusion model (Ho et al., 2020) learns two half moons, with an average of its weights that it
draws with.

python -m examples.diffusion run.pm      # kill it at any moment, and start it again
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import make_moons
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import pmstore
import pmstore.torch

TIMES = 50
BETA = torch.linspace(1e-3, 0.2, TIMES)
KEPT = torch.cumprod(1 - BETA, 0)  # of the data's variance, after each time


class Denoiser(nn.Module):
    """Tells the noise that is in a point at a time."""

    waves: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", 2 * torch.randn(2, 32))
        self.point, self.time = nn.Linear(64, 128), nn.Embedding(TIMES, 128)
        self.rest = nn.Sequential(nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 2))

    def forward(self, points: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        angles = points @ self.waves
        return self.rest(self.point(torch.cat([angles.sin(), angles.cos()], 1)) + self.time(times))


def train(path: str, epochs: int = 120) -> float:
    """Goes on from the last committed batch, to so many epochs in all. Returns: the share of drawn
    points that lie beside a point of the moons."""
    torch.manual_seed(0)
    moons = torch.tensor(make_moons(2000, noise=0.02, random_state=0)[0], dtype=torch.float32)
    moons = (moons - moons.mean(0)) / moons.std(0)
    loader = DataLoader(TensorDataset(moons), batch_size=200, shuffle=True)
    model = Denoiser()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model={"model": model, "average": average}, optimizer=optimizer, loader=loader
        )
        print(f"goes on after step {run.step}" if run.resumed else "a new run", flush=True)
        for (points,) in run.batches(epochs=epochs):
            times, noise = torch.randint(TIMES, (len(points),)), torch.randn_like(points)
            kept = KEPT[times, None]
            noisy = kept.sqrt() * points + (1 - kept).sqrt() * noise
            loss = nn.functional.mse_loss(model(noisy, times), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            run.log(loss=loss)
        beside = float((torch.cdist(drawn(average, 500), moons).amin(1) < 0.25).float().mean())
        print(f"step {run.step} committed, {beside:.1%} of drawn points lie on the moons")
    return beside


@torch.no_grad()
def drawn(model: nn.Module, count: int) -> torch.Tensor:
    """Points, from noise, one time after another."""
    points = torch.randn(count, 2)
    for time in reversed(range(TIMES)):
        noise = model(points, torch.full((count,), time))
        points = (points - BETA[time] / (1 - KEPT[time]).sqrt() * noise) / (1 - BETA[time]).sqrt()
        if time:
            points += BETA[time].sqrt() * torch.randn_like(points)
    return points


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else "diffusion.pm")
