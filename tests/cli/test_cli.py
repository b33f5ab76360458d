"""The command line: answers, exit codes, errors without tracebacks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import pmstore
from pmstore.commands.application import app


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.pm"
    with pmstore.open(path) as store:
        store["w"] = np.zeros((3, 4), np.float32)
        store["group/inner/x"] = np.arange(5)
        store["group/note"] = "hello"
        store.zeros("t", (2,), "f4")
    return path


def test_info(path: Path) -> None:
    result = run("info", path)
    assert result.exit_code == 0
    assert f"path      {path}" in result.stdout
    assert "a commit survives" in result.stdout
    facts = json.loads(run("info", path, "--json").stdout)
    assert facts["names"] == 3
    assert facts["epoch"] >= 1
    assert facts["recovery"]["clean"] is True
    assert facts["file_bytes"] == path.stat().st_size - 4096  # the last page is not of the state


def test_ls(path: Path) -> None:
    result = run("ls", path)
    assert result.exit_code == 0
    assert "3x4" in result.stdout
    assert "inner" not in result.stdout
    assert [row["name"] for row in json.loads(run("ls", path, "--json").stdout)] == [
        "w",
        "group",
        "t",
    ]
    rows = json.loads(run("ls", "-r", "--json", path, "group").stdout)
    assert [row["name"] for row in rows] == ["group/inner", "group/inner/x", "group/note"]
    assert rows[1] == {
        "name": "group/inner/x",
        "kind": "array",
        "dtype": "int64",
        "shape": [5],
        "bytes": 40,
    }
    missing = run("ls", path, "nothing")
    assert missing.exit_code == 2
    assert "there is no 'nothing'" in missing.stderr
    assert "is no group" in run("ls", path, "w").stderr


def test_ls_of_a_tensor(path: Path) -> None:
    pytest.importorskip("torch")
    with pmstore.open(path) as store:
        del store["t"]
        store.tensor("t", (2,))
    tensor = json.loads(run("ls", path, "--json").stdout)[2]
    assert (tensor["kind"], tensor["dtype"], tensor["bytes"]) == ("tensor", "float32", 8)


def test_check(path: Path) -> None:
    result = run("check", path)
    assert result.exit_code == 0
    assert "sound" in result.stdout
    told = json.loads(run("check", path, "--json").stdout)
    assert (told["path"], told["sound"], told["problems"], told["notes"]) == (
        str(path),
        True,
        [],
        [],
    )
    assert (told["names"], told["leaks"], told["sound_copies"]) == (6, 0, 3)


def test_a_damaged_store(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[: 1 << 16] = bytes(1 << 16)
    path.write_bytes(data)
    result = run("check", path)
    assert result.exit_code == 1
    assert result.stderr.startswith("pmstore: ")


@pytest.mark.parametrize("command", ["info", "ls", "check", "repair", "compact"])
def test_what_is_no_store(command: str, tmp_path: Path) -> None:
    missing = run(command, tmp_path / "none.pm")
    assert missing.exit_code == 2
    assert "no such store" in missing.stderr
    other = tmp_path / "other"
    other.write_text("something else")
    result = run(command, other)
    assert result.exit_code == 1
    assert result.stderr == (
        f"pmstore: {other}: not a pmstore file (no magic). It was left as it is: give a store's "
        "path\n"
    )
    assert other.read_text() == "something else"
    assert run(command).exit_code == 2
    with pmstore.open(tmp_path / "busy.pm"):
        busy = run(command, tmp_path / "busy.pm")
        if command in ("repair", "compact"):
            assert busy.exit_code == 2
            assert "held open" in busy.stderr
            assert busy.stderr.endswith(": stop it, or wait until it is done\n")
        else:  # read beside it
            assert busy.exit_code == 0, busy.stderr


PYTHON = re.compile(r"\w+\(|\w=['\w]|`")
"""Calls and arguments: words of a program, which a user of the command line has not written."""


def test_errors_speak_to_users_of_the_command_line(tmp_path: Path) -> None:
    store, full, text, wrong = (
        tmp_path / name for name in ("run.pm", "full.pm", "text", "wrong.npy")
    )
    text.write_text("something else")
    with pmstore.open(store) as opened:
        opened["a"] = np.arange(5)
    damaged = tmp_path / "damaged.pm"
    damaged.write_bytes(store.read_bytes()[:100_000])
    pmstore.open(full, size="1MiB", max_size="1MiB").close()
    np.save(wrong, np.array([{}], dtype=object), allow_pickle=True)
    for code, said, words in (
        (1, "give a store's path", ["show", text, "x"]),
        (1, "give a store's path", ["dump", text, tmp_path / "x"]),
        (1, "pmstore restore", ["info", damaged]),
        (2, "pmstore rm", ["set", full, "x", "--dtype", "S900000", '["x"]']),
        (2, "--domain file", ["create", tmp_path / "dax.pm", "--domain", "dax"]),
        (1, "not a .npy file", ["set", store, "x", "--file", text]),
        (1, str(wrong), ["set", store, "x", "--file", wrong]),
        (1, f"{text}: not a dump", ["load", text, tmp_path / "new.pm"]),
    ):
        result = run(*words)
        assert result.exit_code == code
        assert said in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert not PYTHON.search(result.stderr.replace("(made by `pmstore dump`)", "")), (
            result.stderr
        )


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"pmstore {pmstore.__version__}\n")


def test_bad_options_of_the_demo(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    result = run("demo", "--domain", "moon")
    assert result.exit_code == 2
    assert "unknown domain 'moon'" in result.stderr
    assert run("demo", "--steps", "3").exit_code == 2


def test_as_a_process(path: Path) -> None:
    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pmstore", *words], capture_output=True, text=True, check=False
        )

    sound = call("check", str(path))
    assert (sound.returncode, sound.stderr) == (0, "")
    missing = call("info", str(path.with_name("none.pm")))
    assert missing.returncode == 2
    assert "Traceback" not in missing.stderr


def test_output_that_cannot_be_written(path: Path) -> None:
    command = [sys.executable, "-m", "pmstore", "ls", str(path)]
    with open("/dev/full", "w") as full:
        told = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (told.returncode, told.stderr) == (
        2,
        "pmstore: standard output: No space left on device\n",
    )
    read, write = os.pipe()
    os.close(read)
    told = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (told.returncode, told.stderr) == (1, "")


def test_nothing_heavy_is_imported_for_the_package() -> None:
    code = (
        "import sys, pmstore, pmstore.commands.cli; print([name for name in ('typer', 'rich', "
        "'torch') if name in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_without_the_extra() -> None:
    code = "import sys; sys.modules['typer'] = None; from pmstore.commands.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert (
        result.stderr.strip() == "pmstore: the command line needs typer: pip install 'pmstore[cli]'"
    )
