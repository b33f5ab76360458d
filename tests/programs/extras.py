"""`live`, in a fork server that has imported what only few programs need, and not everybody has."""

from __future__ import annotations

import contextlib
import importlib

from .life import live
from .registry import PROGRAMS

__all__ = ["live"]

for _program in PROGRAMS.values():
    for _module in _program.needs.split():
        with contextlib.suppress(ImportError):  # the program itself says so
            importlib.import_module(_module)
