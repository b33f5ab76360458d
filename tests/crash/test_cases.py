"""`python -m crashtests --seed N`: a case is what kind and seed say, and a failure says both."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from crashtests import cases

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"images": 20, "kills": 301, "faults": 301, "formats": 3, "stress": 1}
"""Sizes. The others are run by tests of their own, each as a case."""


def shown(*words: str) -> str:
    command = [sys.executable, "-m", "crashtests", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("name", cases.KINDS)
def test_a_seed_draws_the_same_case(name: str) -> None:
    """Another one than another seed does; and the seeds of a run have all that there is."""
    try:
        kind = cases.load(name)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    told = [str(kind.draw(seed, kind.size)) for seed in range(4)]
    assert told == [str(kind.draw(seed, kind.size)) for seed in range(4)]
    assert len(set(told)) == 4
    assert kind.cases() > 0


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("name", SMALL)
def test_a_case_is_run(name: str) -> None:
    words = ["--kind", name, "--seed", "2", "--size", str(SMALL[name])]
    said = shown(*words)
    assert f"\npython -m crashtests {' '.join(words)}\n" in said
    assert said.endswith("; 0 are wrong\n")


def test_a_seed_alone_draws_the_kind() -> None:
    seed = next(n for n in range(1000) if cases.kind_of(n) == "formats")
    said = shown("--seed", str(seed), "--size", "3")
    assert f"\npython -m crashtests --kind formats --seed {seed} --size 3\n" in said
    assert {cases.kind_of(n) for n in range(200)} == set(cases.KINDS)


def _liar(case: str, size: int, tool: object) -> cases.Found:
    if case == "raises":
        raise OSError("told by nobody")
    problems = ["it is wrong"] if case == "wrong" else []
    return cases.Found(Counter(looks=size), problems)


LIAR = cases.Kind(
    3,
    "looks",
    lambda: 6,
    lambda seed, _: (word := ("right", "wrong", "raises")[seed % 3], word),
    _liar,
)


def test_what_fails_says_how_to_have_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cases.KINDS, "liar", f"{__name__}:LIAR")
    assert cases.run(cases.Settings("liar", cases=None, workers=2)) == 1
    said = capsys.readouterr().out
    lines = [f"again: python -m crashtests --kind liar --seed {n}" for n in (1, 2, 4, 5)]
    assert said.endswith("\n".join(["6 cases in 0 s: 12 looks; 4 are wrong", *lines, ""]))
    assert all(said.count(f"{line}\n") == 2 for line in lines)
    assert "OSError: told by nobody" in said
    assert cases.run(cases.Settings("liar", 3, size=7)) == 0
    assert "--kind liar --seed 3 --size 7\n" in capsys.readouterr().out
    assert cases.run(cases.Settings("liar", cases=None, only=("right",))) == 0
    assert cases.run(cases.Settings("liar", cases=None, seconds=-1)) == 0
