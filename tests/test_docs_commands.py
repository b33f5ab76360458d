"""The commands in README.md and docs/CLI.md run, and print what the documents say."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pmstore.commands.program import app

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("document", ["README.md", "docs/CLI.md"])
def test_documented_session(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = 0
    for block in re.findall(r"```console\n(.*?)```", (ROOT / document).read_text(), re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, expected = part.partition("\n")
            program, *words = shlex.split(line)
            assert program == "pmstore"
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 0, f"{line}: {result.output}"
            told = re.sub(r" +$", "", result.stdout, flags=re.MULTILINE)
            if expected:
                same = doctest.OutputChecker().check_output(expected, told, doctest.ELLIPSIS)
                assert same, f"{line}:\n{told}\nthe document says:\n{expected}"
            commands += 1
    assert commands >= 6


def test_documented_golden_counts() -> None:
    """docs/EXPERIMENTS.md shows some of the counts that native/tests/test_golden.c holds."""
    source = (ROOT / "native" / "tests" / "test_golden.c").read_text()
    golden = {
        name: counts
        for name, *counts in re.findall(r'\{"([^"]+)", \w+, \d+, (\d+), (\d+), \w+\}', source)
    }
    table = (
        (ROOT / "docs" / "EXPERIMENTS.md")
        .read_text()
        .partition("| transaction | fences | lines |")[2]
        .split("\n\n")[0]
    )
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \|", table, re.MULTILINE)
    assert len(rows) >= 6
    assert [[name, *golden[name]] for name, *_ in rows] == [list(row) for row in rows]
