"""Of `make nightly WHAT=frameworks-all`. (Files that are not called test_* are in no other
list.)"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_two_workers_go_on_from_a_tier(tmp_path: Path) -> None:
    """One life of both is ended after a checkpoint; the bits are those of workers that lived."""
    done = subprocess.run(
        [sys.executable, str(HERE / "ray_workers.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'RESULT {"0": 2, "1": 2}' in done.stdout
