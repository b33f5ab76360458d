"""Which of the tiers that a store remembers are flushed to: those that this file had added here,
by this user.

A store is a file, and files come from anywhere. What one says of tiers would send whatever is
committed to it to a place of its maker's choice, with the credentials of whoever commits. So what a
store remembers of a tier is sealed: a keyed hash over it, the store's uuid and the file's inode.
The key is made at random, once for each user, and lies outside every store. Who makes a file does
not know it; and in a copy of a store, which has another inode, seals do not hold.

The device's number is no part of it: on network and stacked file systems it changes from mount to
mount. Nor is the machine: whoever has the key is the same user, whose home machines may share.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from pmstore._base.newfile import create
from pmstore._engine.pool_info import PoolInfo

SEAL = "seal"
"""The key under which a store remembers a tier's seal."""
KEY_BYTES = 32


def key_path() -> Path | None:
    """Returns `$XDG_STATE_HOME/pmstore/key`; None: no home is known."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # as its specification says
        state = os.path.expanduser("~/.local/state")
    return Path(state, "pmstore", "key") if os.path.isabs(state) else None


def _read(path: Path) -> bytes | None:
    """Reads a key; None: there is none, or one that is no secret of this user's alone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if not stat.S_ISREG(status.st_mode) or not private or status.st_size != KEY_BYTES:
            return None
        key = os.read(fd, KEY_BYTES)
    except OSError:
        return None
    finally:
        os.close(fd)
    return key if len(key) == KEY_BYTES else None


def _make(path: Path) -> None:
    """Makes a key, whole or not at all, and never in another one's place.

    Raises: OSError.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = create(temporary, os.O_WRONLY)
    try:
        try:
            os.write(fd, secrets.token_bytes(KEY_BYTES))
            os.fsync(fd)
        finally:
            os.close(fd)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)


def _key(make: bool) -> bytes | None:
    path = key_path()
    if path is None:
        return None
    key = _read(path)
    if key is None and make:
        with contextlib.suppress(OSError):
            _make(path)
        key = _read(path)
    return key


def _hash(key: bytes, info: PoolInfo, name: str, value: dict[str, Any]) -> str:
    rest = {key: one for key, one in value.items() if key != SEAL}
    what = [1, name, info.uuid.hex(), info.inode, rest]
    return hashlib.blake2b(
        json.dumps(what, sort_keys=True).encode(), key=key, digest_size=32
    ).hexdigest()


def seal(info: PoolInfo, name: str, value: dict[str, Any]) -> dict[str, Any]:
    """Seals what the store is to remember of a tier. Where no key can be kept it has no seal: then
    whoever opens the store next has to add the tier anew."""
    key = _key(make=True)
    return (
        {**value, SEAL: _hash(key, info, name, value)}
        if key is not None and info.inode
        else dict(value)
    )


def sealed(info: PoolInfo, name: str, value: dict[str, Any]) -> bool:
    """Says whether this file had the tier added here."""
    found, key = value.get(SEAL), _key(make=False)
    if not isinstance(found, str) or not found.isascii() or key is None or not info.inode:
        return False
    try:
        return hmac.compare_digest(found, _hash(key, info, name, value))
    except (TypeError, ValueError, RecursionError):  # values that no tier has
        return False
