"""Looks at a whole store, as the engine sees it: sizes, soundness, where its bytes are. It can mend
a store too."""

from __future__ import annotations

from dataclasses import fields
from itertools import count

from pmstore._engine._native import ffi as _ffi
from pmstore._engine._native import lib as _lib
from pmstore._engine.pool import Pool
from pmstore._engine.store_info import CheckReport, SegmentUsage, Stats

LINE_BYTES = 64
"""The bytes of memory that one write-back takes."""
_COUNTS = [field.name for field in fields(CheckReport) if field.name != "problems"]


def stats(pool: Pool) -> Stats:
    """Returns the store's sizes and counts as they are now."""
    raw = _ffi.new("struct pms_stats *")
    pool.call(_lib.pms_pool_stats, raw)
    return Stats(**{name: getattr(raw, name) for name, _ in _ffi.typeof("struct pms_stats").fields})


def written_bytes(pool: Pool) -> int:
    """Returns the bytes that commits have written since open. Domain "file": to the journal and
    straight home. Where the heap is written in place: the lines that were written back. Domain
    "process", which writes nothing back: the pre-images."""
    raw = _ffi.new("struct pms_stats *")
    pool.call(_lib.pms_pool_stats, raw)
    if pool.info.domain == "file":
        return int(raw.journal_bytes + raw.straight_bytes)
    return int(raw.captured_bytes if pool.info.domain == "process" else raw.lines * LINE_BYTES)


class Check:
    """Checks what the engine knows of a store. Another thread may ask meanwhile how far it is."""

    def __init__(self) -> None:
        self._raw = _ffi.new("struct pms_check_report *")
        self._decoded = count(1)
        self._seen = 0

    def run(self, pool: Pool) -> tuple[dict[str, int], list[str]]:
        """Checks the store. Returns counts, and the problems found: the first PMS_CHECK_PROBLEMS in
        words, then how many more."""
        raw = self._raw
        pool.call(_lib.pms_check, raw)
        told = min(raw.problem_count, _lib.PMS_CHECK_PROBLEMS)
        problems = [_ffi.string(raw.problem[i]).decode("ascii", "replace") for i in range(told)]
        if raw.problem_count > told:
            problems.append(f"and {raw.problem_count - told} more")
        return {name: getattr(raw, name) for name in _COUNTS}, problems

    def decoded(self) -> None:
        """Counts a look by the caller: at a name, or at an item of a list."""
        self._seen = next(self._decoded)

    @property
    def looks(self) -> tuple[int, int]:
        """How many looks were taken, and how many there are in all as far as is known: the
        engine's, one at each block, and the caller's."""
        raw = self._raw
        return raw.owners + self._seen, raw.blocks + (raw.objects if self._seen else raw.blocks)


def usage(pool: Pool) -> tuple[SegmentUsage, ...]:
    """Returns what is in use of each segment of the file."""
    raw = _ffi.new("struct pms_segment_usage[]", _lib.PMS_USAGE_SEGMENTS)
    found = _ffi.new("uint32_t *")
    pool.call(_lib.pms_usage, raw, found)
    plain = [name for name, _ in _ffi.typeof("struct pms_segment_usage").fields if name != "cell"]
    return tuple(
        SegmentUsage(**{name: getattr(one, name) for name in plain}, cells=tuple(one.cell))
        for one in raw[0 : found[0]]
    )


def free_leaks(pool: Pool) -> int:
    """Frees blocks that belong to nobody, in the running transaction. Returns their number.

    Raises: CorruptStoreError if the check finds other problems too.
    """
    raw = _ffi.new("struct pms_check_report *")
    pool.call(_lib.pms_free_leaks, raw)
    return int(raw.leaks)


def mend_superblock(pool: Pool) -> None:
    """Writes the superblock in use into its other copy. Durable on return."""
    pool.call(_lib.pms_mend_superblock)
