"""Training with torch.distributed.checkpoint, whose checkpoints lie in stores.

    torchrun --nproc-per-node 2 examples/dcp.py checkpoints    # or: python examples/dcp.py ...

Kill it at any moment and start it again, with any number of processes: it goes on from the last
checkpoint that was published.
"""

import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from pmstore.dcp import StoreReader, StoreWriter

STEPS, EVERY = 60, 20


def main(folder: str) -> None:
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    if dist.is_initialized():
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    done, saved = 0, None
    if StoreReader.validate_checkpoint_id(folder):
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, storage_reader=StoreReader(folder))
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **parts)
        done = state["step"]
    print(f"begins at step {done}", flush=True)
    writer = StoreWriter(folder, keep=2)
    group = dist.new_group() if dist.is_initialized() else None  # of the saves alone
    for step in range(done + 1, STEPS + 1):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        if step % EVERY == 0:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "step": step}
            where = {"checkpoint_id": folder, "storage_writer": writer, "process_group": group}
            saved = dcp.async_save(state, **where)
    if saved is not None:
        saved.result()
    print(f"done: step {STEPS}", flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:  # by torchrun
        dist.init_process_group("gloo")
    main(sys.argv[1] if len(sys.argv) > 1 else "checkpoints")
