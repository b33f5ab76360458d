"""What the questions on training train: an MLP and a small transformer with AdamW; their state in
the forms that peers take."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

MB = 1_000_000


def mlp(state_bytes: int) -> tuple[nn.Module, torch.Tensor]:
    """A module of square layers without values, and a batch. Its state (parameters, two moments)
    has about those bytes."""
    parameters = state_bytes / 12
    width = (
        64 if parameters < 1e5 else 512 if parameters < 4e6 else 2048 if parameters < 80e6 else 4096
    )
    layers = max(1, round(parameters / (width * width + width)))
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return module.to_empty(device="cpu"), torch.randn(
        16, width, generator=torch.Generator().manual_seed(0)
    )


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """About 3.2 M parameters: 38 MB of state."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(8, 32, 256)


def initialize(module: nn.Module) -> None:
    """Cheap, the same everywhere."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, 0.02)


class Trainer:
    """One model, one optimizer; `step` trains on a fixed batch."""

    def __init__(self, module: nn.Module, batch: torch.Tensor) -> None:
        self.model, self.batch = module, batch
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, foreach=True)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Flat: what safetensors and DCP take. AdamW has state after its first step."""
        flat = {f"model.{k}": v.detach() for k, v in self.model.state_dict().items()}
        for i, p in enumerate(self.model.parameters()):
            flat |= {f"optimizer.{i}.{k}": v for k, v in self.optimizer.state[p].items()}
        return flat

    def adopt(self, flat: dict[str, torch.Tensor]) -> None:
        """Makes those tensors the state, without a copy."""
        self.model.load_state_dict(
            {k.removeprefix("model."): v for k, v in flat.items() if k.startswith("model.")},
            assign=True,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, foreach=True)
        for i, p in enumerate(self.model.parameters()):
            self.optimizer.state[p] = {
                k: flat[f"optimizer.{i}.{k}"] for k in ("step", "exp_avg", "exp_avg_sq")
            }

    def nested(self) -> dict[str, object]:
        """As torch.save's users write it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors().values())


def publish(temporary: Path, path: Path) -> None:
    """fsync, rename, fsync of the directory."""
    for target, rename in ((temporary, True), (path.parent, False)):
        fd = os.open(target, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        if rename:
            temporary.rename(path)
