"""Some seconds of `make nightly WHAT=fuzz-formats`, which runs for hours by hand.
PMSTORE_FORMAT_CASES: cases of each format."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from crashtests.formats import FORMATS

ROOT = Path(__file__).resolve().parents[2]
CASES = int(os.environ.get("PMSTORE_FORMAT_CASES", "500"))


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_and_forged(kind: str) -> None:
    """In a process of its own, as its peak of memory is looked at."""
    seed = list(FORMATS).index(kind) + len(FORMATS)
    words = [sys.executable, "-m", "crashtests", "--kind", "formats"]
    words += ["--seed", str(seed), "--size", str(CASES)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert f"formats {seed} ({kind} 1): " in done.stdout
    told = {what: int(count) for count, what in re.findall(r"(\d+) (\w+)", done.stdout)}
    assert told.get("CorruptStoreError", 0) + told.get("TierError", 0) > CASES / 2  # it damages,
    assert told["read"] > 0  # and not so much that nothing is ever reached
