"""Says what lies where in a writer's folder, and reads and writes the bytes of it that are not
tensors.

    index.pm           a store; each name in it is a published checkpoint: which parts, and metadata
    index-00001.pm     the same, of rank 1 alone, where ranks saved without collectives
    rank-00001.pm      the store of rank 1; each name in it that begins with "part-" is a part
    rank-00001.pm/part-.../table    what lies in the part's other arrays, "0", "1", ...; with CRCs

A part is written once. What `index.pm` names is never touched. So a checkpoint is there when the
one commit that names it is, and a part that no index names is garbage.
"""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pmstore._base.untrusted import sound
from pmstore._engine.snapshot import checksum
from pmstore.errors import CorruptStoreError, FormatVersionError, PmstoreError, StoreLockedError
from pmstore.objects import values
from pmstore.objects.containers import Group
from pmstore.opening import open as open_store
from pmstore.store import Store

FORMAT = 1
"""The version of the format. It is raised whenever an older pmstore would misread what is new."""
MARK = "pmstore.dcp"
"""The name that marks each of our stores: {"format": FORMAT, "kind": "rank" or "index"}."""
PIECE_BYTES = 1 << 20
"""Each piece of a chunk has a CRC of its own."""
LOCK_SECONDS = 20.0
"""How long a writer waits for readers of other processes, which keep it out while they read."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def path_of(place: str | os.PathLike[str], instead: str) -> str:
    """Returns the path of a file system that the machine has mounted. instead: what to give
    otherwise, for the message.

    Raises: TypeError; ValueError: an address, which would become a folder with a strange name.
    """
    path = os.fspath(place)
    if not isinstance(path, str):
        raise TypeError(f"a folder is a str or a path of str, not {type(path).__name__}")
    if "://" in path:
        raise ValueError(f"{path!r} is an address, and stores are files: {instead}")
    return path


def index_path(folder: str, rank: int | None = None) -> str:
    """Returns the path of the index of all ranks. rank: the path of that rank's own index."""
    return os.path.join(folder, "index.pm" if rank is None else f"index-{rank:05}.pm")


def rank_path(folder: str, rank: int) -> str:
    return os.path.join(folder, f"rank-{rank:05}.pm")


def rank_paths(folder: str) -> dict[int, str]:
    """Returns the paths of the ranks' stores that are there, by rank."""
    found = {str(path): path.stem.removeprefix("rank-") for path in Path(folder).glob("rank-*.pm")}
    return {int(number): path for path, number in found.items() if number.isdecimal()}


def index_paths(folder: str) -> list[str]:
    """Returns the paths of all indices that are there, sorted."""
    return sorted(str(path) for path in Path(folder).glob("index*.pm"))


@dataclass(frozen=True)
class PartName:
    """Names a part in an index. crc: of its table, which has those of all else in it."""

    rank: int
    uuid: str
    name: str
    crc: int


def _part_name(rank: Any, uuid: Any, name: Any, crc: Any) -> PartName:
    """Checks the name of a part in an index, and returns it. Anybody may have made the index: the
    name must not name a store outside of its folder.

    Raises: CorruptStoreError.
    """
    if not (type(rank) is int and rank >= 0 and type(crc) is int):
        raise CorruptStoreError(f"a part has the rank {rank!r}")
    if not (isinstance(uuid, str) and isinstance(name, str)):
        raise CorruptStoreError(f"a part has the name {name!r}")
    return PartName(rank, uuid, name, crc)


@dataclass(frozen=True)
class Chunk:
    """Says where in a part a chunk of a tensor, or an object, lies.

    Attributes:
        offset: of the chunk in its tensor; None: an object, of uint8.
        array: number of the array; start: of its first byte there.
        crcs: of each `PIECE_BYTES`.
    """

    fqn: str
    offset: tuple[int, ...] | None
    dtype: str
    shape: tuple[int, ...]
    array: int
    start: int
    nbytes: int
    crcs: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A published checkpoint.

    Attributes:
        where: number in `parts` of each chunk and object, in the order of the metadata.
        metadata: see `pmstore.dcp._format.metadata`.
    """

    number: int
    parts: tuple[PartName, ...]
    where: tuple[int, ...]
    metadata: bytes


def crcs_of(data: Bytes) -> tuple[int, ...]:
    """Returns the CRC-32C of each piece of the data."""
    return tuple(checksum(data[at : at + PIECE_BYTES]) for at in range(0, data.size, PIECE_BYTES))


def _sealed(value: Any) -> Bytes:
    data = values.encode(value)
    return np.frombuffer(checksum(data).to_bytes(4, "little") + data, np.uint8)


def _unsealed(array: Any, place: str) -> tuple[int, Any]:
    """Returns the CRC and the value of a sealed array. Raises: CorruptStoreError,
    FormatVersionError."""
    with sound(place):
        if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1:
            raise CorruptStoreError("this is not what pmstore.dcp writes")
        data = array.tobytes()
        crc = int.from_bytes(data[:4], "little")
        if len(data) < 4 or checksum(data[4:]) != crc:
            raise CorruptStoreError("the checksum is wrong")
        value = values.decode(data[4:])
        if value["format"] > FORMAT:
            raise FormatVersionError(
                f"{place}: of format {value['format']}; this pmstore reads up to {FORMAT}: install "
                "a newer one"
            )
        return crc, value


def sealed_table(chunks: list[Chunk]) -> tuple[int, Bytes]:
    """Returns the CRC of a part's table, and the table."""
    made = _sealed({"format": FORMAT, "chunks": [list(astuple(chunk)) for chunk in chunks]})
    return int.from_bytes(made[:4].tobytes(), "little"), made


