"""Where the chunks of an epoch go: a file in a directory, or a stream to a place."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from pmstore.engine.snapshot import SPARED, Snapshot, Transfer, checksum
from pmstore.errors import TierError
from pmstore.objects.array import Array
from pmstore.tiers._places.fsspec import FsspecBackend
from pmstore.tiers._places.local import LocalBackend
from pmstore.tiers._places.place import Backend
from pmstore.tiers.config import TierConfig

NAP_SECONDS = 0.05


class Sink(Protocol):
    end: int
    """Bytes of the file so far."""

    def write(self, indices: Array, known: Array | None = None) -> tuple[Array, Array]:
        """Adds chunks (uint64 indices). known: as for `Snapshot.write`, as is what it returns.

        Raises: TierError, PmstoreError: cancelled, and what else may happen; OSError.
        """


@contextlib.contextmanager
def open_sink(
    backend: Backend,
    name: str,
    snapshot: Snapshot,
    config: TierConfig,
    transfer: Transfer,
    chunks: int,
    known: Array | None,
) -> Iterator[Sink]:
    """A new file of so many chunks. known: of them, as they will be written: there may be fewer.
    Durable on leaving; gone if that fails.

    Raises: PmstoreError, OSError.
    """
    if isinstance(backend, LocalBackend):
        fewer = known is not None and bool((known >= 0).any())
        with backend.create(name, chunks * config.chunk_bytes, fewer) as fd:
            sink = _FileSink(snapshot, config, transfer, fd)
            yield sink
            if fewer:
                os.ftruncate(fd, sink.end)  # room that was set aside
    else:
        assert isinstance(backend, FsspecBackend)
        with backend.create(name) as stream:
            yield _StreamSink(snapshot, config, transfer, stream)


class _FileSink:
    def __init__(self, snapshot: Snapshot, config: TierConfig, transfer: Transfer, fd: int) -> None:
        self._snapshot, self._size, self._transfer = snapshot, config.chunk_bytes, transfer
        self._fd = fd
        self.end: int = 0

    def write(self, indices: Array, known: Array | None = None) -> tuple[Array, Array]:
        crc, position = self._snapshot.write(
            self._fd, self._size, indices, self.end, self._transfer, known
        )
        self.end += int((position != SPARED).sum()) * self._size
        return crc, position


class _StreamSink:
    def __init__(
        self, snapshot: Snapshot, config: TierConfig, transfer: Transfer, stream: Any
    ) -> None:
        self._snapshot, self._size, self._transfer = snapshot, config.chunk_bytes, transfer
        self._rate = config.max_bytes_per_second
        self._stream = stream
        self._start = time.monotonic()
        self.end: int = 0

    def write(self, indices: Array, known: Array | None = None) -> tuple[Array, Array]:
        crc = np.zeros(len(indices), np.uint32)
        position = np.full(len(indices), SPARED, np.uint64)
        buffer = np.empty(self._size, np.uint8)
        for i, index in enumerate(indices.tolist()):
            self._snapshot.take(index * self._size, buffer)
            crc[i] = checksum(buffer)
            spared = known is not None and int(crc[i]) == known[i]
            if not spared:
                self._snapshot.give_up(index * self._size, self._size)
                self._stream.write(buffer.data)
                position[i] = self.end
                self.end += self._size
            self._transfer.add(self._size, spared)
            self._keep_to_the_rate()
        return crc, position

    def _keep_to_the_rate(self) -> None:
        while not self._transfer.cancelled and self._rate:
            due = self._start + self._transfer.written_bytes / self._rate
            if time.monotonic() >= due:
                break
            time.sleep(min(NAP_SECONDS, due - time.monotonic()))
        if self._transfer.cancelled:
            raise TierError("the flush was cancelled")
