"""A short choice of random programs of steps (`python -m crashtests --kind steps` for many)."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'pmstore[torch]'")

from jobs.server import JobServer

from crashtests import cases
from pmstore.testing import ForkServer
from tests.steps import harness
from tests.steps.drawing import draw

CHOSEN = (1, 7, 9, 11, 14, 29, 33)
"""Seeds: heads, tails, `ahead`, mirrors, slots, a guard, a disk, a run that is asked for more."""


@pytest.fixture
def forks(server: ForkServer) -> JobServer:
    return harness.server(server)


@pytest.mark.parametrize("seed", CHOSEN)
def test_each_write_is_done_once(seed: int, forks: JobServer) -> None:
    found = cases.examine("steps", seed, 3, forks)
    assert not found.problems
    assert found.counts.total() > found.counts["lives"]


def test_a_job_of_two_ranks(forks: JobServer) -> None:
    assert draw(15).world == 2
    found = cases.examine("steps", 15, 2, forks)
    assert not found.problems
    assert found.counts.total() > found.counts["lives"]


def test_the_choice_has_all_kinds() -> None:
    programs = [draw(seed) for seed in CHOSEN]
    loops = [loop for one in programs for loop in one.stages[-1]]
    assert {loop.kind for loop in loops} == {"epochs", "batches", "steps", "hand"}
    for kind in ("ahead", "device", "name", "limit", "stops"):
        assert any(getattr(loop, kind) for loop in loops), kind
    assert any(loop.every > 1 for loop in loops)
    for what in ("noisy", "events", "mirror", "guard"):
        assert any(getattr(one, what) for one in programs), what
    assert {one.domain for one in programs} == {"process", "file"}
    assert any(one.optimizer == "slots" for one in programs)
    assert any(len(one.stages) > 1 for one in programs)


def test_the_harness_finds_what_a_program_forgets(forks: JobServer) -> None:
    report = harness.examine(replace(draw(0), forgets=True), forks, ends=3)
    assert any("other bits" in problem for problem in report.problems)
