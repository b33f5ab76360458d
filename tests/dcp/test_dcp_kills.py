"""A drawn choice of what `make nightly WHAT=dcp-kills` does at each primitive."""

from __future__ import annotations

from pathlib import Path

import pythons

SEED = 20261123


def test_killed_saves_of_two_ranks(shm: Path) -> None:
    program = "import sys; from tests.dcp import dcp_kills; sys.exit(dcp_kills.main())"
    words = ["-c", program, "--kills", "18", "--seed", str(SEED), "--folder", str(shm)]
    ended = pythons.run(words, cwd=Path(__file__).parents[2], timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "18 kills: " in ended.stdout
    assert " 0 times" not in ended.stdout, ended.stdout
