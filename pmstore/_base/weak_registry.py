"""Finds the objects that are alive among those that are kept weakly."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar
from weakref import WeakValueDictionary

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def alive(kept: WeakValueDictionary[Key, Value]) -> list[Value]:
    """Returns the values that are alive now. It does not iterate over the dictionary: other
    threads, finalizers and signal handlers may add values meanwhile."""
    return [one for reference in kept.valuerefs() if (one := reference()) is not None]
