"""Types of the cffi module pmstore._engine._native: what is in native/pms.cdef. Only
pmstore/_engine/ looks in here."""

from typing import Any

ffi: Any
lib: Any
