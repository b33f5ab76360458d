"""What a resumed run goes through again says so, where it takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

_FIRST = 2.0
"""Seconds until the first line."""
_EVERY = 5.0
"""And between two lines."""


def batches_again(count: int) -> Iterator[int]:
    """Counts up to that number. If that takes long, lines on standard error say how far it is."""
    begun = said = time.monotonic()
    wait = _FIRST
    for number in range(count):
        yield number
        now = time.monotonic()
        if now - said >= wait:
            _say(f"going through {number + 1:,} of {count:,} batches again ...")
            said, wait = now, _EVERY
    if said != begun:
        _say(f"went through {count:,} batches again in {time.monotonic() - begun:.0f} s")


def _say(what: str) -> None:
    print(f"pmstore: {what}", file=sys.stderr, flush=True)
