"""Numbers of the engine's interface (native/pms.cdef) that Python calls by name."""

from __future__ import annotations

from pmstore._engine._native import lib as _lib

MODES = {
    "r": _lib.PMS_MODE_READ,
    "r+": _lib.PMS_MODE_READ_WRITE,
    "a": _lib.PMS_MODE_APPEND,
    "w": _lib.PMS_MODE_TRUNCATE,
    "x": _lib.PMS_MODE_EXCLUSIVE,
}
DOMAINS: dict[str, int] = {
    "auto": _lib.PMS_DOMAIN_AUTO,
    "dax": _lib.PMS_DOMAIN_DAX,
    "file": _lib.PMS_DOMAIN_FILE,
    "process": _lib.PMS_DOMAIN_PROCESS,
    "emulated": _lib.PMS_DOMAIN_EMULATED,
}
FLUSHES: dict[int, str] = {
    _lib.PMS_FLUSH_NONE: "none",
    _lib.PMS_FLUSH_CLFLUSH: "clflush",
    _lib.PMS_FLUSH_CLFLUSHOPT: "clflushopt",
    _lib.PMS_FLUSH_CLWB: "clwb",
    _lib.PMS_FLUSH_CVAP: "dc cvap",
    _lib.PMS_FLUSH_CVAC: "dc cvac",
}
VALUE: int = _lib.PMS_OBJECT_VALUE
ARRAY: int = _lib.PMS_OBJECT_ARRAY
GROUP: int = _lib.PMS_OBJECT_GROUP
LIST: int = _lib.PMS_OBJECT_LIST
FILL_NONE: int = _lib.PMS_FILL_NONE
FILL_ZERO: int = _lib.PMS_FILL_ZERO
FILL_COPY: int = _lib.PMS_FILL_COPY
FILL_PATTERN: int = _lib.PMS_FILL_PATTERN
FILL_OF_SLOT: int = _lib.PMS_FILL_OF_SLOT
MIN_SIZE_BYTES: int = _lib.PMS_MIN_SIZE
HISTORY_BYTES: int = _lib.PMS_HISTORY_BYTES
GROUPS_MAX: int = _lib.PMS_GROUPS_MAX
HELD_NOT: int = _lib.PMS_HELD_NOT
HELD_FOR_STORE: int = _lib.PMS_HELD_FOR_STORE
HELD_FOR_JOB: int = _lib.PMS_HELD_FOR_JOB
PAGE_BYTES: int = _lib.PMS_PAGE
"""Unit of protection, of captures and of the superblock."""
ROOT = 0
"""The directory of the store itself."""

SLOT_CURRENT: int = _lib.PMS_SLOT_CURRENT
SLOT_IDLE: int = _lib.PMS_SLOT_IDLE
SLOT_NEXT: int = _lib.PMS_SLOT_NEXT

LIST_END = -1
"""The index behind the last item, for `Pool.splice`."""

ROLLED_BACK = 2
"""When a transaction block calls the store's hook: enum when in _transaction.c."""
