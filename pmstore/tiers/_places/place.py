"""The contract of a place that tiers lie in. Names are plain: no folders in a tier.

`pmstore.testing.PlaceTests` is a suite of tests that every place passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pmstore._engine.snapshot import Fill, Snapshot, Transfer
from pmstore.objects.array import Array


class BrokenEpochError(Exception):
    """An epoch that cannot be restored. kind: "corrupt" (the bytes are wrong) or "missing" (they
    are not there)."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind


class Lock(Protocol):
    """Held while its owner writes."""

    def check(self) -> None:
        """Makes sure that it is still held. Raises: TierError if somebody else writes now."""

    def release(self) -> None: ...


class NewFile(Protocol):
    """A file of chunks that is being written, end to end."""

    end: int
    """Bytes of the file so far."""

    def write(
        self,
        snapshot: Snapshot,
        chunk_bytes: int,
        indices: Array,
        transfer: Transfer,
        known: Array | None = None,
    ) -> tuple[Array, Array]:
        """Adds chunks (uint64 indices) of the snapshot, as fast as the transfer allows. known: as
        for `Snapshot.write`, as is what it returns.

        Raises: TierError, PmstoreError: cancelled, and what else may happen; OSError.
        """


@dataclass(frozen=True, slots=True)
class NewStore:
    """A store that is being made: where `Place.copy` puts what it copies."""

    fd: int
    path: Path
    """The file's path, until it is whole."""
    nbytes: int
    """The size of the whole file. What a last chunk has beyond is left out."""
    fill: Fill


class Source(Protocol):
    """A place, or the places of all ranks, read as one. All methods raise OSError, or what the
    library of that place raises."""

    url: str

    def names(self) -> dict[str, int]:
        """Names and sizes of what is there; empty if the place does not exist yet."""

    def listed(self) -> Mapping[str, int]:
        """Names and sizes, for callers that want all names and few sizes. A size may be looked up
        only when it is asked for; it is -1 if the file has gone since."""

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes of a file, from start to end (None: its end); fewer if it is shorter.

        Raises: FileNotFoundError.
        """

    def touch(self, name: str) -> None:
        """Makes an empty file whose time is now, as the place tells it; one that is there gets the
        time alone."""

    def delete(self, name: str) -> None:
        """Removes a file. Nothing happens if it is not there."""

    def of(self, name: str) -> Place:
        """The place where a file lies. Raises: FileNotFoundError, where there are several, and it
        lies in none."""


class Place(Source, Protocol):
    """A place, as a flush and a restore need it. Any thread may call, several at once."""

    root: str
    """The URL's path, in which `find` looks for places of ranks."""
    maps: bool
    """Whether `copy` fills a store in memory through a mapping (`NewStore.fill`)."""
    may_hang: bool
    """Whether a call may never return: a flush that makes no progress is then given up."""

    def publish(self, name: str, data: bytes) -> None:
        """Makes a small file, or replaces it: all of it, durable on return, or nothing. A place
        that cannot replace a file at once (SFTP) may show half of it for a moment: checksums
        tell."""

    def modified(self, name: str) -> float | None:
        """Returns when a file was written or touched last, in seconds of the place's own clock;
        None: the place does not tell.

        Raises: FileNotFoundError.
        """

    def lock(self, prefix: str, session: str) -> Lock:
        """Keeps other writers of the same prefix out, and makes the place if it does not exist.

        Raises: TierError.
        """

    def create(self, name: str, nbytes: int, fewer: bool) -> AbstractContextManager[NewFile]:
        """A new file of chunks. nbytes: its size. fewer: it may become smaller than that, so too
        little room for all of it is no error yet. Durable on leaving; an exception on leaving means
        that it is not there, or not whole.

        Raises: PmstoreError, OSError.
        """

    def copy(
        self,
        files: Sequence[tuple[str, Array]],
        chunk_bytes: int,
        store: NewStore,
        transfer: Transfer,
    ) -> None:
        """Copies chunks into a store, each checked. files: names, each with the chunks in it (of
        dtype CHUNK), in the order in which they lie there.

        Raises: BrokenEpochError: a file is not there, or a chunk is wrong or cut off; OSError.
        """

    def find(self, pattern: str) -> list[str]:
        """Paths, as `root` is one, that match a pattern of `glob`."""
