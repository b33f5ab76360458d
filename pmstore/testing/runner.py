"""The program that is crash-tested, and its runs in copies of the working directory."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pmstore.testing import crashboard, processes
from pmstore.testing.outcomes import Finding, Kill, Outcome, Trial

_NOT_COPIED = shutil.ignore_patterns(
    ".git",
    ".venv",
    "__pycache__",
    "node_modules",
    ".mypy_cache",
    ".pytest_cache",
    "pmstore-crashtest-*",  # the folder of a crash test, if temporary files go there
)
DOMAINS = {1: "dax", 2: "file", 3: "process", 4: "emulated"}


@dataclass(frozen=True)
class Program:
    """Describes a program that is crash-tested, where there is more to say of it than its command.

    Attributes:
        resume: the command that goes on after a kill; empty: the same.
        results: files below the folder that it leaves, compared as the state is.
        timeout_seconds: that one run may take.
        grace_seconds: between SIGTERM and SIGKILL, with model "term".
        check: a command that looks at what a whole run left in the folder; ends with status 0 if
            that is as it should be.
    """

    command: Sequence[str]
    resume: Sequence[str] = ()
    results: Sequence[str] = ()
    timeout_seconds: float = 600.0
    grace_seconds: float = 5.0
    check: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("command", "resume", "results", "check"):
            words = getattr(self, name)
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
    """One run of the command.

    Attributes:
        status, said: how it ended, and the end of what it said.
        seen: what its processes noted on the board, in the order in which they opened a store.
        kills: how many of the ordered kills are behind it.
        failed: it ended badly, and no kill is the reason.
        over: nothing is left to be resumed.
        seconds: that it took.
    """

    status: int
    said: str
    seen: Sequence[crashboard.Seen]
    kills: int
    failed: bool
    over: bool
    seconds: float


class Runner:
    """Runs a program in copies of a folder. terminates: a kill at a time begins with SIGTERM."""

    def __init__(self, program: Program, folder: Path, terminates: bool) -> None:
        self.program = program
        self.terminates = terminates
        self._folder = folder
        self._lock = threading.Lock()
        self._running: dict[subprocess.Popen[bytes], str] = {}  # with the tokens of their boards
        self._ended = False

    def end(self) -> None:
        """Kills what other threads run, and lets nothing more begin."""
        with self._lock:
            self._ended = True
            for child, token in self._running.items():
                processes.end(child, token)

    def fresh_copy(self, into: Path) -> Path:
        shutil.copytree(self._folder, into, ignore=_NOT_COPIED, symlinks=True)
        return into

    def check(self, cwd: Path) -> None:
        """Runs the user's own check. Raises: Finding."""
        if not self.program.check:
            return
        try:
            ran = subprocess.run(
                list(self.program.check),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=self.program.timeout_seconds,
            )
        except subprocess.TimeoutExpired:
            raise Finding(Outcome.MANUAL, "the check does not end") from None
        if ran.returncode:
            said = ran.stdout[-400:].decode(errors="replace").strip()
            raise Finding(Outcome.DIFFERENT, f"the check ends with status {ran.returncode}: {said}")

    @contextlib.contextmanager
    def started(
        self, cwd: Path, environment: dict[str, str], *, resumed: bool
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Starts the program. When the block is left, the program has ended, with all that it has
        started."""
        token = environment["PMSTORE_CRASH_TOKEN"]
        with _output(cwd).open("wb") as file, self._lock:
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
            self._running[child] = token
        try:
            yield child
        finally:
            processes.end(child, token)
            child.wait()
            with self._lock:
                del self._running[child]

    def run(
        self,
        cwd: Path,
        kill: Kill | None = None,
        power_seed: int | None = None,
        *,
        resumed: bool = False,
    ) -> Run:
        """Runs a program of one store until it ends or is killed. A kill counts as behind it also
        where the program ended before."""
        board, timeout = board_of(cwd), self.program.timeout_seconds
        point = kill.primitive if kill is not None else 0
        environment = crashboard.environment(board, at=point, power_seed=power_seed)
        patience = kill.delay_seconds if kill is not None and not kill.primitive else timeout
        began = time.monotonic()
        with self.started(cwd, environment, resumed=resumed) as child:
            try:
                child.wait(patience)
            except subprocess.TimeoutExpired:
                if patience == timeout:
                    raise Finding(Outcome.MANUAL, f"it did not end within {timeout:g} s") from None
                if self.terminates:
                    child.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(self.program.grace_seconds)
        # how a program that was asked to end says that it did so is its own affair
        well = (0,) if kill is None else (0, -signal.SIGKILL)
        page, status = crashboard.read(board), child.returncode
        return Run(
            status=status,
            said=said(cwd),
            seen=[page] if page.path else [],
            kills=int(kill is not None),
            failed=status not in well and not (kill is not None and self.terminates),
            over=kill is None,
            seconds=time.monotonic() - began,
        )


def board_of(cwd: Path) -> Path:
    return cwd.with_name(cwd.name + ".board")


def _output(cwd: Path) -> Path:
    return cwd.with_name(cwd.name + ".output")


def said(cwd: Path, characters: int = 400) -> str:
    """Returns the end of what the program said in its last run there."""
    return _output(cwd).read_bytes()[-characters:].decode(errors="replace").strip()


def in_turn(
    todo: Sequence[Callable[[], Trial]],
    runner: Runner,
    jobs: int,
    on_trial: Callable[[Trial], None],
) -> tuple[Trial, ...]:
    """Runs the trials, so many at a time, and returns them by number."""
    found = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(one) for one in todo]
        try:
            for future in concurrent.futures.as_completed(futures):
                found.append(future.result())
                on_trial(found[-1])
        except BaseException:  # Ctrl-C: nobody waits for what runs
            runner.end()
            raise
        finally:
            for future in futures:
                future.cancel()
    return tuple(sorted(found, key=lambda trial: trial.number))
