"""Restoring into a store of its own, and looking; a lock of a tier, as its writer holds it; waiting
for flushes, and keeping them from beginning."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import pmstore
from pmstore.errors import TierError
from pmstore.tiers._flush.flusher import Flusher

CHUNK = 16384


def restored(path: Path, url: str, epoch: int | None = None, **options: Any) -> dict[str, Any]:
    """What an epoch holds."""
    target = path.with_name(f"restored-{secrets.token_hex(4)}.pm")
    report = pmstore.restore(target, url, epoch, **options)
    try:
        with pmstore.open(target, "r") as store:
            assert store.check().problems == ()
            assert store.epoch == report.epoch
            return {
                "a": store["a"].copy(),
                "epoch": store.epoch,
                "report": report,
                "config": store.get("config"),
            }
    finally:
        target.unlink()


class HeldLock:
    def __init__(self, lost: bool = False) -> None:
        self.lost = lost

    def check(self) -> None:
        if self.lost:
            raise TierError("the lock is lost")

    def release(self) -> None: ...


def newest_file(url: str, suffix: str) -> Path:
    files = sorted(Path(url).glob(f"*{suffix}"), key=lambda one: one.stat().st_mtime_ns)
    return files[-1]


def wait_until(seen: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def no_flush_begins() -> Iterator[None]:
    """Until it is left: else a flush may be over before the next line of a test looks at it."""
    go, run = threading.Event(), Flusher._run

    def waits(flusher: Flusher, job: Any) -> None:
        assert go.wait(60)
        run(flusher, job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Flusher, "_run", waits)
        try:
            yield
        finally:
            go.set()
