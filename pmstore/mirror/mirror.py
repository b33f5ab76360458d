"""One mirrored tensor, or several in one pair of slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pmstore._base import notebook
from pmstore.mirror.copier import flat, flat_bytes
from pmstore.objects.slots import Slots


class MirrorPart(NamedTuple):
    """A tensor that is mirrored, and the place of its bytes in the slots."""

    tensor: torch.Tensor
    at: int
    live: bool = True
    """The program goes on writing it: `PendingCommit.fence` is for it."""


class Mirror:
    """A tensor that every commit of the store copies into slots of the store. Made by
    `store.mirror(name, tensor)`.

    The tensor stays where it is, on its device, and is used as if there were no store. `slots` is
    where its committed versions are.
    """

    __slots__ = ("parts", "resumed", "settled", "slots")
    fenced = False
    """Each commit calls its `fence` itself, before the program can be interrupted."""

    def __init__(self, slots: Slots, parts: Sequence[MirrorPart], resumed: bool) -> None:
        self.slots: Slots = slots
        self.resumed: bool = resumed
        """Whether the store held a version, which the tensor holds now."""
        self.parts: tuple[MirrorPart, ...] = tuple(parts)
        # blocks known to be committed: only those may be written without capture
        self.settled: set[int] = set()

    @property
    def name(self) -> str:
        """The name of the slots."""
        return self.slots.name

    @property
    def tensor(self) -> torch.Tensor:
        return self.parts[0].tensor

    def restore(self) -> None:
        """Copies the current version back into the tensor."""
        held = self.slots.current
        whole = flat_bytes(held)
        with torch.no_grad():
            for tensor, at, _ in self.parts:
                nbytes = tensor.numel() * tensor.element_size()
                if nbytes:
                    flat(tensor).copy_(whole[at : at + nbytes].view(tensor.dtype))

    def __repr__(self) -> str:
        return f"<pmstore.Mirror of {self.slots!r}>"

    def _repr_html_(self) -> str:
        rows = [
            (part.tensor.dtype, tuple(part.tensor.shape), part.tensor.device, part.at)
            for part in self.parts
        ]
        return notebook.table(
            repr(self),
            ("dtype", "shape", "device", "first byte"),
            rows[: notebook.SHOWN],
            len(rows),
        )
