"""`pmstore top`: what it shows of runs that train, and how it ends with them."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("typer")

from test_report import told
from typer.testing import CliRunner

import pmstore
from pmstore.commands.application import app
from pmstore.show.units import number
from tests.courses import log, made

PATIENCE = 120.0
TRAINER = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {root!r})
    from pmstore.course import Course
    from tests.courses import begin, train

    with begin(Path({path!r})) as store:
        course = Course(store, "run")
        while not Path({stop!r}).exists():
            train(store, course, 20)
            print("step", flush=True)
            time.sleep(0.01)
"""


def once(*arguments: object, columns: int = 120) -> Any:
    return CliRunner().invoke(app, ["top", *map(str, arguments)], env={"COLUMNS": str(columns)})


def test_a_look_at_stores_that_nobody_writes_to(tmp_path: Path) -> None:
    paths = [made(tmp_path / f"rank{rank}.pm", 300 + 100 * rank) for rank in range(2)]
    answer = once(*paths)
    assert answer.exit_code == 0, answer.output
    for rank, path in enumerate(paths):
        with pmstore.open(path, mode="r") as store:
            epoch = store.epoch
        assert f"step {300 + 100 * rank:,}" in answer.output
        assert f"{epoch:,} commits" in answer.output
        assert f"loss      {number(list(told(path).whole())[-1].loss)}" in answer.output
    assert answer.output.count("nobody writes to it") == 2
    assert "to store: risk reached the price" in answer.output


@pytest.mark.parametrize("columns", range(56, 84, 3))
def test_numbers_stay_with_their_units(columns: int, tmp_path: Path) -> None:
    answer = once(made(tmp_path / "run.pm"), columns=columns)
    lines = [line.strip("│ ") for line in answer.output.splitlines()]
    assert max(map(len, answer.output.splitlines())) <= columns
    assert len([line for line in lines if "KiB" in line or " ms" in line]) >= 3
    units = re.compile(r"(us|ms|s|min|h|bytes|KiB|MiB|GiB|commits|steps?)\b")
    for line, following in pairwise(lines):
        assert not (re.search(r"\d$", line) and units.match(following)), (line, following)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_what_was_logged_lately(columns: int, tmp_path: Path) -> None:
    path = made(tmp_path / "run.pm")
    with pmstore.open(path) as store:
        values = {
            "accuracy": [(n, n / 3000) for n in range(1, 3000)],
            "rare": [(9, 2.0), (99, 4.0)],
        }
        log(store, values)
    lines = once(path, columns=columns).output.splitlines()
    assert max(map(len, lines)) <= columns
    (at,) = (at for at, line in enumerate(lines) if "│ lately" in line)
    assert re.search(r"lately +▁+▂.*█ accuracy 0.9997 ", lines[at])
    assert re.search(r"│ +▁█ rare 4 ", lines[at + 1])


def test_odd_stores(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "none.pm", size="2MiB") as store:
        store["x"] = 1
    assert once(tmp_path / "none.pm").exit_code == 0
    assert once(tmp_path / "gone.pm").exit_code == 2
    (tmp_path / "text").write_text("no store")
    answer = once(tmp_path / "text")
    assert answer.exit_code == 1
    assert re.search("state +cannot be read", answer.output)
    assert "not a pmstore file" in answer.output
    assert "mode=" not in answer.output  # which is for programs in Python


def test_names_do_not_steer_the_terminal(tmp_path: Path) -> None:
    path = made(tmp_path / "run.pm", 40, "[red]evil\x1b[2J")
    answer = once(path)
    assert answer.exit_code == 0
    assert "\x1b[2J" not in answer.output
    assert "[red]evil" in answer.output


# ---- while a program trains


class Shown:
    """`pmstore top` in a terminal."""

    def __init__(self, *paths: Path) -> None:
        terminal, theirs = pty.openpty()
        self._terminal = terminal
        self.text = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pmstore", "top", "--interval", "0.1", *map(str, paths)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "60"},
            close_fds=True,
        )
        os.close(theirs)

    def read(self) -> bool:
        """What it wrote since; False: it has ended."""
        ready, _, _ = select.select([self._terminal], [], [], 0.1)
        if not ready:
            return True
        try:
            got = os.read(self._terminal, 1 << 16)
        except OSError:  # the other end is closed
            return False
        self.text += got.decode(errors="replace")
        return bool(got)

    def until(self, pattern: str) -> str:
        """Reads until it shows that. Escape sequences are left out."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if found := re.search(pattern, plain(self.text)):
                return found[0]
            if not self.read() and not re.search(pattern, plain(self.text)):
                break
        raise AssertionError(f"{pattern!r} is not in {plain(self.text)[-3000:]}")

    def ended(self) -> int:
        end = time.monotonic() + PATIENCE
        while self.read():
            assert time.monotonic() < end
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        with suppress(OSError):
            os.close(self._terminal)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@pytest.fixture
def trainer(shm: Path) -> Iterator[tuple[Path, Path, subprocess.Popen[str]]]:
    """A store, a file that stops its program when it appears, and that program's process."""
    path, stop = shm / "run.pm", shm / "stop"
    root = str(Path(__file__).resolve().parents[2])
    program = textwrap.dedent(TRAINER).format(root=root, path=str(path), stop=str(stop))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "step\n"
            yield path, stop, process
        finally:
            process.kill()


def test_it_ends_when_the_run_ends(trainer: Any) -> None:
    path, stop, process = trainer
    with closing(Shown(path)) as shown:
        shown.until(f"open for writing by process {process.pid}")
        shown.until(r"step [\d,]+ . [\d.,]+ steps a second")  # read beside its writer
        shown.until("risk reached the price")
        stop.touch()
        assert process.wait(PATIENCE) == 0
        assert shown.ended() == 0
        with pmstore.open(path, mode="r") as store:
            step = int(store["run/progress"][0])
        assert f"ended: closed at step {step:,}" in plain(shown.text)


def test_it_waits_for_a_store(shm: Path) -> None:
    words = [sys.executable, "-m", "pmstore", "top", "--wait", "--once", "-i", "0.1"]
    with subprocess.Popen(
        [*words, str(shm / "run.pm")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"pmstore: waiting for {shm / 'run.pm'}\n"
        made(shm / "made.pm").rename(shm / "run.pm")
        told, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, "")
    assert "nobody writes to it" in told


def test_it_says_that_the_run_died(trainer: Any) -> None:
    path, _, process = trainer
    with closing(Shown(path)) as shown:
        shown.until(f"open for writing by process {process.pid}")
        process.kill()
        process.wait()
        assert shown.ended() == 1
        assert "its process died: the store is as of its last commit, at step" in plain(shown.text)


def test_a_run_that_was_killed_before_the_first_look(trainer: Any) -> None:
    path, _, process = trainer
    process.stdout.readline()
    process.kill()
    process.wait()
    answer = once(path)
    assert "who did was killed: this is its last commit, at step" in answer.output
    assert "steps a second" not in answer.output


def test_ctrl_c_ends_it_and_leaves_the_run_alone(trainer: Any) -> None:
    path, _, process = trainer
    with closing(Shown(path)) as shown:
        shown.until(f"open for writing by process {process.pid}")
        shown.process.send_signal(signal.SIGINT)
        assert shown.ended() == 0
        assert process.poll() is None
