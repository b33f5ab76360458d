"""examples/dcp.py, as a user starts it: one process, then two, from what the one has saved."""

from __future__ import annotations

import os
from pathlib import Path

import pythons

from pmstore.dcp import StoreReader

ROOT = Path(__file__).parents[2]


def test_one_process_then_two(shm: Path) -> None:
    folder = str(shm / "checkpoints")
    program = [str(ROOT / "examples/dcp.py"), folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    torchrun = ["-c", "from torch.distributed.run import main; main()", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--start-method", "fork", "--run-path"]
    for begins, words in ((0, program), (60, torchrun + program)):
        ran = pythons.run(words, env=environment, timeout=300)
        assert ran.returncode == 0, ran.stderr[-3000:]
        assert f"begins at step {begins}\n" in ran.stdout
        assert "done: step 60\n" in ran.stdout
    assert StoreReader.numbers(folder) == [2, 3]
