"""What `crashtests.tiers` runs under the recorder: flushes and restores, and with failing system
calls.

python -m crashtests.tier_driver RECORDER trace FOLDER TRACE STEPS python -m crashtests.tier_driver
RECORDER faults FOLDER ERRNO STRIDE python -m crashtests.tier_driver RECORDER store FOLDER TRACE
STEPS
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np

import pmstore
from pmstore.tiers._epochs.manifest import Manifest
from pmstore.tiers._restore import restore as restoring

LENGTH = 6000
CHUNK = 16384
RESTORED = 1 << 32
"""Marks of acknowledged restores are the step plus this."""


def one_step(store: pmstore.Store, step: int) -> None:
    """Everything of a step, but what is of every third alone, so that some chunks stay as they
    are, though they are stored to."""
    with store.transaction():
        store["hot"][:] = step
        store["cold"][:] = step - step % 3
        store["new"] = np.full(100 + step, step)
        store["step"] = step


def check(store: pmstore.Store) -> int:
    """The step that all of the store is of. Raises: AssertionError."""
    problems = store.check().problems
    assert problems == (), problems
    step = int(store["step"])
    assert store["hot"].tolist() == [step] * LENGTH, "hot is of another step"
    assert store["cold"].tolist() == [step - step % 3] * (LENGTH * 2), "cold is of another step"
    assert store["new"].tolist() == [step] * (100 + step), "new is of another step"
    return step


def flush(store: pmstore.Store, url: Path, scratch: Path) -> None:
    """One that reports success has an epoch that restore takes: it is shown.

    Raises: AssertionError; what flush raises.
    """
    handle = store.flush("t", wait=True)
    step = int(store["step"])
    report = pmstore.restore(scratch, url)
    try:
        assert (report.epoch, report.skipped) == (handle.epoch, ()), (
            f"a flush of epoch {handle.epoch} succeeded: {report}"
        )
        with pmstore.open(scratch, "r") as restored:
            assert check(restored) == step
    finally:
        scratch.unlink()


def begin(path: Path, url: Path) -> pmstore.Store:
    store = pmstore.open(path, "w", domain="process", size="1MiB")
    store.zeros("hot", LENGTH)
    store.zeros("cold", LENGTH * 2)
    store.add_tier("t", pmstore.TierConfig(url, keep=2, chunk_bytes=CHUNK))
    one_step(store, 0)
    return store


def trace(recorder: ctypes.CDLL, folder: Path, target: Path, steps: int) -> None:
    """Flushes a step at a time, closes half way and goes on; restores after each."""
    url, scratch = folder / "deep" / "tier", folder.with_name("trace-restored.pm")
    store = begin(folder.with_name("trace.pm"), url)
    recorder.recorder_start(str(folder).encode(), str(target).encode())
    for step in range(1, steps + 1):
        one_step(store, step)
        flush(store, url, scratch)
        recorder.recorder_mark(ctypes.c_uint64(step))
        if step == steps // 2:
            store.close()
            store = pmstore.open(folder.with_name("trace.pm"))
            flush(store, url, scratch)  # the same commit, by another process
            recorder.recorder_mark(ctypes.c_uint64(step))
    pmstore.restore(folder / "restored.pm", url)
    recorder.recorder_mark(ctypes.c_uint64(RESTORED + steps))
    store.close()


def store_itself(recorder: ctypes.CDLL, folder: Path, target: Path, steps: int) -> None:
    """A store in domain file is made, written, and compacted after half of the steps."""
    recorder.recorder_start(str(folder).encode(), str(target).encode())
    path = folder / "run.pm"
    for begun, ended in ((1, steps // 2), (steps // 2 + 1, steps)):
        with pmstore.open(path, domain="file", size="1MiB") as store:
            for step in range(begun, ended + 1):
                # one commit with the arrays' making: there is no state between
                with store.transaction():
                    store.require("hot", LENGTH)
                    store.require("cold", LENGTH * 2)
                    store["ballast"] = bytes(300_000 if step < steps // 2 else 1)
                    one_step(store, step)
                recorder.recorder_mark(ctypes.c_uint64(step))
        if ended < steps:
            pmstore.compact(path)
            recorder.recorder_mark(ctypes.c_uint64(ended))


def faults(recorder: ctypes.CDLL, folder: Path, error: int, stride: int) -> int:
    """Each operation of a flush and of a restore fails once. Returns how many."""
    url, scratch = folder / "tier", folder / "restored.pm"
    store = begin(folder.with_name("faults.pm"), url)
    store.flush("t", wait=True)
    recorder.recorder_start(str(folder).encode(), b"")
    tried, acknowledged, step, operation = 0, 0, 0, 1
    while True:
        step += 1
        one_step(store, step)
        recorder.recorder_fail(ctypes.c_long(operation), ctypes.c_int(error))
        with suppress(OSError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old epochs that could not be deleted
            store.flush("t", wait=True)
            acknowledged = step  # and below it is restored
            store.drain()
            pmstore.restore(scratch, url)
        used = recorder.recorder_fail(ctypes.c_long(0), ctypes.c_int(0))
        scratch.unlink(missing_ok=True)
        report = pmstore.restore(scratch, url)
        with pmstore.open(scratch, "r") as restored:
            found = check(restored)
        scratch.unlink()
        assert found >= acknowledged, (
            f"operation {operation}: step {acknowledged} was acknowledged, {found} is there"
        )
        assert report.skipped == (), f"operation {operation}: {report}"
        if used < operation:
            break
        tried += 1
        operation += stride
    store.flush("t", wait=True)
    store.drain()
    named = {
        name
        for one in url.glob("*.manifest")
        for name, _ in Manifest.unpack(one.read_bytes()).files
    }
    assert {one.name for one in url.glob("*.chunks")} == named, "half-written files stay"
    assert not list(url.glob(".*.new")), "half-written manifests stay"
    store.close()
    return tried


def main() -> None:
    recorder = ctypes.CDLL(sys.argv[1])
    recorder.recorder_fail.restype = ctypes.c_long
    restoring.MAP_MEMORY = False  # the recorder asks what would be written to a disk
    folder = Path(sys.argv[3])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if sys.argv[2] in ("trace", "store"):
        run = trace if sys.argv[2] == "trace" else store_itself
        run(recorder, folder, Path(sys.argv[4]), int(sys.argv[5]))
    else:
        print(faults(recorder, folder, int(sys.argv[4]), int(sys.argv[5])))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
