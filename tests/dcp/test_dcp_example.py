"""examples/dcp.py, as a user starts it: one process, then two, from what the one has saved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pythons

from pmstore.dcp import StoreReader

ROOT = Path(__file__).parents[2]


def test_one_process_then_two(shm: Path) -> None:
    folder = str(shm / "checkpoints")
    program = [str(ROOT / "examples/dcp.py"), folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for begins in (0, 60):
        if begins == 0:
            ran = pythons.run(program, env=environment, timeout=300)
        else:
            ran = subprocess.run(
                [sys.executable, *torchrun, *program],
                capture_output=True,
                text=True,
                env=environment,
                timeout=300,
                check=False,
            )
        assert ran.returncode == 0, ran.stderr[-3000:]
        assert f"begins at step {begins}\n" in ran.stdout
        assert "done: step 60\n" in ran.stdout
    assert StoreReader.numbers(folder) == [2, 3]
