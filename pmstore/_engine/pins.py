"""Snapshots that somebody copies from, for whom the end of the store waits."""

from __future__ import annotations

import time
from typing import Protocol
from weakref import WeakValueDictionary

from pmstore._base.weak_registry import alive

_IDLE_SECONDS = 5.0
"""How long the store's end waits for a snapshot that nobody reads from: it may have been
forgotten."""
_LOOK_SECONDS = 0.002


class Pin(Protocol):
    """A snapshot that somebody copies from."""

    @property
    def closed(self) -> bool: ...

    @property
    def busy(self) -> bool:
        """Whether a call of another thread is under way. A call of this thread does not count: it
        goes on only after the wait."""


class Pins:
    """The snapshots of one store that somebody copies from."""

    def __init__(self) -> None:
        self._pins: WeakValueDictionary[int, Pin] = WeakValueDictionary()

    def add(self, pin: Pin) -> None:
        self._pins[id(pin)] = pin

    def wait(self) -> None:
        """Waits until what the snapshots show has been copied, or until nobody has read from them
        for a while."""
        read = time.monotonic()
        while left := [pin for pin in alive(self._pins) if not pin.closed]:
            if any(pin.busy for pin in left):
                read = time.monotonic()
            elif time.monotonic() - read > _IDLE_SECONDS:
                return
            time.sleep(_LOOK_SECONDS)
