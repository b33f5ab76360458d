"""`make nightly WHAT=gpu-check`, with host memory as the device: every step that needs no GPU has
run before it meets one."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pythons

torch = pytest.importorskip("torch")

import fake_cuda  # noqa: E402 - needs torch

from tools.gpu_check.__main__ import CHECKS, machine  # noqa: E402
from tools.gpu_check.apart import apart, carry_out  # noqa: E402
from tools.gpu_check.device import Settings  # noqa: E402
from tools.gpu_check.outcome import Outcome  # noqa: E402

ROOT = Path(__file__).parents[2]


def gpu_check(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.gpu_check", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


FORKED = """
import multiprocessing, runpy
context = multiprocessing.get_context
multiprocessing.get_context = lambda method: context("fork")
runpy.run_module("tools.gpu_check", run_name="__main__")
"""
"""Host memory survives a fork: no check has to import torch. The tests below begin each anew."""


def test_each_check_runs_in_host_memory(tmp_path: Path, shm: Path) -> None:
    out = tmp_path / "page.json"
    small = ("--bytes", str(4 << 20), "--rounds", "3", "--kills", "1")
    words = ("--device", "cpu", *small, "--out", str(out), "--folder", str(shm))
    done = pythons.run(["-c", FORKED, *words], cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    page: dict[str, Any] = json.loads(out.read_text())
    checks = {one["name"]: one for one in page["checks"]}
    assert {one["status"] for one in checks.values()} == {"passed"}
    assert set(checks) == {"resume", "streams", "losses", "memory", "copies", "steps", "first"}
    assert checks["resume"]["figures"]["kills"] == 1
    assert checks["losses"]["figures"]["losses read"] > 0
    assert checks["copies"]["figures"]["commit, GB/s"] > 0
    # no aim is met or missed without a GPU, and what was not looked at is said
    assert not any(one["aims"] for one in checks.values())
    assert len(page["not_checked"]) == 6
    assert not list(shm.glob("pmstore-gpu-*"))


def test_what_is_wrong_fails_it(tmp_path: Path) -> None:
    """A product that does not take copies back."""
    (tmp_path / "sitecustomize.py").write_text(
        "import pmstore\npmstore.Store.rollback = pmstore.Store.commit\n"
    )
    out = tmp_path / "page.json"
    only = ("--only", "memory", "--only", "losses")
    done = gpu_check(
        *("--device", "cpu", "--quick", "--out", str(out)), *only, PYTHONPATH=f"{tmp_path}:{ROOT}"
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
        PYTHONPATH=f"{tmp_path}:{ROOT}",
    )
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text())


# ---- what it does on a GPU alone, with host memory that passes for one ----


@pytest.fixture
def settings(shm: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(Settings, "cuda", property(lambda settings: True))
    return Settings(torch.device("cpu"), shm, nbytes=4 << 20, rounds=3, kills=1, seed=0)


@pytest.mark.parametrize("name", ["streams", "losses", "memory"])
def test_on_a_gpu(name: str, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda.install(monkeypatch.setattr)
    outcome = carry_out(name, CHECKS[name], settings)
    assert (outcome.status, outcome.why, outcome.left_out) == ("passed", "", [])


@pytest.mark.parametrize(("name", "aims"), [("copies", 2), ("steps", 1), ("first", 1)])
def test_rates_on_a_gpu(
    name: str, aims: int, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cuda.install(monkeypatch.setattr, late=False)
    outcome = carry_out(name, CHECKS[name], settings)
    assert (outcome.status, outcome.why, outcome.left_out) == ("passed", "", [])
    assert len(outcome.aims) == aims
    assert machine(settings)["device"] == "host"


def test_pages_that_cannot_be_pinned_are_told(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing fails of it, neither there nor in what comes after."""
    runtime = fake_cuda.install(monkeypatch.setattr)
    runtime.refuses = 801
    outcome = carry_out("memory", CHECKS["memory"], settings)
    assert (outcome.status, outcome.why) == ("passed", "")
    assert outcome.left_out == ["an array of a store could not be pinned: CUDA's error 801"]
    torch.zeros(3).fill_(1)  # a kernel


def test_a_fence_that_does_nothing_is_found(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the copies are far behind the program's own stream, which nothing holds back
    lags = itertools.chain([fake_cuda.LAG], itertools.repeat(20 * fake_cuda.LAG))
    fake_cuda.install(monkeypatch.setattr, lags=lags)
    monkeypatch.setattr("pmstore.mirror.copier._CudaBatch.fence", lambda batch: True)
    outcome = carry_out("streams", CHECKS["streams"], settings)
    assert outcome.status == "failed"
    assert "the commit of step 1 holds" in outcome.why


def test_a_folder_without_room(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's /dev/shm has 64 MB."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    outcome = carry_out("copies", CHECKS["copies"], settings)
    assert outcome.status == "not checked"
    assert "has room for 0.001 GB, of 0.013 that the stores take: --folder" in outcome.why


# ---- what a check may meet ----


def _dies(settings: Settings, outcome: Outcome) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _never_ends(settings: Settings, outcome: Outcome) -> None:
    signal.pause()


def test_a_check_that_dies_or_never_ends(settings: Settings) -> None:
    assert apart("one", _dies, settings, 600).why == "its process ended with status -9"
    assert apart("one", _never_ends, settings, 0.5).why == "it was not over after 0.5 seconds"


NOT_TAKEN_BACK = """
from pmstore.scheduler._models.losses import Losses
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
