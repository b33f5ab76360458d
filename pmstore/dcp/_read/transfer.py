"""Does `read_data` for all readers: reads from a `Source` into what the planner gives, by all
cores."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from pmstore._engine.snapshot import read_ahead
from pmstore.dcp._format import copies
from pmstore.dcp._read.checkpoint_source import Source
from pmstore.errors import PmstoreError

_BATCH_BYTES = 1 << 30
"""So much is copied before the planner is asked for more tensors: it may make them for us."""


def read(source: Source, plan: LoadPlan, planner: LoadPlanner, *, trusted: bool) -> None:
    """Reads all items of the plan.

    trusted: load objects that torch.load refuses with weights_only=True, too. They can run any
        code: only what one wrote oneself.

    Raises: CorruptStoreError; ValueError: what is there has another size than what the planner
        gives; PmstoreError: an object was refused.
    """

    def copy(each: tuple[MetadataIndex, int, torch.Tensor, torch.Tensor]) -> None:
        index, base, part, target = each
        steps = zip(part.shape, part.stride(), strict=True)
        last = sum((length - 1) * step for length, step in steps)
        start, nbytes = part.data_ptr() - base, (last + 1) * part.element_size()
        read_ahead(part.data_ptr(), nbytes)
        source.verify(index, start, start + nbytes)
        copies.copy(part, target)

    tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
    for batch in _batches(source, tensors):
        targets = [_target(planner, item) for item, _ in batch]
        pairs = zip(batch, targets, strict=True)
        copies.by_all_cores(
            copy,
            [
                (item.storage_index, chunk.data_ptr(), *pair)
                for (item, chunk), target in pairs
                for pair in copies.slices(_part(chunk, item), target)
            ],
        )
        for (item, _), target in zip(batch, targets, strict=True):
            planner.commit_tensor(item, target)
    for item in plan.items:
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, _gated(source.blob(item.storage_index), item, trusted))


def _batches(
    source: Source, items: Sequence[ReadItem]
) -> Iterator[list[tuple[ReadItem, torch.Tensor]]]:
    batch, size = [], 0
    for item in items:
        chunk = source.chunk(item.storage_index)
        batch.append((item, chunk))
        size += item.lengths.numel() * chunk.element_size()
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _part(chunk: torch.Tensor, item: ReadItem) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        chunk = chunk.narrow(dim, start, length)
    return chunk


def _target(planner: LoadPlanner, item: ReadItem) -> torch.Tensor:
    target = planner.resolve_tensor(item).detach()
    if target.size() != item.lengths:
        raise ValueError(
            f"{item.storage_index.fqn!r}: {tuple(item.lengths)} elements are to be read, and the "
            f"tensor that the planner gives has {tuple(target.size())}"
        )
    return target


def _gated(data: bytes, item: ReadItem, trusted: bool) -> io.BytesIO:
    """Returns an object's bytes as a file, if they may be loaded. The planner calls `torch.load`
    with weights_only=False, which runs what the bytes say. Raises: PmstoreError: they are not
    trusted, and torch.load refuses them with weights_only=True."""
    if not trusted:
        try:
            torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            (reason, *_) = str(error).splitlines() or [""]
            raise PmstoreError(
                f"{item.storage_index.fqn!r} is an object that torch.load refuses with "
                "weights_only=True, as it may run any code when it is loaded: if you made the "
                f"checkpoint yourself, use StoreReader(..., trusted=True). ({reason})"
            ) from error
    return io.BytesIO(data)
