"""Stands in for PyMM's native module: it has the functions that programs call."""

from __future__ import annotations

import warnings


def enable_transient_memory(
    backing_directory: str = "/tmp", pmem_file: str | None = None, pmem_file_size_gb: int = 0
) -> None:
    """Does nothing: it needs PyMM's own build of numpy, which would put temporary arrays into a
    file. Warns, as PyMM does with any other numpy."""
    del backing_directory, pmem_file, pmem_file_size_gb
    warnings.warn(
        "transient memory is not enabled: temporary arrays are in ordinary memory, as without it",
        stacklevel=2,
    )


def disable_transient_memory() -> None:
    """Does nothing: memory that is not on a shelf is Python's own here."""
