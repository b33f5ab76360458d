"""What the tests run on: programs that begin as forks, turns, what is quick."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import durations
import pytest
import pythons
import turns

pytest.importorskip("torch", reason="needs torch: pip install 'pmstore[torch]'")

PROGRAM = """
import atexit, os, sys, threading, time
atexit.register(print, "last")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
print(sys.argv[1:], os.environ.get("COLOUR"), os.getcwd(), __name__, "torch" in sys.modules)
sys.exit(int(sys.argv[1]))
"""


def test_a_program_is_as_one_that_begins_anew(tmp_path: Path) -> None:
    environment = {**os.environ, "COLOUR": "red"}
    (tmp_path / "program.py").write_text(PROGRAM)
    for words in (["-c", PROGRAM], ["-W", "ignore", str(tmp_path / "program.py")]):
        ended = pythons.run([*words, "3", "x"], cwd=tmp_path, env=environment, timeout=60)
        assert ended.returncode == 3
        assert ended.stdout == f"['3', 'x'] red {tmp_path} __main__ True\nthread\nlast\n"
        assert ended.stderr == ""
    assert "COLOUR" not in os.environ


def test_how_a_program_may_end() -> None:
    failed = pythons.run(["-c", "1 / 0"], timeout=60)
    assert (failed.returncode, failed.stderr.splitlines()[-1]) == (
        1,
        "ZeroDivisionError: division by zero",
    )
    refused = pythons.run(["-c", "import sys; sys.exit('no')"], timeout=60)
    assert (refused.returncode, refused.stderr) == (1, "no\n")
    killed = pythons.start(["-c", "import time; time.sleep(1000)"])
    assert killed.poll() is None
    killed.kill()
    killed.communicate(60)
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        pythons.run(["-c", "import time; time.sleep(1000)"], timeout=0.1)


def test_one_that_is_alone_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns.tempfile, "tempdir", str(tmp_path))
    said, told = os.pipe()
    here = turns.Turns("run")
    with here.taken(alone=False):
        child = os.fork()
        if child == 0:
            with turns.Turns("run").taken(alone=False):  # beside each other
                os.write(told, b"beside ")
            with turns.Turns("run").taken(alone=True):
                os.write(told, b"alone ")
            os._exit(0)
        assert os.read(said, 100) == b"beside "
        time.sleep(0.1)
        os.set_blocking(said, False)
        with pytest.raises(BlockingIOError):
            os.read(said, 100)
    os.waitpid(child, 0)
    assert os.read(said, 100) == b"alone "
    here.close()
    os.close(said)
    os.close(told)
    assert list(tmp_path.iterdir()) == []


def test_what_is_quick() -> None:
    assert durations.is_quick(0.4, 0.09, 0)
    assert not durations.is_quick(0.6, 0.09, 0)
    assert not durations.is_quick(0.4, 0.2, 0)
    assert not durations.is_quick(0.05, 0.05, 1)
