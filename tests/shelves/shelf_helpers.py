"""What the tests of shelves share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pmstore
from pmstore import pymm

try:
    import torch
except ModuleNotFoundError:
    torch = None  # type: ignore[assignment]

needs_torch = pytest.mark.skipif(torch is None, reason="needs torch")


@pytest.fixture
def shelf(shm: Path) -> Iterator[Any]:
    made = pymm.shelf("s", pmem_path=shm, size_mb=4)
    yield made
    made._close()


def committed(shm: Path) -> pmstore.Store:
    """What another process would find if this one died now: a copy of the file, recovered."""
    copied = shm / "copy.pm"
    copied.write_bytes((shm / "s.pm").read_bytes())
    return pmstore.open(copied)


def stored(shm: Path, name: str) -> Any:
    """What it would find under a name, as Python's own values."""
    with committed(shm) as store:
        found = store[name]
        items = list(found) if isinstance(found, pmstore.List) else found
        return items.tolist() if hasattr(items, "tolist") else items
