"""Loops with Hugging Face's Accelerate: prepared loaders, killed at drawn moments; its hooks."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pmstore.testing import ForkServer

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="not installed")

KILLS = 4
STEPS = 18


def lived(server: ForkServer, name: str, folder: Path, *args: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    run = server.run(f"accelerate_work:{name}", [str(folder), *args])
    assert run.exit_code == 0, "the child failed: see its stderr"
    assert not run.killed
    result: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return result


@pytest.mark.parametrize(
    ("seedable", "workers"), [(True, 0), (False, 0), (True, 2)], ids=["seeded", "drawn", "workers"]
)
def test_killed_anywhere(server: ForkServer, shm: Path, seedable: bool, workers: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # shown if it fails
    chance = random.Random(seed)
    whole = lived(server, "kept", shm / "whole", seedable, workers)
    assert [at for at, end in enumerate(whole["ends"]) if end] == [5, 11, 17]
    if not workers:  # see docs/TRAINING.md, Generators of your own
        assert lived(server, "plain", shm / "plain", seedable, workers) == whole
    folder = shm / "killed"
    folder.mkdir()
    for number in range(KILLS):
        step = chance.randrange(STEPS) if number % 2 else -1
        at = 0 if number % 2 else chance.randrange(60, 400)
        run = server.run("accelerate_work:kept", [str(folder), seedable, workers, step], kill_at=at)
        assert run.killed or run.exit_code == 0, "the child failed: see its stderr"
    assert lived(server, "kept", folder, seedable, workers)["model"] == whole["model"]


@pytest.mark.parametrize("seedable", [True, False])
def test_a_second_loader_keeps_its_order(server: ForkServer, shm: Path, seedable: bool) -> None:
    whole = lived(server, "beside", shm / "whole", seedable)
    assert len({str(order) for order in whole["ends"]}) == 3
    folder = shm / "killed"
    folder.mkdir()
    for step in (3, 8, 14):
        run = server.run("accelerate_work:beside", [str(folder), seedable, step])
        assert run.killed
    assert lived(server, "beside", folder, seedable) == whole


@pytest.mark.parametrize("check", ["hooks", "refused", "amid_accumulation", "the_example"])
def test_check(server: ForkServer, shm: Path, check: str) -> None:
    run = server.run(f"accelerate_work:{check}", [str(shm)])
    assert run.exit_code == 0, "the child failed: see its stderr"
    assert not run.killed
