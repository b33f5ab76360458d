"""A store as one portable file, and back: `dump` and `load`. The format is in docs/FORMAT.md: a stream of msgpack, in which
nothing is code, that holds names, kinds, descriptions and bytes. It can be piped.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np

from pmstore import _ffi, array, slots, values
from pmstore.array import Descriptor
from pmstore.containers import split_name
from pmstore.core import Payload
from pmstore.errors import CorruptStoreError
from pmstore.store import Domain, Store, open
from pmstore.words import is_own_name, warn_of_own_names

FORMAT = "pmstore dump"
VERSION = 1
_CHUNK_BYTES = 1 << 20
_BATCH_BYTES = 64 << 20

Progress = Callable[[int], None]


def _nothing(done: int) -> None:
    pass


# ---- writing ---------------------------------------------------------------------------------------------------------------


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
    """Writes all that the store holds to the file, which need not be seekable. Returns the number of objects.

    Memory used does not depend on the store's size. What is uncommitted is dumped too; the caller keeps others from writing
    meanwhile (a store opened with mode "r" has no writers). progress: called with bytes of arrays that were written.

    Raises: CorruptStoreError, OSError.
    """
    pool = store._core.pool
    stats = store.stats()
    writer = _Writer(file, progress)
    header = {"format": FORMAT, "version": VERSION, "epoch": stats.epoch, "used_bytes": stats.used_bytes}
    file.write(msgpack.packb(header))
    with store._core.lock:
        for raw, found in pool.tree():
            try:
                path = raw.decode()
            except UnicodeDecodeError as error:
                raise CorruptStoreError(f"{pool.path}: a name that is not UTF-8: {raw[:200]!r}") from error
            if is_own_name(path):
                continue
            if found.kind == _ffi.GROUP:
                writer.record("group", path, found.meta)  # the description of slots, which are a group
            elif found.kind == _ffi.LIST:
                writer.record("list", path)
                for at in range(pool.list_count(found.data)):
                    item = pool.item(found.data, at)
                    if item is None:
                        raise CorruptStoreError(f"{store.path}: the list {path!r} is shorter than it says")
                    _dump_object(writer, pool, "item", item)
            else:
                _dump_object(writer, pool, path, found)
    writer.end()
    return writer.objects


def _dump_object(writer: _Writer, pool: _ffi.Pool, where: str, found: _ffi.Found) -> None:
    kind = "item" if where == "item" else "name"
    path = () if kind == "item" else (where,)
    if found.kind == _ffi.VALUE:
        writer.record(f"{kind} value", *path, found.meta)
    elif found.kind == _ffi.ARRAY:
        writer.record(f"{kind} array", *path, found.meta, found.data_bytes)
        writer.data(pool.info.base + found.data, found.data_bytes)
    else:
        raise TypeError(f"{pool.path}: {where!r} is of a kind that a dump cannot hold: copy what it holds into arrays first")


# ---- reading ---------------------------------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, file: BinaryIO, progress: Progress) -> None:
        self._unpacker = msgpack.Unpacker(
            file, max_buffer_size=(1 << 31) - 1, max_array_len=8, max_map_len=16, max_ext_len=0, strict_map_key=True
        )
        self._progress = progress
        self.objects = 0
        self.crc = 0

    def next(self) -> Any:
        """Raises: CorruptStoreError."""
        try:
            return self._unpacker.unpack()
        except msgpack.OutOfData:
            raise CorruptStoreError("the dump ends before its end record: it was cut short") from None
        except (ValueError, msgpack.UnpackException) as error:
            raise CorruptStoreError(f"the dump is damaged: {error}") from error

    def record(self) -> list[Any]:
        record = self.next()
        if not isinstance(record, list) or not record or not isinstance(record[0], str):
            raise CorruptStoreError("the dump is damaged: no record where one should be")
        if record[0] != "end":
            self.crc = zlib.crc32(msgpack.packb(record), self.crc)
            self.objects += 1
        return record

    def pass_over(self, what: str, length: int) -> None:
        """The bytes of an array that is not wanted; of anything else there are none."""
        if what.endswith(" array") and type(length) is not int:
            raise CorruptStoreError("the dump is damaged: an array of no length")
        while what.endswith(" array") and length > 0:
            chunk = self.next()
            if not isinstance(chunk, bytes) or not 0 < len(chunk) <= length:
                raise CorruptStoreError("the dump is damaged: not the bytes of an array where they should be")
            self.crc = zlib.crc32(chunk, self.crc)
            self._progress(len(chunk))
            length -= len(chunk)

    def data(self, into: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        at = 0
        while at < into.size:
            chunk = self.next()
            if not isinstance(chunk, bytes) or not 0 < len(chunk) <= into.size - at:
                raise CorruptStoreError("the dump is damaged: not the bytes of an array where they should be")
            into[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
            self.crc = zlib.crc32(chunk, self.crc)
            self._progress(len(chunk))
            at += len(chunk)


def load(
    file: BinaryIO,
    path: str | os.PathLike[str],
    *,
    size: int | str | None = None,
    max_size: int | str | None = None,
    domain: Domain = "auto",
    progress: Progress = _nothing,
) -> int:
    """Makes a store of a dump. Returns the number of objects. The file is not at the path before it is whole and durable.

    size, max_size, domain: as of `pmstore.open`. progress: called with bytes of arrays that were read.

    Raises: FileExistsError if there is something at the path; CorruptStoreError if the dump is damaged or cut short;
        StoreFullError, OSError. Then nothing is made.
    """
    target = Path(path)
    if os.path.lexists(target):
        raise FileExistsError(17, "the file exists: give another path, or remove it first", str(target))
    reader = _Reader(file, progress)
    header = reader.next()
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CorruptStoreError("not a dump of a store (made by `pmstore dump`)")
    if header.get("version") != VERSION:
        raise CorruptStoreError(f"a dump of version {header.get('version')!r}, made by a newer pmstore: load it with that")
    part = target.with_name(f".{target.name[:200]}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "x", size=size, max_size=max_size, domain=domain, hot=False) as store:
            _load_objects(store, reader)
        os.rename(part, target)
    finally:
        part.unlink(missing_ok=True)
    return reader.objects


def _load_objects(store: Store, reader: _Reader) -> None:
    pool = store._core.pool
    items: int | None = None
    left_out: list[str] = []
    passing = False  # what is being read is under a name of the library's own
    batch: list[Payload] = []
    pending = 0
    while True:
        record = reader.record()
        what = record[0]
        if batch and (not what.startswith("item") or pending >= _BATCH_BYTES or len(batch) >= 1000):
            assert items is not None
            pool.splice(items, _ffi.LIST_END, 0, 1, batch)
            batch = []
        if pending >= _BATCH_BYTES:
            store.commit()
            pending = 0
        try:
            if what == "end":
                if record[1:] != [reader.objects, reader.crc]:
                    raise CorruptStoreError("the dump is damaged: its checksum is another")
                warn_of_own_names("the dump", left_out, 3)
                return
            if not what.startswith("item") and len(record) > 1 and isinstance(record[1], str):
                passing = is_own_name(record[1])
                left_out += [record[1]] * passing
            if passing:
                reader.pass_over(what, record[-1])
                continue
            if what.startswith("item"):
                if items is None:
                    raise ValueError("an item of no list")
                batch.append(_item(reader, what, *record[1:]))
                pending += batch[-1].data_bytes + 64
                continue
            items, used = _load_named(store, reader, what, *record[1:])
            pending += used
        except CorruptStoreError:
            raise
        except (ValueError, TypeError, AssertionError) as error:
            raise CorruptStoreError(f"the dump is damaged: {error}") from error


def _directory(store: Store, parts: list[bytes]) -> int:
    directory = _ffi.ROOT
    for part in parts:
        found = store._core.pool.group(directory, part, create=True)
        assert found is not None
        directory = found
    return directory


def _load_named(
    store: Store, reader: _Reader, what: str, path: str, meta: bytes = b"", length: int = 0
) -> tuple[int | None, int]:
    """The list, if it is one, and the bytes that were read."""
    pool = store._core.pool
    parts = split_name(path)
    name = parts.pop()
    directory = _directory(store, parts)
    if what == "group":
        pool.group(directory, name, create=True)
        if meta:
            slots.unpack(meta)
            pool.describe_group(directory, name, meta)
    elif what == "list":
        return pool.open_list(directory, name, create=True), 64
    elif what == "name value":
        values.decode(meta)
        pool.put_value(directory, name, meta)
    elif what == "name array":
        _check_array(meta, length)
        block = pool.put_array(directory, name, meta, length, fill=_ffi.FILL_NONE, must_be_new=True)
        if length:
            memory: Any = (ctypes.c_uint8 * length).from_address(pool.info.base + block)
            reader.data(np.frombuffer(memory, np.uint8))
    else:
        raise ValueError(f"a record of an unknown kind {what[:40]!r}")
    return None, 64 + length


def _item(reader: _Reader, what: str, meta: bytes, length: int = 0) -> Payload:
    if what == "item value":
        values.decode(meta)
        return Payload(_ffi.VALUE, meta)
    if what != "item array":
        raise ValueError(f"a record of an unknown kind {what[:40]!r}")
    _check_array(meta, length)
    data = np.empty(length, np.uint8)
    reader.data(data)
    return Payload(_ffi.ARRAY, meta, length, array.address(data), data)


def _check_array(meta: bytes, length: int) -> None:
    descriptor = Descriptor.unpack(meta)
    if type(length) is not int or not 0 <= length <= array.LARGEST_BYTES:
        raise ValueError("an array of no length")
    if not descriptor.torch:  # torch is not imported for this
        array.check_bytes(descriptor, array.numpy_dtype(descriptor).itemsize, length)
