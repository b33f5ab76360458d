"""Pins tensors of stores that this process writes to, as attached runs have them: what is committed
need not be copied while the program waits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pmstore._engine.snapshot import Snapshot
from pmstore.dcp._format import copies
from pmstore.objects.slots import idle_blocks
from pmstore.store import Store, writable_stores

Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor, and where it is to be copied."""


class Pin:
    """The last commit of a store, and what is to be copied out of it: offsets in the file."""

    def __init__(self, snapshot: Snapshot, pairs: list[tuple[int, torch.Tensor]]) -> None:
        self._snapshot = snapshot
        self._pairs = pairs

    @property
    def targets(self) -> list[torch.Tensor]:
        return [target for _, target in self._pairs]

    def copy(self) -> None:
        """Copies the pinned bytes, by all cores. Raises: what the engine does; OSError."""
        size = copies.SLICE_BYTES
        spans = [
            (offset + at, copies.as_bytes(target)[at : at + size])
            for offset, target in self._pairs
            for at in range(0, target.numel() * target.element_size(), size)
        ]
        copies.by_all_cores(lambda span: self._snapshot.copy(*span), spans)

    def close(self) -> None:
        self._snapshot.close()


def pin(pairs: Sequence[Pair]) -> tuple[list[Pin], list[Pair]]:
    """Pins what is committed. Returns what can be copied later, and what has to be copied now."""
    pins, left = [], list(pairs)
    for store in writable_stores():
        info = store._core.pool.info
        inside: list[Pair] = []
        rest: list[Pair] = []
        for pair in left:
            here = pair[0].device.type == "cpu" and pair[0].numel()
            at = pair[0].data_ptr() - info.base if here else -1
            (inside if 0 <= at < info.reserve_bytes else rest).append(pair)
        if inside:
            made, more = _pin_in(store, inside)
            pins += made
            left = rest + more
    return pins, left


def _pin_in(store: Store, pairs: list[Pair]) -> tuple[list[Pin], list[Pair]]:
    core = store._core
    snapshot = store._pin_committed()
    if snapshot is None:
        return [], pairs
    idle, base = idle_blocks(core), core.pool.info.base
    later: list[tuple[int, torch.Tensor]] = []
    now = []
    for source, target in pairs:
        block = source.untyped_storage().data_ptr() - base
        # A block that no name has any more is the program's own: no commit has what is in it.
        if copies.is_plain(source) and block not in idle and core.pool.is_live(block):
            later.append((source.data_ptr() - base, target))
        else:
            now.append((source, target))
    return [Pin(snapshot, later)], now
