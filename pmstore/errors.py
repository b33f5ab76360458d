"""The exceptions of pmstore.

Each message says what happened, to which file, and what to do. Each class has a second base where a
Python user would look for it (`OSError`, `ValueError`, `RuntimeError`). A plain failure of the
operating system stays Python's own class: `FileNotFoundError`, `FileExistsError`,
`PermissionError`, `IsADirectoryError`, `OSError`; so does `KeyError`, for a name that is not there.

>>> issubclass(StoreFullError, OSError), issubclass(TransactionError, RuntimeError)
(True, True)
"""

from __future__ import annotations


class PmstoreError(Exception):
    """Base of all errors that are pmstore's own.

    Attributes:
        path: the store's file, or "" where none is concerned.
        problem: the message without path and remedy, which is for programs in Python, or "" where
            it has no such parts.
        permanent: the same program, started again on the same stores, gets the same error. So a
            launcher should not do that (docs/DISTRIBUTED.md says how to tell it).
    """

    path: str = ""
    problem: str = ""
    permanent: bool = False


class StoreLockedError(PmstoreError, BlockingIOError):
    """Another process, or another `open` in this one, holds the store's lock. A reader beside a
    writer (mode "r" without lock=True) gets this error only if the writer does not answer it.

    Attributes:
        pid: a holder's process id, or None where the system does not tell (/proc/locks).
    """

    pid: int | None = None


class SnapshotLostError(PmstoreError, RuntimeError):
    """A store that is read beside a writer (`pmstore.open`, mode "r") went on, and what was asked
    for cannot be had as of the commit that this reader shows. What was read before stays as it
    is."""


class MirrorError(PmstoreError, RuntimeError):
    """A copy from a device failed or came too late: the commit did not happen. What was pending
    before is pending still.

    The copier's own error, if there is one, is the `__cause__`.
    """


class MovedError(PmstoreError, RuntimeError):
    """An array or tensor of the store has its bytes elsewhere now, where no commit can find them.
    Nothing was committed."""


class StoreFullError(PmstoreError, OSError):
    """There is no room for an object or for its log (errno ENOSPC). Nothing was changed.

    Attributes:
        needed_bytes: what was asked for, 0 where that is not known.
        available_bytes: what there was.
    """

    needed_bytes: int = 0
    available_bytes: int = 0


class CorruptStoreError(PmstoreError, ValueError):
    """The file breaks a rule of docs/FORMAT.md: damaged, truncated, or made to deceive.

    Attributes:
        offset: where in the file, in bytes, or None where no single place is to blame.
    """

    permanent = True
    offset: int | None = None


class NotAStoreError(CorruptStoreError):
    """The file is something else than a store. It was not touched."""


class FormatVersionError(PmstoreError, ValueError):
    """The store was written by a version of pmstore, or on a machine, that this one does not
    understand."""

    permanent = True


class UncleanMachineCrashError(PmstoreError, OSError):
    """The machine restarted under a store whose domain only survives the death of its process. The
    store may be torn.

    The error is raised too where the system does not tell whether the machine restarted."""

    permanent = True


class UncleanCopyError(UncleanMachineCrashError):
    """The file is a copy that was made while the store was being written: it is torn."""


class TransactionError(PmstoreError, RuntimeError):
    """The call is not allowed at this point of a transaction, or the transaction block of
    another thread or task is in the way.

    Attributes:
        owner: name of the thread or task whose transaction block is open, or None.
    """

    owner: str | None = None


class ForkedStoreError(TransactionError):
    """The store belongs to the parent process; in a fork child it can only be read."""


class InDoubtError(TransactionError):
    """The version before the last commit is held for a job of several ranks, and it is not known
    that all of them have the last commit. What would let go of it is refused: commits, transaction
    blocks, the next version of slots that it has, `Store.rewind`.

    Leaving the store's `with` raises it too, where something was written: the store is closed, what
    was pending is rolled back, and what is held stays.
    """


class ClosedStoreError(PmstoreError, ValueError):
    """The store was closed."""


class ReadOnlyStoreError(PmstoreError, OSError):
    """The store is open for reading only, or went read-only after a failed sync (errno EROFS)."""


class NoSuchNameError(KeyError):
    """A `KeyError` that says what is missing in a sentence: `KeyError` itself shows its text in
    quotes, and with escapes."""

    __str__ = Exception.__str__


class NameExistsError(PmstoreError, ValueError):
    """The name is taken by another object."""


class DomainError(PmstoreError, OSError):
    """The domain that was asked for cannot be had for this file (errno EOPNOTSUPP)."""


class TierError(PmstoreError, OSError):
    """A storage tier failed.

    Attributes:
        damaged: what was asked for is there, and damaged or not whole.
    """

    damaged: bool = False


class MixedStoresError(PmstoreError, RuntimeError):
    """The stores, or the programs, of a job's ranks do not belong together: no state of the job is
    in all of them, or one rank did what the others did not. Every rank raises it. Nothing was
    lost."""

    permanent = True


class PeerLostError(PmstoreError, RuntimeError):
    """Another rank of the job has died, or did not come in time. This rank's store stays at its
    last commit and holds the one before: start the job again, and all ranks go on from the same
    step."""
