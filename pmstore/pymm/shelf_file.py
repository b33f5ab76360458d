"""Says where the file of a shelf is, and how large it begins."""

from __future__ import annotations

import operator
import os
import shutil
import tempfile
from typing import Any, get_args

from pmstore.opening import Domain, open
from pmstore.store import Store

FOLDER = "/mnt/pmem0"
"""PyMM's folder, where a program names none."""
MIB = 1 << 20
_SIZE_MB = 32
_FIRST_SIZE_BYTES = 64 * MIB


def told(first: Any, second: Any, pmem_path: Any, size_mb: Any) -> tuple[str, int]:
    """Returns the folder and the size in MiB that a shelf's arguments name. An argument that is a
    number is the size.

    Raises: TypeError.
    """
    for given in (first, second):
        if given is None:
            continue
        if isinstance(given, (str, os.PathLike)):
            if pmem_path is not None:
                raise TypeError(f"two folders for a shelf: {pmem_path!r} and {given!r}")
            pmem_path = given
        elif isinstance(given, bool) or not hasattr(given, "__index__"):
            raise TypeError(
                f"a shelf's folder is a path, its size a number of MiB: not a "
                f"{type(given).__name__}, {given!r}"
            )
        elif size_mb is not None:
            raise TypeError(f"two sizes for a shelf: {size_mb!r} and {given!r}")
        else:
            size_mb = given
    path: Any = os.fspath(FOLDER if pmem_path is None else pmem_path)
    return path, operator.index(_SIZE_MB if size_mb is None else size_mb)


def store_of(name: str, path: str, size_mb: int, backend: str | None, anew: bool) -> Store:
    """Opens or makes the store of a shelf.

    Raises: FileNotFoundError, and what `pmstore.open` raises.
    """
    # its log takes as much room as what it holds
    size = min(2 * max(size_mb, 1) * MIB, _FIRST_SIZE_BYTES)
    if backend == "mapstore":
        return _in_memory(name, size)
    if not os.path.lexists(path):
        raise FileNotFoundError(
            f"there is no folder {path!r} for the shelf {name!r}: make it, or give another "
            "pmem_path="
        )
    if os.path.isdir(path):
        path = os.path.join(path, f"{name}.pm")
    domain: Any = backend if backend in get_args(Domain) else "auto"
    return open(path, "w" if anew else "a", size=size, domain=domain)


def _in_memory(name: str, size: int) -> Store:
    """Makes a store that ends with its process, whatever ends that: its file has no name any
    more."""
    memory = "/dev/shm"
    folder = tempfile.mkdtemp(
        prefix=f"pmstore-mapstore-{os.getpid()}-",
        dir=memory if os.access(memory, os.W_OK) else None,
    )
    try:
        return open(os.path.join(folder, f"{name}.pm"), "w", size=size, domain="process")
    finally:
        shutil.rmtree(folder)
