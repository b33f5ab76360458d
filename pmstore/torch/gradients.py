"""Gradients that the next step still needs.

In most loops a gradient is dead when a step is committed: the optimizer has used it, and the next
thing done to it is `zero_grad`. Then only whether there *was* one is kept, because
`zero_grad(set_to_none=False)` makes a difference of it: a zero gradient lets the optimizer apply
weight decay and momentum, none does not. But where a loop accumulates gradients over several
batches and commits in between, they are state like any other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from pmstore import Store
from pmstore.objects import array
from pmstore.torch.errors import AttachError
from pmstore.torch.model import encode_name
from pmstore.torch.part import Part

_LARGE_BYTES = 1 << 20
_ALIGNMENT = 64  # of torch's own memory


def _zeros_like(parameter: torch.Tensor) -> torch.Tensor:
    """Large ones in pages that the kernel gives at their first write: most loops drop them
    (`zero_grad`) before that, and a resume is not to take the longer the larger the model is."""
    data_bytes = parameter.numel() * parameter.element_size()
    if data_bytes < _LARGE_BYTES or not parameter.is_contiguous() or parameter.device.type != "cpu":
        return torch.zeros_like(parameter)
    raw = np.zeros(data_bytes + _ALIGNMENT, np.uint8)
    start = -array.address(raw) % _ALIGNMENT
    return (
        torch.from_numpy(raw[start : start + data_bytes])
        .view(parameter.dtype)
        .view(parameter.shape)
    )


class _Names(NamedTuple):
    """Of parameters: that have a gradient, whose gradients are kept, and whose blocks hold dead
    ones."""

    present: list[str]
    kept: list[str]
    idle: list[str]


class GradientKeeper:
    """Keeps gradients of unfinished accumulations in `<path>/<name>`, for as long as they are
    needed, and which there are."""

    def __init__(self, store: Store, path: str) -> None:
        self._store = store
        self._path = path
        self._which = Part(store, f"{path}_layout")
        self._last: _Names | None = None
        self.spent = False
        """The optimizer has used them: their content is not needed."""

    def write(self, parameters: list[tuple[str, torch.Tensor]]) -> None:
        """Pending until the next commit. What was kept goes when they are spent twice in a row: a
        loop that accumulates needs the same blocks again."""
        present = [name for name, parameter in parameters if parameter.grad is not None]
        last = self._stored() if self._last is None else self._last
        if not self.spent:
            for name, parameter in parameters:
                if parameter.grad is not None:
                    self._put(name, parameter.grad)
            held = set(present)
            now = _Names(
                present, present, [name for name in last.kept + last.idle if name not in held]
            )
        elif last.kept:
            now = _Names(present, [], last.kept + last.idle)
        else:
            self._drop(last.idle)
            now = _Names(present, [], [])
        if now != last or self._last is None:
            self._which.write(now._asdict())
        self._last = now

    def _stored(self) -> _Names:
        if not self._which.stored:
            return _Names([], [], [])
        which = self._which.read()
        return _Names(list(which["present"]), list(which["kept"]), list(which.get("idle", [])))

    def _drop(self, names: list[str]) -> None:
        for name in names:
            self._store.pop(f"{self._path}/{encode_name(name)}", None)
        if names and not self._store.get(self._path, True):  # an empty group
            del self._store[self._path]

    def _put(self, name: str, gradient: torch.Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise AttachError(
                f"the gradient of {name} is {gradient.layout}: commits in the middle of an "
                "accumulation take dense gradients. Commit after optimizer.step()"
            )
        gradient = gradient.cpu()
        path = f"{self._path}/{encode_name(name)}"
        held = self._store.get(path)
        if (
            isinstance(held, torch.Tensor)
            and held.shape == gradient.shape
            and held.dtype == gradient.dtype
        ):
            held.copy_(gradient.detach())
        else:
            self._store[path] = gradient.detach()

    def restore(self, parameters: list[tuple[str, torch.Tensor]]) -> None:
        """Sets the gradients to what the last commit holds: kept ones, zeros for spent ones, else
        none."""
        self._which.forget()
        self._last = None
        self.spent = False
        which = self._which.read()
        present, kept = set(which["present"]), set(which["kept"])
        for name, parameter in parameters:
            if name not in present:
                parameter.grad = None
                continue
            gradient = _zeros_like(parameter)
            if name in kept:
                gradient.copy_(self._store[f"{self._path}/{encode_name(name)}"])
            parameter.grad = gradient
