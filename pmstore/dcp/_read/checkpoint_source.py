"""Describes what a checkpoint is read from: a writer's folder, rank stores of a run, an epoch of a
tier."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex


class Source(ABC):
    """One checkpoint, open for reading. `StoreReader` reads any source: checkpoints differ in their
    source alone.

    Methods other than `verify` are called by one thread at a time.
    """

    mark: str
    """Which state it is: ranks that load together must all read the same."""
    twins: frozenset[str] = frozenset()
    """Keys of what is there under another key too."""

    @abstractmethod
    def metadata(self) -> Metadata:
        """Returns what is in the checkpoint. `storage_data` may be None: readers ask by index."""

    @abstractmethod
    def chunk(self, index: MetadataIndex) -> torch.Tensor:
        """Returns the chunk of a tensor that lies at `index.offset`, with the shape that the
        metadata says, on the CPU. It is never written to, may lie in a mapping, and is good until
        `close`.

        Raises: KeyError: there is none; CorruptStoreError, which names the file.
        """

    @abstractmethod
    def blob(self, index: MetadataIndex) -> bytes:
        """Returns an object that is not a tensor, as bytes of the planner's: whole, and as they
        were written.

        Raises: as `chunk`.
        """

    def verify(self, index: MetadataIndex, start: int, stop: int) -> None:  # noqa: B027
        """Checks that bytes [start, stop) of the chunk are what was written. Several threads call
        it at once, each before it copies that part. A source whose bytes are checked elsewhere has
        nothing to do.

        Raises: CorruptStoreError that names the file and the tensor.
        """

    @abstractmethod
    def close(self) -> None:
        """Lets go of all that the source holds. Idempotent."""
