"""What is fixed of a store from its open on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from pmstore.engine._native import ffi as _ffi
from pmstore.engine._native import lib as _lib
from pmstore.engine.constants import DOMAINS, FLUSHES
from pmstore.engine.reports import Recovery


@dataclass(frozen=True)
class PoolInfo(Recovery):
    """struct pms_info: what is fixed from open on.

    Attributes:
        asked_domain: at creation; "auto" decides at every open.
        max_bytes: of the file ever; 0: until the file system is full.
        inode: of the file: a copy has another one.
        permissions: of the file, when it was opened.
    """

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


def read_info(pool: Any) -> PoolInfo:
    """pool: `struct pms_pool *`."""
    raw = _ffi.new("struct pms_info *")
    _lib.pms_pool_info(pool, raw)
    told = {field.name: getattr(raw, field.name) for field in fields(PoolInfo)}
    told |= {one.name: bool(told[one.name]) for one in fields(PoolInfo) if one.type == "bool"}
    names = {number: name for name, number in DOMAINS.items()}
    told |= {name: names[told[name]] for name in ("domain", "asked_domain")}
    return PoolInfo(**{**told, "flush": FLUSHES[raw.flush], "uuid": bytes(_ffi.buffer(raw.uuid))})
