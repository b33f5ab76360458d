"""What is fixed of a store from its open on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pmstore.engine._native import ffi as _ffi
from pmstore.engine._native import lib as _lib
from pmstore.engine.constants import DOMAINS, FLUSHES


@dataclass(frozen=True)
class PoolInfo:
    """struct pms_info: what is fixed from open on."""

    base: int
    reserve_bytes: int
    domain: str
    flush: str
    sync_mapping: bool
    read_only: bool
    created: bool
    clean: bool
    undone_entries: int
    undone_bytes: int
    replayed_records: int
    replayed_bytes: int
    torn: bool
    asked_domain: str
    """At creation; "auto" decides at every open."""
    opens: int
    unclean_opens: int
    max_bytes: int
    """Of the file ever; 0: until the file system is full."""
    uuid: bytes
    inode: int
    """Of the file: a copy has another one."""
    permissions: int
    """Of the file, when it was opened."""


def read_info(pool: Any) -> PoolInfo:
    """pool: `struct pms_pool *`."""
    raw = _ffi.new("struct pms_info *")
    _lib.pms_pool_info(pool, raw)
    names = {number: name for name, number in DOMAINS.items()}
    return PoolInfo(
        base=raw.base,
        reserve_bytes=raw.reserve_bytes,
        domain=names[raw.domain],
        flush=FLUSHES[raw.flush],
        sync_mapping=bool(raw.sync_mapping),
        read_only=bool(raw.read_only),
        created=bool(raw.created),
        clean=bool(raw.clean),
        undone_entries=raw.undone_entries,
        undone_bytes=raw.undone_bytes,
        replayed_records=raw.replayed_records,
        replayed_bytes=raw.replayed_bytes,
        torn=bool(raw.torn),
        asked_domain=names[raw.asked_domain],
        opens=raw.opens,
        unclean_opens=raw.unclean_opens,
        max_bytes=raw.max_bytes,
        uuid=bytes(_ffi.buffer(raw.uuid)),
        inode=raw.inode,
        permissions=raw.permissions,
    )
