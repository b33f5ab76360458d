"""Guards what a plug-in writes into a store. No commit comes while it writes, and a write that was
broken off is not committed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from pmstore import Store
from pmstore.errors import TransactionError
from pmstore.objects.guards import Guard


def check_store(store: object, call: str) -> None:
    """Checks that it is an open store. call: how the call is written, for the message. Raises:
    TypeError."""
    if not isinstance(store, Store):
        raise TypeError(
            f"{call}: store is an open store, not {type(store).__name__}: write "
            "with pmstore.open(path) as store: ..."
        )


class _Halves(Guard):
    """Guards one store: knows the names that are half written."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def half(self) -> str:
        if not self.names:
            return ""
        return (
            f"the store holds only a part of the new {', '.join(sorted(self.names))}: it is being "
            "written in another thread, or that was broken off; then call store.rollback()"
        )

    def lost(self) -> str:
        if not self.names:
            return ""
        return (
            f"writing {', '.join(sorted(self.names))} was broken off: the store is as of its last "
            "commit"
        )

    def went_back(self) -> None:
        self.names.clear()


_of: WeakKeyDictionary[Store, _Halves] = WeakKeyDictionary()


@contextmanager
def written_whole(store: Store, name: str) -> Iterator[None]:
    """Wraps the writing of that name. Until the block ends, the store refuses to commit. If an
    error leaves the block, the store refuses until `store.rollback()`.

    Raises: TransactionError: an earlier one was broken off.
    """
    if (halves := _of.get(store)) is None:
        halves = _of[store] = _Halves()
        store._guard_commits(halves)
    if name in halves.names:
        raise TransactionError(halves.half())
    halves.names.add(name)
    try:
        yield
    except BaseException:
        halves.names.add(name)  # also if the store was rolled back meanwhile
        raise
    halves.names.discard(name)


def broken_off(store: Store, name: str) -> str:
    """Says what is to be done about a name whose writing was broken off. Returns "" if the name is
    whole."""
    halves = _of.get(store)
    return halves.half() if halves is not None and name in halves.names else ""
