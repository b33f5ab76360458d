"""The objects of a store, found in its bytes alone: a snapshot's, or an epoch's of a tier.
docs/FORMAT.md has the bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pmstore._engine.constants import ARRAY, GROUP, GROUPS_MAX, PAGE_BYTES, VALUE
from pmstore.errors import CorruptStoreError
from pmstore.objects import values
from pmstore.objects.array import Descriptor
from pmstore.objects.names import NAME_MAX_BYTES

ROOT_OFFSET = 7 * PAGE_BYTES
_ROOT = struct.Struct("<QQ")
_HEADER = struct.Struct("<QQQQQQ")
_NODE = struct.Struct("<QQQQQIIII")
_NODE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Stored:
    """One object: a value (`meta` is msgpack) or an array or tensor (`meta` describes it) whose
    bytes lie at offset."""

    name: str
    kind: int
    meta: bytes
    offset: int
    nbytes: int


class Image:
    """read: (offset, bytes) of the store's file -> bytes. state_bytes: of all that the store holds;
    names and descriptions that overlap, as no store has them, do not take more. Lists are not
    walked."""

    def __init__(self, read: Callable[[int, int], bytes], state_bytes: int) -> None:
        self.read = read
        self._left = state_bytes
        self.epoch: int
        self.epoch, self._root = _ROOT.unpack(read(ROOT_OFFSET, _ROOT.size))

    def objects(self) -> Iterator[Stored]:
        """Values, arrays and slots, group by group, each with its path. Of slots, which are a
        group, `meta` says which of their two arrays, "0" and "1", is current.

        Raises: CorruptStoreError; what `read` raises.
        """
        groups = [("", self._root, 0)]
        seen = {self._root}
        while groups:
            path, offset, depth = groups.pop()
            for one in self._directory(path, offset):
                if one.kind == GROUP:
                    if depth == GROUPS_MAX or one.offset in seen:
                        raise CorruptStoreError("groups contain each other")
                    seen.add(one.offset)
                    groups.append((one.name + "/", one.offset, depth + 1))
                    if one.meta:
                        yield one
                elif one.kind in (VALUE, ARRAY):
                    yield one

    def arrays(self) -> Iterator[Stored]:
        return (one for one in self.objects() if one.kind == ARRAY)

    def descriptor(self, one: Stored) -> Descriptor:
        return Descriptor.unpack(one.meta)

    def value(self, one: Stored) -> object:
        return values.look_up(one.meta)

    def _directory(self, path: str, offset: int) -> Iterator[Stored]:
        count, _, _, _, node, _ = _HEADER.unpack(self.read(offset, _HEADER.size))
        seen = set()
        for _ in range(count):
            if not node or node in seen:
                raise CorruptStoreError("a directory has fewer names than it counts")
            seen.add(node)
            raw = self.read(node, _NODE_BYTES)
            _, _, following, data, data_bytes, kind, meta_bytes, name_bytes, _ = _NODE.unpack_from(
                raw
            )
            self._left -= _NODE_BYTES + name_bytes + meta_bytes
            if name_bytes > NAME_MAX_BYTES or self._left < 0:
                raise CorruptStoreError("a name in a directory, or its description, is too long")
            rest = self.read(node + _NODE_BYTES, name_bytes + meta_bytes)
            try:
                name = rest[:name_bytes].decode()
            except UnicodeDecodeError as error:
                raise CorruptStoreError(f"a name does not decode: {error}") from error
            yield Stored(path + name, kind, rest[name_bytes:], data, data_bytes)
            node = following
