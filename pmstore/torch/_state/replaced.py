"""Objects that a program has replaced by others: whether what it holds is what it held at the last
look, asked of all in each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from pmstore._engine._binding import Watch, Writes
from pmstore.torch._state.heap import Placed
from pmstore.torch._state.sharded import is_sharded
from pmstore.torch.changes import Question
from pmstore.torch.run_errors import MismatchError


def watch(
    tables: list[Any],
    pairs: Sequence[tuple[torch.Tensor, Placed]] = (),
    questions: list[Question] | None = None,
) -> Watch:
    """Looks at all of them in every step, so in one call: whether tables hold the objects that they
    hold now, whether `Placed.holds` is true of each pair, and whether all questions are answered as
    they were. It holds on to all of them.

    Of an OrderedDict the order is not looked at.
    """
    # A DTensor's part may be another object at any time, so that it is asked for in each step.
    parts = [pair for pair in pairs if is_sharded(pair[0])]
    pairs = [*parts, *(pair for pair in pairs if not is_sharded(pair[0]))]
    tensors, heaps = [tensor for tensor, _ in pairs], [placed.heap for _, placed in pairs]
    return Watch(tables, tensors, heaps, len(parts), questions or [])


@dataclass(frozen=True, slots=True, eq=False)
class Synced:
    """What an optimizer held when all of it was in the store. While it holds the same objects, and
    these are where they were, there is nothing to write: most steps change what is in the heap
    only. Of constants that are others now there are the plain values to be written, as after a
    scheduler's step."""

    all: Watch  # of the three
    roots: Watch  # what the optimizer has its groups and its state in
    groups: Watch
    state: Watch
    writes: Writes  # parameters, and what is written where they have a gradient


# ---- parameters that are other objects now, in an optimizer's groups and state


class Replacing:
    """Puts other objects where an optimizer has its parameters. May be interrupted anywhere, and
    repeated with other ones: it begins each time with what the optimizer held at first."""

    def __init__(self, optimizer: Optimizer, order: list[torch.Tensor], since: object) -> None:
        """since: stays the same object until the last `put` is over."""
        self.since: object = since
        self._optimizer = optimizer
        self._order = order
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._state = [
            (key, held) for key, held in optimizer.state.items() if isinstance(key, torch.Tensor)
        ]
        self._given: list[torch.Tensor] = []

    def put(self, called: str, replaced: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """The parameters' new order. replaced: of the model's tensors, by id of the old.

        State goes with its tensor, to whatever place in the group. Where the tensor is gone, the
        one in its place has it.

        Raises: MismatchError: a parameter is in the place of one of another group, or of another
            optimizer. Nothing was changed by this call.
        """
        still = {id(one) for one in replaced.values()} & replaced.keys()  # elsewhere in the model
        groups = [[replaced.get(id(one), one) for one in before] for before in self._groups]
        for before, now in zip(self._groups, groups, strict=True):
            if (still & {*map(id, before)}) - {*map(id, now)}:
                raise MismatchError(
                    f"{called}: parameters of the model have changed places with such that another "
                    "group trains, or another optimizer, or none: let each stay with its group"
                )
        wanted: dict[torch.Tensor, Any] = {}
        for one, held in self._state:
            new = one if id(one) in still else replaced.get(id(one), one)
            if new is one or id(new) not in still:
                wanted[new] = held
        self._given += replaced.values()
        known = {*map(id, self._given)} | {id(one) for one, _ in self._state}
        state = self._optimizer.state
        for one, held in wanted.items():  # there twice rather than lost
            state[one] = held
        for group, now in zip(self._optimizer.param_groups, groups, strict=False):
            group["params"][:] = now
        for key in [key for key in state if id(key) in known and key not in wanted]:
            del state[key]
        return [replaced.get(id(one), one) for one in self._order]
