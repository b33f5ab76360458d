"""A transaction that writes to more scattered pages than a process may have mappings: the process
goes on as any other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: where the mappings are used up pytest itself has none.
PROGRAM = """
import mmap, random, subprocess, sys, threading
import numpy as np
import pmstore

path, domain, holes = sys.argv[1], sys.argv[2], sys.argv[3] == "holes"
limit = int(open("/proc/sys/vm/max_map_count").read())
blocks = limit + 1000

def mappings():
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)

store = pmstore.open(path, "x", size=f"{blocks * 4096 * 2 + (120 << 20)}", domain=domain)
with store.transaction():
    arrays = [store.full(str(i), 1024, i, "i4") for i in range(blocks)]
if holes:  # between what is written lies what cannot be captured
    with store.transaction():
        for i in range(1, blocks, 2):
            del store[str(i)]
arrays = arrays[::2]
before = mappings()
random.Random(5).shuffle(arrays)
most = 0
for n, array in enumerate(arrays):
    array[5] = -1
    if n % 1000 == 0:
        most = max(most, mappings())
most = max(most, mappings())
print("mappings", most, "of", limit)
assert limit // 3 < most - before <= limit // 4 * 3 + 10, (before, most)
thread = threading.Thread(target=lambda: None)
thread.start()
thread.join()
threads = [threading.Thread(target=threading.Event().wait, args=(0.1,)) for _ in range(100)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(mmap.mmap(-1, 4096)) == 4096
assert np.zeros(64 << 20, "u1").sum() == 0
for name in ("ssl", "sqlite3", "lzma", "asyncio", "multiprocessing.pool", "xml.dom.minidom"):
    __import__(name)
assert subprocess.run(["true"]).returncode == 0
with pmstore.open(path + ".other", "x", size="2MB") as other:
    other["x"] = 1
assert store.check().problems == ()
store.commit()
assert mappings() < before + 1000
for array in arrays:
    assert array[5] == -1 and array[4] == array[6] >= 0
arrays[0][4] = arrays[7][4] = 12345
store.rollback()
assert arrays[0][4] != 12345 and arrays[7][4] != 12345
store.close()
with pmstore.open(path, "r") as again:
    assert len(again) == (len(arrays) if holes else blocks)
    for i in range(0, blocks, 10):
        array = again[str(i)]
        assert array[5] == -1 and array[4] == array[6] == i
print("done")
"""


@pytest.mark.parametrize(("domain", "between"), [("process", "blocks"), ("file", "holes")])
def test_threads_start_and_modules_load_whatever_a_transaction_writes(
    shm: Path, domain: str, between: str
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(shm / "wide.pm"), domain, between]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("done\n")
