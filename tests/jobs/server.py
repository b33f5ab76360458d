"""Forks the ranks of jobs from a process that has imported torch, so that a start is fast.

Who asked for them kills, stops and watches them himself, by their ids."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import random
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pmstore.testing import ForkServer

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

    def __init__(self, forks: ForkServer, pids: list[int]) -> None:
        self.pids = pids
        self.status: dict[int, int] = {}
        self._forks = forks

    def poll(self) -> dict[int, int]:
        """By rank: who has ended, and how."""
        left = [pid for rank, pid in enumerate(self.pids) if rank not in self.status]
        for pid, status in self._forks.ended(left).items():
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
    forks: a server that others have, too; it finds the package, and is not ended.
    """

    def __init__(
        self,
        package: str = __package__,
        modules: Sequence[str] = ("life", "bad"),
        forks: ForkServer | None = None,
    ) -> None:
        self._package = package
        self._shared = forks is not None
        if forks is not None:
            self._forks = forks
            return
        # the first optimizer imports torch._dynamo: here once, before the forks
        imported = [f"{package}.{module}" for module in modules]
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # none that a fork loses
        self._forks = ForkServer(
            [str(_PACKAGE_FOLDER)], preload=[*imported, "torch._dynamo"], environment=threads
        )

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
        pids = []
        for rank, given in enumerate(arguments):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **world, **(environment or {})}
            namespace = namespaces[rank] if namespaces else None
            told = [f"{self._package}.{function}", list(given), str(folder), own, namespace]
            pids.append(self._forks.start(f"{__package__}.server:live", told))
        return Ranks(self._forks, pids)

    def close(self) -> None:
        """Idempotent."""
        if not self._shared:
            self._forks.close()

    def __enter__(self) -> JobServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def live(
    acknowledge: object,
    function: str,
    arguments: list[Any],
    folder: str,
    environment: dict[str, str],
    namespace: str | None,
) -> None:
    """One rank's."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    errors = os.open(f"{folder}/stderr{environment['RANK']}", flags, 0o600)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where it hangs
    if namespace is not None:
        place = os.open(namespace, os.O_RDONLY)
        if libc.setns(place, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    os.environ.update(environment)
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(*arguments)
