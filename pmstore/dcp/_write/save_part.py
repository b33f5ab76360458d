"""Makes a part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pmstore._engine.bring import PIECE_BYTES, bring_home
from pmstore._engine.constants import FILL_OF_SLOT
from pmstore.dcp._format import copies, folder_layout
from pmstore.objects import tensor as tensors

_OWN_ARRAY_BYTES = 1 << 18
"""What is smaller shares an array of so many bytes with others."""
_ALIGN = 64
assert folder_layout.PIECE_BYTES == PIECE_BYTES


class Part:
    """A part that is being made: arrays in which room is taken, and what lies where.

    arrays: by number. Nobody else may use the store's transactions until it is committed or
    dropped: see `RankStore.lock`.
    """

    def __init__(self, group: Any, name: str) -> None:
        self.name = name
        self.arrays: list[torch.Tensor] = []
        self.group = group
        self._shared: tuple[int, int] | None = None  # array, and how much of it is taken

    def take(self, nbytes: int) -> tuple[int, int, torch.Tensor]:
        """Takes room for so many bytes, of unspecified content. Returns the number of the array,
        the start in it, and the bytes."""
        if nbytes >= _OWN_ARRAY_BYTES:
            number = self._new(nbytes)
            return number, 0, self.arrays[number]
        if self._shared is None or self._shared[1] + nbytes > _OWN_ARRAY_BYTES:
            self._shared = (self._new(_OWN_ARRAY_BYTES), 0)
        number, start = self._shared
        self._shared = (number, start + -(-nbytes // _ALIGN) * _ALIGN)
        return number, start, self.arrays[number][start : start + nbytes]

    def _new(self, nbytes: int) -> int:
        """Makes an array. It is written once, so that no log has to be reserved for it: as for a
        slot."""
        number = len(self.arrays)
        descriptor, itemsize = tensors.describe_new(nbytes, torch.uint8)
        self.arrays.append(self.group._create(str(number), descriptor, itemsize, FILL_OF_SLOT))
        return number

    def bring_home(
        self, copies_of: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    ) -> dict[int, tuple[int, ...]]:
        """Copies tensors into arrays of their own that were just taken, (source, target) by number,
        straight to the disk. Returns the CRCs of those that were; the others, small ones among
        them, are as they were.

        Raises: StoreFullError, OSError.
        """
        large = {
            number: both
            for number, both in copies_of.items()
            if copies.size_of(both[0]) >= _OWN_ARRAY_BYTES and copies.is_plain(both[0])
        }
        sources, targets = ([copies.as_bytes(both[i]) for both in large.values()] for i in (0, 1))
        found = bring_home(self.group._core.pool, targets, sources)
        return {number: crcs for number, crcs in zip(large, found, strict=True) if crcs is not None}
