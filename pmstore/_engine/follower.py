"""Waits for commits of another process, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

_PAUSE_SECONDS = 0.1
"""The longest time between two looks for a new commit."""


class Following:
    """What `Store.follow` returns: it yields epochs, to a `for`, or to an `async for`, during which
    the event loop goes on. It may be closed as a generator may, and also by another thread, which
    ends a wait."""

    def __init__(
        self, refresh: Callable[[], bool], epoch: Callable[[], int], timeout_seconds: float | None
    ) -> None:
        self._refresh = refresh
        self._epoch = epoch
        self._timeout = timeout_seconds
        self._closed = False

    def close(self) -> None:
        """Ends the following: it yields nothing from now on. The store stays open."""
        self._closed = True

    async def aclose(self) -> None:
        """Ends the following as `close` does, for `contextlib.aclosing`."""
        self.close()

    def _look(self) -> bool:
        return not self._closed and self._refresh()

    def _pauses(self) -> Iterator[float]:
        """Yields the seconds to wait before each further look, until the time is over."""
        began, pause = time.monotonic(), _PAUSE_SECONDS / 16
        while not self._closed and (
            self._timeout is None or time.monotonic() - began < self._timeout
        ):
            yield pause
            pause = min(2 * pause, _PAUSE_SECONDS)

    def __iter__(self) -> Following:
        return self

    def __next__(self) -> int:
        if self._look():
            return self._epoch()
        for pause in self._pauses():
            time.sleep(pause)
            if self._look():
                return self._epoch()
        raise StopIteration

    def __aiter__(self) -> Following:
        return self

    async def __anext__(self) -> int:
        import asyncio  # to import asyncio takes long, and few want it

        # in a thread: it waits for the writer's answer, and reads the names
        if await asyncio.to_thread(self._look):
            return self._epoch()
        for pause in self._pauses():
            await asyncio.sleep(pause)
            if await asyncio.to_thread(self._look):
                return self._epoch()
        raise StopAsyncIteration
