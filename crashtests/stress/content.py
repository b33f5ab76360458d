"""What objects hold. An integer says whose it is and of which generation: any read can be checked
by itself."""

from __future__ import annotations

from typing import Any

import numpy as np

_GENERATION_BITS = 32


class WrongError(Exception):
    """The store shows what it never should. The text says what was expected, and what was found."""


def encode(tag: int, generation: int) -> int:
    """Exact in float64 too. Negative generations are of blocks that were undone: nobody may ever
    see one afterwards."""
    whole = (tag << _GENERATION_BITS) + abs(generation)
    return whole if generation >= 0 else -whole


def decode(value: Any) -> str:
    """In words, for reports."""
    number = int(value)
    tag, generation = divmod(abs(number), 1 << _GENERATION_BITS)
    undone = " of an undone block" if number < 0 else ""
    return f"object {tag} generation {generation}{undone}"


def expect_filled(what: str, array: Any, value: int) -> None:
    """All of the array or tensor holds one value. Raises: WrongError."""
    found = np.asarray(array)
    if not (found == value).all():
        raise WrongError(f"{what}: expected {decode(value)} throughout, found {describe(found)}")


def describe(array: Any) -> str:
    """Runs of equal values."""
    found = np.asarray(array).ravel()
    if not len(found):
        return "nothing"
    starts = np.concatenate(([0], np.nonzero(np.diff(found))[0] + 1))
    told = [f"[{at}:] {decode(found[at])}" for at in starts[:6]]
    return ", ".join(told) + (f" and {len(starts) - 6} more runs" if len(starts) > 6 else "")
