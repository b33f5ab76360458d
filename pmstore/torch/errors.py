"""What can go wrong between a training program and its stored run."""

from __future__ import annotations

from collections.abc import Iterable

from pmstore.errors import PmstoreError

__all__ = ["AttachError", "MismatchError", "TornStepError"]


class AttachError(PmstoreError, ValueError):
    """What was given to `attach` cannot be moved into the store, or not twice. Nothing was changed."""


class MismatchError(AttachError):
    """Model, optimizer or loader are not the ones whose state is stored. Nothing was changed.

    Attributes:
        missing: stored, but not in what was given.
        unexpected: in what was given, but not stored.
        mismatched: in both, with different shapes, dtypes or ties; a sentence each.
    """

    def __init__(
        self, what: str, *, missing: Iterable[str] = (), unexpected: Iterable[str] = (), mismatched: Iterable[str] = ()
    ) -> None:
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = tuple(mismatched)
        lines = [what]
        lines += _some("stored, but not given", self.missing)
        lines += _some("given, but not stored", self.unexpected)
        lines += _some("different", self.mismatched)
        super().__init__("\n".join(lines))


class TornStepError(AttachError):
    """The store's last commit was made in the middle of a training step, by other means than the run's own commit."""


def _some(title: str, items: tuple[str, ...], most: int = 20) -> list[str]:
    if not items:
        return []
    lines = [f"  {title}:", *(f"    {item}" for item in items[:most])]
    if len(items) > most:
        lines.append(f"    and {len(items) - most} more")
    return lines
