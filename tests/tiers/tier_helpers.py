"""Restoring into a store of its own, and looking; a lock of a tier, as its writer holds it."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pmstore
from pmstore.errors import TierError

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
