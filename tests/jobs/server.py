"""Forks the ranks of jobs from a process that has imported torch, so that a start is fast.

Who asked for them kills, stops and watches them himself, by their ids."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve()
_PACKAGE_FOLDER = _HERE.parents[len(__package__.split("."))]
_PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """One that nothing listens on, below those that the kernel gives out."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Ranks:
    """Processes under way. pids: by rank; status: how those that ended did, as Popen has it."""

    def __init__(self, server: JobServer, pids: list[int]) -> None:
        self.pids = pids
        self.status: dict[int, int] = {}
        self._server = server

    def poll(self) -> dict[int, int]:
        """By rank: who has ended, and how."""
        left = [pid for rank, pid in enumerate(self.pids) if rank not in self.status]
        for pid, status in self._server.ask(op="poll", pids=left)["ended"]:
            self.status[self.pids.index(pid)] = status
        return self.status

    def wait(self, seconds: float) -> bool:
        """Whether all have ended within that time."""
        end = time.monotonic() + seconds
        while len(self.poll()) < len(self.pids):
            if time.monotonic() > end:
                return False
            time.sleep(0.003)
        return True

    def signal(self, rank: int, number: int = signal.SIGKILL) -> bool:
        """Whether the rank was still there. (Its id stays its own until poll has seen its end.)"""
        if rank in self.status:
            return False
        os.kill(self.pids[rank], number)
        return True

    def end(self, grace: float = 0.0) -> list[int]:
        """Kills those left after some seconds. Returns which had to be."""
        if self.wait(grace):
            return []
        left = [rank for rank in range(len(self.pids)) if self.signal(rank)]
        assert self.wait(30)
        return [rank for rank in left if self.status[rank] == -signal.SIGKILL]


class JobServer:
    """Also a context manager, which ends the server and with it all ranks.

    package: whose modules have the functions of ranks; those named are imported before the forks.
    """

    def __init__(
        self, package: str = __package__, modules: Sequence[str] = ("life", "bad")
    ) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from {__package__}.server import serve; serve()",
                package,
                *modules,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(
                    [str(_PACKAGE_FOLDER), os.environ.get("PYTHONPATH", "")]
                ),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",  # none that a fork would lose
            },
        )

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the job server ended with status {self._process.wait()}")
        return json.loads(line)

    def start(
        self,
        function: str,
        folder: Path,
        arguments: Sequence[Sequence[Any]],
        namespaces: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Ranks:
        """`module:function` of the package in one process a rank, as started by hand: with RANK,
        WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

        arguments: by rank. folder: gets `stderr{rank}`. namespaces: files of network namespaces, by
            rank, if each has its own. environment: more of it.
        """
        world = {
            "WORLD_SIZE": str(len(arguments)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        told = self.ask(
            op="start",
            function=function,
            folder=str(folder),
            arguments=[list(one) for one in arguments],
            environment=world | dict(environment or {}),
            namespaces=list(namespaces),
        )
        return Ranks(self, told["pids"])

    def close(self) -> None:
        """Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def __enter__(self) -> JobServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve() -> None:
    """One request a line, one answer a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a rank prints is no answer
    # the first optimizer imports torch._dynamo: here once, before the forks
    _, package, *modules = sys.argv
    for name in (*(f"{package}.{module}" for module in modules), "torch._dynamo"):
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(_start(request) if request["op"] == "start" else _poll(request)))
        answers.write("\n")
        answers.flush()


def _start(request: dict[str, Any]) -> dict[str, Any]:
    pids = []
    for rank, arguments in enumerate(request["arguments"]):
        pid = os.fork()
        if pid == 0:
            _rank(rank, arguments, request)
        pids.append(pid)
    return {"pids": pids}


def _poll(request: dict[str, Any]) -> dict[str, Any]:
    ended = []
    for pid in request["pids"]:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return {"ended": ended}


def _rank(rank: int, arguments: list[Any], request: dict[str, Any]) -> None:
    code = 1
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        errors = os.open(f"{request['folder']}/stderr{rank}", flags, 0o600)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # where it hangs
        if request["namespaces"]:
            place = os.open(request["namespaces"][rank], os.O_RDONLY)
            if libc.setns(place, 0) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        os.environ.update(request["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
        module, _, name = request["function"].partition(":")
        function = getattr(importlib.import_module(f"{sys.argv[1]}.{module}"), name)
        function(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
