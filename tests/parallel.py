"""Looks at many things at a time, each thread with a server that forks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from threading import local
from typing import TypeVar

Server = TypeVar("Server")
Thing = TypeVar("Thing")
Report = TypeVar("Report")


def reports(
    examine: Callable[[Thing, Server], Report],
    things: Iterable[Thing],
    server: Callable[[], AbstractContextManager[Server]],
    threads: int,
) -> Iterator[Report]:
    """Yields what `examine` returns of each thing, in their order. The servers end at the end."""
    mine = local()
    with ExitStack() as servers, ThreadPoolExecutor(threads) as pool:

        def one(thing: Thing) -> Report:
            if not hasattr(mine, "server"):
                mine.server = servers.enter_context(server())
            return examine(thing, mine.server)

        yield from pool.map(one, things)
