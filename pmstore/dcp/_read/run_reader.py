"""Reads an attached run as a checkpoint: the stores of all its ranks as one."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from pmstore.dcp._read.checkpoint_source import Source
from pmstore.dcp._read.rank_stores import Ranks
from pmstore.dcp._read.state_keys import Listed, Prefixes, listed
from pmstore.errors import CorruptStoreError, MixedStoresError
from pmstore.torch._read.stored import StoredRun, StoredTensor, StoreHolding
from pmstore.torch._state.sharded import chunk


def open_run(paths: Sequence[str], name: str, prefixes: Prefixes) -> RunSource:
    """Opens a run as its ranks' stores have it. Raises: as `Ranks`; ValueError: two things would
    have one key."""
    ranks = Ranks(paths, name)
    try:
        runs = [StoredRun(StoreHolding(store), name) for store in ranks.stores]
        return RunSource(runs, prefixes, ranks.mark, ranks.close)
    except BaseException:
        ranks.close()
        raise


class RunSource(Source):
    """A stored run, read as a checkpoint. runs: of each rank, in their order. What several ranks
    have is taken from the first; of a DTensor each has a part.

    mark: which state of the run it is. close: lets go of the stores.
    """

    def __init__(
        self, runs: Sequence[StoredRun], prefixes: Prefixes, mark: str, close: Callable[[], None]
    ) -> None:
        self.mark = mark
        self._close = close
        self._chunks: dict[str, dict[tuple[int, ...], StoredTensor]] = {}
        self._plain: dict[str, Any] = {}
        self._sizes: dict[str, torch.Size] = {}
        self._paths: dict[str, Any] = {}
        for number, run in enumerate(runs):
            self._take(listed(run, prefixes), number)
        self._check_whole()

    def _take(self, found: Listed, number: int) -> None:
        self._paths = {**found.paths, **self._paths}
        self.twins: frozenset[str] = self.twins | found.twins
        for key, one in found.items.items():
            if isinstance(one, torch.Tensor):
                one = _kept(one)
            if not isinstance(one, StoredTensor):
                self._plain.setdefault(key, one)
                continue
            offsets, size = _place(key, one)
            if self._sizes.setdefault(key, size) != size:
                raise MixedStoresError(
                    f"{key!r} is {tuple(size)} at rank {number}, and {tuple(self._sizes[key])} at "
                    "others: one checkpoint has no place for both"
                )
            if torch.Size(one.shape).numel() or not size.numel():  # else the part is empty
                self._chunks.setdefault(key, {}).setdefault(offsets, one)

    def _check_whole(self) -> None:
        for key, size in self._sizes.items():
            parts = self._chunks.get(key, {})
            there = sum(torch.Size(one.shape).numel() for one in parts.values())
            if there != size.numel():
                raise MixedStoresError(
                    f"{key!r} has {size.numel():,} elements, and the stores hold {there:,} of "
                    "them: give the stores of all ranks"
                )

    def metadata(self) -> Metadata:
        described: dict[str, Any] = {key: BytesStorageMetadata() for key in self._plain}
        for key, chunks in self._chunks.items():
            (one, *_) = chunks.values()
            described[key] = TensorStorageMetadata(
                TensorProperties(dtype=one.dtype),
                self._sizes[key],
                [
                    ChunkStorageMetadata(torch.Size(offsets), torch.Size(one.shape))
                    for offsets, one in sorted(chunks.items())
                ],
            )
        return Metadata(described, planner_data=self._paths)

    def chunk(self, index: MetadataIndex) -> torch.Tensor:
        chunks = self._chunks[index.fqn]
        one = chunks[tuple(index.offset or (0,) * len(self._sizes[index.fqn]))]
        tensor = one.read().detach()
        if tuple(tensor.shape) != one.shape or tensor.dtype is not one.dtype:
            raise CorruptStoreError(
                f"{index.fqn!r} is {tuple(tensor.shape)} {tensor.dtype}, and said to be "
                f"{one.shape} {one.dtype}"
            )
        return tensor

    def blob(self, index: MetadataIndex) -> bytes:
        buffer = io.BytesIO()
        torch.save(self._plain[index.fqn], buffer)
        return buffer.getvalue()

    def close(self) -> None:
        self._close()


def _place(key: str, one: StoredTensor) -> tuple[tuple[int, ...], torch.Size]:
    """Returns where in the whole tensor this part of it lies, and the size of the whole.

    Raises: ValueError: it is not one stretch in every dimension.
    """
    if one.shard is None:
        return (0,) * len(one.shape), torch.Size(one.shape)
    try:
        offsets, sizes = chunk(one.shard)
    except ValueError as error:
        raise ValueError(f"{key!r}: {error}") from error
    if sizes != one.shape:
        raise CorruptStoreError(
            f"{key!r} is {one.shape}, and said to be the part {sizes} of a DTensor"
        )
    return offsets, torch.Size(one.shard["shape"])


def _kept(tensor: torch.Tensor) -> StoredTensor:
    """Wraps a tensor that is part of plain state as a stored one."""
    return StoredTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)
