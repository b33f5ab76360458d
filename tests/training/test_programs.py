"""A short choice of the training programs: each killed, stopped and compared bit for bit
(`python -m crashtests --kind programs` for all of them)."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'pmstore[torch]'")

from pairwise import ALL

from crashtests import cases
from pmstore.testing import ForkServer
from tests.programs import harness, registry
from tests.programs.bits import bits_of, differences

CHOSEN = {name: one for name, one in registry.load().items() if one.quick}
KILLS = harness.KILLS if ALL else 2
"""Nightly more."""
REFUSED = {name: one for name, one in registry.load().items() if one.refused}


@pytest.mark.parametrize("name", CHOSEN)
def test_programs_end_with_the_same_bits(name: str, server: ForkServer) -> None:
    found = cases.examine("programs", harness.every().index(CHOSEN[name]), KILLS, server)
    assert not found.problems
    assert found.counts["kills"] >= KILLS
    assert found.counts["in step"] >= len(CHOSEN[name].stops)
    assert found.counts["resumed"] >= len(CHOSEN[name].stops)


@pytest.mark.parametrize("name", REFUSED)
def test_programs_that_would_lose_something_are_refused(name: str, server: ForkServer) -> None:
    assert not harness.examine(REFUSED[name], server).problems


@pytest.mark.parametrize(
    ("name", "found"), [("forgetful", ["kill", "term", "raise", "break"]), ("hasty", ["term"])]
)
def test_the_harness_finds_faults(name: str, found: list[str], server: ForkServer) -> None:
    report = harness.examine(registry.PROGRAMS[name], server)
    assert [problem.partition(":")[0] for problem in report.problems] == found


def test_there_are_enough_of_them() -> None:
    kinds = {one.kind for one in registry.load().values()}
    assert len(kinds) >= 60
    assert 10 <= len(CHOSEN) <= 20


def test_the_harness_sees_a_bit() -> None:
    """What compares is itself compared: shapes, types, one bit of a number, and names."""
    whole = {"a": [1.0, 2], "b": (True, None)}
    assert not differences(bits_of(whole), bits_of({"b": (True, None), "a": [1.0, 2]}))
    for other in (
        {**whole, "a": [1.0000000000000002, 2]},
        {**whole, "a": [1.0, 2.0]},
        {**whole, "a": [1.0]},
        {**whole, "b": (1, None)},
        {"a": [1.0, 2]},
        {**whole, "c": 0},
    ):
        assert differences(bits_of(whole), bits_of(other)), other
