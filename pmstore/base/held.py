"""What is asked for names like a store."""

from __future__ import annotations

from typing import Any, Protocol


class Held(Protocol):
    """A store, or an epoch of a tier."""

    def __contains__(self, name: str, /) -> bool: ...

    def __getitem__(self, name: str, /) -> Any: ...
