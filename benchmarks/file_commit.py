"""Domain `file`: one fdatasync per commit, against a bare pwrite + fdatasync of the same bytes into a preallocated file."""

from __future__ import annotations

import os

import numpy as np

import pmstore
from benchmarks.harness import Method, Row, measure, report, scratch


def main(quick: bool = False) -> None:
    rows: list[Row] = []
    with scratch("disk") as folder:
        for size in (5_000, 63_000):
            fd = os.open(folder / "bare", os.O_RDWR | os.O_CREAT, 0o600)
            os.pwrite(fd, bytes(1 << 20), 0)
            os.fsync(fd)
            with pmstore.open(folder / f"store-{size}", size="64MiB", domain="file") as store:
                a = store.zeros("a", size, "uint8")
                store.commit()

                def commit(store: pmstore.Store = store, a: np.ndarray = a) -> None:
                    with store.transaction():
                        a += 1

                def bare(fd: int = fd, data: bytes = bytes(size)) -> None:
                    os.pwrite(fd, data, 0)
                    os.fdatasync(fd)

                before = store.stats()
                methods = [
                    Method("pwrite + fdatasync", "power-safe, torn", bare),
                    Method("pmstore file", "power-safe", commit, 2.0),
                ]
                rows += measure(f"{size} bytes", methods, 60 if quick else 300, methods[0].name, 20)
                after = store.stats()
                commits, syncs = after.commits - before.commits, after.syncs - before.syncs
                print(f"file_commit: {commits} commits of {size} bytes: {syncs} syncs, {after.home_syncs} in the background")
            os.close(fd)
    report("file_commit", "Domain file against a bare write and sync", rows)
