"""A drawn choice of what `python tests/dcp/dcp_kills.py` (`make nightly WHAT=dcp-kills`) does at
each primitive."""

from __future__ import annotations

from pathlib import Path

import pythons

SEED = 20261123


def test_killed_saves_of_two_ranks(shm: Path) -> None:
    program = Path(__file__).with_name("dcp_kills.py")
    words = [str(program), "--kills", "18", "--seed", str(SEED), "--folder", str(shm)]
    ended = pythons.run(words, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "18 kills: " in ended.stdout
    assert " 0 times" not in ended.stdout, ended.stdout
