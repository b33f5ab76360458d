"""Crash-testing a training program: kill it again and again, resume it, and say what became of its
state.

    result = crash_test(["python", "train.py"], trials=20, verify=check)
    assert result.ok, result

The program is run in copies of the working directory, so it has to name its store by a relative
path. Two runs that nobody kills come first: they show how many persistence points there are, how
the state ends, and whether it always ends so. Each trial then starts afresh, kills the program at a
persistence point (or at a random time), checks a copy of the store, kills the resumed program once
more, and lets it end. What counts as the end is the store, and the files that `results` names.

Source: the classes of outcomes, and the comparison with a run that nobody kills, follow ckpt-chaos
    (PyPI), which kills at file boundaries.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import math
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import numpy as np

import pmstore
from pmstore.errors import PmstoreError
from pmstore.testing import crashboard

__all__ = ["CrashTestResult", "Kill", "Outcome", "Trial", "crash_test"]

Verify = Callable[[pmstore.Store], object]

_NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", "node_modules", ".mypy_cache", ".pytest_cache"
)
_DOMAINS = {1: "dax", 2: "file", 3: "process", 4: "emulated"}
_POWER_DOMAINS = ("dax", "file", "emulated")

Model = Literal["kill", "power", "term"]


class Outcome(Enum):
    """What became of a program that was killed, from best to worst."""

    CLEAN = "clean resume"
    MANUAL = "needs manual work"
    DIFFERENT = "silent resume with different state"
    LOST = "lost work"


@dataclass(frozen=True)
class Kill:
    """One death. primitive: the persistence point, 0 if it came at a random time. acknowledged:
    commits that had returned;
    found: commits that the store held afterwards, None if there was no store yet."""

    primitive: int
    delay_seconds: float
    acknowledged: int = 0
    found: int | None = None

    def __str__(self) -> str:
        return f"point {self.primitive}" if self.primitive else f"{self.delay_seconds:.3f} s"


@dataclass(frozen=True)
class Trial:
    """One program killed and resumed. commits: what the store held at the end, None if it did not
    get there."""

    number: int
    kills: tuple[Kill, ...]
    outcome: Outcome
    detail: str
    commits: int | None


@dataclass(frozen=True)
class CrashTestResult:
    """What `crash_test` found. `ok`: every trial was a clean resume.

    primitives, commits: of the run that nobody killed. deterministic: a second such run ended in
        the same state; if not, `not_compared` has the names that two such runs leave with different
        contents, and only all others were compared.
    """

    seed: int
    model: str
    domain: str
    primitives: int
    commits: int
    deterministic: bool
    seconds: float
    trials: tuple[Trial, ...] = field(default=())
    not_compared: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(trial.outcome is Outcome.CLEAN for trial in self.trials)

    def count(self, outcome: Outcome) -> int:
        return sum(trial.outcome is outcome for trial in self.trials)

    def __str__(self) -> str:
        lines = [
            (
                f"{self.count(Outcome.CLEAN)} of {len(self.trials)} trials resumed cleanly (seed "
                f"{self.seed})"
            )
        ]
        for trial in self.trials:
            if trial.outcome is not Outcome.CLEAN:
                kills = ", ".join(map(str, trial.kills))
                lines.append(
                    f"trial {trial.number}, killed at {kills}: {trial.outcome.value}: "
                    f"{trial.detail}"
                )
        return "\n".join(lines)


class _Finding(Exception):
    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.acknowledged = 0


# ---- a store's state -----------------------------------------------------------------------------


def _leaves(mapping: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in mapping:
        value = mapping[name]
        if isinstance(value, pmstore.Group):
            yield from _leaves(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


def _content(value: Any) -> bytes:
    if isinstance(value, pmstore.Slots):
        value = value.current
    if hasattr(value, "detach"):  # a tensor, of a dtype that numpy may not have
        import torch

        raw = value.detach().contiguous().flatten().view(torch.uint8).numpy()
        return f"{value.dtype} {tuple(value.shape)} ".encode() + bytes(raw)
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} ".encode() + value.tobytes()
    return repr(
        [_content(item) for item in value] if isinstance(value, pmstore.List) else value
    ).encode()


def _digest(store: pmstore.Store) -> dict[str, str]:
    """Names to hashes of what they hold."""
    return {name: hashlib.sha256(_content(value)).hexdigest() for name, value in _leaves(store)}


def _digest_files(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Of the files that are there, the same."""
    found = {name: folder / name for name in names}
    return {
        f"file {name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in found.items()
        if path.is_file()
    }


