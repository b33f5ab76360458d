"""Training with Lightning that goes on where it was killed.

    python examples/lightning_run.py        # kill it at any moment, and start it again

It ends with the same weights, bit for bit, as if it had never been killed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pmstore.integrations.lightning import PmstoreCallback


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def validation_step(self, batch: Any, index: int) -> None:
        inputs, targets = batch
        self.log("error", nn.functional.mse_loss(self.net(inputs), targets))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def main(path: Path, epochs: int = 5) -> None:
    L.seed_everything(1, verbose=False)
    inputs = torch.randn(512, 10)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[PmstoreCallback(path)],
    )
    trainer.fit(Regression(), DataLoader(data, 16, shuffle=True), DataLoader(data, 64))
    print(f"{trainer.global_step} steps, error {trainer.callback_metrics.get('error', 0):.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "lightning.pm"))
