"""Streams that are killed between and inside batches end as one that never was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")

from estimators import MADE, digest

import pmstore
from pmstore.integrations.sklearn import persist
from pmstore.testing import ForkServer

BATCHES = 12


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    here = Path(__file__).parent
    with ForkServer([str(here), str(here.parent.parent)]) as made:
        yield made


@pytest.fixture(scope="module", params=MADE)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(server: ForkServer, kind: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    told = tmp_path_factory.mktemp("whole") / "digest"
    assert server.run("estimators:tell_whole", [str(told), kind, BATCHES]).exit_code == 0
    return told.read_text()


@pytest.mark.parametrize("block", [False, True], ids=["commit", "block"])
def test_killed_at_primitives(
    server: ForkServer, path: Path, kind: str, expected: str, block: bool
) -> None:
    """Of the engine: in creation, in commits, while a state is copied in, in recovery."""
    rng = random.Random(f"{kind}{block}")
    last = 0
    for _ in range(8):
        point = rng.randrange(1, 80)
        run = server.run("estimators:learn", [str(path), kind, BATCHES, block], kill_at=point)
        assert run.killed or run.exit_code == 0
        assert run.acknowledged >= last or run.acknowledged < 0
        last = max(last, run.acknowledged)
    run = server.run("estimators:learn", [str(path), kind, BATCHES, block])
    assert (run.killed, run.exit_code, run.acknowledged) == (False, 0, BATCHES)
    with pmstore.open(path, "r") as store:
        estimator = persist(MADE[kind](), store, "it")
        assert store["it/batches"] == store["seen"] == BATCHES
        assert digest(estimator) == expected
        assert store.check().problems == ()


def test_killed_at_any_time(server: ForkServer, disk: Path, kind: str, expected: str) -> None:
    """Inside batches too, on a disk."""
    rng = random.Random(kind)
    path = disk / "store.pm"
    for _ in range(4):
        delay = rng.uniform(0.005, 0.1)
        server.run("estimators:learn", [str(path), kind, BATCHES, True], delay_seconds=delay)
    run = server.run("estimators:learn", [str(path), kind, BATCHES, True])
    assert (run.exit_code, run.acknowledged) == (0, BATCHES)
    with pmstore.open(path) as store:
        assert digest(persist(MADE[kind](), store, "it")) == expected
    np.random.seed(0)


def test_the_example_goes_on(server: ForkServer, shm: Path) -> None:
    whole, path = shm / "whole.pm", shm / "killed.pm"
    assert server.run("estimators:example", [str(whole), 20]).exit_code == 0
    assert server.run("estimators:example", [str(path), 20], kill_at=150).killed
    assert server.run("estimators:example", [str(path), 20]).exit_code == 0
    with pmstore.open(whole, "r") as one, pmstore.open(path, "r") as other:
        for name in ("pca", "classifier"):
            assert one[f"{name}/batches"] == other[f"{name}/batches"] == 20
            ours, theirs = one[f"{name}/arrays"], other[f"{name}/arrays"]
            assert {key: ours[key].tobytes() for key in ours} == {
                key: theirs[key].tobytes() for key in theirs
            }
