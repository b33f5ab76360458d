"""Who says that what is pending in a store is only half of something."""

from __future__ import annotations

import sys
import warnings
from typing import Protocol
from weakref import ref

from pmstore.errors import TransactionError


class Guard(Protocol):
    """Asked before a store is committed, and told of its end; must not write."""

    def half(self) -> str:
        """Of what half is pending, and what to do about it. "": what is pending is whole."""

    def running(self) -> bool:
        """Whether the program is still at work, so that what is pending may be half of something
        without `half` knowing it. Asked when it exits: then nothing is committed."""

    def lost(self, orderly: bool) -> str:
        """What the end of the store without a commit takes back, in words. "": nothing to be told.

        orderly: it was to be committed, and `half` or `running` kept it from that.
        """

    def ended(self) -> None:
        """The store is closed."""


class Guards:
    """Of one store. Each is forgotten when nothing else holds it."""

    def __init__(self) -> None:
        self._guards: list[ref[Guard]] = []

    def __bool__(self) -> bool:
        return bool(self._guards)

    def add(self, guard: Guard) -> None:
        self._guards = [*(one for one in self._guards if one() is not None), ref(guard)]

    def _alive(self) -> list[Guard]:
        return [guard for reference in self._guards if (guard := reference()) is not None]

    def refuse_half(self, but: Guard | None = None) -> None:
        """Raises: TransactionError: what is pending is half of something, of others than but."""
        for guard in self._alive():
            if guard is not but and (why := guard.half()):
                raise TransactionError(why)

    def half(self) -> bool:
        return any(guard.half() for guard in self._alive())

    def running(self) -> bool:
        return any(guard.running() for guard in self._alive())

    def lost(self, orderly: bool) -> list[str]:
        return [told for guard in self._alive() if (told := guard.lost(orderly))]

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
