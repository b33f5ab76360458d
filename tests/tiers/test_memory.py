"""How much memory a flush takes, as the system counts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, threading, time
import numpy as np
import pmstore

def anonymous():
    status = open("/proc/self/status")
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) << 10

with pmstore.open(f"{sys.argv[1]}/s.pm", size="160MiB", domain="process") as store:
    store["a"] = np.ones(64 << 20, np.uint8)
    store.add_tier("t", pmstore.TierConfig(f"{sys.argv[1]}/tier", memory="8MiB", max_rate="100MB"))
    store.commit()
    before = most = anonymous()
    over = threading.Event()

    def look():
        global most
        while not over.wait(0.002):
            most = max(most, anonymous())

    thread = threading.Thread(target=look)
    thread.start()
    handle = store.flush("t")
    store["a"][:] = 2
    store.commit()
    handle.wait()
    over.set()
    thread.join()
    print(most - before, handle.stats.peak_kept_bytes)
"""
MIB = 1 << 20
BUFFERS = 16 * MIB
"""Of the threads that write."""


@pytest.mark.alone
def test_memory_is_bounded_as_the_system_counts_it(shm: Path) -> None:
    """A commit changes 64 MiB under a flush that may keep 8."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, shm],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    most, kept = map(int, done.stdout.split())
    assert kept <= 8 * MIB
    assert most <= 8 * MIB + BUFFERS + 6 * MIB  # threads, and what Python makes in passing
