"""The record that makes an epoch: which chunks a store had, and where in the tier's files each of
them lies.

A manifest is published whole or not at all, and after everything it names: one that is there
describes an epoch that was whole. Its file is `PMSTIER1`, a CRC-32C and the length of the rest,
then msgpack. docs/TIERS.md has the fields.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import msgpack
import numpy as np

from pmstore._engine.constants import PAGE_BYTES
from pmstore._engine.snapshot import checksum, file_bytes_of, uuid_of
from pmstore.objects.array import Array

MAGIC = b"PMSTIER1"
SUFFIX = ".manifest"
CHUNKS_SUFFIX = ".chunks"
FORMAT = 1
RUN = re.compile(r"[A-Za-z0-9_-]{1,64}")
MANIFEST_MOST = 4 << 30
"""Bytes of a manifest that is read at all: a state of 45 TB."""
WORLD_MOST = 1 << 20

CHUNK = np.dtype([("index", "<u8"), ("position", "<u8"), ("file", "<u4"), ("crc", "<u4")])
"""index: of the chunk in the store's file. position: in file number `file` of the manifest's list.
    crc: CRC-32C."""

_HEAD = struct.Struct("<8sIQ")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,200}\.chunks")
GENERATION_MOST = 1 << 62
"""Generations above are not ours: a name that says so would leave no room for those after it."""
_NAME = re.compile(
    r"(\d{8,20})\.(\d{12,20})\.([A-Za-z0-9_-]{1,64})\.(\d{1,20})-(\d{1,20})\.manifest", re.ASCII
)
_CHUNKS_REST = re.compile(r"([0-9a-f]{8})\.([0-9]{6,20})\.chunks")
_TEMPORARY = re.compile(r"\.(.*\.manifest)\.[0-9a-f]{8}\.new")


class BadManifestError(ValueError):
    """The bytes are no manifest, or a damaged one."""


_NAMES_MOST = 1 << 13


class ManifestName(NamedTuple):
    """The name of a manifest. generation: counts the epochs of a tier, whatever clocks say. run:
    whose epochs they are."""

    generation: int
    epoch: int
    run: str
    rank: int
    world_size: int

    def __str__(self) -> str:
        return (
            f"{self.generation:08d}.{self.epoch:012d}.{self.run}."
            f"{self.rank}-{self.world_size}{SUFFIX}"
        )

    @classmethod
    @lru_cache(_NAMES_MOST)  # a flush parses all names of a tier, again and again
    def parse(cls, name: str) -> ManifestName | None:
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        made = cls(int(match[1]), int(match[2]), match[3], int(match[4]), int(match[5]))
        ours = (
            made.generation <= GENERATION_MOST
            and made.epoch <= GENERATION_MOST
            and made.rank < made.world_size
        )
        return made if ours and str(made) == name else None

    @property
    def data_prefix(self) -> str:
        """The names of all files that this run's rank writes chunks into begin so."""
        return f"{self.run}.{self.rank}-{self.world_size}."

    def chunks_name(self, session: str, number: int) -> str:
        """The name of a file that this run's rank writes chunks into. session: 8 hexadecimal
        digits."""
        return f"{self.data_prefix}{session}.{number:06d}{CHUNKS_SUFFIX}"

    def is_written(self, name: str) -> bool:
        """Says whether this run's rank gave a file that name: chunks, or what is to become a
        manifest. Others are somebody else's, and stay."""
        if name.startswith(self.data_prefix):
            match = _CHUNKS_REST.fullmatch(name, len(self.data_prefix))
            return match is not None and self.chunks_name(match[1], int(match[2])) == name
        match = _TEMPORARY.fullmatch(name)
        return (
            match is not None
            and (parsed := self.parse(match[1])) is not None
            and parsed[2:] == self[2:]
        )


