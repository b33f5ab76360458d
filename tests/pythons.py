"""Python programs that begin at once: each is a fork of a process that has imported torch, which
costs a new one seconds.

    run(["-c", program, "word"])           as subprocess.run([sys.executable, "-c", ...]) does it
    start(["program.py", "word"], ...)     as subprocess.Popen, with files for what is printed
    server().run("test_kills:work", ...)   as a ForkServer does it: one for all tests of a process

A program has its own arguments, environment, folder and `__main__`, and its threads and exit
functions end as those of others do. What the interpreter reads when it begins (PYTHONHASHSEED,
OMP_NUM_THREADS) is of the process that forks: one thread. What has to begin anew, or to end as the
interpreter does, is no program for this.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from pmstore.testing import ForkServer

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
PRELOAD = ("numpy", "torch", "torch._dynamo", "torch.distributed.tensor.parallel")
PRELOAD += ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict")
PRELOAD += ("pmstore.torch", "pmstore.torch.optim", "pmstore.dcp")
FOLDERS = ("training",)
"""Where workloads are, beside this one and the project's."""
environment: dict[str, str] | None = None
"""Of the server, whatever the first test that asks for it has put into its own."""
_PR_SET_PDEATHSIG = 1
_server: ForkServer | None = None
_folder: tempfile.TemporaryDirectory[str] | None = None


def server() -> ForkServer:
    """One for all tests of a process: from the first that asks for it to the last."""
    global _server, _folder
    if _server is None:
        _folder = tempfile.TemporaryDirectory(prefix="pmstore-test-pythons-")
        here = Path(__file__).parent
        path = [str(here), str(here.parent), *(str(here / name) for name in FOLDERS)]
        began = dict(os.environ) if environment is None else environment
        with mock.patch.dict(os.environ, began, clear=True):
            _server = ForkServer(path, preload=PRELOAD, environment=ONE_THREAD)
    return _server


def server_pid() -> int | None:
    return _server and _server._process.pid


def close() -> None:
    global _server, _folder
    if _server is not None and _folder is not None:
        _server.close()
        _folder.cleanup()
    _server = _folder = None


class Python:
    """A program under way. pid; returncode: None, or as Popen has it."""

    def __init__(self, words: Sequence[str], cwd: Path | None, env: Mapping[str, str] | None):
        self._forks = server()
        assert _folder is not None
        self.words = list(words)
        self._said = Path(tempfile.mkdtemp(dir=_folder.name))
        for name in ("stdout", "stderr"):  # one that is killed at once makes none
            (self._said / name).touch()
        given = {
            "words": self.words,
            "cwd": str(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "said": str(self._said),
        }
        self.returncode: int | None = None
        self.pid = self._forks.start("pythons:live", [json.dumps(given)])

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.ended([self.pid]).get(self.pid)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it printed, when it has ended. Raises: subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if timeout is not None and end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.words, timeout)
            time.sleep(0.005)
        out, error = (
            (self._said / name).read_text(errors="replace") for name in ("stdout", "stderr")
        )
        return out, error

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    words: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Python:
    return Python(words, cwd, env)


def run(
    words: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    started = start(words, cwd=cwd, env=env)
    try:
        out, error = started.communicate(timeout)
    except BaseException:
        started.kill()
        started.communicate(30)
        raise
    assert started.returncode is not None
    return subprocess.CompletedProcess(started.words, started.returncode, out, error)


def _leave_out_the_ends_of_libraries() -> None:
    """torch reports on its compiler, and takes itself apart: three quarters of what a small program
    costs."""
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        one.atexit = False
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        atexit.unregister(dynamo.dump_compile_times)


def live(acknowledge: object, told: str) -> NoReturn:
    """The program's process."""
    given: dict[str, Any] = json.loads(told)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{given['said']}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(given["environment"])
    os.chdir(given["cwd"])
    words: list[str] = given["words"]
    while words[0] == "-W":
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        words = words[2:]
    _leave_out_the_ends_of_libraries()
    code = 0
    try:
        _execute(words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        code, sys.last_value = 1, error
        sys.excepthook(type(error), error, error.__traceback__)
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _execute(words: list[str]) -> None:
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    inherited = [one for one in sys.path if one]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[:] = ["", *filter(None, path), *inherited]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = __builtins__
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = list(words)
        sys.path[:] = [str(Path(words[0]).resolve().parent), *filter(None, path), *inherited]
        runpy.run_path(words[0], run_name="__main__")
