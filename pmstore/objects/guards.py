"""Asks the guards of a store whether what is pending in it is only half of something."""

from __future__ import annotations

import sys
import warnings
from typing import Protocol
from weakref import ref

from pmstore.errors import TransactionError


class Guard(Protocol):
    """Is asked before a store is committed, and is told of its roll backs and of its end. One that
    answers only some of the calls derives from it, and has nothing to say to the others."""

    def half(self) -> str:
        """Says which half of something is pending, and what to do about it. Returns "" if what is
        pending is whole. It must not write."""
        return ""

    def capture(self) -> None:
        """Writes what belongs to the state that is about to be committed by somebody else, and is
        not in the store yet."""
        return

    def lost(self) -> str:
        """Says in words what is taken back because `half` kept it from being committed when the
        store was left normally. Returns "" if there is nothing to tell."""
        return ""

    def leaving(self) -> bool:
        """Is called before the store's `with` is left normally. Returns whether it has committed
        what is pending, for good. What it raises keeps the store from being committed."""
        return False

    def dropping(self) -> None:
        """Is called when the store is about to be closed, and what is not committed is dropped."""
        return

    def went_back(self) -> None:
        """Is called when the store was rolled back or rewound: it holds another state than
        before."""
        return

    def ending(self, kept: bool, raising: bool) -> None:
        """Is called before the store is closed; it may write the history.

        kept: what is pending is committed then, or was. raising: by an error or an exit."""
        return

    def ended(self) -> None:
        """Is called when the store is closed."""
        return


class Guards:
    """The guards of one store. Each is forgotten when nothing else holds it.

    Attributes:
        held: the store holds that one, which works on something, until `let_go`.
        committing: one that commits the store itself, and is not asked meanwhile.
    """

    def __init__(self) -> None:
        self._guards: list[ref[Guard]] = []
        self.held: Guard | None = None
        self.committing: Guard | None = None

    def __bool__(self) -> bool:
        return bool(self._guards)

    def add(self, guard: Guard) -> None:
        self._guards = [*(one for one in self._guards if one() is not None), ref(guard)]

    def let_go(self, guard: Guard) -> None:
        if self.held is guard:
            self.held = None

    def _alive(self) -> list[Guard]:
        return [guard for reference in self._guards if (guard := reference()) is not None]

    def before_commit(self) -> None:
        """Has all guards but the one that commits bring the store up to date.

        Raises: TransactionError: what is pending is half of something of one of them.
        """
        but, others = self.committing, False
        for reference in self._guards:
            guard = reference()
            if guard is not None and guard is not but:
                others = True
                if why := guard.half():
                    raise TransactionError(why)
        if others:
            for guard in self._alive():
                if guard is not but:
                    guard.capture()

    def half(self) -> bool:
        return any(guard.half() for guard in self._alive())

    def lost(self) -> list[str]:
        return [told for guard in self._alive() if (told := guard.lost())]

    def leaving(self) -> bool:
        """Returns whether what is pending has been committed."""
        committed = False
        for guard in self._alive():
            committed |= guard.leaving()
        return committed

    def dropping(self) -> None:
        for guard in self._alive():
            guard.dropping()

    def went_back(self) -> None:
        for guard in self._alive():
            guard.went_back()

    def ending(self, kept: bool, raising: bool) -> None:
        for guard in self._alive():
            guard.ending(kept, raising)

    def ended(self) -> None:
        for guard in self._alive():
            guard.ended()
        self.held = None


def tell(lost: list[str], raising: bool) -> None:
    """Warns. raising: of an error or an exit that goes on, which no warning that is an error may
    replace: it is written to stderr then."""
    for told in lost:
        try:
            warnings.warn(told, RuntimeWarning, stacklevel=4)
        except RuntimeWarning:
            if not raising:
                raise
            print(f"pmstore: {told}", file=sys.stderr)
