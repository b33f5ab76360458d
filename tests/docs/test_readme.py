"""README.md's first program and its session, as a newcomer goes through them, and its figures.
(test_documents.py runs the programs of all other documents.)"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import pythons

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]


def block(first_words: str) -> str:
    """The block of the README that begins so."""
    blocks = re.findall(
        r"```(?:python)?\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (found,) = [block for block in blocks if block.startswith(first_words)]
    return str(found)


def train(folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """Its status, and what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = pythons.run(["train.py", *arguments], cwd=folder, env=environment, timeout=300)
    return done.returncode, done.stdout.splitlines()


def test_the_training_loop_survives_kill_9(shm: Path) -> None:
    (shm / "train.py").write_text(block("# train.py\n"), encoding="utf-8")
    session = block("$ python train.py 504\n").splitlines()
    killed, first = train(shm, "504")
    assert killed == -signal.SIGKILL
    resumed, second = train(shm)
    (shm / "run.pm").unlink()
    whole, third = train(shm)
    assert resumed == whole == 0
    assert second[-1] == third[-1]
    told = [*first, "Killed", *second, *third]
    assert [shown(line) for line in told] == [
        shown(line) for line in session if not line.startswith("$ ")
    ]


def shown(line: str) -> str:
    """Without what depends on the machine: digits of the loss, how much was undone."""
    line = re.sub(r"(loss 0\.00)\d+", r"\1", line)
    return re.sub(r"\([\d,]+ bytes in \d+ pieces\)", "", line)


def test_a_commit_costs_what_was_measured() -> None:
    """The last run of the benchmarks has README's figures."""
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    table = results.partition("## training: ")[2].partition("\n## ")[0]
    titles, *rows = [line.strip("| ").split(" | ") for line in table.splitlines() if "|" in line]
    (row,) = [row for row in rows if row[0] == "MLP, 101 MB of state"]
    measured = dict(zip(titles, row, strict=True))
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = re.search(
        r"step with 101 MB of state takes (\d+) ms\. With a commit it takes (\d+) ms in memory, "
        r"and (\d+) ms on a disk\. With `torch\.save` and `fsync` it takes (\d+) ms",
        text,
    )
    assert said is not None
    columns = (
        "no checkpoint",
        "pmstore process, declared",
        "pmstore file, declared",
        "torch.save + fsync + rename",
    )
    assert [int(figure) for figure in said.groups()] == [
        round(float(re.match(r"([\d.]+) ms", measured[column])[1]))  # type: ignore[index]
        for column in columns
    ]


def test_it_is_read_in_one_go() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100
