"""From any source to any form of checkpoint, a tensor at a time."""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter

from pmstore.base.newfile import PRIVATE, absent, new_file, publish
from pmstore.dcp import reading
from pmstore.dcp.foreign import Taking
from pmstore.dcp.source import Source
from pmstore.dcp.writer import StoreWriter

Progress = Callable[[int], None]
"""Called with bytes done since."""


def all_of(source: Source) -> Metadata:
    """Each thing under one key."""
    metadata = source.metadata()
    metadata.state_dict_metadata = {
        key: one for key, one in metadata.state_dict_metadata.items() if key not in source.twins
    }
    return metadata


def total_bytes(metadata: Metadata) -> int:
    return sum(
        one.size.numel() * one.properties.dtype.itemsize
        for one in metadata.state_dict_metadata.values()
        if isinstance(one, TensorStorageMetadata)
    )


def to_store(source: Source, target: Path, metadata: Metadata, advance: Progress) -> None:
    """A folder of `StoreWriter`."""
    with _new_folder(target) as part:
        writer = StoreWriter(part, keep=1)
        try:
            _save(source, metadata, writer, advance)
        finally:
            writer.close()


def to_torch(source: Source, target: Path, metadata: Metadata, advance: Progress) -> None:
    """A folder of torch's FileSystemWriter."""
    with _new_folder(target) as part:
        _save(source, metadata, FileSystemWriter(part), advance)


def _save(source: Source, metadata: Metadata, writer: StorageWriter, advance: Progress) -> None:
    """Chunks stay as they are."""
    with _plainly(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # there is one process
        planner = _Copying(source, metadata, advance)
        save({}, storage_writer=writer, planner=planner, no_dist=True)


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """torch's own exception says what a rank met; there is one."""
    try:
        yield
    except CheckpointException as error:
        for one, _ in error.failures.values():
            raise one from None
        raise


class _Copying(SavePlanner):
    """Gives torch's save what a source has, when it is written."""

    def __init__(self, source: Source, metadata: Metadata, advance: Progress) -> None:
        self._source = source
        self._metadata = metadata
        self._advance = advance

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None: ...

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, one in self._metadata.state_dict_metadata.items():
            if not isinstance(one, TensorStorageMetadata):
                items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
                continue
            for number, chunk in enumerate(one.chunks):
                index = MetadataIndex(key, chunk.offsets, number)
                data = TensorWriteData(chunk, one.properties, one.size)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        kept = self._metadata
        return all_plans, Metadata(
            kept.state_dict_metadata,
            planner_data={
                key: path
                for key, path in (kept.planner_data or {}).items()
                if key in kept.state_dict_metadata
            },
        )

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._source.blob(write_item.index))
        tensor = self._source.chunk(write_item.index)
        size = tensor.numel() * tensor.element_size()
        self._source.verify(write_item.index, 0, size)
        self._advance(size)
        return tensor


def to_file(
    source: Source, target: Path, metadata: Metadata, advance: Progress, trusted: bool
) -> None:
    """A file of `torch.save`: nested as the program's state dict was. Tensors are put together in a
    file beside it, not in memory.

    Raises: PmstoreError: an object was refused; see `reading.read`.
    """
    described = metadata.state_dict_metadata
    tensors = {key: one for key, one in described.items() if isinstance(one, TensorStorageMetadata)}
    absent(target)
    with new_file(target, PRIVATE) as file, _made_beside(target, tensors) as made:
        items = [
            _item(LoadItemType.TENSOR, MetadataIndex(key, chunk.offsets, number), chunk)
            for key, one in tensors.items()
            for number, chunk in enumerate(one.chunks)
        ]
        nothing = ChunkStorageMetadata(torch.Size([0]), torch.Size([0]))
        objects = [
            _item(LoadItemType.BYTE_IO, MetadataIndex(key), nothing)
            for key in described
            if key not in tensors
        ]
        into = _Assembling(made, advance)
        reading.read(source, LoadPlan(items + objects), into, trusted=trusted)
        state: dict[str, Any] = {}
        paths = metadata.planner_data or {}
        for key in described:
            set_element(state, paths.get(key, (key,)), into.found[key])
        torch.save(state, file)


def _item(kind: LoadItemType, index: MetadataIndex, chunk: ChunkStorageMetadata) -> ReadItem:
    """All of a chunk, to its place in the tensor."""
    zeros = torch.Size([0] * len(chunk.sizes))
    return ReadItem(kind, index, chunk.offsets, index, zeros, chunk.sizes)


class _Assembling(Taking):
    """Takes what is read into tensors that are there."""

    def __init__(self, tensors: dict[str, torch.Tensor], advance: Progress) -> None:
        self.found: dict[str, Any] = dict(tensors)
        self._advance = advance

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor: torch.Tensor = self.found[read_item.dest_index.fqn]
        for dim, start in enumerate(read_item.dest_offsets):
            tensor = tensor.narrow(dim, start, read_item.lengths[dim])
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._advance(tensor.numel() * tensor.element_size())

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # what is not trusted was refused before
        self.found[read_item.dest_index.fqn] = torch.load(
            value, map_location="cpu", weights_only=False
        )


@contextlib.contextmanager
def _made_beside(
    target: Path, tensors: dict[str, TensorStorageMetadata]
) -> Iterator[dict[str, torch.Tensor]]:
    """Empty tensors, in a file without a name in the folder of the target."""
    starts, end = {}, 0
    for key, one in tensors.items():
        starts[key] = end
        end += -(-one.size.numel() * one.properties.dtype.itemsize // _ALIGN) * _ALIGN
    with tempfile.TemporaryFile(dir=target.parent) as file:
        os.truncate(file.fileno(), max(end, 1))
        whole = np.frombuffer(mmap.mmap(file.fileno(), max(end, 1)), np.uint8)
        made = {}
        for key, one in tensors.items():
            dtype, count = one.properties.dtype, one.size.numel()
            part = whole[starts[key] : starts[key] + count * dtype.itemsize]
            flat = torch.from_numpy(part).view(dtype) if count else torch.empty(0, dtype=dtype)
            made[key] = flat.view(one.size)
        yield made


_ALIGN = 64
"""A tensor begins where any dtype may."""


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """The folder has the path when the block ends without an exception.

    Raises: FileExistsError, FileNotFoundError.
    """
    absent(target)
    if not target.parent.is_dir():
        raise FileNotFoundError(2, "there is no such directory: make it first", str(target.parent))
    part = Path(
        tempfile.mkdtemp(prefix=f".{target.name[:200]}.", suffix=".part", dir=target.parent)
    )
    try:
        yield part
        publish(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
