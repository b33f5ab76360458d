"""Checkpoints that torch itself wrote, as sources: its folders, and files of `torch.save`. Pickle
in them makes tensors and plain data alone, unless they are trusted."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from pmstore.base.untrusted import sound
from pmstore.dcp.source import Source
from pmstore.errors import PmstoreError

_METADATA = {
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "builtins": {"set", "frozenset", "list", "dict", "tuple"},
}
"""What torch's metadata is made of."""


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} is nothing that metadata is made of")


class TorchFolder(Source):
    """A folder of torch's FileSystemWriter."""

    def __init__(self, folder: str | os.PathLike[str], trusted: bool = False) -> None:
        """Raises: FileNotFoundError; PmstoreError: its metadata would run code."""
        self.mark: str = str(folder)
        self._folder = os.fspath(folder)
        self._reader = FileSystemReader(folder)
        path = os.path.join(self._folder, ".metadata")
        with open(path, "rb") as file:
            try:
                made = pickle.load(file) if trusted else _Metadata(file).load()
            except pickle.UnpicklingError as error:
                raise refused(path, error) from error
        if not isinstance(made, Metadata):
            raise PmstoreError(f"{path}: this is no metadata of a checkpoint")
        self._metadata = made
        self._reader.set_up_storage_reader(made, True)

    def metadata(self) -> Metadata:
        return self._metadata

    def chunk(self, index: MetadataIndex) -> torch.Tensor:
        described = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(described, TensorStorageMetadata)
        chunk = next(one for one in described.chunks if one.offsets == index.offset)
        into = torch.empty(chunk.sizes, dtype=described.properties.dtype)
        self._read(index, LoadItemType.TENSOR, chunk.sizes, _Into(into))
        return into

    def blob(self, index: MetadataIndex) -> bytes:
        into = _Into(None)
        self._read(index, LoadItemType.BYTE_IO, torch.Size([0]), into)
        return into.data

    def _read(
        self, index: MetadataIndex, kind: LoadItemType, lengths: torch.Size, into: _Into
    ) -> None:
        zeros = torch.Size([0] * len(lengths))
        item = ReadItem(kind, index, zeros, index, zeros, lengths)
        with sound(f"{self._folder}: {index.fqn!r}"):
            self._reader.read_data(LoadPlan([item]), into).wait()

    def close(self) -> None:
        self._reader.reset()


class Taking(LoadPlanner):
    """A planner for what reads to one. Of its own it plans nothing."""

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None: ...

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan


class _Into(Taking):
    """Takes what one item is read to."""

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self._tensor = tensor
        self.data = b""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert self._tensor is not None
        return self._tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.data = value.getvalue()


class TorchFile(Source):
    """A file of `torch.save` with a state dict; tensors are read when they are wanted."""

    def __init__(self, path: str | os.PathLike[str], trusted: bool = False) -> None:
        """Raises: PmstoreError: it would run code; it holds no state dict, or a tensor that no
        checkpoint holds; CorruptStoreError."""
        self.mark: str = str(path)
        place = os.fspath(path)
        with sound(place), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old files' storages
            try:
                state = _load(place, trusted)
            except pickle.UnpicklingError as error:
                raise refused(place, error) from error
        if not isinstance(state, dict):
            raise PmstoreError(f"{place}: it holds a {type(state).__name__}, and no state dict")
        self._state, self._paths = flatten_state_dict(state)
        for key, one in self._state.items():
            if isinstance(one, torch.Tensor) and not _is_dense(one):
                raise PmstoreError(
                    f"{place}: {key!r} is a {type(one).__name__} of layout {one.layout}, on "
                    f"{one.device}: a checkpoint holds dense tensors"
                )

    def metadata(self) -> Metadata:
        described: dict[str, Any] = {}
        for key, one in self._state.items():
            described[key] = BytesStorageMetadata()
            if isinstance(one, torch.Tensor):
                chunk = ChunkStorageMetadata(torch.Size([0] * one.dim()), one.size())
                properties = TensorProperties(dtype=one.dtype)
                described[key] = TensorStorageMetadata(properties, one.size(), [chunk])
        return Metadata(described, planner_data=self._paths)

    def chunk(self, index: MetadataIndex) -> torch.Tensor:
        tensor: torch.Tensor = self._state[index.fqn].detach()
        return tensor

    def blob(self, index: MetadataIndex) -> bytes:
        return saved(self._state[index.fqn])

    def close(self) -> None:
        self._state = {}


def _load(path: str, trusted: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=not trusted)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
    # of a version of torch that wrote no zip files
    return torch.load(path, map_location="cpu", weights_only=not trusted)


def _is_dense(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.device.type == "cpu"
    )


def saved(value: Any) -> bytes:
    """A plain object, as a checkpoint has it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def refused(place: str, error: Exception) -> PmstoreError:
    (reason, *_) = str(error).splitlines() or [""]
    return PmstoreError(
        f"{place}: it holds more than tensors and plain data, and could run any code when it is "
        f"loaded: if you made it yourself, trust it (trusted=True, --trusted). ({reason})"
    )
