"""What is fixed of a store from its open on."""

from __future__ import annotations

from typing import Any, NamedTuple

from pmstore._engine._native import ffi as _ffi
from pmstore._engine._native import lib as _lib
from pmstore._engine.constants import DOMAINS, FLUSHES


class PoolInfo(NamedTuple):
    """What is fixed of a store from its open on: struct pms_info. The first fields are those of
    `Recovery`.

    Attributes:
        asked_domain: at creation; "auto" decides at every open.
        max_bytes: of the file ever; 0: until the file system is full.
        inode: of the file: a copy has another one.
        permissions: of the file, when it was opened.
        beside: a reader without the lock: 1, it sees the file; 2, what its writer shows; 0: none.
    """

    created: bool
    clean: bool
    undone_entries: int
    undone_bytes: int
    replayed_records: int
    replayed_bytes: int
    torn: bool
    opens: int
    unclean_opens: int
    base: int
    reserve_bytes: int
    domain: str
    flush: str
    sync_mapping: bool
    read_only: bool
    asked_domain: str
    max_bytes: int
    uuid: bytes
    inode: int
    permissions: int
    beside: int


_TRUTHS = [name for name, kind in PoolInfo.__annotations__.items() if "bool" in str(kind)]


def read_info(pool: Any) -> PoolInfo:
    """Reads what is fixed of an open store. pool: `struct pms_pool *`."""
    raw = _ffi.new("struct pms_info *")
    _lib.pms_pool_info(pool, raw)
    told = {name: getattr(raw, name) for name in PoolInfo._fields}
    told |= {name: bool(told[name]) for name in _TRUTHS}
    names = {number: name for name, number in DOMAINS.items()}
    told |= {name: names[told[name]] for name in ("domain", "asked_domain")}
    return PoolInfo(**{**told, "flush": FLUSHES[raw.flush], "uuid": bytes(_ffi.buffer(raw.uuid))})
