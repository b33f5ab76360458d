"""Training on a GPU: the model stays there, and a step commits while the next one runs. Without a
GPU the same in host memory.

python -m examples.gpu run.pm      # interrupt or kill it, and start it again
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import pmstore
import pmstore.torch


def train(path: str, steps: int, device: str) -> list[torch.Tensor]:
    """Goes on from the last committed step, to `steps` in all. Returns: the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 32)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pmstore.open(path) as store:
        # on cuda mirror=True is the default
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, mirror=True)
        print(f"goes on after step {run.step}" if run.resumed else "a new run", f"on {device}")
        for _ in run.steps(steps):
            features = torch.randn(64, 32, device=device)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(features), features.flip(1))
            loss.backward()
            optimizer.step()  # waits until the last commit has read what it is about to write
            run.log(loss=loss)  # the step's commit is copied, and made durable, during the next
    print(f"step {run.step} committed")
    return [parameter.detach().cpu() for parameter in model.parameters()]


if __name__ == "__main__":
    train(
        sys.argv[1] if len(sys.argv) > 1 else "gpu.pm",
        500,
        "cuda" if torch.cuda.is_available() else "cpu",
    )
