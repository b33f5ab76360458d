"""Programs of Lightning, killed with SIGKILL where it hurts: bit for bit the run that was left
alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import ALL

from pmstore.testing import ForkServer
from pmstore.testing.store_state import differing, examine

LIFE = "lightning_work:run"
PLACES = {
    "net": ["step", "validation", "epoch end", "batch end"],
    "half": ["step", "epoch end"],
    "pair": ["step"],
    "stream": ["step", "validation", "epoch end"],
    "rare": ["step", "validation", "epoch end"],
    "two": ["step", "epoch end"],
    "module": ["step", "epoch end"],
    "stateful": ["step", "epoch end"],
    "workers": ["step"],
    "scaled": ["step"],
    "compiled": ["batch end"],
    "asks": ["step", "epoch end"],
    "saving": ["step"],
}
"""Of each program, where it dies."""
KILLS = 2 if ALL else 1
"""At each place."""


def end_of(store: Path) -> Any:
    return torch.load(f"{store}.end", weights_only=False)


def assert_same(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one.nan_to_num(), other.nan_to_num()), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, (ours, theirs) in enumerate(zip(one, other, strict=True)):
            assert_same(ours, theirs, f"{where}[{number}]")
    elif hasattr(one, "tobytes"):
        assert one.tobytes() == other.tobytes(), where
    else:
        assert one == other or (one != one and other != other), where


@pytest.mark.parametrize("which", PLACES)
def test_killed_and_started_again(tmp_path: Path, server: ForkServer, which: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # shown if it fails
    chance = random.Random(seed)

    def live(name: str, *rest: Any) -> Any:
        return server.run(LIFE, [which, str(tmp_path / name), *rest], timeout_seconds=300)

    assert live("plain").exit_code == 0
    assert live("whole.pm").exit_code == 0
    whole = end_of(tmp_path / "whole.pm")
    if which != "stream":  # what an iterable draws is of a generator of its own
        assert_same(end_of(tmp_path / "plain"), whole)
    for place in [*PLACES[which], "primitive"]:
        name = f"{place.replace(' ', '-')}.pm"
        kills = 0
        while True:
            most = {"primitive": 150, "epoch end": 2}.get(place, 13)  # there are more of each
            kill = (place, chance.randrange(1, most)) if kills < KILLS else ("", 0)
            life = live(name, kill)
            if not life.killed:
                break
            kills += 1
        assert life.exit_code == 0
        assert kills, f"it never died at {place}"
        assert_same(whole, end_of(tmp_path / name))


def test_the_example(shm: Path, server: ForkServer) -> None:
    """Killed twice, it leaves the store of one that nobody killed."""
    whole, killed = shm / "whole.pm", shm / "killed.pm"
    ran = server.run("lightning_work:the_example", [str(whole)], kill_at=2**62)
    assert ran.exit_code == 0
    for kill_at in (ran.acknowledged * 2 // 3, ran.acknowledged // 6):
        assert server.run("lightning_work:the_example", [str(killed)], kill_at=kill_at).killed
    assert server.run("lightning_work:the_example", [str(killed)]).exit_code == 0
    assert differing(examine(whole, None).state, examine(killed, None).state) == []


@pytest.mark.parametrize("which", ["net"])
def test_two_ranks(tmp_path: Path, server: ForkServer, which: str) -> None:
    """One rank dies; both start again, each from its own store."""

    def live(name: str, *rest: Any) -> Any:
        return server.run(
            "lightning_work:run_ranks", [which, str(tmp_path / name), *rest], timeout_seconds=300
        )

    assert live("plain").exit_code == 0
    for name, dies, kill in (
        ("step.pm", 1, ("step", 11)),
        ("commit.pm", 0, ("primitive", 90)),
        ("validation.pm", 1, ("validation", 5)),
    ):
        assert live(name, dies, kill).killed
        assert not live(name).killed
        for rank in range(2):
            assert (tmp_path / name.replace(".", f"-{rank}.")).exists()
            assert_same(
                torch.load(tmp_path / f"plain{rank}.end", weights_only=False),
                torch.load(tmp_path / f"{name}{rank}.end", weights_only=False),
            )
