"""Words of messages."""

from __future__ import annotations

__all__ = ["counted"]


def counted(count: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "commit"), counted(20_000, "name")
    ('1 commit', '20,000 names')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"
