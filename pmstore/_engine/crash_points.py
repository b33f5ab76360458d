"""Points at which a crash test kills its process (native/crash/debug.h)."""

from __future__ import annotations

from pmstore._engine._native import lib as _lib


def kill_at_primitive(count: int) -> None:
    """Has this process killed (SIGKILL) at the count-th persistence primitive from now; 0: at none.
    For crash tests."""
    _lib.pms_debug_kill_at(count)


def primitives_seen() -> int:
    """Returns how many persistence primitives this process has carried out since the last
    `kill_at_primitive`."""
    return int(_lib.pms_debug_primitives())
