"""Names what can go wrong between a framework's objects and what a store holds of them."""

from __future__ import annotations

from collections.abc import Iterable

from pmstore.errors import PmstoreError


class DifferentError(PmstoreError, ValueError):
    """Says that what is given is not that of which the store holds the state. Nothing was changed.

    Attributes:
        differences: a sentence each, with both values.
    """

    def __init__(self, what: str, differences: Iterable[str], remedy: str) -> None:
        self.differences: tuple[str, ...] = tuple(differences)
        told, more = self.differences[:20], len(self.differences) - 20
        lines = [what, *(f"  {one}" for one in told)]
        if more > 0:
            lines.append(f"  and {more} more")
        super().__init__("\n".join([*lines, remedy]))
