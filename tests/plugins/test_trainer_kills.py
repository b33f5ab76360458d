"""Hugging Face's Trainer, killed at drawn moments: bit for bit the training that was left alone."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pmstore.testing import ForkServer
from pmstore.testing.store_state import differing, examine

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="not installed")

CASES = (
    *("stops_early", "accumulates", "plateau", "masks", "masks_of_its_own", "groups_lengths"),
    *("shuffles_unseeded", "streams", "workers", "streams_by_worker"),
)
KILLS = 3


def lived(server: ForkServer, name: str, case: str, folder: Path, *args: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    run = server.run(f"trainer_work:{name}", [case, str(folder), *args])
    assert run.exit_code == 0, "the child failed: see its stderr"
    assert not run.killed
    result: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return result


@pytest.mark.parametrize("case", CASES)
def test_killed_anywhere(server: ForkServer, shm: Path, case: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # shown if it fails
    chance = random.Random(seed)
    whole = lived(server, "train", case, shm / "whole")
    if case != "workers":  # see docs/TRAINING.md, Generators of your own
        assert lived(server, "reference", case, shm / "plain") == whole
    folder = shm / "killed"
    folder.mkdir()
    reached = 0
    for number in range(KILLS):
        # at a step's end, before it is committed; or at one of the engine's writes
        step = chance.randrange(reached + 1, whole["steps"] + 1) if number % 2 == 0 else 0
        at = 0 if step else chance.randrange(60, 600)
        run = server.run("trainer_work:train", [case, str(folder), step], kill_at=at)
        if not run.killed:
            assert run.exit_code == 0, "the child failed: see its stderr"
            break
        assert run.acknowledged >= reached or run.acknowledged == -1
        reached = max(reached, run.acknowledged)
    assert lived(server, "train", case, folder) == whole
    # and a program that is started once more has nothing left to do
    assert lived(server, "train", case, folder) == whole


def test_the_example(server: ForkServer, shm: Path) -> None:
    """Killed twice, it leaves the store of one that nobody killed."""
    whole, killed = shm / "whole", shm / "killed"
    ran = server.run("trainer_work:the_example", [str(whole)], kill_at=2**62)
    assert ran.exit_code == 0
    for kill_at in (ran.acknowledged * 2 // 3, ran.acknowledged // 6):
        assert server.run("trainer_work:the_example", [str(killed)], kill_at=kill_at).killed
    assert server.run("trainer_work:the_example", [str(killed)]).exit_code == 0
    stores = (examine(folder / "trainer.pm", None).state for folder in (whole, killed))
    assert differing(*stores) == []
