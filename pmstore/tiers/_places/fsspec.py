"""A tier in whatever fsspec reaches."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from pmstore._base.workers import Patience, Tasks, WorkerError
from pmstore._engine.snapshot import SPARED, Snapshot, Transfer, checksum, write_all
from pmstore.errors import TierError
from pmstore.extras import install
from pmstore.objects.array import Array
from pmstore.tiers._places.place import BrokenEpochError, Lock, NewFile, NewStore

THREADS = 8
"""Threads that `copy` reads with."""
RANGE_BYTES = 8 << 20
"""Bytes that it asks for at once."""
NAP_SECONDS = 0.05

_Answer = TypeVar("_Answer")


class Prompt:
    """Asks on the caller's thread: somebody else looks whether the place answers."""

    def ask(self, question: Callable[[], _Answer]) -> _Answer:
        return question()


Ask = Prompt | Patience
"""How questions are asked: `Patience` gives up those without an answer."""


class _OwnerMark:
    """A mark with the writer's session: who finds another one there has been replaced. Object
    stores have no locks."""

    def __init__(self, place: FsspecPlace, name: str, session: str) -> None:
        self.place, self.name, self.session = place, name, session
        place.publish(name, session.encode())

    def check(self) -> None:
        try:
            found = self.place.read(self.name)
        except FileNotFoundError:
            found = b""
        if found != self.session.encode():
            raise TierError(
                f"{self.place.url}: another writer of this run has taken over (session "
                f"{found[:16]!r}). This one stops; give it another run= or URL"
            )

    def release(self) -> None:
        """The mark stays: the next writer replaces it."""


