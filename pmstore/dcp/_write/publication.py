"""Publishes a checkpoint: one commit of the index names the parts of all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from pmstore._engine.constants import PAGE_BYTES
from pmstore._engine.snapshot import uuid_of
from pmstore.dcp._format import folder_layout
from pmstore.dcp._format import metadata as codec
from pmstore.dcp._format.folder_layout import Entry, PartName
from pmstore.errors import PmstoreError
from pmstore.opening import open as open_store


def indices_of(metadata: Metadata) -> Iterable[MetadataIndex]:
    """Yields the indices of all chunks and objects, always in the same order."""
    for name, what in metadata.state_dict_metadata.items():
        if isinstance(what, BytesStorageMetadata):
            yield MetadataIndex(name)
        else:
            for chunk in what.chunks:
                yield MetadataIndex(name, chunk.offsets)


def _check_seen(folder: str, part: PartName) -> None:
    """Checks that the store that a rank wrote its part to is the one seen here. Raises:
    PmstoreError: it is not."""
    path = folder_layout.rank_path(folder, part.rank)
    try:
        with open(path, "rb") as file:
            seen = uuid_of(file.read(PAGE_BYTES)) == part.uuid
    except FileNotFoundError:
        seen = False
    if not seen:
        raise PmstoreError(
            f"{path}: rank {part.rank} wrote its part of the checkpoint, and the coordinator sees "
            "another file here or none: nothing is published. Give a folder that all ranks see, as "
            "of a shared file system"
        )


def publish(
    path: str, domain: Any, keep: int, metadata: Metadata, results: Iterable[Iterable[WriteResult]]
) -> int:
    """Publishes what ranks have committed, in an index, and forgets all but the newest `keep`.
    Returns the checkpoint's number. It is durable on return, as far as the domain goes.

    Raises: PmstoreError: the results are not those of this metadata; as `pmstore.open` and
        `Store.commit`.
    """
    written = {result.index: result.storage_data for result in chain.from_iterable(results)}
    parts: dict[PartName, int] = {}
    where = []
    for index in indices_of(metadata):
        part = written.get(index)
        if not isinstance(part, PartName):
            raise PmstoreError(
                f"{path}: no rank has written {index.fqn!r}"
                + (f" at {tuple(index.offset)}" if index.offset is not None else "")
                + ": saves at the same time, of one process group, were mixed up. Wait for the "
                "future of the one before the next"
            )
        where.append(parts.setdefault(part, len(parts)))
    for part in parts:
        _check_seen(os.path.dirname(path), part)
    encoded = codec.encode(metadata)
    with folder_layout.open_marked(path, "index", domain) as index_store:
        there = folder_layout.numbers_in(index_store)
        number = there[-1] + 1 if there else 1
        entry = Entry(number, tuple(parts), tuple(where), encoded)
        index_store[folder_layout.entry_name(number)] = folder_layout.sealed_entry(entry)
        for old in there[: max(0, len(there) + 1 - keep)]:
            del index_store[folder_layout.entry_name(old)]
        index_store.commit()
    return number


def forget_ranks(folder: str, world: int) -> None:
    """Removes stores of ranks that are no more, where more ranks saved before, as soon as no
    checkpoint names a part in them. What cannot be removed now stays until the next save."""
    others = [path for rank, path in folder_layout.rank_paths(folder).items() if rank >= world]
    if not others:
        return
    with suppress(PmstoreError, OSError):
        named = {part.uuid for part in folder_layout.named_parts(folder)}
        for path in others:
            with suppress(PmstoreError, OSError), open_store(path, "r+") as store:
                folder_layout.check_mark(store, "rank")
                if folder_layout.uuid_of(store) not in named:
                    os.unlink(path)
