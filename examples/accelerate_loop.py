"""A loop with Accelerate whose state is in a store: kill it at any moment, and start it again.

python examples/accelerate_loop.py /dev/shm    # needs accelerate
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pmstore
import pmstore.torch
from pmstore.integrations.accelerate import register


def train(folder: str, epochs: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.5)
    x = torch.randn(2000, 20)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=50, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    with pmstore.open(f"{folder}/accelerate.pm") as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, lr_scheduler=schedule, loader=loader
        )
        register(accelerator, run)
        print(f"{'goes on after' if run.resumed else 'begins at'} step {run.step}")
        for inputs, targets in run.batches(epochs=epochs, every=2):  # an update is a step
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            run.log(loss=loss)
        accelerator.save_state(f"{folder}/accelerate-state")  # what else Accelerate saves
        print(f"step {run.step} committed")


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else ".", int(sys.argv[2]) if len(sys.argv) > 2 else 10)
