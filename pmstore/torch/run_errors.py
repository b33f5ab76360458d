"""What can go wrong between a training program and its stored run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pmstore._engine.failures import damaged
from pmstore.errors import PmstoreError
from pmstore.objects import dtypes


class AttachError(PmstoreError, ValueError):
    """What was given to `attach` cannot be moved into the store, or is attached already; or the run
    was detached; or the program trains with what it has not given. Nothing was changed."""

    permanent = True


class MismatchError(AttachError):
    """Model, optimizer or loader are not the ones whose state is stored. Nothing was changed.

    Attributes:
        missing: stored, but not in what was given.
        unexpected: in what was given, but not stored.
        mismatched: in both, with different shapes, dtypes or ties; a sentence each.
    """

    def __init__(
        self,
        what: str,
        *,
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        mismatched: Iterable[str] = (),
        ways: Iterable[str] = (),
    ) -> None:
        """ways: how the program can go on, a sentence each."""
        self.missing: tuple[str, ...] = tuple(missing)
        self.unexpected: tuple[str, ...] = tuple(unexpected)
        self.mismatched: tuple[str, ...] = tuple(mismatched)
        lines = [what]
        lines += _some("stored, but not given", self.missing)
        lines += _some("given, but not stored", self.unexpected)
        lines += _some("different", self.mismatched)
        lines += _some(
            "what can be written: attach(..., resume=pmstore.torch.Resume(...))", tuple(ways)
        )
        super().__init__("\n".join(lines))


class ChangedError(MismatchError):
    """The program gives other settings than it gave when the run was last attached, and does not
    say which of them count (`Resume`). Nothing was changed.

    Attributes:
        mismatched: a sentence for each: both values, and what to write.
    """


class TornStepError(AttachError):
    """The store's last commit was made in the middle of a training step, by other means than the
    run's own commit."""


class LookaheadError(PmstoreError, RuntimeError):
    """The program holds batches, or passes over them, and does not say so: which of them a step is
    of would not be known. Nothing of it was committed."""


class RolledBackError(PmstoreError, RuntimeError):
    """The run was taken back to a place to which Python cannot be sent: before the loop or the
    epoch that the program is in. Store and program are there; the program has to begin its loop
    again, or its loops from the first, as the message says."""


class UnfinishedStepError(PmstoreError, RuntimeError):
    """The store was left normally in a step that nobody said is complete. That step, and what the
    policy had left at risk, is taken back."""


class NotKeptError(PmstoreError, LookupError):
    """There is no such earlier state of the run. Nothing was changed."""


@contextmanager
def records(path: str, name: str) -> Iterator[None]:
    """Where a stored run becomes Python's. What is not as a run writes it (a name that is gone, a
    value of another kind or length) is met in many places, some of them in the objects that are
    given their state; it ends here.

    Raises: CorruptStoreError.
    """
    try:
        yield
    except PmstoreError:
        raise
    except dtypes.UNDECODABLE as error:
        told = (
            f"{error} is not there"
            if type(error) is KeyError
            else f"{type(error).__name__}: {error}"
        )
        raise damaged(
            path,
            f"the run {name!r} is not as a run was stored, or not of the objects given: {told}",
        ) from error


def _some(title: str, items: tuple[str, ...], most: int = 20) -> list[str]:
    if not items:
        return []
    lines = [f"  {title}:", *(f"    {item}" for item in items[:most])]
    if len(items) > most:
        lines.append(f"    and {len(items) - most} more")
    return lines
