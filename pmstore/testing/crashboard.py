"""What a crash test and the program that it runs share: a file of one page, of which
`native/crash/debug.h` has the layout. A job's has a page for each process that opens a store, after
a first one for orders.

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

from pmstore._base.newfile import create

BOARD_BYTES = 4096
_MAGIC = b"PMSBOARD"
_HEAD = struct.Struct("=8s32s")
_COUNTS = struct.Struct("=QQQQQQQQ")
_KILL_AT = _HEAD.size + 5 * 8
_PATH = _HEAD.size + _COUNTS.size


class Seen(NamedTuple):
    """What a program noted on its page of the board.

    primitives: that the program has carried out. acknowledged: commits of its first store that had
    returned. domain: of that store, as a number. power: 1 if it died by a simulated power failure.
    path: of the store, as the program named it.

    A page of a job's board has more. owner: process id. killed: whether it died at a persistence
    point. agreed: as acknowledged, when all ranks were last known to have what this one has."""

    primitives: int
    acknowledged: int
    domain: int
    power: int
    owner: int
    killed: bool
    agreed: int
    path: str


def environment(
    board: Path,
    *,
    at: int = 0,
    power_seed: int | None = None,
    processes: int = 0,
    base: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Makes a board, and the environment of the program that it is for: base, without what another
    crash test put there.

    at: SIGKILL at that persistence point (0: none); power_seed: with a simulated power failure. See
        `native/crash/debug.h`.
    processes: of a job, that open a store, those that are restarted counted again; 0: no job.
    """
    token = secrets.token_hex(16)
    board.unlink(missing_ok=True)
    with os.fdopen(create(board, os.O_WRONLY), "wb") as file:
        file.write(_HEAD.pack(_MAGIC, token.encode()))
        file.truncate(BOARD_BYTES * (1 + processes))
    made = {name: value for name, value in base.items() if not name.startswith("PMSTORE_CRASH_")}
    made["PMSTORE_CRASH_BOARD"], made["PMSTORE_CRASH_TOKEN"] = str(board), token
    if at:
        made["PMSTORE_CRASH_AT"] = str(at)
        if power_seed is not None:
            made["PMSTORE_CRASH_POWER"] = str(power_seed)
    return made


def read(board: Path) -> Seen:
    """Returns what the program has noted on its board."""
    return _seen(board.read_bytes())


def read_job(board: Path) -> list[Seen]:
    """Returns what the processes of a job have noted, in the order in which they opened a store.
    Processes that opened none are left out."""
    raw = board.read_bytes()
    pages = (_seen(raw[at : at + BOARD_BYTES]) for at in range(BOARD_BYTES, len(raw), BOARD_BYTES))
    return [page for page in pages if page.primitives]  # from its path on


def order_kill(board: Path, path: str, at: int) -> None:
    """Orders the death of the process of a job that next opens the store of that path, as it names
    it: it dies at that persistence point. 0: nobody dies."""
    with board.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), bytes(8), _KILL_AT)
        os.pwrite(file.fileno(), os.fsencode(path)[: BOARD_BYTES - _PATH - 1] + b"\0", _PATH)
        os.pwrite(file.fileno(), struct.pack("=Q", at), _KILL_AT)


def _seen(raw: bytes) -> Seen:
    primitives, acknowledged, domain, power, owner, _, killed, agreed = _COUNTS.unpack_from(
        raw, _HEAD.size
    )
    path = os.fsdecode(raw[_PATH:].split(b"\0", 1)[0])
    return Seen(primitives, acknowledged, domain, power, owner, bool(killed), agreed, path)