def _examine(path: Path, verify: Verify | None) -> tuple[int, dict[str, str]]:
    """Opens a copy of the store, as the resumed program will open it; its number of commits and
    state."""
    copy = path.with_name(path.name + ".examined")
    shutil.copyfile(path, copy)
    try:
        with pmstore.open(copy, mode="r+", force=True) as store:  # nobody wrote while it was copied
            problems = store.check().problems
            if problems:
                raise _Finding(Outcome.MANUAL, f"the check finds: {problems[0]}")
            if verify is not None and store.epoch > 0:
                try:
                    answer = verify(store)
                except Exception as error:  # the user's function, in any way
                    raise _Finding(
                        Outcome.DIFFERENT, f"the verification fails: {error!r}"
                    ) from None
                if answer is False:
                    raise _Finding(Outcome.DIFFERENT, "the verification says no")
            return store.epoch, _digest(store)
    except (PmstoreError, OSError) as error:
        raise _Finding(Outcome.MANUAL, f"the store does not open: {error}") from None
    finally:
        copy.unlink(missing_ok=True)


# ---- the program ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    status: int
    said: str
    primitives: int
    acknowledged: int
    domain: str
    path: str


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # with the workers it may have started


class _Program:
    """The user's command, run in copies of the working directory.

    resume: the command that goes on after a kill. results: files it leaves. grace_seconds: between
        SIGTERM and SIGKILL, where a kill is at a time; None: there is no SIGTERM.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        timeout_seconds: float,
        resume: Sequence[str] = (),
        results: Sequence[str] = (),
        grace_seconds: float | None = None,
    ) -> None:
        self.command = list(command)
        self.resume = list(resume or command)
        self.folder = folder
        self.timeout_seconds = timeout_seconds
        self.results = list(results)
        self.grace_seconds = grace_seconds
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
        shutil.copytree(self.folder, into, ignore=_NOT_COPIED, symlinks=True)
        return into

    def run(
        self,
        cwd: Path,
        kill: Kill | None = None,
        power_seed: int | None = None,
        *,
        resumed: bool = False,
    ) -> _Run:
        board, output = cwd.with_name(cwd.name + ".board"), cwd.with_name(cwd.name + ".output")
        point = kill.primitive if kill is not None else 0
        environment = crashboard.environment(board, at=point, power_seed=power_seed)
        patience = (
            kill.delay_seconds if kill is not None and not kill.primitive else self.timeout_seconds
        )
        with output.open("wb") as file:
            with self._lock:
                if self._ended:
                    raise _Finding(Outcome.MANUAL, "the crash test was ended")
                child = subprocess.Popen(
                    self.resume if resumed else self.command,
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
                if patience == self.timeout_seconds:
                    raise _Finding(
                        Outcome.MANUAL, f"it did not end within {self.timeout_seconds:g} s"
                    ) from None
                if self.grace_seconds is not None:
                    child.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(self.grace_seconds)
            finally:
                _kill_group(child)
                child.wait()
                with self._lock:
                    self._running.discard(child)
        seen = crashboard.read(board)
        said = output.read_bytes()[-400:].decode(errors="replace").strip()
        return _Run(
            child.returncode,
            said,
            seen.primitives,
            seen.acknowledged,
            _DOMAINS.get(seen.domain, ""),
            seen.path,
        )


@dataclass(frozen=True)
class _Reference:
    """What a run that nobody kills does."""

    store: str
    primitives: int
    commits: int
    seconds: float
    domain: str
    state: dict[str, str]
    differs: frozenset[str] = frozenset()
    """Names that another such run left with other contents."""
    steady: bool = True
    """Another such run made as many commits."""


def _differing(a: dict[str, str], b: dict[str, str]) -> list[str]:
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def _reference(program: _Program, cwd: Path, verify: Verify | None) -> _Reference:
    program.fresh_copy(cwd)
    began = time.monotonic()
    run = program.run(cwd)
    seconds = time.monotonic() - began
    if run.status != 0:
        raise ValueError(
            f"the program ends with status {run.status} without being killed: {run.said}"
        )
    if not run.path:
        raise ValueError("the program opens no store")
    path = (cwd / run.path).resolve()
    if not path.is_relative_to(cwd.resolve()):
        raise ValueError(
            f"the program names its store {run.path}: the path has to be relative, because each "
            "trial has its own"
        )
    if not run.acknowledged:
        raise ValueError("the program commits nothing")
    try:
        epoch, state = _examine(path, verify)
    except _Finding as finding:
        raise ValueError(f"after a run that nobody killed: {finding}") from None
    if missing := [name for name in program.results if not (cwd / name).is_file()]:
        raise ValueError(f"a run that nobody killed leaves no file {missing[0]}")
    state |= _digest_files(cwd, program.results)
    return _Reference(
        str(path.relative_to(cwd.resolve())), run.primitives, epoch, seconds, run.domain, state
    )


# ---- trials --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    number: int
    kills: tuple[Kill, ...]
    power_seed: int | None


def _plan(trials: int, reference: _Reference, model: str, seed: int) -> list[_Plan]:
    """The first kill of trial i lies in the ith part of all points, so that all of the run is
    covered; every third is at a random time. SIGTERM always is."""
    chance = random.Random(seed)
    plans = []
    for i in range(trials):
        share = reference.primitives / trials
        first = Kill(math.floor(share * i + chance.random() * share) + 1, 0.0)
        if i % 3 == 2 and model == "kill":
            first = Kill(0, chance.uniform(0.0, reference.seconds))
        second = Kill(chance.randint(1, reference.primitives), 0.0)
        if model == "term":
            first, second = (Kill(0, chance.uniform(0.0, reference.seconds)) for _ in range(2))
        plans.append(
            _Plan(i + 1, (first, second), chance.getrandbits(63) if model == "power" else None)
        )
    return plans


def _die(
    program: _Program,
    cwd: Path,
    path: Path,
    kill: Kill,
    power_seed: int | None,
    verify: Verify | None,
    had: int,
    resumed: bool,
) -> Kill:
    """Runs until the kill, and looks at what it left. had: commits before."""
    run = program.run(cwd, kill, power_seed, resumed=resumed)
    asked_to_end = program.grace_seconds is not None  # how it says that it did so is its own affair
    if run.status not in (0, -signal.SIGKILL) and not asked_to_end:
        raise _Finding(
            Outcome.MANUAL,
            f"{'resumed, ' if had else ''}it ended with status {run.status}: {run.said}",
        )
    acknowledged = max(had, run.acknowledged)
    if not path.exists():
        if acknowledged:
            raise _Finding(Outcome.LOST, "the store is gone")
        return Kill(kill.primitive, kill.delay_seconds)
    try:
        found, _ = _examine(path, verify)
    except _Finding as finding:
        finding.acknowledged = acknowledged
        raise
    if found < acknowledged:
        raise _Finding(
            Outcome.LOST, f"{acknowledged} commits had returned, the store holds {found}"
        )
    return Kill(kill.primitive, kill.delay_seconds, acknowledged, found)


def _one_trial(
    plan: _Plan,
    program: _Program,
    cwd: Path,
    reference: _Reference,
    verify: Verify | None,
    compare: bool,
    keep: Path | None,
) -> Trial:
    program.fresh_copy(cwd)
    path = cwd / reference.store
    kills: list[Kill] = []
    found = 0
    try:
        for kill in plan.kills:
            kills.append(kill)
            kills[-1] = _die(
                program, cwd, path, kill, plan.power_seed, verify, found, resumed=len(kills) > 1
            )
            found = kills[-1].found or 0
        run = program.run(cwd, resumed=True)
        if run.status != 0:
            raise _Finding(
                Outcome.MANUAL, f"resumed, it ended with status {run.status}: {run.said}"
            )
        commits, state = _examine(path, verify)
        state |= _digest_files(cwd, program.results)
        if commits < found:
            raise _Finding(Outcome.LOST, f"the store went back from commit {found} to {commits}")
        slack = len(plan.kills) + 1  # what a program may commit at each start
        if (
            compare
            and reference.steady
            and found > 2 * slack
            and commits - found > reference.commits - found // 2
        ):
            raise _Finding(
                Outcome.LOST, f"it started over: {commits - found} commits after {found} were there"
            )
        names = [
            name for name in _differing(state, reference.state) if name not in reference.differs
        ]
        if compare and names:
            raise _Finding(
                Outcome.DIFFERENT,
                f"not the end of a run that nobody killed: {', '.join(names[:4])}",
            )
    except _Finding as finding:
        if finding.acknowledged:
            kills[-1] = replace(kills[-1], acknowledged=finding.acknowledged)
        if keep is not None:
            shutil.copytree(cwd, keep / f"trial{plan.number}", dirs_exist_ok=True, symlinks=True)
        return Trial(plan.number, tuple(kills), finding.outcome, str(finding), None)
    finally:
        shutil.rmtree(cwd, ignore_errors=True)
    return Trial(plan.number, tuple(kills), Outcome.CLEAN, "", commits)


def crash_test(
    command: Sequence[str],
    *,
    trials: int = 20,
    model: Model = "kill",
    verify: Verify | None = None,
    compare: bool = True,
    resume: Sequence[str] = (),
    results: Sequence[str] = (),
    grace_seconds: float = 5.0,
    seed: int = 1,
    at: Sequence[int] = (),
    jobs: int = 1,
    folder: str | os.PathLike[str] = ".",
    keep: str | os.PathLike[str] | None = None,
    timeout_seconds: float = 600.0,
    on_trial: Callable[[Trial], None] = lambda _: None,
) -> CrashTestResult:
    """Runs the command, kills it and resumes it, `trials` times, in copies of the folder.

    model: "kill" is SIGKILL, two of three at a persistence point, every third at a random time.
        "power": the process dies at a persistence point, and of all that was not durable its
        store's file keeps a part drawn at random, by cache lines (domains dax, emulated) or sectors
        (domain file). "term": SIGTERM at a random time, as a scheduler of jobs sends it, and
        SIGKILL after grace_seconds.
    verify: gets the open store (a copy) after each kill; False or an exception is a state that
        should not be.
    compare: the final state has to be, bit for bit, that of a run that nobody killed, but for names
        whose contents differ between two such runs.
    resume: the command that goes on after a kill; empty: the same. results: files below the folder
        that the program leaves, compared as the state is.
    seed: the same seed draws the same points. at: one trial with these points instead, as an
        earlier run printed them.
    jobs: trials at a time. keep: a folder that gets the working directories of trials that failed.

    Raises:
        ValueError: the program fails without being killed, opens no store or one outside its
            working directory, commits nothing, leaves none of the results, or uses a domain that
            does not claim to survive what the model does; points are given though SIGTERM comes at
            times.
    """
    start = time.monotonic()
    if at and model == "term":
        raise ValueError(
            "SIGTERM comes at random times, not at persistence points: leave out either"
        )
    with tempfile.TemporaryDirectory(prefix="pmstore-crashtest-") as temporary:
        room = Path(temporary)
        grace = grace_seconds if model == "term" else None
        program = _Program(command, Path(folder).resolve(), timeout_seconds, resume, results, grace)
        try:
            reference = _reference(program, room / "reference", verify)
            if compare:
                control = _reference(program, room / "control", verify)
                differs = frozenset(_differing(reference.state, control.state))
                reference = replace(
                    reference, differs=differs, steady=control.commits == reference.commits
                )
        except _Finding as finding:
            raise ValueError(str(finding)) from None
        if model == "power" and reference.domain not in _POWER_DOMAINS:
            raise ValueError(
                f"the store is in domain {reference.domain}, which does not survive a power "
                "failure: open it with domain='file'"
            )
        plans = _plan(trials, reference, model, seed)
        if at:
            plans = [_Plan(1, tuple(Kill(point, 0.0) for point in at), plans[0].power_seed)]
        found = []
        with concurrent.futures.ThreadPoolExecutor(max(1, jobs)) as pool:
            kept = Path(keep) if keep is not None else None
            futures = [
                pool.submit(
                    _one_trial,
                    plan,
                    program,
                    room / f"trial{plan.number}",
                    reference,
                    verify,
                    compare,
                    kept,
                )
                for plan in plans
            ]
            try:
                for future in concurrent.futures.as_completed(futures):
                    found.append(future.result())
                    on_trial(found[-1])
            except BaseException:  # Ctrl-C: nobody waits for what runs
                program.end()
                raise
            finally:
                for future in futures:
                    future.cancel()
    found.sort(key=lambda trial: trial.number)
    return CrashTestResult(
        seed,
        model,
        reference.domain,
        reference.primitives,
        reference.commits,
        not reference.differs,
        time.monotonic() - start,
        tuple(found),
        tuple(sorted(reference.differs)),
    )
