"""Deaths that are no SIGKILL, in a transaction: a fault, an abort, no memory left. The next open
finds the last commit."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pmstore

LENGTH = 200_000

PROGRAM = """
import ctypes, os, resource, sys
import numpy as np
import pmstore

path, domain, how, length = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def no_memory_left():
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + (16 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    hoard = []
    for size in (1 << 20, 1 << 16, 1 << 12):
        try:
            while True:
                hoard.append(bytearray(size))
        except MemoryError:
            pass
    return hoard


store = pmstore.open(path, domain=domain, size="4MiB")
array = store.zeros("array", int(length))
store["step"] = 1
store.commit()
array[::1000] = 5  # pending
with store.transaction():
    store["step"] = 2
with store.transaction():
    array[:] = 7
    store["step"] = 3
    if how == "fault":
        ctypes.string_at(0)
    elif how == "abort":
        os.abort()
    elif how == "memory":  # what malloc does not give ends the process here; captures need none
        hoard = no_memory_left()
        array[:] = 8
        os.abort()
    elif how == "uncaught":  # the block is undone, and the interpreter ends, with hardly any memory
        hoard = no_memory_left()
        np.zeros(1 << 30, "u1")
"""


@pytest.mark.parametrize("domain", ["process", "emulated", "file"])
@pytest.mark.parametrize("how", ["fault", "abort", "memory", "uncaught"])
def test_a_death_in_a_block(shm: Path, domain: Any, how: str) -> None:
    path = shm / "x.pm"
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), domain, how, str(LENGTH)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    ended = {
        "fault": -signal.SIGSEGV,
        "abort": -signal.SIGABRT,
        "memory": -signal.SIGABRT,
        "uncaught": 1,
    }[how]
    assert run.returncode == ended, run.stderr
    assert (how == "uncaught") == ("MemoryError" in run.stderr), run.stderr
    for mode in ("r", "r+", "r+"):
        with pmstore.open(path, mode, domain=domain) as store:  # type: ignore[arg-type]
            assert store.check().problems == ()
            assert store["step"] == 2
            assert store["array"][::1000].tolist() == [5] * (LENGTH // 1000)
            assert store["array"].sum() == 5 * LENGTH // 1000
