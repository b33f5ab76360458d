"""Content for new blocks that lies elsewhere (native/flush/bring.h), typed. The call runs without
the interpreter's lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pmstore._engine._native import ffi as native_ffi
from pmstore._engine._native import lib as native
from pmstore._engine.failures import call
from pmstore._engine.pool import Pool

PIECE_BYTES: int = native.PMS_BRING_PIECE
"""Each piece of a block has a checksum of its own."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def bring_home(
    pool: Pool, blocks: Sequence[Bytes], sources: Sequence[Bytes]
) -> list[tuple[int, ...] | None]:
    """Writes sources to where blocks of the running transaction lie in the file, and not through
    memory. Returns the CRC-32C of each piece of a source; None: that block is as it was, and the
    caller stores to it. REQUIRES: blocks are whole arrays of this store; nobody stores to them
    meanwhile.

    Raises: StoreFullError, OSError: what is in the blocks is anything; as other changes.
    """
    counts = [-(-source.nbytes // PIECE_BYTES) for source in sources]
    crcs = np.empty(sum(counts), np.uint32)
    ends = np.cumsum(counts).tolist()
    first = native_ffi.cast("uint32_t *", crcs.ctypes.data)
    raw = native_ffi.new("struct pms_bring[]", len(sources))
    for one, block, source, count, end in zip(raw, blocks, sources, counts, ends, strict=True):
        one.data = block.ctypes.data - pool.info.base
        one.src = native_ffi.cast("void *", source.ctypes.data)
        one.bytes = source.nbytes
        one.crc = first + end - count
    call(pool.path, native.pms_bring_home, pool.raw, raw, len(sources))
    return [
        tuple(crcs[end - count : end].tolist()) if one.brought else None
        for one, count, end in zip(raw, counts, ends, strict=True)
    ]
