"""Crash-tests a training program: kills it again and again, resumes it, and says what became of its
state.

    result = crash_test(["python", "train.py"], trials=20, verify=check)
    assert result.ok, result

The program is run in copies of the working directory, so it has to name its store by a relative
path. Two runs that nobody kills come first: they show how many persistence points there are, how
the state ends, and whether it always ends so. Each trial then starts afresh, kills the program at a
persistence point (or at a random time), checks a copy of the store, kills the resumed program once
more, and lets it end. What counts as the end is the store, and the files that `Program.results`
names.

Source: the classes of outcomes, and the comparison with a run that nobody kills, follow ckpt-chaos
    (PyPI), which kills at file boundaries.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from pmstore.testing.outcomes import CrashTestResult, Finding, Kill, Outcome, Trial
from pmstore.testing.runner import Program, Runner, in_turn
from pmstore.testing.store_state import Verify, differing, digest_files, examine

_POWER_DOMAINS = ("dax", "file", "emulated")

Model = Literal["kill", "power", "term"]


@dataclass(frozen=True)
class _Reference:
    """The course of a run that nobody kills."""

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


def _reference(runner: Runner, cwd: Path, verify: Verify | None) -> _Reference:
    runner.fresh_copy(cwd)
    began = time.monotonic()
    run = runner.run(cwd)
    seconds = time.monotonic() - began
    seen = run.seen
    if run.status != 0:
        raise ValueError(
            f"the program ends with status {run.status} without being killed: {run.said}"
        )
    if not seen.path:
        raise ValueError("the program opens no store")
    path = (cwd / seen.path).resolve()
    if not path.is_relative_to(cwd.resolve()):
        raise ValueError(
            f"the program names its store {seen.path}: the path has to be relative, because each "
            "trial has its own"
        )
    if not seen.acknowledged:
        raise ValueError("the program commits nothing")
    try:
        examined = examine(path, verify)
    except Finding as finding:
        raise ValueError(f"after a run that nobody killed: {finding}") from None
    if missing := [name for name in runner.program.results if not (cwd / name).is_file()]:
        raise ValueError(f"a run that nobody killed leaves no file {missing[0]}")
    state = examined.state | digest_files(cwd, runner.program.results)
    runner.check(cwd)
    name = str(path.relative_to(cwd.resolve()))
    return _Reference(name, seen.primitives, examined.commits, seconds, run.domain, state)


# ---- trials --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    number: int
    kills: tuple[Kill, ...]
    power_seed: int | None


def _plan(trials: int, reference: _Reference, model: str, seed: int) -> list[_Plan]:
    """Draws the kills of each trial. The first kill of trial i lies in the ith part of all points,
    so that all of the run is covered; with model "kill", every third is at a random time. SIGTERM
    always comes at a random time."""
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
    runner: Runner,
    cwd: Path,
    path: Path,
    kill: Kill,
    power_seed: int | None,
    verify: Verify | None,
    had: int,
    resumed: bool,
) -> Kill:
    """Runs the program until the kill, and looks at what it left. had: commits before."""
    run = runner.run(cwd, kill, power_seed, resumed=resumed)
    asked_to_end = runner.terminates  # how it says that it did so is its own affair
    if run.status not in (0, -signal.SIGKILL) and not asked_to_end:
        raise Finding(
            Outcome.MANUAL,
            f"{'resumed, ' if had else ''}it ended with status {run.status}: {run.said}",
        )
    acknowledged = max(had, run.seen.acknowledged)
    if not path.exists():
        if acknowledged:
            raise Finding(Outcome.LOST, "the store is gone")
        return Kill(kill.primitive, kill.delay_seconds)
    try:
        found = examine(path, verify).commits
    except Finding as finding:
        finding.acknowledged = acknowledged
        raise
    if found < acknowledged:
        raise Finding(Outcome.LOST, f"{acknowledged} commits had returned, the store holds {found}")
    return Kill(kill.primitive, kill.delay_seconds, acknowledged, found)


def _one_trial(
    plan: _Plan,
    runner: Runner,
    cwd: Path,
    reference: _Reference,
    verify: Verify | None,
    compare: bool,
    keep: Path | None,
) -> Trial:
    runner.fresh_copy(cwd)
    path = cwd / reference.store
    kills: list[Kill] = []
    found = 0
    try:
        for kill in plan.kills:
            kills.append(kill)
            kills[-1] = _die(
                runner, cwd, path, kill, plan.power_seed, verify, found, resumed=len(kills) > 1
            )
            found = kills[-1].found or 0
        run = runner.run(cwd, resumed=True)
        if run.status != 0:
            raise Finding(Outcome.MANUAL, f"resumed, it ended with status {run.status}: {run.said}")
        examined = examine(path, verify)
        commits = examined.commits
        state = examined.state | digest_files(cwd, runner.program.results)
        if commits < found:
            raise Finding(Outcome.LOST, f"the store went back from commit {found} to {commits}")
        slack = len(plan.kills) + 1  # what a program may commit at each start
        if (
            compare
            and reference.steady
            and found > 2 * slack
            and commits - found > reference.commits - found // 2
        ):
            raise Finding(
                Outcome.LOST, f"it started over: {commits - found} commits after {found} were there"
            )
        names = [
            name for name in differing(state, reference.state) if name not in reference.differs
        ]
        if compare and names:
            raise Finding(
                Outcome.DIFFERENT,
                f"not the end of a run that nobody killed: {', '.join(names[:4])}",
            )
        runner.check(cwd)
    except Finding as finding:
        if finding.acknowledged:
            kills[-1] = replace(kills[-1], acknowledged=finding.acknowledged)
        if keep is not None:
            shutil.copytree(cwd, keep / f"trial{plan.number}", dirs_exist_ok=True, symlinks=True)
        return Trial(plan.number, tuple(kills), finding.outcome, str(finding), None)
    finally:
        shutil.rmtree(cwd, ignore_errors=True)
    return Trial(plan.number, tuple(kills), Outcome.CLEAN, "", commits)


def crash_test(
    program: Program | Sequence[str],
    *,
    trials: int = 20,
    model: Model = "kill",
    verify: Verify | None = None,
    compare: bool = True,
    seed: int = 1,
    at: Sequence[int] = (),
    jobs: int = 1,
    folder: str | os.PathLike[str] = ".",
    keep: str | os.PathLike[str] | None = None,
    on_trial: Callable[[Trial], None] = lambda _: None,
) -> CrashTestResult:
    """Runs the program, kills it and resumes it, `trials` times, in copies of the folder.

    program: its command, or a `Program`, which says more of it: how it is resumed, what it leaves.
    model: "kill" is SIGKILL, two of three at a persistence point, every third at a random time.
        "power": the process dies at a persistence point, and of all that was not durable its
        store's file keeps a part drawn at random, by cache lines (domains dax, emulated) or sectors
        (domain file). "term": SIGTERM at a random time, as a scheduler of jobs sends it, and
        SIGKILL some seconds later.
    verify: gets the open store (a copy) after each kill; False or an exception is a state that
        should not be.
    compare: the final state has to be, bit for bit, that of a run that nobody killed, but for names
        whose contents differ between two such runs.
    seed: the same seed draws the same points. at: one trial with these points instead, as an
        earlier run printed them.
    jobs: trials at a time. keep: a folder that gets the working directories of trials that failed.

    Raises:
        ValueError: the program fails without being killed, opens no store or one outside its
            working directory, commits nothing, leaves none of the results, or uses a domain that
            does not claim to survive what the model does; points are given though SIGTERM comes at
            times, or that a run which nobody kills does not reach.
        TypeError: the program is no list of words: one str, for example.
    """
    if model not in get_args(Model):
        raise ValueError(f"model={model!r}: one of {', '.join(get_args(Model))}")
    if trials < 1 or jobs < 1:
        raise ValueError(f"trials={trials!r} and jobs={jobs!r}: at least one")
    if not all(type(point) is int and point >= 1 for point in at):
        raise ValueError(f"at={at!r}: a list of points, numbers from 1 on, such as [150, 160]")
    start = time.monotonic()
    if not isinstance(program, Program):
        program = Program(program)
    if at and model == "term":
        raise ValueError(
            "SIGTERM comes at random times, not at persistence points: leave out either"
        )
    with tempfile.TemporaryDirectory(prefix="pmstore-crashtest-") as temporary:
        room = Path(temporary)
        runner = Runner(program, Path(folder).resolve(), terminates=model == "term")
        try:
            reference = _reference(runner, room / "reference", verify)
            if compare:
                control = _reference(runner, room / "control", verify)
                differs = frozenset(differing(reference.state, control.state))
                reference = replace(
                    reference, differs=differs, steady=control.commits == reference.commits
                )
        except Finding as finding:
            raise ValueError(str(finding)) from None
        if model == "power" and reference.domain not in _POWER_DOMAINS:
            raise ValueError(
                f"the store is in domain {reference.domain}, which does not survive a power "
                "failure: open it with domain='file'"
            )
        if any(point > reference.primitives for point in at):
            raise ValueError(
                f"at={list(at)}: an undisturbed run has {reference.primitives} points, so nothing "
                "would be killed there"
            )
        plans = _plan(trials, reference, model, seed)
        if at:
            plans = [_Plan(1, tuple(Kill(point, 0.0) for point in at), plans[0].power_seed)]
        kept = Path(keep) if keep is not None else None
        found = in_turn(
            [
                partial(
                    _one_trial,
                    plan,
                    runner,
                    room / f"trial{plan.number}",
                    reference,
                    verify,
                    compare,
                    kept,
                )
                for plan in plans
            ],
            runner,
            jobs,
            on_trial,
        )
    return CrashTestResult(
        seed,
        model,
        reference.domain,
        reference.primitives,
        reference.commits,
        not reference.differs,
        time.monotonic() - start,
        found,
        tuple(sorted(reference.differs)),
    )
