"""A short choice of jobs whose ranks are killed (`make nightly WHAT=jobs` for all of them)."""

from __future__ import annotations

from typing import Any

import pytest
import pythons

pytest.importorskip("torch", reason="needs torch: pip install 'pmstore[torch]'")

from crashtests import cases
from tests.jobs import harness, registry
from tests.jobs.server import JobServer

CHOSEN = {name: one for name, one in registry.load().items() if one.quick}
DOMAINS = ("process", "file")


@pytest.fixture(scope="module")
def server() -> JobServer:
    return JobServer(forks=pythons.server())


def combinations() -> list[Any]:
    """Each job in one of the domains; in the others nightly."""
    return [
        pytest.param(name, domain, marks=pytest.mark.nightly if (i + j) % len(DOMAINS) else ())
        for i, name in enumerate(CHOSEN)
        for j, domain in enumerate(DOMAINS)
    ]


@pytest.mark.parametrize(("name", "domain"), combinations())
def test_jobs_end_with_the_same_bits(name: str, domain: str, server: JobServer) -> None:
    found = cases.examine("jobs", harness.every().index((CHOSEN[name], domain)), 5, server)
    assert not found.problems
    assert found.counts["kills"] >= 5
    assert found.counts["joins"] >= 4


def test_the_harness_finds_ranks_that_go_on_apart(server: JobServer) -> None:
    report = harness.examine(registry.JOBS["alone-2"], server, kills=40)
    assert any("not at the same place" in problem for problem in report.problems)
