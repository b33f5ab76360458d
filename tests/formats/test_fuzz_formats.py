"""Some seconds of `python -m crashtests.formats`, which runs for hours by hand.
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
    words = [
        sys.executable,
        "-m",
        "crashtests.formats",
        kind,
        "--cases",
        str(CASES),
        "--seconds",
        "100000",
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = re.match(
        rf"{kind}: (\d+) cases: .*\b(\d+) (?:CorruptStoreError|TierError), .*\b(\d+) read; peak",
        done.stdout,
    )
    assert told is not None, done.stdout
    assert int(told[1]) == CASES
    assert int(told[2]) > CASES / 2  # it damages,
    assert int(told[3]) > 0  # and not so much that nothing is ever reached
