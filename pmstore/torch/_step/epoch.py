"""An epoch that a loop hands out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from pmstore.objects.readonly import PLAIN


class Epoch(int):
    """One epoch of `Run.epochs`: its number, from 0, which is iterated for its batches."""

    _batches: Callable[[], Iterator[Any]]
    _length: Callable[[], int | None]

    @classmethod
    def of(
        cls, number: int, batches: Callable[[], Iterator[Any]], length: Callable[[], int | None]
    ) -> Epoch:
        epoch = cls(number)
        epoch._batches, epoch._length = batches, length
        return epoch

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """A copy of it, and a pickle, is its number."""
        return int, (int(self),)

    def __iter__(self) -> Iterator[Any]:
        """The batches of the epoch that were not trained on."""
        return self._batches()

    def __len__(self) -> int:
        """Batches of the whole epoch. Raises: TypeError: the loader does not say."""
        length = self._length()
        if length is None:
            raise TypeError("the loader of the run does not say how many batches an epoch has")
        return length


PLAIN[Epoch] = int
if hasattr(torch.serialization, "add_safe_globals"):
    # `torch.load` makes nothing that is not listed, not even a number from a number
    torch.serialization.add_safe_globals([int])
