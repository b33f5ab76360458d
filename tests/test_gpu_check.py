"""`make gpu-check`, with host memory as the device: every step that needs no GPU has run before it
meets one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).parent.parent


def gpu_check(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpu_check", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def test_each_check_runs_in_host_memory(tmp_path: Path, shm: Path) -> None:
    out = tmp_path / "page.json"
    small = ("--bytes", str(4 << 20), "--rounds", "3", "--kills", "1")
    done = gpu_check("--device", "cpu", *small, "--out", str(out), "--folder", str(shm))
    assert done.returncode == 0, done.stdout + done.stderr
    page: dict[str, Any] = json.loads(out.read_text())
    checks = {one["name"]: one for one in page["checks"]}
    assert {one["status"] for one in checks.values()} == {"passed"}
    assert set(checks) == {"resume", "streams", "losses", "memory", "copies", "steps"}
    assert checks["resume"]["figures"]["kills"] == 1
    assert checks["losses"]["figures"]["losses read"] > 0
    assert checks["copies"]["figures"]["commit, GB/s"] > 0
    # no aim is met or missed without a GPU, and what was not looked at is said
    assert not any(one["aims"] for one in checks.values())
    assert len(page["not_checked"]) == 5
    assert not list(shm.glob("pmstore-gpu-*"))


def test_what_is_wrong_fails_it(tmp_path: Path) -> None:
    """A product that does not take copies back."""
    (tmp_path / "sitecustomize.py").write_text(
        "import pmstore\npmstore.Store.rollback = pmstore.Store.commit\n"
    )
    out = tmp_path / "page.json"
    only = ("--only", "memory", "--only", "losses")
    done = gpu_check(
        *("--device", "cpu", "--quick", "--out", str(out)), *only, PYTHONPATH=str(tmp_path)
    )
    assert done.returncode == 1
    assert "a roll back did not take back a copy from the device (not declared)" in done.stdout
    assert "FAILED: memory" in done.stdout
    checks = {one["name"]: one["status"] for one in json.loads(out.read_text())["checks"]}
    assert checks == {"losses": "passed", "memory": "failed"}


def broken(tmp_path: Path, lines: str, *only: str) -> tuple[int, dict[str, Any]]:
    """The status and the page, of a product or a device with which that is wrong: its trainings',
    too."""
    (tmp_path / "sitecustomize.py").write_text("import os, torch, pmstore, pmstore.torch\n" + lines)
    out = tmp_path / "page.json"
    done = gpu_check(
        *("--device", "cpu", "--rounds", "3", "--kills", "1", "--out", str(out)),
        *(word for name in only for word in ("--only", name)),
        PYTHONPATH=str(tmp_path),
    )
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text())


NOT_TAKEN_BACK = """
from pmstore.scheduler.losses import Losses
def read(losses, step, value):
    raise OverflowError("a loss")
Losses.read = read
pmstore.Store.rollback = lambda store: None
"""


def test_whatever_a_check_meets_the_others_are_done(tmp_path: Path) -> None:
    status, page = broken(tmp_path, NOT_TAKEN_BACK, "losses", "streams")
    assert status == 1
    why = {one["name"]: one["why"] for one in page["checks"] if one["status"] == "failed"}
    assert "OverflowError: a loss" in why["losses"]
    assert why["streams"] == "a roll back to step 1 left other values on the device"


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(tmp_path: Path) -> None:
    done = gpu_check("--out", str(tmp_path / "page.json"))
    assert done.returncode == 1
    assert "sees none" in done.stderr
    assert "--device cpu" in done.stderr
    assert not (tmp_path / "page.json").exists()
