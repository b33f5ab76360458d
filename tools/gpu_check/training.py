"""The training that the check of resuming kills.

    python -m tools.gpu_check.training STORE STEPS DEVICE

Prints "ready" behind the first step of a life, and at the end a digest of all that was trained.
"""

from __future__ import annotations

import hashlib
import os
import sys

import torch
from torch import nn

import pmstore
import pmstore.torch

WIDTH = 512


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of every bit."""
    found = hashlib.sha256()
    state = optimizer.state_dict()["state"]
    tensors = list(model.state_dict().values()) + [
        value for one in state.values() for value in one.values()
    ]
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train(path: str, steps: int, device: torch.device) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.ReLU(),
        nn.Dropout(0.1),  # draws from the device's generator
        nn.Linear(WIDTH, 64),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, mirror=True, policy=None
        )
        second = run.step + 1
        for n in run.steps(steps):
            if n == second:
                print("ready", flush=True)
            features = torch.randn(32, 64, device=device)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(features), features.flip(1))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        found = digest(model, optimizer)
    with pmstore.open(path, mode="r") as store:
        problems = store.check().problems
        if problems:
            raise SystemExit(f"the store is damaged: {problems}")
    return found


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS sums in one order
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    print("digest", train(sys.argv[1], int(sys.argv[2]), torch.device(sys.argv[3])), flush=True)
