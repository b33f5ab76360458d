"""Stands for `pmstore` where a program is run on plain torch: keeps nothing, commits nothing."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch as _torch

import pmstore.scheduler as scheduler  # programs name policies by it

__all__ = ["open", "scheduler", "torch"]


class _Store(dict[str, Any]):
    """A dict that has what programs use of a store."""

    epoch = 0

    def group(self, name: str) -> _Store:
        return self.setdefault(name, _Store())

    def list(self, name: str) -> builtins.list[Any]:
        return self.setdefault(name, [])

    def zeros(self, name: str, shape: Any, dtype: Any = np.float64) -> Any:
        if isinstance(dtype, _torch.dtype):
            return self.setdefault(name, _torch.zeros(shape, dtype=dtype))
        return self.setdefault(name, np.zeros(shape, dtype))

    require = zeros

    def tensor(self, name: str, shape: Any, dtype: _torch.dtype | None = None) -> Any:
        return self.setdefault(name, _torch.zeros(shape, dtype=dtype))

    def transaction(self, **_: Any) -> Any:
        return contextlib.nullcontext()

    def commit(self) -> None: ...

    def __enter__(self) -> _Store:
        return self

    def __exit__(self, *_: object) -> None: ...


class _Run:
    """Counts steps and goes through the loader."""

    resumed = False

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.step = self.data_epoch = 0
        self.batch = -1

    def batches(self, epochs: int | None = 1, **_: Any) -> Iterator[Any]:
        while epochs is None or self.data_epoch < epochs:
            for number, batch in enumerate(self.loader):
                self.batch = number
                yield batch
            self.data_epoch += 1

    def commit(self, loss: Any = None, wait: bool = True) -> None:
        self.step += 1

    def end_step(self, loss: Any = None) -> bool:
        self.step += 1
        return True

    def rewind(self, steps: int) -> None:
        """Here the step is not done again: it would be the same."""

    @contextlib.contextmanager
    def transaction(self, loss: Any = None) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace()
        self.step += 1


def open(path: str, **_: Any) -> _Store:
    return _Store()


def _attach(store: _Store, *, loader: Iterable[Any] = (), **_: Any) -> _Run:
    return _Run(loader)


torch = SimpleNamespace(attach=_attach, optim=_torch.optim)
