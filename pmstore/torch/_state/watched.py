"""Whether what a program holds is what it held at the last look: asked of all in each step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from pmstore.engine._binding import Watch, Writes
from pmstore.torch._state.heap import Placed
from pmstore.torch._state.sharded import is_sharded

SAME, VALUES, OTHERS = range(3)
"""What `Watch.look` says: nothing has changed; constants are others; more has changed, perhaps."""


def watch(
    tables: Iterable[dict[Any, Any] | list[Any]], pairs: Iterable[tuple[torch.Tensor, Placed]] = ()
) -> Watch:
    """Looks at all of them in every step, so in one call: whether tables hold the objects that they
    hold now, and whether `Placed.holds` is true of each pair. It holds on to all of them.

    Of an OrderedDict the order is not looked at.
    """
    # A DTensor's part may be another object at any time, so that it is asked for in each step.
    pairs = sorted(pairs, key=lambda pair: not is_sharded(pair[0]))
    wrapped = sum(is_sharded(tensor) for tensor, _ in pairs)
    tensors, heaps = [tensor for tensor, _ in pairs], [placed.heap for _, placed in pairs]
    return Watch(list(tables), tensors, heaps, wrapped)


@dataclass(frozen=True, slots=True, eq=False)
class Synced:
    """What an optimizer held when all of it was in the store. While it holds the same objects, and
    these are where they were, there is nothing to write: most steps change what is in the heap
    only. Of constants that are others now there are the plain values to be written, as after a
    scheduler's step."""

    roots: tuple[object, object]  # what the optimizer has its groups and its state in
    groups: Watch
    state: Watch
    writes: Writes  # parameters, and what is written where they have a gradient
