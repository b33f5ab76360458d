"""Blocks of the store whose pages are pinned, so that a device writes them itself."""

from __future__ import annotations

from collections.abc import Set
from contextlib import suppress

import torch

# of cudaHostRegister: another program, or part of this one, has pinned these pages
_ALREADY = 712


class PinnedBlocks:
    """Holds the blocks of one store that are pinned, for all CUDA devices alike: a page is pinned
    once.

    Holds a view of each block, so that its memory is nobody else's while it is pinned.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[torch.Tensor, torch.device]] = {}
        self._refused = False

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def refused(self) -> bool:
        """Whether no more is tried: the pages of this file cannot be pinned."""
        return self._refused

    def pin(self, block: torch.Tensor, device: torch.device) -> bool:
        """Pins the block. Returns whether it is pinned now. REQUIRES: its pages may be written:
        CUDA pins no others for a device that writes."""
        address = block.data_ptr()
        if address in self._blocks:
            return True
        if self._refused:
            return False
        with torch.cuda.device(device):  # another one that is current would get a context
            status = torch.cuda.cudart().cudaHostRegister(address, block.numel(), 0)  # type: ignore[no-untyped-call]
        if int(status) == 0:
            self._blocks[address] = (block, device)
            return True
        forget_error(device)
        # file systems whose pages cannot be pinned for long; too little memory that may be locked
        self._refused = int(status) != _ALREADY
        return False

    def keep(self, addresses: Set[int]) -> None:
        """Gives all others back. REQUIRES: no copy is under way."""
        for address in self._blocks.keys() - addresses:
            with torch.cuda.device(self._blocks[address][1]):
                torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
            del self._blocks[address]


def forget_error(device: torch.device) -> None:
    """Clears the error that a refused call of CUDA leaves behind in this thread. The next kernel
    that the program starts would raise it, so one is started here."""
    with suppress(RuntimeError):
        torch.empty(1, dtype=torch.uint8, device=device).fill_(0)
