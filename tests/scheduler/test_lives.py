"""What a store tells of the processes that trained a run: of each, also after a rewind."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import pmstore
from pmstore.course import Course, Told, read
from pmstore.course.process import command_line, revision, this_process
from pmstore.course.records import CHANGES_MAX, COMMAND_MAX
from tests.courses import begin, train

SHA = "0123456789abcdef0123456789abcdef01234567"


def told(store: pmstore.Store) -> Told:
    found = read(store, "run")
    assert found is not None
    return found


def test_each_life_is_told(tmp_path: Path) -> None:
    for life in range(70):
        with begin(tmp_path / "run.pm") as store:
            course = Course(store, "run", 2 * life)
            course.lives.told["resume"] = f"of life {life}"
            train(store, course, 2)
            found = told(store)
    assert [one.number for one in found.starts] == list(range(7, 71))
    for one in found.starts:
        assert one.life.resume == f"of life {one.number - 1}"
        assert (one.life.host, one.life.pmstore) == (os.uname().nodename, pmstore.__version__)
        assert one.life.after is not None
        assert 0.0 <= one.time - one.life.after < 3600.0
    assert found.starts[0].life.command == command_line(sys.orig_argv)


def test_what_was_stays_when_the_run_goes_back(tmp_path: Path) -> None:
    with begin(tmp_path / "run.pm") as store:
        course = Course(store, "run")
        train(store, course, 10)
        before = (tmp_path / "run.pm").read_bytes()
        store["run/progress"][0] = 11
        course.add(11, 1.0, 0.0)
        store.rollback()
        course.rolled_back(10)
        course.lives.keep(10)
        course.lives.rewound(11, 10)
        train(store, course, 5)
        assert [(one.step, one.to) for one in told(store).rewinds] == [(11, 10)]
        assert len(told(store).starts) == 1
    (tmp_path / "run.pm").write_bytes(before)
    with begin(tmp_path / "run.pm") as store:
        course = Course(store, "run", 10)
        train(store, course, 5)
        del store["pmstore.course"]  # as a state is that was kept before the course began
        store.commit()
        store["x"] = 1
        store.rollback()
        course.rolled_back(15)
        train(store, course, 5)
        assert [one.number for one in told(store).starts] == [1, 2]


@pytest.mark.parametrize(
    "lives",
    [
        7,
        [7, None, {}, {"number": True}, {"number": 10**400}],
        [{"number": 1, "command": 7, "after": float("nan"), "changed": [1, ["a"], [[], 1, {}, 2]]}],
        [{"number": 1, "host": "x" * 10**5, "after": -1.0, "changed": [["a"] * 4] * 10**3}],
    ],
)
def test_what_a_stranger_wrote(tmp_path: Path, lives: Any) -> None:
    with begin(tmp_path / "run.pm") as store:
        train(store, Course(store, "run"), 3)
        store["pmstore.course/run/lives"] = lives
        (start,) = told(store).starts
    assert start.life.command == ""
    assert start.life.after is None
    assert len(start.life.host) <= COMMAND_MAX
    assert len(start.life.changed) <= CHANGES_MAX
    with begin(tmp_path / "run.pm") as store:
        train(store, Course(store, "run", 3), 3)
        assert told(store).starts[-1].life.host == os.uname().nodename


def test_the_revision_is_read_where_git_has_it(tmp_path: Path) -> None:
    git, code = tmp_path / "code" / ".git", tmp_path / "code" / "deep"
    code.mkdir(parents=True)
    assert revision(code) == revision(tmp_path) == ""
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text(f"{SHA}\n")
    assert revision(code) == SHA
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert revision(code) == ""
    (git / "packed-refs").write_text(f"# pack-refs with: peeled\n{SHA} refs/heads/main\n^{SHA}\n")
    assert revision(code) == SHA
    (git / "refs" / "heads" / "main").write_text("f" * 40 + "\n")
    assert revision(code) == "f" * 40
    tree, own = tmp_path / "tree", git / "worktrees" / "tree"
    tree.mkdir()
    own.mkdir(parents=True)
    (tree / ".git").write_text(f"gitdir: {own}\n")
    (own / "HEAD").write_text("ref: refs/heads/main\n")
    (own / "commondir").write_text("../..\n")
    assert revision(tree) == "f" * 40
    (git / "refs" / "heads" / "main").write_text("a secret")
    assert revision(code) == ""


@pytest.mark.parametrize(
    "words",
    [
        ["--WANDB_API_KEY", "~~"],
        ["--password=~~"],
        ["--password", "-~~"],
        ["--token", "~~"],
        ["secret=~~"],
        ["--api-keys", "~~"],
        ["--auth", "me:~~"],
        ["--set=api_key=~~"],
        ["--env", "A=1,HF_TOKEN=~~"],
        ["--config", '{"password":"~~"}'],
        ["-c", "a=1; password='~~'"],
        ["--header", "Authorization: Bearer ~~"],
        ["https://me:~~@host/x"],
        ["s3://me:p@~~@host/x"],
        ["s3://me:p/~~@host/x"],
        ["https://host/x?a=1&token=~~&b"],
        ["https://host/x?X-Amz-Signature=~~"],
    ],
)
def test_a_secret_is_not_kept(words: list[str]) -> None:
    told = command_line(["python", "-m", "train", *words, "--lr", "0.1"])
    assert "~~" not in told
    assert told.startswith("python -m train ")
    assert told.endswith(" --lr 0.1")


def test_what_is_no_secret_is_kept() -> None:
    words = ["python", "train_keyed.py", "--max-tokens=512", "--author", "me", "--tokenizer", "bpe"]
    assert command_line(words) == " ".join(words)
    assert len(command_line(["x" * 10**6] * 100)) == COMMAND_MAX


@pytest.mark.parametrize("words", ["none", None, ["python", Path("train.py")], ["\udcff"]])
def test_what_launchers_make_of_sys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Any
) -> None:
    """A training does not fail because of what the process is."""
    (tmp_path / "a").symlink_to(tmp_path / "a")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "a" / "x"), False)
    if words == "none":
        monkeypatch.delattr(sys, "orig_argv")
    else:
        monkeypatch.setattr(sys, "orig_argv", words)
    this_process.cache_clear()
    try:
        with begin(tmp_path / "run.pm") as store:
            train(store, Course(store, "run"), 2)
            assert told(store).starts[-1].life.pmstore == pmstore.__version__
    finally:
        this_process.cache_clear()
