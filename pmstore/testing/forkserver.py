"""Kills workloads by the hundred, each at a chosen instruction: see `pmstore.testing`."""

from __future__ import annotations

import gc
import importlib
import json
import mmap
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from pmstore._engine.crash_points import kill_at_primitive


def shared_words(count: int) -> memoryview:
    """Returns `count` signed integers of 64 bits, zero, that forked children share with their
    parent.

    Each is written by one store, so a kill leaves the old value or the new one. (`struct.pack_into`
    would not do: it clears the place first, and a child killed just then has acknowledged step 0.)
    """
    return memoryview(mmap.mmap(-1, 8 * count)).cast("q")


@dataclass(frozen=True)
class KilledRun:
    """Says what became of one child.

    Attributes:
        acknowledged: the last step that the workload acknowledged; -1: none.
        killed: it died of SIGKILL, its own or ours.
        exit_code: if it was not killed: 0, or 1 after an exception (whose traceback is on stderr).
    """

    acknowledged: int
    killed: bool
    exit_code: int


class ForkServer:
    """Runs workloads in forked children and kills them. It is also a context manager, which ends
    the server.

    search_path: folders for the server's `sys.path`, where the workloads' modules are. preload:
        modules that it imports at once. environment: more of it.
    """

    def __init__(
        self,
        search_path: Sequence[str] = (),
        *,
        preload: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command = [sys.executable, "-c", "from pmstore.testing.forkserver import _serve; _serve()"]
        path = os.pathsep.join([*search_path, os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [*command, *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {}), "PYTHONPATH": path},
        )

    def run(
        self,
        workload: str,
        args: Sequence[Any] = (),
        *,
        delay_seconds: float | None = None,
        kill_at: int = 0,
        timeout_seconds: float = 60.0,
    ) -> KilledRun:
        """Runs `module:function` in a child until it ends or is killed.

        args: anything JSON has. delay_seconds: SIGKILL so long after the fork. kill_at: SIGKILL at
            that persistence primitive. timeout_seconds: then it is killed whatever else was asked
            for.
        """
        asked = {"workload": workload, "args": list(args), "kill_at": kill_at}
        return KilledRun(**self._ask("run", **asked, delay=delay_seconds, timeout=timeout_seconds))

    def start(self, workload: str, args: Sequence[Any] = ()) -> int:
        """Runs `module:function` in a child beside others. Returns its id, which stays its own
        until `ended` has told of it. Nothing is acknowledged: the first argument does nothing."""
        return int(self._ask("start", workload=workload, args=list(args), kill_at=0))

    def ended(self, pids: Sequence[int]) -> dict[int, int]:
        """Which of the children that were started have ended, and how, as Popen has it: each is
        told of once."""
        return {int(pid): status for pid, status in self._ask("ended", pids=list(pids)).items()}

    def _ask(self, what: str, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"what": what, **request}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fork server ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """Ends the server. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve() -> None:
    """Runs the server's loop: it reads one request a line, and writes one answer a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a workload prints is no answer
    for module in sys.argv[1:]:
        importlib.import_module(module)
    board = shared_words(1)
    answer = {"run": _run, "start": _fork, "ended": _ended}
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(answer[request["what"]](request, board)) + "\n")
        answers.flush()


def _run(request: dict[str, Any], board: memoryview) -> dict[str, Any]:
    board[0] = -1
    status = _wait(_fork(request, board), request["delay"], request["timeout"])
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return {
        "acknowledged": board[0],
        "killed": killed,
        "exit_code": 0 if killed else os.waitstatus_to_exitcode(status),
    }


def _fork(request: dict[str, Any], board: memoryview) -> int:
    module, _, name = request["workload"].partition(":")
    function = getattr(importlib.import_module(module), name)
    gc.collect()
    gc.freeze()  # else each collection of a child looks at all of torch, and copies its pages
    child = os.fork()
    if child == 0:
        _work(function, board, request)
    return child


def _ended(request: dict[str, Any], _: memoryview) -> dict[int, int]:
    ended = {}
    for pid in request["pids"]:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def _work(function: Callable[..., object], board: memoryview, request: dict[str, Any]) -> None:
    code = 1
    try:
        if request["kill_at"]:
            kill_at_primitive(request["kill_at"])
        function(partial(board.__setitem__, 0), *request["args"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _wait(child: int, delay: float | None, timeout: float) -> int:
    """Reaps the child, and kills it after the delay. Returns its wait status."""
    end = time.monotonic() + (timeout if delay is None else min(delay, timeout))
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.0002)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]
