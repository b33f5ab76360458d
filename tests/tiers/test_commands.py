"""pmstore flush, restore, epochs."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import pmstore

typer_testing = pytest.importorskip("typer.testing")

from pmstore.commands.application import app  # noqa: E402

Step = Callable[[float], int]


def run(*arguments: object) -> tuple[int, str]:
    done = typer_testing.CliRunner().invoke(app, [str(one) for one in arguments])
    return done.exit_code, done.output


def test_epochs_and_restore(step: Step, path: Path, url: str) -> None:
    older, newer = step(1), step(2)
    code, text = run("epochs", url)
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == ["epoch", str(newer), str(older)]
    code, text = run("epochs", url, "--verify", "--json")
    assert [(one["epoch"], one["problem"]) for one in json.loads(text)] == [
        (newer, None),
        (older, None),
    ]
    target = path.with_name("b.pm")
    code, text = run("restore", target, url)
    assert (code, text.strip()) == (0, f"epoch {newer} restored to {target} (8,388,608 bytes)")
    said = "there is something already: give another path, or remove it first"
    assert run("restore", target, url) == (2, f"pmstore: {target}: {said}\n")
    target.unlink()
    chunks = max(Path(url).glob("*.chunks"), key=lambda one: one.stat().st_mtime_ns)
    data = bytearray(chunks.read_bytes())
    data[50] ^= 1
    chunks.write_bytes(data)
    assert run("epochs", url)[0] == 0  # names and sizes are right
    code, text = run("epochs", url, "--verify")
    assert code == 1
    assert "its checksum is wrong" in text
    code, text = run("restore", target, url, "--json")
    assert code == 0
    assert (json.loads(text)["epoch"], json.loads(text)["skipped"][0][0]) == (older, newer)
    code, text = run("restore", path.with_name("c.pm"), url, "--epoch", newer)
    assert code == 1
    assert "corrupt" in text
    assert run("restore", path.with_name("c.pm"), url, "--epoch", 77)[0] == 2
    nothing = path.with_name("nothing")
    assert run("epochs", nothing) == (2, f"pmstore: {nothing}: no such directory, and so no tier\n")


def test_export_of_a_tier(url: str, path: Path) -> None:
    for tier in (url, "s3://bucket/run"):
        Path(url).mkdir(exist_ok=True)
        code, text = run("export", tier, path.with_name("n.safetensors"))
        assert code == 2
        assert "If it is a tier: pmstore " in text


def test_flush(filled: pmstore.Store, path: Path, url: str) -> None:
    """To a tier that the store remembers, to a URL, to all; the store is as it was."""
    assert run("flush", path, "t")[0] == 2  # in use
    epoch = filled.epoch
    filled.close()
    before = path.read_bytes()
    code, text = run("flush", path, "t")
    assert code == 0
    assert text.startswith(f"epoch {epoch} flushed to {url}: 1.")
    assert " MiB in " in text
    other = f"{url}/../other"
    code, text = run("flush", path, other, "--json")
    assert code == 0
    assert [(one["url"], one["epoch"]) for one in json.loads(text)] == [(other, epoch)]
    assert run("flush", path)[0] == 0
    assert path.read_bytes() == before
    for where in (url, other):
        assert [(one.epoch, one.problem) for one in pmstore.epochs(where)] == [(epoch, None)]
    assert run("flush", path, "nowhere") == (
        2,
        f"pmstore: {path}: the store remembers no tier 'nowhere' (it has: t): give a URL\n",
    )
    Path(url + ".file").write_text("")
    assert run("flush", path, url + ".file")[0] in (1, 2)
    with pmstore.open(path) as store:
        store.remove_tier("t")
    assert run("flush", path)[0] == 2


def on_a_terminal(*words: object) -> tuple[str, str]:
    """What a command writes to its output, and to a terminal that is its standard error."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pmstore", *map(str, words)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    shown = b""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment
    ) as running:
        os.close(theirs)
        try:
            while some := os.read(ours, 1 << 16):
                shown += some
        except OSError:  # EIO: nobody has it open any more
            pass
        os.close(ours)
        assert running.stdout is not None
        output = running.stdout.read()
    assert running.returncode == 0, shown
    return output, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())


def test_progress_bars(filled: pmstore.Store, path: Path, url: str) -> None:
    """To the end, of all bytes; and not in what a program may read."""
    filled.close()
    output, shown = on_a_terminal("flush", path, "t")
    assert re.search(r"flushing to t .*1\.(\d)/1\.\1 MiB", shown), shown
    assert output.startswith("epoch ")
    assert output.count("\n") == 1
    output, shown = on_a_terminal("restore", path.with_name("b.pm"), url)
    assert re.search(r"restoring b\.pm .*1\.(\d)/1\.\1 MiB", shown), shown
    assert output.count("\n") == 1
    output, shown = on_a_terminal("epochs", "--verify", url)
    assert re.search(r"reading epoch \d+ .*1\.(\d)/1\.\1 MiB", shown), shown
