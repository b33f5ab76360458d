"""Whether something is as it was at the last look: questions, asked all at once in C."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from pmstore._engine._binding import Watch

SAME, VALUES, OTHERS = range(3)
"""What `Watch.look` says: nothing has changed; constants are others; more has changed, perhaps."""


Question = tuple[Callable[..., Any], tuple[Any, ...], Any]
"""A function, its arguments, and what it answered: an object, or bytes."""


def asking(questions: list[Question]) -> Watch:
    """Whether all are answered as they were."""
    return Watch([], [], [], 0, questions)


def still(one: Any, attribute: str, value: Any) -> Question:
    """Whether an attribute of it is this object."""
    return attrgetter(attribute), (one,), value


def all_of(watches: Iterable[Watch]) -> list[Question]:
    """Whether all is as each of them has seen it."""
    return [(one.look, (), SAME) for one in watches]


_SAMPLED = 512
"""Elements of an array of numpy that are compared."""


def sample_of(one: Any) -> Any:
    """What tells that something large was changed in place: torch counts that; of numpy's arrays
    some elements; of collections their length; of anything else nothing."""
    if isinstance(one, torch.Tensor):
        return None if one.is_inference() else one._version
    if isinstance(one, np.ndarray):
        flat = one.reshape(-1) if one.flags.c_contiguous else one.flat  # that is slow, and no copy
        return flat[:: max(one.size // _SAMPLED, 1)].tobytes()
    return len(one) if isinstance(one, (list, dict, deque, set)) else None
