"""What is wrong with a file is said in the same words, with the same exit code, by every command
that is given it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import pmstore
from pmstore.commands.application import app
from pmstore.commands.table import TABLE

OF_A_STORE = [
    *("info {}", "ls {}", "show {} a", "top --once {}", "report {} -o {}.html", "check {}"),
    *("set {} x 1", "rm {} a", "compact {}", "repair {} --yes", "dump {} {}.dump"),
    *("export {} {}.npz", "export {} {}.csv", "import {good}.npz {}", "flush {} {good}.tier"),
    *("trust {} --yes", "job {}", "job --adopt {}", "resolve {} --back"),
]
"""Commands that are given a store which has to be there."""
OF_A_FILE = ["import {} {good}.new", "set {good} x --file {}"]
OF_A_NEW_STORE = ["create {}", "load {good}.dump {}", "restore {} {good}.tier"]
OTHER = {"epochs", "crashtest"}


def answer(words: str, path: Path, good: Path) -> tuple[int, str]:
    """Exit code, and what was said of the path."""
    told = CliRunner().invoke(app, [word.format(path, good=good) for word in words.split()])
    assert told.exception is None or isinstance(told.exception, SystemExit), (words, told)
    return told.exit_code, told.stderr.replace(str(path), "PATH")


@pytest.fixture
def good(shm: Path) -> Path:
    """A store, beside it what is made of one; all of it open to everybody."""
    path = shm / "good.pm"
    with pmstore.open(path, size="2MiB") as store:
        store["a"] = np.arange(5)
    for words in ("dump {} {}.dump", "export {} {}.npz", "flush {} {}.tier"):
        assert answer(words, path, path) == (0, "")
    shm.chmod(0o777)
    return path


@contextmanager
def without_rights(commands: list[str], good: Path) -> Iterator[None]:
    """Root may read everything, and is somebody else meanwhile, who may be unable to import what
    the commands need: they are asked before."""
    if os.geteuid():
        yield
        return
    for words in commands:
        answer(words, good.parent / "no" / "store", good)
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def missing(path: Path, good: Path) -> None:
    pass


def no_folder(path: Path, good: Path) -> None:
    path.parent.rmdir()


def link_to_nothing(path: Path, good: Path) -> None:
    path.symlink_to("nothing")


def link_to_itself(path: Path, good: Path) -> None:
    path.symlink_to(path.name)


def directory(path: Path, good: Path) -> None:
    path.mkdir()


def text(path: Path, good: Path) -> None:
    path.write_text("a text\n" * 1000)


def empty(path: Path, good: Path) -> None:
    path.touch()


def cut(path: Path, good: Path) -> None:
    path.write_bytes(good.read_bytes()[: 1 << 20])


def cut_to_a_few(path: Path, good: Path) -> None:
    path.write_bytes(good.read_bytes()[:100])


def not_allowed(path: Path, good: Path) -> None:
    shutil.copy(good, path)
    path.chmod(0)


def pipe(path: Path, good: Path) -> None:
    os.mkfifo(path)


def device(path: Path, good: Path) -> None:
    path.symlink_to("/dev/zero")


Kind = Callable[[Path, Path], None]
NONE = ": no such store\n"
DEVICE = (
    ": a device, not a file: give persistent memory a DAX file system (ndctl create-namespace "
    "--mode=fsdax, mount -o dax)\n"
)
SHORT = (
    ": the end of the store is missing: the file has 1,048,576 bytes, its superblock says "
    "2,093,056: pmstore restore makes a store of an epoch in a tier; or take a copy of the file\n"
)
NO_MAGIC = ": not a pmstore file (no magic). It was left as it is: give a store's path\n"


@pytest.mark.parametrize(
    ("make", "code", "said"),
    [
        (missing, 2, NONE),
        (link_to_itself, 2, NONE),
        (
            directory,
            2,
            ": a directory: give a store's file. If it is a tier: pmstore epochs PATH\n",
        ),
        (text, 1, NO_MAGIC),
        (empty, 1, ": the file is empty. It was left as it is: give a store's path\n"),
        (cut, 1, SHORT),
        (not_allowed, 2, ": Permission denied (opening the store)\n"),
        (pipe, 2, ": not a regular file\n"),
        (device, 2, DEVICE),
    ],
)
def test_no_store(make: Kind, code: int, said: str, shm: Path, good: Path) -> None:
    path = shm / "folder" / "x.pm"
    path.parent.mkdir()
    path.parent.chmod(0o777)
    make(path, good)
    there = sorted(shm.rglob("*"))
    left_out = {"import {good}.npz {}"} if make in (missing, link_to_itself) else set()
    shows = {"top --once {}"} if code == 1 else set()  # in its frame
    left_out |= {"top --once {}"} if make is not_allowed else set()  # there, too
    commands = [words for words in OF_A_STORE if words not in left_out]
    with without_rights(commands, good) if make is not_allowed else nullcontext():
        answers = {words: answer(words, path, good) for words in commands}
    for words in shows:
        assert answers.pop(words) == (1, "")
    assert answers == dict.fromkeys(answers, (code, f"pmstore: PATH{said}"))
    assert sorted(shm.rglob("*")) == there


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (missing, "No such file or directory"),
        (no_folder, "No such file or directory"),
        (directory, "Is a directory"),
        (not_allowed, "Permission denied"),
        (pipe, "not a regular file"),
        (device, "not a regular file"),
    ],
)
def test_no_file(make: Kind, said: str, shm: Path, good: Path) -> None:
    path = shm / "folder" / "x.npz"
    path.parent.mkdir()
    path.parent.chmod(0o777)
    make(path, good)
    commands = OF_A_FILE + ["load {} {good}.new"] * (make not in (pipe, device))  # it reads pipes
    with without_rights(commands, good) if make is not_allowed else nullcontext():
        answers = {words: answer(words, path, good) for words in commands}
    assert answers == dict.fromkeys(answers, (2, f"pmstore: PATH: {said}\n"))


@pytest.mark.parametrize("make", [text, empty, cut, cut_to_a_few])
def test_a_file_of_another_kind_is_bad_news(make: Kind, shm: Path, good: Path) -> None:
    path = shm / "x.npz"
    make(path, good)
    for words in [*OF_A_FILE, "load {} {good}.new"]:
        code, said = answer(words, path, good)
        assert code == 1
        assert said.startswith("pmstore: PATH: ")
        assert len(said.splitlines()) == 1
    assert not Path(f"{good}.new").exists()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (no_folder, "FOLDER: there is no such directory: make it first"),
        *(
            (one, "PATH: there is something already: give another path, or remove it first")
            for one in (link_to_nothing, link_to_itself, directory, text, cut, empty)
        ),
    ],
)
def test_no_place_for_a_store(make: Kind, said: str, shm: Path, good: Path) -> None:
    path = shm / "folder" / "x.pm"
    path.parent.mkdir()
    make(path, good)
    for words in OF_A_NEW_STORE + ["import {good}.npz {}"] * (make is no_folder):
        code, told = answer(words, path, good)
        assert (code, told.replace(str(path.parent), "FOLDER")) == (2, f"pmstore: {said}\n"), words


def test_every_command_is_asked() -> None:
    asked = {words.split()[0] for words in (*OF_A_STORE, *OF_A_FILE, *OF_A_NEW_STORE)}
    assert asked | OTHER == set(TABLE)
