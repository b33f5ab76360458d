"""A ticket: what every rank says of its newest commit, and what all make of it.

It is one all-reduce of 128 bytes, and 16 more for each tier. It takes the least of [x, -x], so that
all ranks see the least and the greatest of each number. That it has completed, at any rank, proves
that all have committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Fields(NamedTuple):
    """What one rank says of its newest commit. The fields of all ranks must be alike."""

    generation: int
    step: int
    kind: int
    """COMMIT: of a new generation. ASK: of none, to agree on the next. LEAVING: the rank is about
    to leave its store. FINAL: it has committed for the last time."""
    mark: int
    """The mark of what the rank has done since the job was joined: see `generations.Key`."""
    digest: int
    """The digest of job, term and policy."""


COMMIT, ASK, LEAVING, FINAL = 0, 1, 2, 3


def pack(fields: Fields, wants: Sequence[int]) -> torch.Tensor:
    """Returns the numbers of a ticket, int64. Each field is in it twice, once negated, so that the
    least of all ranks tells least and greatest. wants: numbers of which the least of all ranks
    counts."""
    numbers = torch.tensor([*fields, *wants], dtype=torch.int64)
    return torch.cat((numbers, -numbers))


def unpack(reduced: torch.Tensor) -> tuple[Fields, Fields, list[int]]:
    """Returns the least and the greatest of the fields, and the least of each number in `wants`."""
    numbers = reduced.tolist()
    half, count = len(numbers) // 2, len(Fields._fields)
    greatest = [-number for number in numbers[half : half + count]]
    return Fields(*numbers[:count]), Fields(*greatest), numbers[count:half]
