"""A store as one portable file, and back: `dump` and `load`. The format is in docs/FORMAT.md: a
stream of msgpack, in which nothing is code, that holds names, kinds, descriptions and bytes. It can
be piped.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np

from pmstore._base.newfile import absent, part_of, publish
from pmstore._base.text import is_own_name, warn_of_own_names
from pmstore._base.untrusted import refuse, sound
from pmstore._engine.constants import (
    ARRAY,
    FILL_NONE,
    FILL_OF_SLOT,
    GROUP,
    LIST,
    LIST_END,
    ROOT,
    VALUE,
)
from pmstore._engine.failures import damaged
from pmstore._engine.pool import Found, Pool
from pmstore.errors import CorruptStoreError
from pmstore.objects import array, slots, values
from pmstore.objects.array import Descriptor
from pmstore.objects.core import Payload
from pmstore.objects.names import split_name
from pmstore.opening import Domain, open
from pmstore.store import Store

__all__ = ["dump", "load"]

FORMAT = "pmstore dump"
VERSION = 1
_CHUNK_BYTES = 1 << 20
_BATCH_BYTES = 64 << 20
_BATCH_ITEMS = 1000
_SPOOLED_BYTES = 16 << 20

Progress = Callable[[int], None]


def _nothing(done: int) -> None:
    pass


# ---- writing -------------------------------------------------------------------------------------


class _Writer:
    def __init__(self, file: BinaryIO, progress: Progress) -> None:
        self._file = file
        self._pack = msgpack.Packer().pack
        self._progress = progress
        self.objects = 0
        self.crc = 0

    def record(self, *parts: Any) -> None:
        packed = self._pack(parts)
        self.crc = zlib.crc32(packed, self.crc)
        self._file.write(packed)
        self.objects += 1

    def data(self, address: int, data_bytes: int) -> None:
        for at in range(0, data_bytes, _CHUNK_BYTES):
            chunk = ctypes.string_at(address + at, min(_CHUNK_BYTES, data_bytes - at))
            self.crc = zlib.crc32(chunk, self.crc)
            self._file.write(self._pack(chunk))
            self._progress(len(chunk))

    def end(self) -> None:
        self._file.write(self._pack(["end", self.objects, self.crc]))


def dump(store: Store, file: BinaryIO, progress: Progress = _nothing) -> int:
    """Writes all that the store holds to the file, which need not be seekable. Returns the number
    of objects.

    Memory used does not depend on the store's size. What is uncommitted is dumped too; the caller
    keeps others from writing meanwhile (a store opened with mode "r" has no writers). progress:
    called with bytes of arrays that were written.

    Raises: CorruptStoreError, OSError.
    """
    pool = store._core.pool
    stats = store.stats()
    writer = _Writer(file, progress)
    header = {
        "format": FORMAT,
        "version": VERSION,
        "epoch": stats.epoch,
        "used_bytes": stats.used_bytes,
    }
    file.write(msgpack.packb(header))
    with store._core.lock:
        for raw, found in pool.tree():
            path = raw.decode()
            if is_own_name(path):
                continue
            if found.kind == GROUP:
                # the description of slots, which are a group
                writer.record("group", path, found.meta)
            elif found.kind == LIST:
                writer.record("list", path)
                for at in range(pool.list_count(found.data)):
                    item = pool.item(found.data, b"", at, True)
                    if item is None:
                        raise damaged(
                            store.path, f"the list {path!r} is shorter than it says", found.node
                        )
                    _dump_object(writer, pool, "item", item)
            else:
                _dump_object(writer, pool, path, found)
    writer.end()
    return writer.objects


def _dump_object(writer: _Writer, pool: Pool, where: str, found: Found) -> None:
    kind = "item" if where == "item" else "name"
    path = () if kind == "item" else (where,)
    if found.kind == VALUE:
        writer.record(f"{kind} value", *path, found.meta)
    elif found.kind == ARRAY:
        writer.record(f"{kind} array", *path, found.meta, found.data_bytes)
        pool.load(found.data, found.data_bytes)
        writer.data(pool.info.base + found.data, found.data_bytes)
    else:
        raise TypeError(
            f"{pool.path}: {where!r} is of a kind that a dump cannot hold: copy what it holds into "
            "arrays first"
        )


# ---- reading -------------------------------------------------------------------------------------


_RECORDS: dict[str, tuple[type, ...]] = {
    "group": (str, bytes),
    "list": (str,),
    "name value": (str, bytes),
    "name array": (str, bytes, int),
    "item value": (bytes,),
    "item array": (bytes, int),
    "end": (int, int),
}


class _Reader:
    """Reads records, and the bytes of arrays. It takes memory only for what has arrived. msgpack
    bounds each length by itself. So objects within objects, of which a few bytes declare many, are
    refused when the first of them ends.

    Raises (all methods): CorruptStoreError, which names the file and the record; PmstoreError for
    want of memory; OSError.
    """

    def __init__(self, file: BinaryIO, progress: Progress) -> None:
        name = getattr(file, "name", None)
        self.source = os.fspath(name) if isinstance(name, (str, os.PathLike)) else "the dump"
        self._unpacker = msgpack.Unpacker(
            file,
            max_buffer_size=(1 << 31) - 1,
            max_array_len=8,
            max_map_len=16,
            max_ext_len=0,
            strict_map_key=True,
            list_hook=self._outermost,
            object_hook=self._outermost,
        )
        self._pack = msgpack.Packer().pack
        self._progress = progress
        self._containers = 0
        self.objects = 0
        self.crc = 0
        self._name: Any = None

    @property
    def place(self) -> str:
        """The place in words: the file, and the record that was read last."""
        if not self.objects:
            return self.source
        return f"{self.source}: record {self.objects}" + (
            "" if self._name is None else f", {self._name[:200]!r}"
        )

    def wrong(self, what: str) -> CorruptStoreError:
        return CorruptStoreError(f"{self.place}: {what}")

    def _outermost(self, container: Any) -> Any:
        self._containers += 1
        if self._containers > 1:
            raise ValueError("objects within objects")
        return container

    def next(self) -> Any:
        self._containers = 0
        try:
            return self._unpacker.unpack()
        except msgpack.OutOfData:
            raise self.wrong("the dump ends before its end record: it was cut short") from None
        except Exception as error:
            refuse(self.place, error)

    def record(self) -> list[Any]:
        self.objects += 1
        self._name = None
        record: Any = self.next()
        kinds = (
            _RECORDS.get(record[0])
            if isinstance(record, list) and record and type(record[0]) is str
            else None
        )
        if kinds is None or [type(part) for part in record[1:]] != list(kinds):
            raise self.wrong("the dump is damaged: no record where one should be")
        if kinds[0] is str:
            self._name = record[1]
        if record[0] == "end":
            self.objects -= 1
        else:
            self.crc = zlib.crc32(self._pack(record), self.crc)
        return list(record)

    def pieces(self, data_bytes: int) -> Iterator[bytes]:
        """Yields the bytes of an array, as they arrive."""
        left = data_bytes
        if left < 0:
            raise self.wrong("the dump is damaged: an array of no length")
        while left:
            piece = self.next()
            if not isinstance(piece, bytes) or not 0 < len(piece) <= left:
                raise self.wrong(
                    "the dump is damaged: not the bytes of an array where they should be"
                )
            self.crc = zlib.crc32(piece, self.crc)
            self._progress(len(piece))
            left -= len(piece)
            yield piece


def load(
    file: BinaryIO,
    path: str | os.PathLike[str],
    *,
    size: int | str | None = None,
    max_size: int | str | None = None,
    domain: Domain = "auto",
    progress: Progress = _nothing,
) -> int:
    """Makes a store of a dump. Returns the number of objects. The file is not at the path before it
    is whole and durable.

    An array gets its room in the store when an eighth of it has arrived: what a dump merely
    declares takes none. Until then its bytes are in memory, and from 16 MiB on in a file without a
    name beside the path.

    size, max_size, domain: as of `pmstore.open`. progress: called with bytes of arrays that were
        read.

    Raises: FileExistsError if there is something at the path; CorruptStoreError, which names the
        record, if the dump is damaged or cut short, has a name twice, or slots that hold anything
        but their two arrays; PmstoreError for want of memory; StoreFullError, OSError. After an
        error nothing is made.
    """
    target = absent(path)
    reader = _Reader(file, progress)
    header = reader.next()
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise reader.wrong("not a dump of a store (made by `pmstore dump`)")
    if header.get("version") != VERSION:
        version = str(header.get("version"))[:40]
        raise reader.wrong(
            f"a dump of version {version}, made by a newer pmstore: load it with that"
        )
    with part_of(target) as part:
        with open(part, "x", size=size, max_size=max_size, domain=domain, hot=False) as store:
            _Loader(store, reader, target.parent).load()
        publish(part, target)
    return reader.objects


class _Loader:
    """Puts what the records say into a store that is nobody else's. Raises: as `load`."""

    def __init__(self, store: Store, reader: _Reader, folder: Path) -> None:
        self._store = store
        self._pool = store._core.pool
        self._reader = reader
        self._folder = folder
        self._list: int | None = None
        self._batch: list[Payload] = []  # items of that list that are not there yet
        self._pending = 0  # bytes since the last commit
        self._pair: list[bytes] = []  # the slots whose arrays come now
        self._left_out: list[str] = []

    def load(self) -> None:
        passed_over = False  # the last name, and the items of a list that has it
        while True:
            record = self._reader.record()
            what = record[0]
            is_item = what.startswith("item")
            if self._batch and (
                not is_item or self._pending >= _BATCH_BYTES or len(self._batch) >= _BATCH_ITEMS
            ):
                assert self._list is not None
                self._pool.splice(self._list, b"", LIST_END, 0, 1, self._batch)
                self._batch = []
            if self._pending >= _BATCH_BYTES:
                self._store.commit()
                self._pending = 0
            if what == "end":
                self._leave_pair([])
                if record[1:] != [self._reader.objects, self._reader.crc]:
                    raise self._reader.wrong("the dump is damaged: its checksum is another")
                warn_of_own_names(self._reader.source, self._left_out, 3)
                return
            if not is_item:
                self._list = None
                passed_over = is_own_name(record[1])
                self._left_out += [record[1]] * passed_over
            if passed_over:
                self._pass_over(*record)
            elif is_item:
                self._batch.append(self._item(*record))
                self._pending += self._batch[-1].data_bytes + 64
            else:
                self._named(*record)

    def _pass_over(self, what: str, *parts: Any) -> None:
        """Reads what is under a name of the library's own, as all of the dump is read, and puts it
        nowhere."""
        if what.endswith(" array"):
            for _ in self._reader.pieces(parts[-1]):
                pass

    def _item(self, what: str, meta: bytes, length: int = 0) -> Payload:
        if self._list is None:
            raise self._reader.wrong("the dump is damaged: an item of no list")
        if what == "item value":
            self._check_value(meta)
            return Payload(VALUE, meta)
        self._check_array(meta, length)
        held = bytearray()
        for piece in self._reader.pieces(length):
            try:
                held += piece
            except MemoryError as error:
                refuse(self._reader.place, error)
        data = np.frombuffer(held, np.uint8)
        return Payload(ARRAY, meta, length, array.address(data), data)

    def _named(self, what: str, path: str, meta: bytes = b"", length: int = 0) -> None:
        try:
            parts = split_name(path)
        except ValueError as error:
            refuse(self._reader.place, error)
        name = parts.pop()
        self._leave_pair(parts)
        if parts and parts == self._pair and what != "name array":
            raise self._reader.wrong("the dump is damaged: slots hold two arrays and nothing else")
        directory = self._directory(parts)
        if self._pool.find(directory, name) is not None:
            raise self._reader.wrong("the dump is damaged: the name occurs twice")
        if what == "group":
            self._pool.group(directory, name, create=True)
            if meta:
                with sound(self._reader.place):
                    slots.unpack(meta)
                self._pool.describe_group(directory, name, meta)
                self._pair = [*parts, name]
        elif what == "list":
            self._list = self._pool.open_list(directory, name, create=True)
        elif what == "name value":
            self._check_value(meta)
            self._pool.put_value(directory, name, meta)
        else:
            self._check_array(meta, length)
            self._array(directory, name, meta, length)
        self._pending += 64 + length

    def _directory(self, parts: list[bytes]) -> int:
        """Returns the directory of the group that the path names. The group's record came
        before."""
        directory = ROOT
        for depth, part in enumerate(parts, 1):
            found = self._pool.find(directory, part)
            if found is None or found.kind != GROUP:
                raise self._reader.wrong("the dump is damaged: no record made a group for it")
            if found.meta and parts[:depth] != self._pair:
                raise self._reader.wrong(
                    "the dump is damaged: slots hold two arrays and nothing else"
                )
            directory = found.data
        return directory

    def _leave_pair(self, parts: list[bytes]) -> None:
        """Checks slots, when what comes next is in another group."""
        if self._pair and parts != self._pair:
            pair, self._pair = self._pair, []
            found = self._pool.find(self._directory(pair[:-1]), pair[-1])
            assert found is not None
            with sound(
                f"{self._reader.place}: before it, "
                f"{b'/'.join(pair)[:200].decode(errors='replace')!r}"
            ):
                slots.check(self._pool, found)

    def _array(self, directory: int, name: bytes, meta: bytes, length: int) -> None:
        pieces = self._reader.pieces(length)
        arrived = 0
        with tempfile.SpooledTemporaryFile(_SPOOLED_BYTES, dir=str(self._folder)) as early:
            while length > _SPOOLED_BYTES and arrived < length >> 3:
                arrived += early.write(next(pieces))
            fill = FILL_OF_SLOT if self._pair else FILL_NONE
            block = self._pool.put_array(directory, name, meta, length, fill=fill, must_be_new=True)
            if not length:
                return
            memory: Any = memoryview(
                (ctypes.c_uint8 * length).from_address(self._pool.info.base + block)
            ).cast("B")
            early.seek(0)
            at = 0
            for piece in itertools.chain(iter(lambda: early.read(_CHUNK_BYTES), b""), pieces):
                memory[at : at + len(piece)] = piece
                at += len(piece)

    def _check_value(self, meta: bytes) -> None:
        try:
            values.decode(meta)
        except Exception as error:
            refuse(self._reader.place, error)

    def _check_array(self, meta: bytes, length: int) -> None:
        try:
            descriptor = Descriptor.unpack(meta)
            if not 0 <= length <= array.LARGEST_BYTES:
                raise ValueError("an array of no length")
            if not descriptor.torch:  # torch is not imported for this
                array.check_bytes(descriptor, array.numpy_dtype(descriptor).itemsize, length)
        except Exception as error:
            refuse(self._reader.place, error)
