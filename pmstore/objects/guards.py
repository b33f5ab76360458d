"""Who says that what is pending in a store is only half of something."""

from __future__ import annotations

import sys
import warnings
from typing import Protocol
from weakref import ref

from pmstore.errors import TransactionError


class Guard(Protocol):
    """Asked before a store is committed, and told of its roll backs and its end; must not write,
    but for the history in `ending`."""

    def half(self) -> str:
        """Of what half is pending, and what to do about it. "": what is pending is whole."""

    def running(self) -> bool:
        """Whether the program is still at work, so that what is pending may be half of something
        without `half` knowing it. Asked when it exits: then nothing is committed."""

    def lost(self, orderly: bool) -> str:
        """What the end of the store without a commit takes back, in words. "": nothing to be told.

        orderly: it was to be committed, and `half` or `running` kept it from that.
        """

    def leaving(self, half: bool) -> bool:
        """Before the store's `with` is left. Returns whether it has committed what is pending, for
        good. What it raises keeps the store from being committed.

        half: others keep it from that already."""

    def raising(self) -> None:
        """The store's `with` is left by an error or an exit, or in the middle of something: commits
        what is whole, if it knows that nothing else is pending."""

    def went_back(self) -> None:
        """The store was rolled back, or rewound: it holds another state than before."""

    def ending(self, kept: bool, raising: bool) -> None:
        """Before the store is closed.

        kept: what is pending is committed then, or was. raising: by an error or an exit."""

    def ended(self) -> None:
        """The store is closed."""


class Watcher:
    """A guard that has nothing to say: for those that say something of a few."""

    def half(self) -> str:
        return ""

    def running(self) -> bool:
        return False

    def lost(self, orderly: bool) -> str:
        return ""

    def leaving(self, half: bool) -> bool:
        return False

    def went_back(self) -> None:
        pass

    def raising(self) -> None:
        pass

    def ending(self, kept: bool, raising: bool) -> None:
        pass

    def ended(self) -> None:
        pass


class Guards:
    """Of one store. Each is forgotten when nothing else holds it, unless it is to be kept."""

    def __init__(self) -> None:
        self._guards: list[ref[Guard]] = []
        self._kept: list[Guard] = []

    def __bool__(self) -> bool:
        return bool(self._guards)

    def add(self, guard: Guard, *, keep: bool = False) -> None:
        if keep:
            self._kept.append(guard)
        self._guards = [*(one for one in self._guards if one() is not None), ref(guard)]

    def _alive(self) -> list[Guard]:
        return [guard for reference in self._guards if (guard := reference()) is not None]

    def refuse_half(self, but: Guard | None = None) -> None:
        """Raises: TransactionError: what is pending is half of something, of others than but."""
        for reference in self._guards:
            guard = reference()
            if guard is not None and guard is not but and (why := guard.half()):
                raise TransactionError(why)

    def refuse_left(self) -> None:
        """Before a further user of the store begins: forgets kept guards of what is over.

        Raises: TransactionError: half of something is left of one.
        """
        for guard in list(self._kept):
            if why := guard.half():
                raise TransactionError(why)
            self._kept.remove(guard)

    def half(self) -> bool:
        return any(guard.half() for guard in self._alive())

    def half_of_others(self, but: Guard) -> bool:
        return any(guard.half() for guard in self._alive() if guard is not but)

    def running(self) -> bool:
        return any(guard.running() for guard in self._alive())

    def lost(self, orderly: bool) -> list[str]:
        return [told for guard in self._alive() if (told := guard.lost(orderly))]

    def leaving(self, raising: bool) -> bool:
        """Returns whether what is pending has been committed. raising: an exit goes on."""
        guards, committed = self._alive(), False
        for guard in guards:
            others = [one for one in guards if one is not guard]
            half = any(one.half() or (raising and one.running()) for one in others)
            committed |= guard.leaving(half)
        return committed

    def ending(self, kept: bool, raising: bool) -> None:
        for guard in self._alive():
            guard.ending(kept, raising)

    def went_back(self) -> None:
        for guard in self._alive():
            guard.went_back()

    def raising(self) -> None:
        """What it raises is told, and changes nothing: something else goes on."""
        for guard in self._alive():
            try:
                guard.raising()
            except Exception as error:
                print(f"pmstore: finished steps are not committed: {error}", file=sys.stderr)

    def ended(self) -> None:
        for guard in self._alive():
            guard.ended()


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
