"""What shelves and their members share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pmstore.store import Store

HIDDEN = "__pymm__"
"""A group of the store: for each name that `shelf.save` was given, how its leaves go together."""


class Shadow:
    """A value that becomes a member when it is assigned to an attribute of a shelf."""

    def store_in(self, store: Store, name: str) -> None:
        """Makes the member. REQUIRES: a transaction."""
        raise NotImplementedError


class ShelvedCommon:
    """Base of everything that a shelf's attributes are:
    `isinstance(shelf.x, pymm.ShelvedCommon)`."""

    __slots__ = ()


class Core:
    """What the members need of their shelf. They keep the core, and not the shelf, so that `del
    shelf` closes the file."""

    __slots__ = ("bind", "block", "members", "rollbacks", "store")

    def __init__(self, store: Store, bind: Callable[[Core, str, Any], Any]) -> None:
        """Takes the shelf's store. bind: makes the member for a stored value."""
        self.store: Store = store
        self.bind: Callable[[Core, str, Any], Any] = bind
        self.members: dict[str, Any] = {}
        self.rollbacks: int = store.rollbacks
        self.block: Any = None
        """The transaction between tx_begin and tx_end."""

    def writing(self) -> AbstractContextManager[Any]:
        """Returns the block around each operation that writes: a transaction, or part of the one
        that is open.

        After the close, members are private memory, and there is nothing to commit.
        """
        return nullcontext() if self.store.closed else self.store.transaction()

    def current(self) -> dict[str, Any]:
        """Returns the members that were given out and are still what the store holds."""
        if self.rollbacks != self.store.rollbacks:
            self.rollbacks = self.store.rollbacks
            self.members.clear()
        return self.members

    def member(self, name: str) -> Any:
        """Returns the member of that name: the one that was given out, or a new one; None if the
        store has nothing of that name."""
        members = self.current()
        if name in members:
            return members[name]
        try:
            value = self.store[name]
        except KeyError:
            return None
        member = self.bind(self, name, value)
        if isinstance(member, ShelvedCommon):
            members[name] = member
        return member

    def close(self) -> None:
        """Commits, and gives the file up; a transaction that was not ended is rolled back.
        Idempotent."""
        if self.block is not None:
            self.store.close()
        elif not self.store.closed:
            self.store.__exit__(None, None, None)
