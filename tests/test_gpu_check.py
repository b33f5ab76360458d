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


def broken(
    tmp_path: Path, lines: str, *only: str, limit: int = 600
) -> tuple[int, dict[str, Any]]:
    """The status and the page, of a product or a device with which that is wrong: its trainings',
    too."""
    (tmp_path / "sitecustomize.py").write_text("import os, torch, pmstore, pmstore.torch\n" + lines)
    out = tmp_path / "page.json"
    done = gpu_check(
        *("--device", "cpu", "--rounds", "3", "--kills", "1", "--out", str(out)),
        *("--bytes", str(16 << 20), "--limit", str(limit)),
        *(word for name in only for word in ("--only", name)),
        PYTHONPATH=str(tmp_path),
    )
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text())


FAKE = """
import sys
sys.path += [{root!r}, {root!r} + "/tests"]
import fake_cuda, gpu_check.device
runtime = fake_cuda.install()
gpu_check.device.Settings.cuda = property(lambda settings: True)
"""


def fake(tmp_path: Path, more: str, *only: str) -> tuple[int, dict[str, Any]]:
    """With host memory that passes for a GPU."""
    return broken(tmp_path, FAKE.format(root=str(ROOT)) + more, *only)


def test_what_it_does_on_a_gpu_runs_where_host_memory_passes_for_one(tmp_path: Path) -> None:
    """The steps that it takes there alone, too."""
    status, page = fake(tmp_path, "")
    checks = {one["name"]: one for one in page["checks"]}
    assert {one["status"] for one in checks.values()} == {"passed"}, page
    assert status == 0
    assert page["not_checked"] == []
    assert [len(checks[name]["aims"]) for name in ("copies", "steps")] == [2, 1]
    assert page["machine"]["device"] == "host"


def test_pages_that_cannot_be_pinned_are_told(tmp_path: Path) -> None:
    """Nothing fails of it, neither there nor in what comes after."""
    status, page = fake(tmp_path, "runtime.refuses = 801", "memory", "streams", "copies")
    assert {one["status"] for one in page["checks"]} == {"passed"}, page
    assert status == 0
    assert page["not_checked"] == [
        "memory: an array of a store could not be pinned: CUDA's error 801"
    ]


def test_a_fence_that_does_nothing_is_found(tmp_path: Path) -> None:
    status, page = fake(
        tmp_path,
        "import pmstore.mirror.copier\npmstore.mirror.copier._CudaBatch.fence = lambda self: True",
        "streams",
    )
    assert status == 1
    assert "the commit of step 1 holds [-1.0] of 'large'" in page["checks"][0]["why"]


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


ENDS = """
from pmstore.scheduler.losses import Losses
Losses.read = lambda losses, step, value: os.kill(os.getpid(), 9)
"""
NEVER_ENDS = """
import time
pmstore.Store.rollback = lambda store: time.sleep(1000)
"""


def test_a_check_that_dies_or_never_ends(tmp_path: Path) -> None:
    status, page = broken(tmp_path, ENDS + NEVER_ENDS, "losses", "streams", limit=8)
    assert status == 1
    why = {one["name"]: one["why"] for one in page["checks"]}
    assert why["losses"] == "its process ended with status -9"
    assert why["streams"] == "it was not over after 8 seconds"


def test_a_folder_without_room(tmp_path: Path) -> None:
    status, page = broken(
        tmp_path,
        "import shutil, types\n"
        "shutil.disk_usage = lambda path: types.SimpleNamespace(free=64 << 20)",
        *("copies", "steps"),
    )
    assert status == 0
    assert all("has room for 0.067 GB" in text for text in page["not_checked"])
    assert len(page["not_checked"]) == 2


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(tmp_path: Path) -> None:
    done = gpu_check("--out", str(tmp_path / "page.json"))
    assert done.returncode == 1
    assert "sees none" in done.stderr
    assert "--device cpu" in done.stderr
    assert not (tmp_path / "page.json").exists()