class Shared(NamedTuple):
    """A replicated array: every rank has it, and each flushes a part (see `sharding`)."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    epoch: int
    run: str
    rank: int
    world_size: int
    chunk_bytes: int
    head: bytes
    """The store's superblock: segments, hash seed, uuid."""
    files: tuple[tuple[str, int], ...]
    """Name and bytes of each file that chunks lie in."""
    chunks: Array
    """An array of dtype CHUNK, ascending by index: all that the store's file holds, but for what
    other ranks flush."""
    time: float = 0.0
    """Unix time, for people: nothing is decided by it."""
    shared: tuple[Shared, ...] = field(default=())
    borrowed: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    """Indices of the chunks that other ranks flush."""

    @property
    def lineage(self) -> str:
        """The store's uuid. A restored store has a new one."""
        return uuid_of(self.head)

    @property
    def store_bytes(self) -> int:
        """The size of the store's file, as its superblock says."""
        return file_bytes_of(self.head)

    @property
    def state_bytes(self) -> int:
        return (len(self.chunks) + len(self.borrowed)) * self.chunk_bytes

    def pack(self) -> bytes:
        body: bytes = msgpack.packb(
            {
                "format": FORMAT,
                "epoch": self.epoch,
                "run": self.run,
                "rank": self.rank,
                "world_size": self.world_size,
                "chunk_bytes": self.chunk_bytes,
                "head": self.head,
                "files": [list(one) for one in self.files],
                "chunks": self.chunks.tobytes(),
                "time": self.time,
                "shared": [list(one) for one in self.shared],
                "borrowed": self.borrowed.astype("<u8").tobytes(),
            }
        )
        return _HEAD.pack(MAGIC, checksum(body), len(body)) + body

    @staticmethod
    def packed_bytes(data: bytes) -> int:
        """Returns the size of a manifest, by its first bytes.

        Raises: BadManifestError.
        """
        if len(data) < _HEAD.size:
            raise BadManifestError("the manifest is cut off")
        magic, _, length = _HEAD.unpack_from(data)
        if magic != MAGIC:
            raise BadManifestError("not a manifest")
        if length > MANIFEST_MOST:
            raise BadManifestError(f"the manifest has more than {MANIFEST_MOST} bytes")
        return _HEAD.size + int(length)

    @classmethod
    def unpack(cls, data: bytes) -> Manifest:
        """Reads a manifest, and checks everything that is followed later.

        Raises: BadManifestError.
        """
        if len(data) != cls.packed_bytes(data):
            raise BadManifestError("the manifest is cut off")
        _, crc, _ = _HEAD.unpack_from(data)
        body = data[_HEAD.size :]
        if checksum(body) != crc:
            raise BadManifestError("the manifest's checksum is wrong")
        try:
            fields = msgpack.unpackb(body)
            if fields["format"] != FORMAT:
                raise BadManifestError(
                    f"the manifest has format {fields['format']}, this version reads {FORMAT}"
                )
            made = cls(
                epoch=int(fields["epoch"]),
                run=str(fields["run"]),
                rank=int(fields["rank"]),
                world_size=int(fields["world_size"]),
                chunk_bytes=int(fields["chunk_bytes"]),
                head=bytes(memoryview(fields["head"])),
                files=tuple((str(name), int(size)) for name, size in fields["files"]),
                chunks=np.frombuffer(fields["chunks"], CHUNK),
                time=float(fields["time"]) if math.isfinite(fields["time"]) else 0.0,
                shared=tuple(Shared(str(n), int(o), int(b)) for n, o, b in fields["shared"]),
                borrowed=np.frombuffer(fields["borrowed"], "<u8"),
            )
        except (
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            OverflowError,
            msgpack.UnpackException,
        ) as error:
            raise BadManifestError(f"the manifest does not decode: {error!r}") from error
        made._check()
        return made

    def _check(self) -> None:
        def must(condition: Any, what: str) -> None:
            if not condition:
                raise BadManifestError(f"the manifest is wrong: {what}")

        must(
            self.chunk_bytes >= PAGE_BYTES and self.chunk_bytes % PAGE_BYTES == 0, "size of a chunk"
        )
        must(self.chunk_bytes <= 1 << 30, "size of a chunk")
        must(
            len(self.head) == PAGE_BYTES and 0 <= self.rank < self.world_size <= WORLD_MOST,
            "head or rank",
        )
        for name, size in self.files:
            must(_FILE.fullmatch(name) and 0 <= size < 1 << 60, "name of a file")
        end = -(-self.store_bytes // self.chunk_bytes)
        c = self.chunks
        must(np.all(c["file"] < len(self.files)), "number of a file")
        if len(c):
            must(
                np.all(c["index"][1:] > c["index"][:-1]) and int(c["index"][-1]) < end,
                "order of the chunks",
            )
            sizes = np.array([size for _, size in self.files], np.uint64)
            must(np.all(c["position"] <= np.uint64(1 << 60)), "position of a chunk")
            must(
                np.all(c["position"] + np.uint64(self.chunk_bytes) <= sizes[c["file"]]),
                "position of a chunk",
            )
            at = np.lexsort((c["position"], c["file"]))
            file, position = c["file"][at], c["position"][at]
            apart = (file[1:] != file[:-1]) | (
                position[1:] - position[:-1] >= np.uint64(self.chunk_bytes)
            )
            # a few bytes in a tier would stand for any number in a store
            must(np.all(apart), "chunks that overlap")
        b = self.borrowed
        must(
            not len(b) or (np.all(b[1:] > b[:-1]) and int(b[-1]) < end),
            "order of the chunks of others",
        )
        end = 0
        for one in sorted(self.shared, key=lambda shared: shared.offset):
            must(
                one.offset > end and one.nbytes > 0 and one.offset + one.nbytes <= self.store_bytes,
                "a replicated array",
            )
            end = one.offset + one.nbytes - 1
