"""Makes a part of a checkpoint."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from pmstore._engine.constants import FILL_NONE
from pmstore.objects import tensor as tensors

_OWN_ARRAY_BYTES = 1 << 18
"""What is smaller shares an array of so many bytes with others."""
_ALIGN = 64


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
        number = len(self.arrays)
        descriptor, itemsize = tensors.describe_new(nbytes, torch.uint8)
        self.arrays.append(self.group._create(str(number), descriptor, itemsize, FILL_NONE))
        return number

    def keep_only(self, numbers: set[int]) -> None:
        """Deletes all arrays of the part but these."""
        for number in range(len(self.arrays)):
            if number not in numbers:
                with suppress(KeyError):
                    del self.group[str(number)]
