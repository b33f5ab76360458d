"""What a crash test and the program that it runs share: a file of one page, of which
`native/crash/debug.h` has the layout.

The engine of the program heeds the environment only if the board has the magic and the token that
the environment names, so that neither a variable that somebody left behind nor one that names
another file does anything.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

BOARD_BYTES = 4096
_MAGIC = b"PMSBOARD"
_HEAD = struct.Struct("=8s32s")
_COUNTS = struct.Struct("=QQQQ")


class Seen(NamedTuple):
    """primitives: that the program has carried out. acknowledged: commits of its first store that
    had returned. domain: of that store, as a number. power: 1 if it died by a simulated power
    failure. path: of the store, as the program named it."""

    primitives: int
    acknowledged: int
    domain: int
    power: int
    path: str


def environment(
    board: Path, *, at: int = 0, power_seed: int | None = None, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Makes a board, and the environment of the program that it is for: base, without what another
    crash test put there.

    at: SIGKILL at that persistence point (0: none); power_seed: with a simulated power failure. See
        `native/crash/debug.h`.
    """
    token = secrets.token_hex(16)
    board.unlink(missing_ok=True)
    with os.fdopen(os.open(board, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(_HEAD.pack(_MAGIC, token.encode()).ljust(BOARD_BYTES, b"\0"))
    made = {name: value for name, value in base.items() if not name.startswith("PMSTORE_CRASH_")}
    made["PMSTORE_CRASH_BOARD"], made["PMSTORE_CRASH_TOKEN"] = str(board), token
    if at:
        made["PMSTORE_CRASH_AT"] = str(at)
        if power_seed is not None:
            made["PMSTORE_CRASH_POWER"] = str(power_seed)
    return made


def read(board: Path) -> Seen:
    """What the program has noted there."""
    raw = board.read_bytes()
    path = raw[_HEAD.size + _COUNTS.size :].split(b"\0", 1)[0]
    primitives, acknowledged, domain, power = _COUNTS.unpack_from(raw, _HEAD.size)
    return Seen(primitives, acknowledged, domain, power, os.fsdecode(path))
