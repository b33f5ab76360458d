"""Reads a checkpoint in a writer's folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from pmstore._base.untrusted import sound
from pmstore._engine.snapshot import checksum
from pmstore.dcp._format import copies, folder_layout
from pmstore.dcp._format import metadata as codec
from pmstore.dcp._format.folder_layout import PIECE_BYTES, Chunk, Entry
from pmstore.dcp._read.checkpoint_source import Source
from pmstore.dcp._write import publication
from pmstore.dcp._write.rank_store import RankStore
from pmstore.errors import CorruptStoreError
from pmstore.store import Store

_Key = tuple[str, tuple[int, ...] | None]


def _key(index: MetadataIndex) -> _Key:
    return index.fqn, None if index.offset is None else tuple(index.offset)


class _OpenPart:
    """A part that is open for reading: arrays, and what lies in them."""

    def __init__(self, folder: str, name: folder_layout.PartName) -> None:
        """Opens the part, in this process's own store where it has that open. Raises:
        FileNotFoundError, CorruptStoreError."""
        self.path = folder_layout.rank_path(folder, name.rank)
        ours = RankStore.open_at(self.path)  # of this process, whose mapping is read
        self._keeps = ours
        self._reader = None if ours is not None else folder_layout.open_reading(self.path, "rank")
        store = ours.store if ours is not None else self._reader
        assert store is not None
        try:
            if folder_layout.uuid_of(store) != name.uuid:
                raise CorruptStoreError(
                    f"{self.path}: this is another store than the one that the checkpoint was "
                    "written to: the folder was mixed from copies, or of several jobs"
                )
            if name.name not in store:
                raise CorruptStoreError(
                    f"{self.path}: it does not have {name.name}, which the index names: the folder "
                    "was copied by half, or while it was written to; or newer checkpoints have "
                    "taken its place meanwhile: load again"
                )
            self._group = store[name.name]
            table = folder_layout.table_of(self._group, name, self.path)
        except BaseException:
            self.close()
            raise
        self.chunks = {(c.fqn, None if c.offset is None else tuple(c.offset)): c for c in table}
        self._arrays: dict[int, torch.Tensor] = {}
        self.sound: set[tuple[_Key, int]] = set()

    def data(self, chunk: Chunk) -> torch.Tensor:
        """Returns the bytes of a chunk, over the store's memory."""
        with sound(f"{self.path}: {chunk.fqn!r}"):
            array = self._arrays.get(chunk.array)
            if array is None:
                array = self._arrays[chunk.array] = self._group[str(chunk.array)]
            if array.dtype != torch.uint8 or chunk.start + chunk.nbytes > array.numel():
                raise CorruptStoreError("its array is not what the table says")
            return array[chunk.start : chunk.start + chunk.nbytes]

    def close(self) -> None:
        self._arrays = {}
        if self._reader is not None:
            self._reader.close()


class FolderSource(Source):
    """A checkpoint in a writer's folder.

    number: of the checkpoint; None: the newest. rank: of its own index; None: the index of all.
    """

    def __init__(self, folder: str, number: int | None = None, rank: int | None = None) -> None:
        """Opens the checkpoint's entry in the index. Raises: FileNotFoundError: there is no
        checkpoint; CorruptStoreError; TypeError: the number is no int."""
        if number is not None and not isinstance(number, int):
            raise TypeError(f"number is {number!r}: give an int (see StoreReader.numbers)")
        self._folder = folder
        self._index = folder_layout.index_path(folder, rank)
        with _open_index(folder, self._index) as index:
            there = folder_layout.numbers_in(index)
            if not there or (number is not None and number not in there):
                what = "no checkpoint" if number is None else f"no checkpoint {number}"
                raise FileNotFoundError(f"{self._index}: there is {what} in it: it has {there}")
            self._entry: Entry = folder_layout.entry_in(
                index, there[-1] if number is None else number, self._index
            )
        self.mark: str = f"checkpoint {self._entry.number}"
        if rank is None:  # two nodes may each have a folder of that name; ranks' own always differ
            self.mark += f", {checksum(self._entry.metadata):08x}"
        self._parts: dict[int, _OpenPart] = {}
        self._where: dict[_Key, int] | None = None

    @staticmethod
    def numbers(folder: str) -> list[int]:
        path = folder_layout.index_path(folder)
        with _open_index(folder, path) as index:
            return folder_layout.numbers_in(index)

    @staticmethod
    def is_one(folder: str) -> bool:
        return os.path.isdir(folder) and bool(folder_layout.index_paths(folder))

    def metadata(self) -> Metadata:
        metadata = codec.decode(self._entry.metadata, self._index)
        indices = list(publication.indices_of(metadata))
        with sound(self._index):
            pairs = zip(indices, self._entry.where, strict=True)
            self._where = {_key(index): part for index, part in pairs}
        return metadata

    def _find(self, index: MetadataIndex) -> tuple[_OpenPart, Chunk]:
        if self._where is None:
            self.metadata()
            assert self._where is not None
        number = self._where[_key(index)]
        part = self._parts.get(number)
        if part is None:
            part = _OpenPart(self._folder, self._entry.parts[number])
            self._parts[number] = part
        chunk = part.chunks.get(_key(index))
        if chunk is None:
            raise CorruptStoreError(f"{part.path}: {index.fqn!r} is not in the part that has it")
        return part, chunk

    def chunk(self, index: MetadataIndex) -> torch.Tensor:
        part, chunk = self._find(index)
        with sound(f"{part.path}: {index.fqn!r}"):
            return copies.from_bytes(part.data(chunk), codec.dtype_of(chunk.dtype), chunk.shape)

    def blob(self, index: MetadataIndex) -> bytes:
        part, chunk = self._find(index)
        self.verify(index, 0, chunk.nbytes)
        return part.data(chunk).numpy().tobytes()

    def verify(self, index: MetadataIndex, start: int, stop: int) -> None:
        part, chunk = self._find(index)
        data = part.data(chunk).numpy()
        for piece in range(start // PIECE_BYTES, -(-stop // PIECE_BYTES)):
            if ((key := _key(index)), piece) in part.sound:
                continue
            at = piece * PIECE_BYTES
            if checksum(data[at : at + PIECE_BYTES]) != chunk.crcs[piece]:
                raise CorruptStoreError(
                    f"{part.path}: {index.fqn!r} is damaged: bytes {at} to "
                    f"{min(at + PIECE_BYTES, chunk.nbytes)} of its chunk at {chunk.offset} do not "
                    "have the checksum that they were written with. Load another checkpoint "
                    "(StoreReader.numbers), or what a tier or a copy has"
                )
            part.sound.add((key, piece))

    def close(self) -> None:
        parts, self._parts = self._parts, {}
        for part in parts.values():
            part.close()


@contextmanager
def _open_index(folder: str, path: str) -> Iterator[Store]:
    if not os.path.exists(path):
        why = "none was published, or it is another folder"
        if os.path.isfile(folder):
            why = (
                "it is a file. Give the folder of a StoreWriter; for the store of an attached run: "
                "StoreReader.of_run"
            )
        elif os.path.exists(os.path.join(folder, ".metadata")):
            why = "torch wrote what is there: use torch's FileSystemReader"
        raise FileNotFoundError(
            f"{path}: there is no checkpoint of pmstore.dcp in {folder!r}: {why}"
        )
    with folder_layout.open_reading(path, "index") as index:
        yield index
