"""Checkpoints saved by some ranks and loaded by others: 1 -> 2 -> 3 -> 4 -> 1, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import ranks

CASES = (
    dcp_ranks.plain,
    dcp_ranks.sharded,
    dcp_ranks.changing,
    dcp_ranks.twice_sharded,
    dcp_ranks.fsdp,
    dcp_ranks.hsdp,
    dcp_ranks.parallel,
)
AT_TWO = (dcp_ranks.fail_in_phases, dcp_ranks.two_at_once, dcp_ranks.without_collectives)
"""What two ranks do besides."""

Stages = list[dict[str, list[Any]]]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """What was found, stage by stage: by case, a list by rank."""
    folder: Path = tmp_path_factory.mktemp("resharding")
    found = []
    for stage, world in enumerate(dcp_ranks.WORLDS):
        own = folder / str(stage)
        own.mkdir()
        found.append(ranks.launch((*CASES, *(AT_TWO if world == 2 else ())), own, world))
    return found


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_each_number_of_ranks_loads_what_another_saved(stages: Stages, case: str) -> None:
    wrong = {
        (stage, rank): found["wrong"]
        for stage, by_case in enumerate(stages)
        for rank, found in enumerate(by_case[case])
        if found["wrong"]
    }
    assert not wrong
    assert [len(by_case[case]) for by_case in stages] == list(dcp_ranks.WORLDS)


@pytest.mark.parametrize("case", [case.__name__ for case in AT_TWO])
def test_two_ranks(stages: Stages, case: str) -> None:
    assert [found["wrong"] for found in stages[1][case]] == [[], []]
