"""Stores of an earlier commit are opened, and their runs go on to the same bits."""

from __future__ import annotations

import os

import pytest
import pythons

pytest.importorskip("torch", reason="needs torch: pip install 'pmstore[torch]'")

from golden.life import HERE, expected
from golden.lives import go_on
from golden.programs import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_a_run_is_the_same(kind: str) -> None:
    found = go_on(kind, pythons.server(), prefix=f"pmstore-test-{os.getpid()}-")
    wanted = expected(kind)
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        for what in ("opened", "losses", "ended"):
            assert theirs[what]
            assert ours[what] == theirs[what], what


def test_nothing_is_kept_without_a_program() -> None:
    archives = {path.name.removesuffix(".tar.xz") for path in HERE.glob("*.tar.xz")}
    assert archives == {path.stem for path in HERE.glob("*.json")} == set(KINDS)
