"""Landings of the engine (native/commit/landing.h), typed. Every call runs without the
interpreter's lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pmstore._engine._native import ffi as native_ffi
from pmstore._engine._native import lib as native
from pmstore._engine.failures import call, fail
from pmstore._engine.pool import Pool

NEW: int = native.PMS_LANDING_NEW
SEALED: int = native.PMS_LANDING_SEALED
COPIED: int = native.PMS_LANDING_COPIED
DONE: int = native.PMS_LANDING_DONE


class LandCopy(NamedTuple):
    """A copy into an idle slot: struct pms_land_copy."""

    data: int
    """The offset of the block."""
    at: int
    """The place in the block."""
    nbytes: int
    source: int
    """Address that is copied from; 0: somebody else writes the block."""
    word: int
    """Address of 8 bytes that are waited for until they are not zero; 0: nothing is waited for."""


class LandFlip(NamedTuple):
    """A flip that names an idle slot the current one: struct pms_land_flip."""

    directory: int
    data: int
    name: bytes
    meta: bytes


class Landing:
    """The copies into idle slots that a commit waits for, and the flips that name them. It keeps
    alive what it was given."""

    __slots__ = ("_kept", "_pool", "_raw")

    def __init__(
        self,
        pool: Pool,
        copies: Sequence[LandCopy],
        flips: Sequence[LandFlip],
        timeout_seconds: float | None,
    ) -> None:
        self._pool = pool
        names = [
            (native_ffi.from_buffer(one.name), native_ffi.from_buffer(one.meta)) for one in flips
        ]
        some_copies = native_ffi.new("struct pms_land_copy[]", max(len(copies), 1))
        some_flips = native_ffi.new("struct pms_land_flip[]", max(len(flips), 1))
        for raw, copy in zip(some_copies, copies, strict=False):
            raw.data, raw.at, raw.bytes = copy.data, copy.at, copy.nbytes
            raw.src = native_ffi.cast("void *", copy.source)
            raw.landed = native_ffi.cast("uint64_t *", copy.word)
        for raw, flip, (name, meta) in zip(some_flips, flips, names, strict=False):
            raw.dir, raw.data, raw.name, raw.meta = flip.directory, flip.data, name, meta
            raw.name_bytes, raw.meta_bytes = len(flip.name), len(flip.meta)
        error = native_ffi.new("struct pms_error *")
        timeout = -1 if timeout_seconds is None else int(timeout_seconds * 1e9)
        made = native.pms_landing_new(
            some_copies, len(copies), some_flips, len(flips), timeout, error
        )
        if made == native_ffi.NULL:
            fail(pool.path, error.status, error)
        self._kept = names
        self._raw = native_ffi.gc(made, native.pms_landing_free)

    def arm(self) -> None:
        """Has the next commit of the store carry it out, whichever commit that is."""
        self._pool.call(native.pms_landing_arm, self._raw)

    def start(self, phase: int) -> None:
        """Commits with it in a thread of the engine, and returns when it has reached the phase; no
        signal handler runs before. Once it is SEALED, nothing that is stored later is part of the
        commit."""
        self._pool.call(native.pms_landing_start, self._raw, phase)

    @property
    def started(self) -> bool:
        """Whether a commit has it, or had it."""
        return bool(native.pms_landing_is_started(self._raw))

    def wait(self, phase: int, timeout_seconds: float) -> bool:
        """Waits at most that long for the phase. Returns whether it is reached."""
        return bool(native.pms_landing_wait(self._raw, phase, int(timeout_seconds * 1e9)))

    def give_up(self) -> None:
        """Says that the words it waits for will not come: the commit fails."""
        native.pms_landing_fail(self._raw)

    def result(self) -> None:
        """Raises what the commit failed with, if it failed. REQUIRES: it is DONE."""
        call(self._pool.path, native.pms_landing_result, self._raw)