class _Stream:
    """A file that chunks are written to one after another."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._start = time.monotonic()
        self.end: int = 0

    def write(
        self,
        snapshot: Snapshot,
        chunk_bytes: int,
        indices: Array,
        transfer: Transfer,
        known: Array | None = None,
    ) -> tuple[Array, Array]:
        crc = np.zeros(len(indices), np.uint32)
        position = np.full(len(indices), SPARED, np.uint64)
        buffer = np.empty(chunk_bytes, np.uint8)
        for i, index in enumerate(indices.tolist()):
            snapshot.take(index * chunk_bytes, buffer)
            crc[i] = checksum(buffer)
            spared = known is not None and int(crc[i]) == known[i]
            if not spared:
                snapshot.give_up(index * chunk_bytes, chunk_bytes)
                self._stream.write(buffer.data)
                position[i] = self.end
                self.end += chunk_bytes
            transfer.add(chunk_bytes, spared)
            self._keep_to_the_rate(transfer)
        return crc, position

    def _keep_to_the_rate(self, transfer: Transfer) -> None:
        while not transfer.cancelled and (rate := transfer.bytes_per_second):
            due = self._start + transfer.written_bytes / rate
            if time.monotonic() >= due:
                break
            time.sleep(min(NAP_SECONDS, due - time.monotonic()))
        if transfer.cancelled:
            raise TierError("the flush was cancelled")


class FsspecPlace:
    """Any URL that fsspec knows. An epoch counts from the moment its manifest is there, which
    object stores put in one piece."""

    def __init__(self, url: str, storage_options: dict[str, Any], asks: Ask) -> None:
        """Raises: TierError: fsspec, or what it needs for that URL, is not there."""
        try:
            import fsspec
        except ImportError:
            raise TierError(
                f"{url}: tiers beyond local directories need fsspec: {install('tiers')}"
            ) from None
        self.url = url
        self.maps: bool = False
        self.may_hang: bool = True
        self._asks = asks
        self.fs: Any
        self.root: str
        try:
            self.fs, self.root = fsspec.core.url_to_fs(url, **storage_options)
        except ImportError as error:
            extra = "s3" if url.startswith("s3") else "tiers"
            raise TierError(
                f"{url}: {error}. {install(extra)} or the library that it names"
            ) from None
        except ValueError as error:
            raise TierError(f"{url}: {error}") from None
        self.root = self.root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        """Asks the library, and makes its errors ours. Libraries of places have errors of their
        own, which nobody could be told to expect: credentials that are missing, hosts that are not
        there. Some call whatever a service answers an EIO, which says nothing of the bytes
        there."""
        try:
            return self._asks.ask(question)
        except WorkerError as error:
            raise TierError(f"{self.url}: {error}") from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno != errno.EIO:
                raise
            raise TierError(f"{self.url}: {type(error).__name__}: {error}") from error

    def of(self, name: str) -> FsspecPlace:
        return self

    def find(self, pattern: str) -> list[str]:
        found: list[str] = self._ask(lambda: self.fs.glob(pattern))
        return found

    def listed(self) -> dict[str, int]:
        return self.names()

    def names(self) -> dict[str, int]:
        def listing() -> list[dict[str, Any]]:
            self.fs.invalidate_cache()
            listed: list[dict[str, Any]] = self.fs.ls(self.root, detail=True)
            return listed

        try:
            listed = self._ask(listing)
        except FileNotFoundError:
            return {}
        return {
            one["name"].rsplit("/", 1)[-1]: int(one["size"] or 0)
            for one in listed
            if one["type"] == "file"
        }

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        path = self._path(name)

        def reading() -> bytes:
            try:
                data: bytes = self.fs.cat_file(path, start=start or None, end=end)
            except FileNotFoundError:
                raise
            except OSError:
                if end is None or self.fs.size(path) > start:
                    raise
                return b""  # services refuse a range past the end, as all of an empty file is
            return data

        return self._ask(reading)

    def publish(self, name: str, data: bytes) -> None:
        def writing() -> None:
            self.fs.makedirs(self.root, exist_ok=True)
            self.fs.pipe_file(self._path(name), data)

        self._ask(writing)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._ask(lambda: self.fs.rm_file(self._path(name)))

    def touch(self, name: str) -> None:
        self._ask(lambda: self.fs.pipe_file(self._path(name), b""))

    def modified(self, name: str) -> float | None:
        def asking() -> float | None:
            with contextlib.suppress(NotImplementedError):
                when: float = self.fs.modified(self._path(name)).timestamp()
                return when
            return None

        return self._ask(asking)

    def lock(self, prefix: str, session: str) -> Lock:
        return _OwnerMark(self, f"{prefix}owner", session)

    @contextlib.contextmanager
    def create(self, name: str, nbytes: int, fewer: bool) -> Iterator[NewFile]:
        """A new file of chunks, written from start to end."""
        self.fs.makedirs(self.root, exist_ok=True)
        with self.fs.open(self._path(name), "wb", block_size=8 << 20) as stream:
            yield _Stream(stream)

    def copy(
        self,
        files: Sequence[tuple[str, Array]],
        chunk_bytes: int,
        store: NewStore,
        transfer: Transfer,
    ) -> None:
        """Reads ranges of files, several at once."""
        ranges = [(name, part) for name, chunks in files for part in _ranges(chunks, chunk_bytes)]
        lock, tasks = threading.Lock(), Tasks()

        def work(number: int) -> None:
            for name, part in ranges[number::THREADS]:
                if transfer.cancelled:
                    return
                self._copy_range(name, part, chunk_bytes, store)
                with lock:
                    transfer.add(len(part) * chunk_bytes)

        def run(number: int) -> Exception | None:
            """Errors are looked through when all have ended: the first of those that say what is
            wrong with the epoch is told."""
            try:
                work(number)
            except Exception as error:
                transfer.cancel()
                return error
            return None

        try:
            errors = [task.ask() for task in [tasks.start(run, i) for i in range(THREADS)]]
        except BaseException:
            transfer.cancel()
            raise
        finally:
            tasks.end()
        broken = [error for error in errors if isinstance(error, BrokenEpochError)]
        for error in broken or filter(None, errors):
            raise error

    def _copy_range(self, name: str, part: Array, chunk_bytes: int, store: NewStore) -> None:
        start = int(part["position"][0])
        try:
            data = memoryview(self.read(name, start, start + len(part) * chunk_bytes))
        except FileNotFoundError:
            raise BrokenEpochError("missing", f"file {name}") from None
        for i, one in enumerate(part):
            piece = data[i * chunk_bytes : (i + 1) * chunk_bytes]
            if len(piece) != chunk_bytes or checksum(piece) != int(one["crc"]):
                raise BrokenEpochError(
                    "corrupt",
                    f"chunk {int(one['index'])} in {name}: its checksum is wrong, or it is cut off",
                )
            offset = int(one["index"]) * chunk_bytes
            write_all(store.fd, piece[: max(0, store.nbytes - offset)], offset)


def _ranges(chunks: Array, chunk_bytes: int) -> Iterator[Array]:
    """Chunks that lie together in a file, up to so many bytes at once."""
    most, start = max(1, RANGE_BYTES // chunk_bytes), 0
    for i in range(1, len(chunks) + 1):
        together = (
            i < len(chunks)
            and i - start < most
            and int(chunks["position"][i])
            == int(chunks["position"][start]) + (i - start) * chunk_bytes
        )
        if not together:
            yield chunks[start:i]
            start = i
