"""LoRA (Hu et al., 2021): a network that reads digits is frozen, and small adapters teach it digits
that lie on their side. A commit keeps the adapters alone.

python -m examples.lora run.pm      # kill it at any moment, and start it again
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pmstore
import pmstore.torch


class LoRA(nn.Module):
    """A product of two thin matrices that is added to a frozen layer."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))
        layer.requires_grad_(False).register_forward_hook(self.added)

    def added(
        self, layer: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor
    ) -> torch.Tensor:
        return output + inputs[0] @ self.down.T @ self.up.T


def fit(
    store: pmstore.Store,
    name: str,
    net: nn.Module,
    part: nn.Module,
    data: TensorDataset,
    epochs: int,
) -> None:
    """A run of that name trains a part of the network; it goes on where it was."""
    loader = DataLoader(data, batch_size=50, shuffle=True)
    optimizer = torch.optim.AdamW(part.parameters(), lr=3e-3)
    run = pmstore.torch.attach(store, model=part, optimizer=optimizer, loader=loader, name=name)
    how = f"goes on after step {run.step}" if run.resumed else "a new run"
    print(f"{name}: {how}", flush=True)
    for inputs, targets in run.batches(epochs=epochs):
        loss = nn.functional.cross_entropy(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
    print(f"{name}: step {run.step} committed", flush=True)
    run.detach()  # a store has one run at a time


def train(path: str, epochs: int = 10) -> tuple[float, float]:
    """Goes on from the last committed batch, to so many epochs of the adapters in all. Returns: the
    share of new images on their side that are read right, without the adapters and with them."""
    torch.manual_seed(0)
    digits = load_digits()
    upright = torch.tensor(digits.images, dtype=torch.float32) / 16
    turned, labels = upright.rot90(1, (1, 2)), torch.tensor(digits.target)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
        nn.Linear(512, 10),
    )  # fmt: skip
    with pmstore.open(path) as store:
        fit(store, "base", net, net, TensorDataset(upright[:1400], labels[:1400]), epochs=3)
        before = share_right(net, turned[1400:], labels[1400:])
        adapters = nn.ModuleList([LoRA(layer) for layer in net if isinstance(layer, nn.Linear)])
        fit(store, "lora", net, adapters, TensorDataset(turned[:1400], labels[:1400]), epochs)
        right = share_right(net, turned[1400:], labels[1400:])
    print(f"{right:.1%} of new images right with the adapters, {before:.1%} without")
    return before, right


@torch.no_grad()
def share_right(net: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float((net(images).argmax(1) == labels).float().mean())


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else "lora.pm")
