"""Restoring into a store of its own, and looking."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pmstore

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
