"""of a test's combinations as many as it takes to have each two parameters together"""

from __future__ import annotations

import os
from collections.abc import Iterable, Set
from itertools import combinations

import pytest

ALL = os.environ.get("PMSTORE_TESTS") == "all"
"""Nightly: what `make test` has a sample of is done as a whole."""


def _pairs(item: pytest.Item) -> Set[object]:
    named = enumerate(item.callspec._idlist)  # type: ignore[attr-defined]
    return set(combinations(named, 2))


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """What `make test` does not run of tests that are marked so. One that is asked for alone is
    alone, and runs."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("pairwise"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    found: set[pytest.Item] = set()
    for each in tests.values():
        pairs = {item: _pairs(item) for item in each}
        missing = set().union(*pairs.values())
        found |= pairs.keys()
        while missing:
            best = max(each, key=lambda item: len(pairs[item] & missing))
            found.discard(best)
            missing -= pairs[best]
    return found
