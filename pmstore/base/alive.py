"""What is alive of objects that are kept weakly."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar
from weakref import WeakValueDictionary

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def alive(kept: WeakValueDictionary[Key, Value]) -> list[Value]:
    """Those that are there now. Not by iterating: other threads, finalizers and signal handlers add
    some meanwhile."""
    return [one for reference in kept.valuerefs() if (one := reference()) is not None]
