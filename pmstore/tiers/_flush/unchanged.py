"""Whether a chunk that may have changed is what the tier has of it already.

A checksum that is another one says that it has changed. One that is the same says nothing for sure:
such a chunk is compared byte for byte with what lies in the tier, or, if that was done before, by a
fingerprint. Fingerprints are made by this process, of chunks that it has compared, and never leave
it: nothing that somebody writes into a tier can make a chunk look unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from pmstore._engine.snapshot import Fingerprints, Snapshot, Transfer
from pmstore.objects.array import Array
from pmstore.tiers._flush.plan import Base
from pmstore.tiers._places.place import Place

READ_BYTES = 4 << 20
"""So many bytes of neighbours in a file of the tier are read at once."""
NAP_SECONDS = 0.05


class Comparison:
    """A comparison of chunks of a snapshot with those of the epoch before."""

    def __init__(
        self, base: Base, prints: Fingerprints, place: Place, bytes_per_second: int
    ) -> None:
        """bytes_per_second: that are read from the tier at most; 0: no limit."""
        self._base, self._prints, self._place = base, prints, place
        self._rate = bytes_per_second
        self.seen: dict[int, bytes] = {}
        """Fingerprints of chunks that were the same, by index."""

    def unchanged(self, snapshot: Snapshot, indices: Array, transfer: Transfer) -> Array:
        """Returns a bool for each chunk (uint64 indices, all of which the base has): whether it is
        the same, for sure. They may be read again. When the transfer is cancelled, nothing more is.

        Raises: PmstoreError: of the snapshot.
        """
        seen, size = self._base.seen, self._base.manifest.chunk_bytes
        now = np.empty(size, np.uint8)
        same = np.zeros(len(indices), bool)
        new = np.array([int(index) not in seen for index in indices], bool)
        there = self._pieces(indices[new], size, transfer)
        for i, index in enumerate(indices.tolist()):
            if transfer.cancelled:
                break
            snapshot.take(index * size, now)
            made = self._prints.of(now)
            same[i] = np.array_equal(now, next(there)) if new[i] else made == seen[index]
            if same[i]:
                self.seen[index] = made
        return same

    def _pieces(self, indices: Array, size: int, transfer: Transfer) -> Iterator[Array]:
        """Yields what the tier has of each chunk; fewer bytes where it cannot be read."""
        old = self._base.manifest
        entries = old.chunks[np.searchsorted(old.chunks["index"], indices)]
        most, i = max(1, READ_BYTES // size), 0
        while i < len(entries):
            n, first = 1, entries[i]
            while (
                n < most
                and i + n < len(entries)
                and entries["file"][i + n] == first["file"]
                and entries["position"][i + n] == first["position"] + n * size
            ):
                n += 1
            found = self._read(old.files[first["file"]][0], int(first["position"]), n * size)
            for k in range(n):
                yield found[k * size : (k + 1) * size]
            self._nap(len(found), transfer)
            i += n

    def _read(self, name: str, start: int, nbytes: int) -> Array:
        try:
            return np.frombuffer(self._place.read(name, start, start + nbytes), np.uint8)
        except OSError:  # it is written anew, then
            return np.zeros(0, np.uint8)

    def _nap(self, nbytes: int, transfer: Transfer) -> None:
        end = time.monotonic() + (nbytes / self._rate if self._rate else 0)
        while not transfer.cancelled and (left := end - time.monotonic()) > 0:
            time.sleep(min(NAP_SECONDS, left))
