"""What Lightning's callback refuses, how programs end, and checkpoints that are stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from pmstore.testing import ForkServer


@pytest.mark.parametrize(
    "what",
    [
        *("given_twice", "added_late", "refused", "changed", "checkpoint_given", "ends"),
        *("goes_on", "checkpoints", "ended_amid", "tiers_and_policy"),
    ],
)
def test_lightning(tmp_path: Path, server: ForkServer, what: str) -> None:
    path = str(tmp_path / "run.pm")
    life = server.run("lightning_bad:check", [what, path], timeout_seconds=300)
    assert (life.exit_code, life.killed) == (0, False)
