"""Power failure and failing system calls, with a small budget: `python -m crashtests --kind
tiers` is the same with more."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from crashtests import disk, tiers  # noqa: E402

MORE = int(os.environ.get("PMSTORE_TIER_KILLS", "1"))

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def test_every_image_of_a_power_failure_restores(shm: Path) -> None:
    checked, failures = tiers.power(tiers.build(), shm, 150 * MORE, 1)
    assert failures == []
    assert checked > 100


@pytest.mark.parametrize(
    "sync",
    [
        r"/deep/tier/[^/]+\.chunks",
        r"/deep/tier/[^/]+\.new",  # a manifest
        r"/deep/tier",  # its names
        r"(/deep)?",  # the tier's own name, and its folder's
        r"/\.restored\.pm\.[^/]+",
    ],
)
def test_a_sync_that_is_left_out_is_noticed(shm: Path, sync: str) -> None:
    """Else the images would prove nothing."""
    root, recorded = shm / "trace", shm / "record"
    tiers.drive(tiers.build(), "trace", str(root), str(recorded), "2")
    record = list(disk.events(recorded.read_bytes()))
    pattern = re.escape(str(root)) + sync
    gone = [
        i
        for i, one in enumerate(record)
        if one.kind == disk.SYNC and re.fullmatch(pattern, one.path)
    ]
    left = [one for i, one in enumerate(record) if i not in gone]
    for done, acknowledged, image in tiers.images(left, str(root), 600, 1):
        if done < gone[0]:
            continue
        tiers.lay_out(root, str(root), image)
        try:
            tiers.verify(root, acknowledged, 2)
        except Exception:
            return
    pytest.fail("nothing was noticed")


def test_a_store_that_is_made_and_compacted_survives_a_power_failure(shm: Path) -> None:
    checked, failures = tiers.power(tiers.build(), shm, 60 * MORE, 1, "store", steps=4)
    assert failures == []
    assert checked > 40


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_each_system_call_that_fails(shm: Path, error: int) -> None:
    tried = tiers.drive(
        tiers.build(), "faults", str(shm / "faults"), str(error), str(max(1, 7 // MORE))
    )
    assert int(tried) > 5
