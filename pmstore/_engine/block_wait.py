"""`async with store.transaction()`: waits for the transaction block of another task or thread, and
lets the event loop go on meanwhile."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from pmstore._engine._binding import Transaction

_LONGEST_PAUSE_SECONDS = 0.01


async def enter(transaction: Transaction, timeout_seconds: float | None) -> Transaction:
    """Enters the transaction block when it is free. It looks again and again: nobody tells an event
    loop that a block was left in another thread, or ended with its thread."""
    end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    pause = 0.0
    while not transaction.enter_if_free(end is not None and time.monotonic() >= end):
        await asyncio.sleep(pause)
        pause = min(pause + 0.0005, _LONGEST_PAUSE_SECONDS)
    return transaction


async def leave(
    transaction: Transaction,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> bool:
    return transaction.__exit__(kind, error, trace)
