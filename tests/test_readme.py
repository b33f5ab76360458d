"""README.md's first program and its session, as a newcomer goes through them. (test_documents.py
runs all others.)"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent.parent


def block(first_words: str) -> str:
    """The block of the README that begins so."""
    blocks = re.findall(
        r"```(?:python)?\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (found,) = [block for block in blocks if block.startswith(first_words)]
    return str(found)


def train(folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """Its status, and what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "train.py", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout.splitlines()


def test_the_training_loop_survives_kill_9(shm: Path) -> None:
    (shm / "train.py").write_text(block("# train.py\n"), encoding="utf-8")
    session = block("$ python train.py 504\n").splitlines()
    killed, first = train(shm, "504")
    assert killed == -signal.SIGKILL
    resumed, second = train(shm)
    (shm / "run.pm").unlink()
    whole, third = train(shm)
    assert resumed == whole == 0
    assert second[-1] == third[-1]
    told = [*first, "Killed", *second, *third]
    assert [shown(line) for line in told] == [
        shown(line) for line in session if not line.startswith("$ ")
    ]


def shown(line: str) -> str:
    """Without what depends on the machine: digits of the loss, how much was undone."""
    line = re.sub(r"(loss 0\.00)\d+", r"\1", line)
    return re.sub(r"\([\d,]+ bytes in \d+ pieces\)", "", line)