def table_of(group: Group, part: PartName, place: str) -> list[Chunk]:
    """Returns the chunks in the part's table. Raises: CorruptStoreError; FormatVersionError."""
    crc, value = _unsealed(group["table"], f"{place}: the table of {part.name}")
    if crc != part.crc:
        raise CorruptStoreError(
            f"{place}: {part.name} is not the part that the index names: the folder was mixed from "
            "copies of different times"
        )
    return [Chunk(*chunk) for chunk in value["chunks"]]


def sealed_entry(entry: Entry) -> Bytes:
    return _sealed(
        {
            "format": FORMAT,
            "number": entry.number,
            "parts": [list(astuple(part)) for part in entry.parts],
            "where": list(entry.where),
            "metadata": entry.metadata,
        }
    )


def entry_name(number: int) -> str:
    return f"checkpoint-{number:010}"


def numbers_in(index: Group) -> list[int]:
    """Returns the numbers of the checkpoints in the index, the newest last."""
    return sorted(int(name.rpartition("-")[2]) for name in index if name.startswith("checkpoint-"))


def entry_in(index: Group, number: int, place: str) -> Entry:
    """Returns the entry of a checkpoint in the index. Raises: KeyError, CorruptStoreError,
    FormatVersionError."""
    _, value = _unsealed(index[entry_name(number)], f"{place}: checkpoint {number}")
    with sound(place):
        parts = tuple(_part_name(*part) for part in value["parts"])
        return Entry(value["number"], parts, tuple(value["where"]), value["metadata"])


def check_mark(store: Store, kind: str) -> None:
    """Checks that the store is one of ours. Raises: PmstoreError: it is not; FormatVersionError."""
    mark = store.get(MARK)
    if not isinstance(mark, dict) or mark.get("kind") != kind:
        raise PmstoreError(
            f"{store.path}: a store of something else, not of checkpoints that StoreWriter writes: "
            "give it a folder of its own"
        )
    if mark["format"] > FORMAT:
        raise FormatVersionError(
            f"{store.path}: of format {mark['format']}; this pmstore reads up to {FORMAT}: install "
            "a newer one"
        )


def _check_place(path: str) -> None:
    """Checks that the path is no link. Raises: PmstoreError: it is a link, which may lead out of
    the folder."""
    if os.path.islink(path):
        raise PmstoreError(
            f"{path}: a link, and what it leads to is no part of the folder: put the store itself "
            "there"
        )


def open_marked(path: str, kind: str, domain: Any) -> Store:
    """Opens one of our stores for writing, or makes it.

    Raises: as `pmstore.open` and `check_mark`.
    """
    _check_place(path)
    store = open_store(path, size="1MiB", domain=domain, lock_timeout=LOCK_SECONDS)
    try:
        if not len(store):
            store[MARK] = {"format": FORMAT, "kind": kind}
            store.commit()
        check_mark(store, kind)
    except BaseException:
        store.close()
        raise
    return store


def open_reading(path: str, kind: str) -> Store:
    """Opens one of our stores for reading. It reads the store's own pages where nobody writes to
    it, and beside the writer otherwise. An empty one is of a process that died when it had made it.

    Raises: as `pmstore.open` and `check_mark`.
    """
    _check_place(path)
    try:
        store = open_store(path, "r", lock=True)
    except StoreLockedError:
        store = open_store(path, "r")
    try:
        if len(store):
            check_mark(store, kind)
    except BaseException:
        store.close()
        raise
    return store


def uuid_of(store: Store) -> str:
    return store.info().uuid


def named_parts(folder: str) -> list[PartName]:
    """Returns the parts that the indices of the folder name.

    Raises: CorruptStoreError, FormatVersionError; as `pmstore.open`.
    """
    found: list[PartName] = []
    for path in index_paths(folder):
        with open_reading(path, "index") as index:
            for number in numbers_in(index):
                found += entry_in(index, number, path).parts
    return found
