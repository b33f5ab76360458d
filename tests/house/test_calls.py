"""The number of calls of an operation may fall, and never rises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'pmstore[torch]'")

import pmstore
from benchmarks import calls

ROOT = Path(__file__).resolve().parents[2]


def test_no_operation_takes_more_calls() -> None:
    """If one has to: `python -m benchmarks.calls --write`, and say why in the commit message."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.calls", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found, stored = json.loads(done.stdout), calls.stored()
    assert found.keys() == stored["operations"].keys()
    assert all(counted["calls"] and counted["engine"] for counted in found.values())
    if stored["python"] == calls.VERSION:  # others call otherwise
        assert not [
            f"{name}: {n} {what}, at most {most}"
            for name, counted in found.items()
            for what, n in counted.items()
            if n > (most := stored["operations"][name][what])
        ]


def test_what_is_counted(shm: Path) -> None:
    """Frames of the package, and functions of the engine: nothing else."""
    assert calls.count(lambda: json.dumps({"a": [1, 2]})) == calls.Counted()
    with pmstore.open(shm / "store.pm") as store:
        array = store.zeros("array", (3,), "float32")
        assert calls.count(lambda: array.sum()) == calls.Counted()
        store["value"] = 1
        found = calls.count(store.commit)
        assert found.calls > 0
        assert found.files > 0
        assert found.engine == 1
