"""What a plug-in is just writing into a store: no commit comes in between, and what was broken off
is not committed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from pmstore import Store
from pmstore.errors import TransactionError
from pmstore.objects.guards import Watcher


def check_store(store: object, call: str) -> None:
    """call: how it is written. Raises: TypeError."""
    if not isinstance(store, Store):
        raise TypeError(
            f"{call}: store is an open store, not {type(store).__name__}: write "
            "with pmstore.open(path) as store: ..."
        )


class _Halves(Watcher):
    """Of one store."""

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
    """Around the writing of that name: until its end the store refuses to commit; if it is left by
    an error, until `store.rollback()`.

    Raises: TransactionError: an earlier one was broken off.
    """
    if (halves := _of.get(store)) is None:
        halves = _of[store] = _Halves()
        store.guard_commits(halves)
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
    """What is to be done about it. "": the name is whole."""
    halves = _of.get(store)
    return halves.half() if halves is not None and name in halves.names else ""
