"""README.md's first program, killed and run again, as a newcomer does it. (test_documents.py runs
all others.)"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent.parent


def program(first_words: str) -> str:
    """The block of Python in the README that begins so."""
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (found,) = [block for block in blocks if block.startswith(first_words)]
    return str(found)


def start(folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "train.py"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )


def test_the_training_loop_survives_kill_9(shm: Path) -> None:
    found = program("# train.py\n")
    longer = found.replace("epochs=100", "epochs=150")
    assert longer != found
    folders = [shm / "killed", shm / "whole"]
    for folder in folders:
        folder.mkdir()
        (folder / "train.py").write_text(longer, encoding="utf-8")
    whole = start(folders[1])
    killed = start(folders[0])
    assert killed.stdout is not None
    assert killed.stdout.readline() == "step 0 - new store\n"
    time.sleep(0.25)
    killed.kill()
    assert killed.communicate(timeout=300)[0] == ""  # it was not at its end
    told = start(folders[0]).communicate(timeout=300)[0].splitlines()
    assert re.match(r"step \d+ - the last writer was killed", told[0])
    assert told[-1] == whole.communicate(timeout=300)[0].splitlines()[-1]
    assert told[-1].startswith("step 3000 loss 0.")
