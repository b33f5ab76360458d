"""The processes that a command has started, wherever its launcher put them: other sessions, other
parents. Each carries the token of its board in its environment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

_PATIENCE = 20.0
"""Seconds until what was killed has to be gone."""


def of_token(token: str) -> list[int]:
    """Returns the ids of the token's processes that are alive. Children are found before and after
    an exec."""
    pids = (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal())
    return [pid for pid in pids if _has(pid, token)]


def kill(pid: int, token: str) -> bool:
    """Kills a process of the token. Returns False if there is no such process any more."""
    if not _has(pid, token):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return True


def _has(pid: int, token: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone meanwhile, or another user's
        return False
    return f"PMSTORE_CRASH_TOKEN={token}".encode() in environment.split(b"\0")


def end(child: subprocess.Popen[bytes], token: str) -> None:
    """Kills the command with all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    until = time.monotonic() + _PATIENCE
    while (alive := of_token(token)) and time.monotonic() < until:
        for pid in alive:  # again, as long as somebody starts others
            kill(pid, token)
        child.poll()
        time.sleep(0.005)
