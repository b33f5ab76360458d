"""Small data and models that the programs share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def numbers(count: int = 120, width: int = 10) -> TensorDataset:
    """Features, and a sum of them to be found again: (count, width) and (count, 1), float32."""
    drawn = torch.Generator().manual_seed(11)
    features = torch.randn(count, width, generator=drawn)
    return TensorDataset(features, features.sum(1, keepdim=True))


def classes(count: int = 120, width: int = 10, kinds: int = 3) -> TensorDataset:
    """Features, and one of a few classes: (count, width) float32 and (count,) int64."""
    drawn = torch.Generator().manual_seed(12)
    features = torch.randn(count, width, generator=drawn)
    return TensorDataset(features, features[:, :kinds].argmax(1))


def images(count: int = 80, size: int = 8) -> TensorDataset:
    """(count, 1, size, size) float32 and the brighter half: (count,) int64."""
    drawn = torch.Generator().manual_seed(13)
    pixels = torch.rand(count, 1, size, size, generator=drawn)
    bright = pixels[..., : size // 2].mean((1, 2, 3)) > pixels[..., size // 2 :].mean((1, 2, 3))
    return TensorDataset(pixels, bright.long())


def words(count: int = 80, length: int = 9, vocabulary: int = 20) -> TensorDataset:
    """(count, length) int64: each token depends on the one before it."""
    drawn = torch.Generator().manual_seed(14)
    tokens = torch.randint(0, vocabulary, (count, length), generator=drawn)
    tokens[:, 1::2] = (tokens[:, ::2][:, : tokens[:, 1::2].shape[1]] * 3 + 1) % vocabulary
    return TensorDataset(tokens)


def batches(data: Any = None, size: int = 10, **options: Any) -> DataLoader[Any]:
    """Twelve shuffled batches of `numbers`, if nothing else is given."""
    given = {"shuffle": True, **options}
    if "sampler" in options or "batch_sampler" in options:
        del given["shuffle"]
    if "batch_sampler" not in options:
        given["batch_size"] = size
    return DataLoader(numbers() if data is None else data, **given)


def mlp(inputs: int = 10, outputs: int = 1, width: int = 16) -> nn.Sequential:
    """With batch statistics and dropout, so that a step counted twice is seen."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.BatchNorm1d(width),
        nn.Tanh(),
        nn.Dropout(0.1),
        nn.Linear(width, outputs),
    )
