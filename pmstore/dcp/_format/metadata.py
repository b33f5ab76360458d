"""Writes metadata of torch.distributed.checkpoint as bytes, and reads it. It is never pickle: the
bytes are plain values (see `pmstore/objects/values.py`), which cannot run anything."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from pmstore._base.untrusted import sound
from pmstore.errors import CorruptStoreError, FormatVersionError
from pmstore.objects import values

FORMAT = 1
"""The version of the format. It is raised whenever an older pmstore would misread what is new."""


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the dtype's name as torch has it, without "torch."."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Returns the torch dtype of that name. Raises: FormatVersionError: the installed torch has
    none of that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FormatVersionError(
            f"a tensor is of dtype {name!r}, which torch {torch.__version__} does not have: "
            "install a newer torch"
        )
    return dtype


def encode(metadata: Metadata) -> bytes:
    """Returns metadata as bytes. `storage_data` is left out: the storage says where chunks lie.

    Raises: TypeError for planner data that is not plain.
    """
    try:
        return values.encode(
            {
                "format": FORMAT,
                "items": [_item(*each) for each in metadata.state_dict_metadata.items()],
                "planner": metadata.planner_data,
                "storage": _storage(metadata.storage_meta),
                "version": getattr(metadata, "version", None),
            }
        )
    except TypeError as error:
        raise TypeError(
            f"the planner's own data is more than plain values, and is not stored: {error}"
        ) from error


def decode(data: bytes, place: str) -> Metadata:
    """Returns the metadata that `encode` wrote. place: for messages.

    Raises: CorruptStoreError, FormatVersionError.
    """
    with sound(place):
        said: Any = values.decode(data)
        if not isinstance(said, dict) or not isinstance(said.get("format"), int):
            raise CorruptStoreError("this is no metadata of a checkpoint")
        if said["format"] > FORMAT:
            raise FormatVersionError(
                f"{place}: metadata of format {said['format']}; this pmstore reads up to "
                f"{FORMAT}: install a newer one"
            )
        metadata = Metadata({name: _described(what) for name, what in said["items"]})
        metadata.planner_data = said["planner"]
        if said["storage"] is not None:
            metadata.storage_meta = StorageMeta(**said["storage"])
        if hasattr(metadata, "version"):
            metadata.version = said["version"]
        return metadata


def _item(name: str, what: Any) -> list[Any]:
    if isinstance(what, BytesStorageMetadata):
        return [name, None]
    properties = what.properties
    return [
        name,
        {
            "dtype": dtype_name(properties.dtype),
            "grad": properties.requires_grad,
            "pinned": properties.pin_memory,
            "order": str(properties.memory_format).removeprefix("torch."),
            "size": list(what.size),
            "chunks": [list(chain(chunk.offsets, chunk.sizes)) for chunk in what.chunks],
        },
    ]


def _described(what: Any) -> BytesStorageMetadata | TensorStorageMetadata:
    if what is None:
        return BytesStorageMetadata()
    dims = len(what["size"])
    order = getattr(torch, what["order"])
    if not isinstance(order, torch.memory_format):
        raise CorruptStoreError(f"{what['order']!r} is no memory format")
    return TensorStorageMetadata(
        properties=TensorProperties(
            dtype=dtype_of(what["dtype"]),
            requires_grad=what["grad"],
            memory_format=order,
            pin_memory=what["pinned"],
        ),
        size=torch.Size(what["size"]),
        chunks=[
            ChunkStorageMetadata(torch.Size(both[:dims]), torch.Size(both[dims:]))
            for both in what["chunks"]
        ],
    )


def _storage(meta: StorageMeta | None) -> dict[str, Any] | None:
    if meta is None:
        return None
    place = meta.checkpoint_id
    return {
        "checkpoint_id": None if place is None else str(place),
        "save_id": meta.save_id,
        "modules": list(meta.modules),
    }
