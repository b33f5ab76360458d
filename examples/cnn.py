"""A convolutional network learns handwritten digits, with batch normalisation, dropout, images that
are shifted at random, and a learning rate that rises and falls.

python -m examples.cnn run.pm      # kill it at any moment, and start it again
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pmstore
import pmstore.torch


def shifted(images: torch.Tensor) -> torch.Tensor:
    """By one pixel at most, another way in each batch."""
    down, right = torch.randint(-1, 2, (2,)).tolist()
    return images.roll((down, right), (2, 3))


def train(path: str, epochs: int = 12) -> float:
    """Goes on from the last committed batch, to so many epochs in all. Returns: the share of new
    images that the network reads right."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    train_set, test_set = (
        TensorDataset(images[:1400], labels[:1400]),
        (images[1400:], labels[1400:]),
    )
    loader = DataLoader(train_set, batch_size=50, shuffle=True)

    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 16, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.02, total_steps=epochs * len(loader)
    )
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, lr_scheduler=schedule, loader=loader
        )
        print(f"goes on after step {run.step}" if run.resumed else "a new run", flush=True)
        for epoch in run.epochs(epochs):
            model.train()
            for inputs, targets in epoch:
                loss = nn.functional.cross_entropy(model(shifted(inputs)), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                run.log(loss=loss)
            run.log(right=share_right(model, *test_set))  # the epoch's end is a step too
        right = float(run.history("right")[1][-1])
        print(f"step {run.step} committed, {right:.1%} of new images right")
    return right


@torch.no_grad()
def share_right(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    return float((model(images).argmax(1) == labels).float().mean())


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else "cnn.pm")
