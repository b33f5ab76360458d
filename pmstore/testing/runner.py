"""The program that is crash-tested, and its runs in copies of the working directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pmstore.testing import crashboard
from pmstore.testing.outcomes import Finding, Kill, Outcome

_NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", "node_modules", ".mypy_cache", ".pytest_cache"
)
_DOMAINS = {1: "dax", 2: "file", 3: "process", 4: "emulated"}


@dataclass(frozen=True)
class Program:
    """A program that is crash-tested, where there is more to say of it than its command.

    Attributes:
        resume: the command that goes on after a kill; empty: the same.
        results: files below the folder that it leaves, compared as the state is.
        timeout_seconds: that one run may take.
        grace_seconds: between SIGTERM and SIGKILL, with model "term".
    """

    command: Sequence[str]
    resume: Sequence[str] = ()
    results: Sequence[str] = ()
    timeout_seconds: float = 600.0
    grace_seconds: float = 5.0

    def __post_init__(self) -> None:
        for name, words in (
            ("command", self.command),
            ("resume", self.resume),
            ("results", self.results),
        ):
            if isinstance(words, (str, bytes)) or not isinstance(words, Sequence):
                raise TypeError(
                    f"{name}={words!r}: a list of words, such as "
                    f"{['out.txt'] if name == 'results' else ['python', 'train.py']}"
                )
            wrong = [one for one in words if not isinstance(one, (str, bytes, os.PathLike))]
            if wrong:
                raise TypeError(f"{name}: {wrong[0]!r} is no str")
        if not self.command:
            raise ValueError("command: empty, so there is nothing to run")


@dataclass(frozen=True)
class Run:
    """One run: how it ended, the end of what it said, and what it noted on the board."""

    status: int
    said: str
    seen: crashboard.Seen

    @property
    def domain(self) -> str:
        return _DOMAINS.get(self.seen.domain, "")


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # with the workers it may have started


class Runner:
    """Runs a program in copies of a folder. terminates: a kill at a time begins with SIGTERM."""

    def __init__(self, program: Program, folder: Path, terminates: bool) -> None:
        self.program = program
        self.terminates = terminates
        self._folder = folder
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended = False

    def end(self) -> None:
        """Kills what runs, in other threads, and lets nothing more begin."""
        with self._lock:
            self._ended = True
            for child in self._running:
                _kill_group(child)

    def fresh_copy(self, into: Path) -> Path:
        shutil.copytree(self._folder, into, ignore=_NOT_COPIED, symlinks=True)
        return into

    def run(
        self,
        cwd: Path,
        kill: Kill | None = None,
        power_seed: int | None = None,
        *,
        resumed: bool = False,
    ) -> Run:
        board, output = cwd.with_name(cwd.name + ".board"), cwd.with_name(cwd.name + ".output")
        timeout = self.program.timeout_seconds
        point = kill.primitive if kill is not None else 0
        environment = crashboard.environment(board, at=point, power_seed=power_seed)
        patience = kill.delay_seconds if kill is not None and not kill.primitive else timeout
        with output.open("wb") as file:
            with self._lock:
                if self._ended:
                    raise Finding(Outcome.MANUAL, "the crash test was ended")
                child = subprocess.Popen(
                    list((resumed and self.program.resume) or self.program.command),
                    cwd=cwd,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
                self._running.add(child)
            try:
                child.wait(patience)
            except subprocess.TimeoutExpired:
                if patience == timeout:
                    raise Finding(Outcome.MANUAL, f"it did not end within {timeout:g} s") from None
                if self.terminates:
                    child.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(self.program.grace_seconds)
            finally:
                _kill_group(child)
                child.wait()
                with self._lock:
                    self._running.discard(child)
        said = output.read_bytes()[-400:].decode(errors="replace").strip()
        return Run(child.returncode, said, crashboard.read(board))
