"""Two workers of Ray Train whose checkpoints are epochs of tiers, stopped and gone on with. Run by
`make nightly WHAT=frameworks-all`: Ray takes half a minute to begin."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import pmstore
from pmstore import TierConfig
from pmstore.integrations.ray import restore, upload_fn
from pmstore.torch import attach

STEPS = 12


def worker(config: dict[str, Any]) -> None:
    """Trains; its first life ends in the middle. Its store is gone then: it comes back from the
    checkpoint."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = ray.train.get_context().get_world_rank()
    marker = Path(tempfile.mkdtemp(dir=config["folder"]))
    path = marker / "store.pm"
    last = ray.train.get_checkpoint()
    if last is not None:
        restore(last, path)
    with pmstore.open(path) as store:
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        run = attach(store, model=model, optimizer=optimizer)
        began = run.step
        if config["dies"] and last is not None:
            assert began == 6
        store.add_tier("shared", TierConfig(f"{config['folder']}/tier-{rank}", keep=3))
        upload = upload_fn(run, "shared")
        empty = marker / "empty"
        empty.mkdir()
        for step in run.steps(STEPS):
            x = torch.full((3, 4), step / STEPS + rank)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.commit()
            if run.step % 3 == 0:
                ray.train.report(
                    {"step": run.step, "began": began},
                    checkpoint=Checkpoint.from_directory(empty),
                    checkpoint_upload_fn=upload,
                )
            if config["dies"] and last is None and run.step == 8:
                raise RuntimeError("the first life ends here")


def train(folder: Path, dies: bool) -> Any:
    folder.mkdir()
    return TorchTrainer(
        worker,
        train_loop_config={"folder": str(folder), "dies": dies},
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            name="test",
            storage_path=str(folder / "results"),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


def weights(checkpoint: Checkpoint, path: Path, rank: int) -> list[bytes]:
    restore(checkpoint, path, rank)
    with pmstore.open(path, "r") as store:
        model = store["run/model"]
        return [model[name].detach().numpy().tobytes() for name in model]


def main(folder: Path) -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        whole, died = train(folder / "whole", False), train(folder / "died", True)
    finally:
        ray.shutdown()
    told = {}
    for rank in (0, 1):
        one, other = (
            weights(result.checkpoint, folder / f"{name}{rank}.pm", rank)
            for name, result in (("whole", whole), ("died", died))
        )
        assert one == other
        told[rank] = len(one)
    assert (died.metrics["step"], died.metrics["began"]) == (STEPS, 6)
    assert len(died.best_checkpoints) == 2
    print("RESULT", json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
