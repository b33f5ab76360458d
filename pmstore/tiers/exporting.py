"""From an epoch of a tier to a safetensors file, without a store in between."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np

from pmstore.base.newfile import absent, new_file
from pmstore.errors import TierError
from pmstore.objects import array
from pmstore.objects.array import Descriptor
from pmstore.tiers._epochs.content import EpochBytes
from pmstore.tiers._epochs.image import Image, Stored
from pmstore.tiers._epochs.listing import BrokenEpochError, EpochInfo
from pmstore.tiers._places.url import open_places
from pmstore.tiers._restore.choose import Wanted, read_first
from pmstore.tiers.patience import STALL_SECONDS, Patience


def export_safetensors(
    path: str | os.PathLike[str],
    url: str | os.PathLike[str],
    epoch: int | None = None,
    *,
    group: str = "",
    run: str | None = None,
    rank: int = 0,
    storage_options: dict[str, Any] | None = None,
    stall_seconds: float | None = STALL_SECONDS,
    progress: Callable[[int, int], Any] | None = None,
    mode: int = 0o600,
) -> tuple[int, list[str]]:
    """Writes the arrays and tensors of an epoch to a safetensors file. Values and lists are left
    out.

    The newest epoch that is whole, or the one asked for; every byte is checked. group: only what is
    under it, with names relative to it. stall_seconds: as of `restore`. progress: called with
    (bytes written, bytes of all).
    mode: permissions of the file.

    Returns: the epoch and the names.
    Raises: TierError, FileExistsError, OSError; ValueError for a dtype that safetensors does not
        have.
    """
    absent(path)
    backend = open_places(url, storage_options, Patience(os.fspath(url), stall_seconds))

    def write(info: EpochInfo) -> list[str]:
        source = EpochBytes(backend, info, rank)
        image = Image(source.read, source.manifest.state_bytes)
        prefix = f"{group.rstrip('/')}/" if group else ""
        found = {
            one.name[len(prefix) :]: one for one in image.arrays() if one.name.startswith(prefix)
        }
        if not found:
            raise TierError(
                f"{backend.url}: epoch {info.epoch} has no "
                f"arrays{f' under {group!r}' if group else ''}"
            )
        with new_file(path, mode) as file:
            metadata = {"pmstore_epoch": str(info.epoch), "pmstore_run": info.run}
            _write(file, source, image, found, metadata, progress or (lambda done, total: None))
            file.flush()
        return sorted(found)

    names, info, _ = read_first(backend, Wanted(epoch, run), "exported", write)
    return info.epoch, names


_TYPES = {
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_PIECE_BYTES = 8 << 20


def _write(
    file: IO[bytes],
    source: EpochBytes,
    image: Image,
    found: Mapping[str, Stored],
    metadata: dict[str, str],
    progress: Callable[[int, int], Any],
) -> None:
    """The format's own writer, because the library's takes all tensors in memory at once: the
    length of a header in JSON, the header, then the tensors in its order.

    Source: the format's description, https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, one in found.items():
        descriptor = image.descriptor(one)
        if math.prod(descriptor.shape) * _item_bytes(_type(descriptor, name)) != one.nbytes:
            raise BrokenEpochError("corrupt", f"{name!r} has not as many bytes as its shape says")
        header[name] = {
            "dtype": _type(descriptor, name),
            "shape": list(descriptor.shape),
            "data_offsets": [at, at + one.nbytes],
        }
        at += one.nbytes
    if at > source.manifest.state_bytes:
        raise BrokenEpochError(
            "corrupt", "its arrays overlap: together they are more than the state"
        )
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(struct.pack("<Q", len(encoded)) + encoded)
    total, done = at, 0
    for one in found.values():
        descriptor = image.descriptor(one)
        if descriptor.order is not None and one.nbytes:
            done += file.write(_in_c_order(descriptor, source.read(one.offset, one.nbytes)))
            progress(done, total)
            continue
        for start in range(0, one.nbytes, _PIECE_BYTES):
            done += file.write(
                source.read(one.offset + start, min(_PIECE_BYTES, one.nbytes - start))
            )
            progress(done, total)


def _type(descriptor: Descriptor, name: str) -> str:
    stored = descriptor.dtype if descriptor.torch else array.numpy_dtype(descriptor).name
    kind = _TYPES.get(str(stored).removeprefix("torch."))
    if kind is None:
        raise ValueError(
            f"{name!r} is of dtype {stored}, which safetensors does not have: export a group "
            "without it"
        )
    return kind


def _item_bytes(kind: str) -> int:
    return 1 if kind == "BOOL" else int("".join(filter(str.isdigit, kind.split("_")[0]))) // 8


def _in_c_order(descriptor: Descriptor, data: bytes) -> bytes:
    assert descriptor.order is not None
    item = len(data) // math.prod(descriptor.shape)
    laid = np.frombuffer(data, f"V{item}").reshape(
        [descriptor.shape[axis] for axis in descriptor.order]
    )
    return np.ascontiguousarray(laid.transpose(np.argsort(descriptor.order))).tobytes()
