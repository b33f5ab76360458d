"""Random transforms in worker processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from pmstore.torch._random.search import find


class Seeded(Dataset[Any]):
    """A dataset that, in a worker, seeds the generators for each batch: the default ones, and those
    that it, the collate function and the `worker_init_fn` hold. All other attributes are the
    dataset's own.

    A generator that is made while a batch is loaded is seeded, and the batch loaded again: loaded
    later, by another worker, it would have been there before.
    """

    def __init__(self, dataset: Dataset[Any], holders: dict[str, Any]) -> None:
        object.__setattr__(self, "_pmstore_dataset", dataset)
        object.__setattr__(self, "_pmstore_holders", holders)
        object.__setattr__(self, "_pmstore_places", set())

    def __getitem__(self, index: tuple[int, Any]) -> Any:
        seed, item = index
        return self._pmstore_load(seed, lambda: self._pmstore_dataset[item])

    def __getitems__(self, batch: tuple[int, list[Any]]) -> Any:
        seed, indices = batch
        return self._pmstore_load(seed, lambda: self._pmstore_items(indices))

    def _pmstore_items(self, indices: list[Any]) -> Any:
        dataset = self._pmstore_dataset
        if getattr(dataset, "__getitems__", None):
            return dataset.__getitems__(indices)
        return [dataset[index] for index in indices]

    def _pmstore_load(self, seed: int, load: Callable[[], Any]) -> Any:
        known = self._pmstore_places
        known.update(self._pmstore_seed(seed))
        loaded = load()
        holders = {"dataset": self._pmstore_dataset, **self._pmstore_holders}
        if any(one.place not in known for one in find(holders)):
            known.update(self._pmstore_seed(seed))
            loaded = load()
        return loaded

    def _pmstore_seed(self, seed: int) -> list[str]:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        found = find({"dataset": self._pmstore_dataset, **self._pmstore_holders})
        for one in found:
            one.seed(seed)
        return [one.place for one in found]

    def __len__(self) -> int:
        return len(self._pmstore_dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_pmstore_") or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # while it is unpickled in a spawned worker
        return getattr(self._pmstore_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._pmstore_dataset, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return Seeded, (self._pmstore_dataset, self._pmstore_holders)
