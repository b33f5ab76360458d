"""The number of an epoch, where a program writes it down; and rows that a number of forms say."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from pmstore.torch._step.epoch import Epoch
from pmstore.torch.settings import settings_of_loader


@pytest.mark.skipif(
    not hasattr(torch.serialization, "add_safe_globals"), reason="torch has no such list"
)
def test_a_checkpoint_with_it_is_loaded_as_torch_loads() -> None:
    epoch = Epoch.of(3, lambda: iter(()), lambda: None)
    file = io.BytesIO()
    torch.save({"epoch": epoch, "weights": torch.ones(2)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["epoch"]) is int
    assert loaded["epoch"] == 3


def rows_of(indices: Any) -> Any:
    data = TensorDataset(torch.ones(100, 2))
    loader = torch.utils.data.DataLoader(Subset(data, indices))
    return settings_of_loader(loader).get("rows of the data set")


def test_the_same_rows_are_said_alike() -> None:
    said = rows_of([2, 5, 8])
    assert said.startswith("3 that begin with 2, 5, 8 (")
    assert said == rows_of(range(2, 10, 3)) == rows_of(np.array([2, 5, 8], np.uint8))
    assert said != rows_of([2, 5, 7])
