"""Gradients that the next step still needs.

In most loops a gradient is dead when a step is committed: the optimizer has used it, and the next
thing done to it is `zero_grad`. Then only whether there *was* one is kept, because
`zero_grad(set_to_none=False)` makes a difference of it: a zero gradient lets the optimizer apply
weight decay and momentum, none does not. But where a loop accumulates gradients over several
batches and commits in between, they are state like any other. Should a program use a dead one
after all, it is told: what stands for it after a resume holds a NaN, which `zero_grad` clears.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch

from pmstore import Store
from pmstore._base.text import encode_name
from pmstore._engine._binding import Spent, Watch
from pmstore.errors import TransactionError
from pmstore.objects import array
from pmstore.torch._state.requires_grad import Parameters
from pmstore.torch._state.sharded import (
    ShardRecord,
    as_recorded,
    is_sharded,
    local,
    record_of,
    version,
)
from pmstore.torch.changes import asking, still
from pmstore.torch.kept_structure import Structure
from pmstore.torch.run_errors import AttachError

_LARGE_BYTES = 1 << 20
_ALIGNMENT = 64  # of torch's own memory
_NOT_KEPT = (
    "before the last commit, which does not keep such: call zero_grad() before backward(). If they "
    "are to be used again, change them between optimizer.step() and run.commit(), for example by "
    "parameter.grad.mul_(0.9): what was changed there is kept"
)


def _zeros_like(parameter: torch.Tensor) -> torch.Tensor:
    """Large ones in pages that the kernel gives at their first write: most loops drop them
    (`zero_grad`) before that, and a resume is not to take the longer the larger the model is."""
    if is_sharded(parameter):
        return torch.zeros_like(parameter)
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


def _cleared(parameter: torch.Tensor) -> torch.Tensor:
    """A gradient of zeros: in the tensor that the program has as such, which may be a view of a
    buffer that holds all of them."""
    held = parameter.grad
    if (
        held is None
        or held.requires_grad
        or held.layout is not torch.strided
        or is_sharded(held)
        or any(step == 0 and size > 1 for size, step in zip(held.shape, held.stride(), strict=True))
    ):
        return _zeros_like(parameter)
    return held.zero_()


def _first(gradient: torch.Tensor) -> torch.Tensor:
    return local(gradient).as_strided((1,), (1,))


def _starts_with_nan(gradient: torch.Tensor) -> bool:
    return (
        gradient.layout is torch.strided
        and local(gradient).numel() > 0
        and bool(_first(gradient).isnan().item())
    )


class _Names(NamedTuple):
    """The names of parameters that have a gradient, whose gradients are kept, and whose blocks hold
    dead ones."""

    present: list[str]
    kept: list[str]
    idle: list[str]
    shards: dict[str, ShardRecord]
    """Of kept ones that are DTensors: they may lie in another way than their parameters."""


class GradientKeeper:
    """Keeps gradients of unfinished accumulations in `<path>/<name>`, for as long as they are
    needed, and which there are.

    Attributes:
        spent: those that an optimizer has used: their content is not needed, until they are written
            again (the generator's loss has gradients for the discriminator too).
        dead: gradients that stand for those that were not kept, by id, with their versions then.
    """

    def __init__(self, store: Store, path: str, parameters: Parameters, *, sharded: bool) -> None:
        """sharded: some gradients may be DTensors."""
        self._store = store
        self._all = parameters
        # asked for each gradient in each step
        self._version: Callable[[torch.Tensor], int] = (
            version if sharded else attrgetter("_version")
        )
        self._path = path
        self._which = Structure(store, f"{path}_layout")
        self._last: _Names | None = None
        self.spent: Spent = Spent(version if sharded else None)
        self.watch: Watch | None = None  # None where some are kept, too
        self.dead: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def _is_unknown(self, gradient: torch.Tensor) -> bool:
        known = self.dead.get(id(gradient))
        return known is not None and known[0]() is gradient and _starts_with_nan(gradient)

    def refuse_unknown(self, called: str, parameters: list[torch.Tensor]) -> None:
        """Checks the parameters before an optimizer uses their gradients.

        Raises: TransactionError: one was not kept, or was computed with one that was not.
        """
        if self.dead:
            self.dead = {
                key: known
                for key, known in self.dead.items()
                if (one := known[0]()) is not None and _starts_with_nan(one)
            }
        if self.dead and any(
            one.grad is not None and _starts_with_nan(one.grad) for one in parameters
        ):
            raise TransactionError(f"{called} would use gradients that it had used {_NOT_KEPT}")

    def capture(self) -> None:
        """Pending until the next commit. The block of a kept one goes when it is not needed twice
        in a row: a loop that accumulates needs the same blocks again.

        Raises: TransactionError: one that was not kept has been added to. Who used it was not seen
            before: a step that a GradScaler left out, for its NaN, or one with a closure.
        """
        self.watch, tensors = None, self._all.tensors
        states = self.spent.look(tensors)
        self._write(self._all.named)
        if not (self.dead or (self._last and (self._last.kept or self._last.idle))):
            same = still(self._all, "tensors", tensors)
            self.watch = asking([same, (self.spent.look, (tensors,), states)])

    def _write(self, parameters: list[tuple[str, torch.Tensor]]) -> None:
        found = [(name, one.grad) for name, one in parameters if one.grad is not None]
        for name, gradient in found:
            if self._is_unknown(gradient) and self._version(gradient) != self.dead[id(gradient)][1]:
                raise TransactionError(
                    f"the gradient of {name} was added to one that its optimizer had used "
                    f"{_NOT_KEPT}. Take the step back with run.rollback()"
                )
        last = self._stored() if self._last is None else self._last
        kept = [
            (name, gradient)
            for name, gradient in found
            if not (self.spent.is_spent(gradient) or self._is_unknown(gradient))
        ]
        for name, gradient in kept:
            self._put(name, gradient)
        names = {name for name, _ in kept}
        self._drop([name for name in last.idle if name not in names])
        now = _Names(
            [name for name, _ in found],
            [name for name, _ in kept],
            [name for name in last.kept if name not in names],
            {name: record for name, one in kept if (record := record_of(one))} if kept else {},
        )
        if now != last or self._last is None:
            self._write_names(now)
        self._last = now

    def _stored(self) -> _Names:
        if not self._which.stored:
            return _Names([], [], [], {})
        which = self._which.read()
        return _Names(
            list(which["present"]),
            list(which["kept"]),
            list(which.get("idle", [])),
            dict(which.get("shards", {})),
        )

    def _write_names(self, names: _Names) -> None:
        said = names._asdict()
        if not names.shards:
            del said["shards"]
        self._which.write(said)

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
        gradient = local(gradient)
        if hasattr(gradient, "wait"):  # a collective that is under way
            gradient = gradient.wait()
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

    def fit(self) -> None:
        """Drops what is stored of others than the parameters; pending until the next commit."""
        stored = self._stored()
        shapes = {name: local(one).shape for name, one in self._all.named}
        wrong = [
            name
            for name in stored.kept + stored.idle
            if self._store[f"{self._path}/{encode_name(name)}"].shape != shapes.get(name)
        ]
        self._drop(wrong)
        left = _Names(
            [name for name in stored.present if name in shapes],
            [name for name in stored.kept if name not in wrong],
            [name for name in stored.idle if name not in wrong],
            {name: one for name, one in stored.shards.items() if name not in wrong},
        )
        if left != stored or not self._which.stored:
            self._write_names(left)

    def restore(self) -> None:
        """Sets the gradients to what the last commit holds: kept ones, for spent ones zeros with a
        NaN in front, else none."""
        self._which.forget()
        self._last = self.watch = None
        self.spent.clear()
        self.dead.clear()
        which = self._stored()
        present, kept = set(which.present), set(which.kept)
        for name, parameter in self._all.named:
            if name not in present:
                parameter.grad = None
                continue
            if name in which.shards:
                part = self._store[f"{self._path}/{encode_name(name)}"].clone()
                parameter.grad = as_recorded(part, which.shards[name], parameter)
                continue
            parameter.grad = _cleared(parameter)
            if name in kept:
                parameter.grad.copy_(self._store[f"{self._path}/{encode_name(name)}"])
            elif local(parameter.grad).numel():
                _first(parameter.grad).fill_(torch.nan)
                gradient = parameter.grad
                self.dead[id(gradient)] = (weakref.ref(gradient), self._version(gradient))
                self.spent.spend([{"params": [parameter]}])
