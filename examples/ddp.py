"""Data-parallel training whose ranks may be killed: all go on from the same step.

python examples/ddp.py /dev/shm    # two ranks; kill one of them, or all, and start it again

It starts its ranks with torchrun, which also starts them again if one dies.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pmstore
import pmstore.torch


def train(folder: str, epochs: int) -> None:
    """One rank's part. Each has a store of its own, on a disk of its own machine."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(2000, 20)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=50, sampler=sampler)
    with pmstore.open(f"{folder}/ddp{rank}.pm") as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=loader, process_group="world"
        )
        print(f"rank {rank}: {'goes on after' if run.resumed else 'begins at'} step {run.step}")
        for epoch in run.epochs(epochs):
            sampler.set_epoch(epoch)
            for inputs, targets in epoch:
                loss = nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.log(loss=loss)  # all ranks alike: after a kill they are at one step again
    print(f"rank {rank}: step {run.step} committed")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:  # nobody has started the ranks yet
        # A rank that torchrun starts again would otherwise look for its peers under the addresses
        # of those that have died: the agent keeps them in a store that all attempts share.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        torchrun = "-m torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=5"
        os.execv(sys.executable, [sys.executable, *torchrun.split(), *sys.argv])
    train(sys.argv[1] if len(sys.argv) > 1 else ".", int(sys.argv[2]) if len(sys.argv) > 2 else 25)
