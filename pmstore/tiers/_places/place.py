"""What tiers need of the place they lie in. Names are plain: no folders in a tier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Lock(Protocol):
    """Held while its owner writes."""

    def check(self) -> None:
        """Raises: TierError if somebody else writes now."""

    def release(self) -> None: ...


class Backend(Protocol):
    """What tiers need of a place. All methods raise OSError, or what the library of that place
    raises."""

    url: str

    def names(self) -> dict[str, int]:
        """Names and sizes of what is there; empty if the place does not exist yet."""

    def listed(self) -> Mapping[str, int]:
        """The same, for those who want all names and few sizes: a size may be as of when it is
        asked for, and is -1 of what has gone since."""

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Raises: FileNotFoundError."""

    def publish(self, name: str, data: bytes) -> None:
        """All of it, durable on return, or nothing."""

    def delete(self, name: str) -> None:
        """Nothing happens if it is not there."""

    def touch(self, name: str) -> None:
        """An empty file whose time is now, as the place tells it: made, or its time alone."""

    def modified(self, name: str) -> float | None:
        """When it was written or touched last, in seconds of the place's own clock; None: the place
        does not tell.

        Raises: FileNotFoundError.
        """

    def lock(self, prefix: str, session: str) -> Lock:
        """Keeps other writers of the same prefix out.

        Raises: TierError.
        """
