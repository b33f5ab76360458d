"""Types of the cffi module pmstore.engine._native: what is in native/pms.cdef. Only
pmstore/engine/ looks in here."""

from typing import Any

ffi: Any
lib: Any
