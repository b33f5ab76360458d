"""Which parameters are trained, in the store: programs freeze and unfreeze while they train."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pmstore import Store
from pmstore._engine._binding import Watch, trained
from pmstore.torch.changes import asking, still


class Parameters:
    """A run's parameters: the same lists while they are the same."""

    __slots__ = ("named", "tensors")

    def __init__(self) -> None:
        self.set([])

    def set(self, named: list[tuple[str, torch.Tensor]]) -> None:
        self.named = named
        self.tensors = [one for _, one in named]


class TrainablePart:
    """Keeps each parameter's `requires_grad`: `<path>`, the names of those without."""

    def __init__(self, store: Store, path: str, parameters: Parameters) -> None:
        self._store = store
        self._path = path
        self._all = parameters
        self._written: list[str] | None = None  # what is stored, if known
        self.watch: Watch | None = None

    def capture(self) -> None:
        """Pending until the next commit."""
        self.watch, tensors = None, self._all.tensors
        flags = trained(tensors)
        frozen = [
            name for (name, _), is_one in zip(self._all.named, flags, strict=True) if not is_one
        ]
        if frozen != self._written:
            self._store[self._path] = frozen
            self._written = frozen
        same = still(self._all, "tensors", tensors)
        self.watch = asking([same, (trained, (tensors,), flags)])

    def restore(self) -> None:
        """Sets them to what the last commit holds. A run of an earlier version says nothing."""
        self._written, self.watch = self._store.get(self._path), None
        if self._written is not None:
            frozen = set(self._written)
            for name, parameter in self._all.named:
                if parameter.requires_grad == (name in frozen):
                    parameter.requires_grad_(name not in frozen)


def read_trainable(store: Store, path: str, names: Sequence[str]) -> dict[str, bool]:
    """What is stored, by name; nothing for a run of an earlier version."""
    frozen = store.get(path)
    return {} if frozen is None else {name: name not in frozen for name in names}
