"""All interleavings of global commits, within small bounds: `python -m crashtests.protocol` is the
same with larger ones."""

from __future__ import annotations

import pytest

from crashtests import protocol
from crashtests.protocol import MUTANTS, WORLDS, Search
from crashtests.protocol_model import Model

LARGE = ("by hand", "branches")
"""Worlds whose whole search takes half a minute."""


@pytest.mark.parametrize("name", [world.name for world in WORLDS if world.name not in LARGE])
def test_two_ranks(name: str) -> None:
    world = protocol.world(name, 2)
    outcome = Search(Model(world._replace(steps=min(world.steps, 3)))).run()
    assert outcome.violation == "", "\n".join(outcome.path)
    assert outcome.states > 1000


@pytest.mark.parametrize("name", LARGE)
def test_two_ranks_and_one_act_by_hand(name: str) -> None:
    world = protocol.world(name, 2)._replace(act_count=1)
    outcome = Search(Model(world)).run()
    assert outcome.violation == "", "\n".join(outcome.path)
    assert outcome.states > 1000


@pytest.mark.parametrize("name", ["deaths", "pending"])
def test_three_ranks(name: str) -> None:
    world = protocol.world(name, 3)._replace(attempts=2)
    outcome = Search(Model(world)).run()
    assert outcome.violation == "", "\n".join(outcome.path)
    assert outcome.states > 1000


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if not m.equivalent], ids=lambda m: m.rule)
def test_a_rule_left_out_is_found(mutant: protocol.Mutant) -> None:
    outcome = protocol.search(mutant.world, 2, mutant.rule)
    assert outcome.violation
    assert len(outcome.path) >= 3
    assert "all start, tell and gather" in outcome.path
