"""Describes objects that are asked for names as a store is."""

from __future__ import annotations

from typing import Any, Protocol


class Held(Protocol):
    """Is asked for names as a store is: a store, or an epoch of a tier."""

    def __contains__(self, name: str, /) -> bool: ...

    def __getitem__(self, name: str, /) -> Any: ...
