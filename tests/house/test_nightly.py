"""The table of what takes longer: each command is there, each document names what the table and the
Makefile have."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nightly
import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split())
NATIVE_TARGETS = {"test-plain", "test-asan", "fuzz", "tidy"}
OF_OTHERS = {"pip", "pytest", "venv", "ziglang", "tests/test_state_checkpointing.py"}


@pytest.mark.parametrize("name", nightly.TASKS)
def test_the_commands_are_there(name: str) -> None:
    """Modules, files and targets that they name; and bash can read them."""
    task = nightly.TASKS[name]
    commands = f"{task.commands}\n{nightly.TURN}"
    syntax = subprocess.run(["bash", "-n", "-c", commands], capture_output=True, text=True)
    assert syntax.returncode == 0, syntax.stderr
    modules = set(re.findall(r" -m ([\w.]+)", commands))
    files = set(re.findall(r"(?<![\w/$])\w[\w/]*\.(?:py|toml|txt)\b", commands))
    assert modules or files or "make -C native" in commands
    for module in modules - OF_OTHERS:
        assert importlib.util.find_spec(module), module
    for file in files - OF_OTHERS:
        assert (ROOT / file).exists(), file
    for line in commands.splitlines():
        if "make -C native" in line:
            assert set(line.split()) & NATIVE_TARGETS, line
    for variable in task.given:
        assert f"${variable}" in commands


def test_the_files_of_asan_are_there() -> None:
    for name in nightly.ASAN_ALL.split():
        folder, _, file = name.rpartition("/")
        assert (ROOT / "tests" / folder / f"test_{file}.py").exists(), name


def nightly_run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "tests" / "nightly.py", *words],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYMM"},
    )


def test_the_table_is_shown() -> None:
    shown = nightly_run()
    assert shown.returncode == 0
    assert all(name in shown.stdout for name in nightly.TASKS)
    hosted = json.loads(nightly_run("--json").stdout)
    assert {"mutants", "stress", "test-long"} <= set(hosted) < set(nightly.TASKS)


def test_what_cannot_run_is_said() -> None:
    assert "invalid choice: 'nothing'" in nightly_run("nothing").stderr
    assert "PYMM=" in nightly_run("upstream-pymm").stderr


def test_commands_that_fail_or_hang_are_seen() -> None:
    assert nightly.run("false\ntrue", alone=True) == 1
    assert nightly.run("sleep 60", seconds=0.1, alone=True) == 124
    assert nightly.run("test $DRAWN = 7 -a -n $PY", number=7, alone=True) == 0


def test_there_are_eight_targets() -> None:
    daily = {"quick", "test", "native", "lint", "docs", "bench", "dist", "clean"}
    assert daily | {"nightly", "all", "venv", "demo"} == TARGETS
    for name in TARGETS:
        assert re.search(rf"^{name}:", MAKEFILE, re.MULTILINE), name


def documents() -> list[Path]:
    """History, CHANGELOG.md, keeps the names of its time."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/*.md")]
    found += [*ROOT.glob(".github/workflows/*"), ROOT / ".ci" / "run", ROOT / "Makefile"]
    for folder in (
        "crashtests",
        "benchmarks",
        "tools/gpu_check",
        "tools/release",
        "tests",
        "native/tests",
    ):
        found += [*ROOT.glob(f"{folder}/**/*.py"), *ROOT.glob(f"{folder}/**/*.c")]
    return sorted({path for path in found if path.name != "CHANGELOG.md"})


def test_documents_name_what_there_is() -> None:
    named = r"(?:`|run: |step \w+ )make\s+([a-z][\w-]*)(?:\s+WHAT=([\w-]+))?"
    fenced = named.replace("(?:", "(?:^|", 1)
    wrong = []
    for path in documents():
        text = path.read_text(encoding="utf-8", errors="replace")
        found = re.findall(named, text)
        for block in re.findall(r"^```.*?^```", text, re.DOTALL | re.MULTILINE):
            found += re.findall(fenced, block, re.MULTILINE)
        for target, what in found:
            if target not in TARGETS or (what and what not in nightly.TASKS):
                wrong.append(f"{path.relative_to(ROOT)}: make {target} {what}")
    assert not wrong
