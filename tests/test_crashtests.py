"""The crash tests with a small budget, and that they would notice. `make crashtest` is the same with more images."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IMAGES = int(os.environ.get("PMS_CRASH_IMAGES", "2000"))

pytestmark = pytest.mark.skipif(
    shutil.which("make") is None or shutil.which("cc") is None, reason="needs a C compiler and make"
)


def crashtests(*arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, object]]:
    command = [sys.executable, "-m", "crashtests", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    return run, json.loads((ROOT / "build" / "crashtest" / "report.json").read_text())


@pytest.mark.parametrize("model", ["i", "ii", "iii", "iv"])
def test_every_image_recovers(model: str) -> None:
    run, report = crashtests("--model", model, "--images", str(IMAGES))
    assert run.returncode == 0, run.stdout + run.stderr
    found = report["models"][model]  # type: ignore[index]
    assert found["failures"] == 0
    assert found["distinct"] >= IMAGES // 2


def test_every_kill_recovers() -> None:
    run, report = crashtests("--model", "kill", "--kill-step", "41")
    assert run.returncode == 0, run.stdout + run.stderr
    assert report["kills"]["trials"] > 200  # type: ignore[index]
