"""Tells what is in a group, without touching the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pmstore._base.text import counted
from pmstore._engine.constants import GROUP, LIST, VALUE
from pmstore._engine.failures import damaged
from pmstore._engine.pool import Found
from pmstore.objects.core import Core


@dataclass(frozen=True)
class Entry:
    """One name of a group, as `Group.entries` tells it. `dtype` and `shape` are None for values,
    groups and lists.

    Attributes:
        nbytes: of the data (arrays, tensors; slots: of one version) or of the encoded value; 0 for
            groups and lists.
        items: what a group or list holds, itself; None for what is neither.
    """

    name: str
    kind: Literal["value", "array", "tensor", "group", "list", "slots"]
    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int
    items: int | None = None

    def extent(self) -> str:
        """Returns in words how large the entry is: its bytes, or the number of its names or
        items."""
        if self.items is None:
            return f"{self.nbytes:,}"
        return counted(self.items, "name" if self.kind == "group" else "item")


def tell(core: Core, name: str, found: Found) -> Entry:
    """Returns what a group's entry says of an object. REQUIRES: the lock."""
    if found.kind == GROUP and found.meta:
        version = core.pool.find(found.data, b"0")  # both are of one description
        if version is None:
            raise damaged(core.path, f"the slots {name!r} lack an array", found.node)
        return replace(_entry(core, name, version), kind="slots")
    return _entry(core, name, found)


def _entry(core: Core, name: str, found: Found) -> Entry:
    if found.kind == GROUP:
        return Entry(name, "group", None, None, 0, core.pool.count(found.data))
    if found.kind == LIST:
        return Entry(name, "list", None, None, 0, core.pool.list_count(found.data))
    if found.kind == VALUE:
        return Entry(name, "value", None, None, len(found.meta))
    descriptor = core.describe(found)
    kind: Literal["tensor", "array"] = "tensor" if descriptor.torch else "array"
    return Entry(name, kind, descriptor.dtype_name(), descriptor.shape, found.data_bytes)
