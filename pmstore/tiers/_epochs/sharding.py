"""Sharding: which rank flushes what, when several hold the same arrays: without a message, by
arithmetic that all of them do alike.

Source: DeepFreeze (CCGrid 2020), section IV.B: the checkpoint of a replicated model is shared out
over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np

from pmstore.objects.array import Array
from pmstore.tiers._epochs.manifest import Shared


class Part(NamedTuple):
    """Bytes [start, end) of array number `array` of the list belong to `rank`."""

    array: int
    start: int
    end: int
    rank: int


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def parts(shared: Sequence[Shared], world_size: int) -> Iterator[Part]:
    """Yields the parts: the arrays, end to end in order of name, are cut into as many equal
    stretches as there are ranks."""
    total = sum(one.nbytes for one in shared)
    cuts = [total * rank // world_size for rank in range(world_size + 1)]
    at, rank = 0, 0
    for number, one in enumerate(shared):
        start = 0
        while start < one.nbytes:
            while at + start >= cuts[rank + 1]:
                rank += 1
            end = min(one.nbytes, cuts[rank + 1] - at)
            yield Part(number, start, end, rank)
            start = end
        at += one.nbytes


def borrowed(
    shared: Sequence[Shared], rank: int, world_size: int, chunk_bytes: int, count: int
) -> Array:
    """Returns the indices (uint64, ascending) of the chunks of this rank's file that lie wholly in
    what other ranks flush."""
    mask = np.zeros(count, bool)
    for part in parts(shared, world_size):
        if part.rank == rank:
            continue
        offset = shared[part.array].offset
        first, last = -(-(offset + part.start) // chunk_bytes), (offset + part.end) // chunk_bytes
        mask[first : max(first, last)] = True
    return np.flatnonzero(mask).astype(np.uint64)


def lenders(
    shared: Sequence[Shared], rank: int, world_size: int, chunk_bytes: int, borrowed: Array
) -> dict[int, tuple[int, int, int]]:
    """Returns for each borrowed chunk: (rank that has it, number of its array, byte of the array
    where the chunk starts). One that is in no other rank's part is left out."""
    found: dict[int, tuple[int, int, int]] = {}
    for part in parts(shared, world_size):
        if part.rank == rank:
            continue
        offset = shared[part.array].offset
        first, end = -(-(offset + part.start) // chunk_bytes), (offset + part.end) // chunk_bytes
        for index in borrowed[slice(*np.searchsorted(borrowed, [first, end]))].tolist():
            found[index] = (part.rank, part.array, index * chunk_bytes - offset)
    return found
