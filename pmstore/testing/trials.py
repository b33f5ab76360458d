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

    result = job_test(["torchrun", "--standalone", "--nproc-per-node=2", "train.py"], trials=10)
    assert result.ok, result

A job is any command that starts ranks on this machine: processes that open a store each, known by
the store's path. Its trials differ in two things. A kill is of one rank, or of the whole job,
launcher included. And whatever is left has to belong together: after each run all ranks can produce
one generation, which is not older than what was found before; at the end all are at the same one.

Source: the classes of outcomes, and the comparison with a run that nobody kills, follow ckpt-chaos
    (PyPI), which kills at file boundaries.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pmstore.objects.generations import Key, explain, newest_common
from pmstore.testing.job_launch import run_job
from pmstore.testing.outcomes import CrashTestResult, Finding, Kill, Outcome, Trial
from pmstore.testing.runner import DOMAINS, Program, Run, Runner, in_turn
from pmstore.testing.store_state import Stores, Verify, differing, digest_files

_POWER_DOMAINS = ("dax", "file", "emulated")

Model = Literal["kill", "power", "term"]


@dataclass(frozen=True)
class _Reference:
    """The course of a program that nobody kills.

    Attributes:
        names: stores, by rank where a job's records tell ranks: paths in the folder, to what the
            program calls them.
        primitives: by store.
        commits: of a job, the last step.
        differs: names that another such run left with other contents.
        steady: another such run made as many commits.
    """

    names: dict[str, str]
    primitives: dict[str, int]
    commits: int
    seconds: float
    domain: str
    state: dict[str, str]
    differs: frozenset[str] = frozenset()
    steady: bool = False


@dataclass(frozen=True)
class _Plan:
    number: int
    kills: tuple[Kill, ...]
    power_seed: int | None = None


@dataclass
class _Seen:
    """Remembers what a trial has shown so far: it must not be less the next time.

    Attributes:
        returned: commits that had returned or been found, by store; agreed: those that all ranks
            were known to have.
        stores: as the last run left them; None where that could not be seen.
        common: of a job, the newest generation that all ranks can produce, by run.
    """

    returned: dict[str, int] = field(default_factory=dict)
    agreed: dict[str, int] = field(default_factory=dict)
    stores: Stores | None = None
    common: dict[str, Key] = field(default_factory=dict)

    def note(self, run: Run, cwd: Path, names: Mapping[str, str]) -> None:
        """Takes in what the processes of a run noted. Raises: Finding: commits had returned in a
        store that nobody will look at."""
        if self.stores is not None:
            self.returned = {name: self.stores.commits(name) for name in self.stores.names}
        self.stores = None
        for page in run.seen:
            name = _within(cwd, page.path)
            if name is not None and name in names:
                self.returned[name] = max(self.returned.get(name, 0), page.acknowledged)
                self.agreed[name] = max(self.agreed.get(name, 0), page.agreed)
            elif page.acknowledged:
                raise Finding(
                    Outcome.LOST,
                    f"{page.path}: {page.acknowledged} commits had returned, in a store that a run "
                    f"which nobody killed does not have (it has {', '.join(names)}): a run that "
                    "is resumed has to open the same one",
                )


def _within(cwd: Path, path: str) -> str | None:
    """Returns where in the folder a store is that a program names so; None: elsewhere."""
    whole, home = (cwd / path).resolve(), cwd.resolve()
    return str(whole.relative_to(home)) if whole.is_relative_to(home) else None


# ---- a program of one store, and a job -----------------------------------------------------------


@dataclass(frozen=True)
class _Program:
    """What a program of one store and one of several, `_Job`, do not have in common.

    Attributes:
        model: of how it dies.
        at: the points of the only trial, if it is not drawn.
    """

    model: str
    at: Sequence[Any]
    several: ClassVar[bool] = False
    noun: ClassVar[str] = "program"
    no_store: ClassVar[str] = "the program opens no store"

    def plans(self, trials: int, reference: _Reference, seed: int) -> list[_Plan]:
        """Draws the kills of each trial. The first kill of trial i lies in the ith part of all
        points, so that all of the run is covered; with model "kill", every third is at a random
        time. SIGTERM always comes at a random time. Raises: ValueError: no run has the points."""
        (points,) = reference.primitives.values()
        if self.model == "power" and reference.domain not in _POWER_DOMAINS:
            raise ValueError(
                f"the store is in domain {reference.domain}, which does not survive a power "
                "failure: open it with domain='file'"
            )
        if any(point > points for point in self.at):
            raise ValueError(
                f"at={list(self.at)}: an undisturbed run has {points} points, so nothing would be "
                "killed there"
            )
        chance = random.Random(seed)
        plans = []
        for i in range(trials):
            share = points / trials
            first = Kill(math.floor(share * i + chance.random() * share) + 1, 0.0)
            if i % 3 == 2 and self.model == "kill":
                first = Kill(0, chance.uniform(0.0, reference.seconds))
            second = Kill(chance.randint(1, points), 0.0)
            if self.model == "term":
                first, second = (Kill(0, chance.uniform(0.0, reference.seconds)) for _ in range(2))
            power = chance.getrandbits(63) if self.model == "power" else None
            plans.append(_Plan(i + 1, (first, second), power))
        if self.at:
            return [replace(plans[0], kills=tuple(Kill(point, 0.0) for point in self.at))]
        return plans

    def run(
        self, runner: Runner, cwd: Path, plan: _Plan, done: int, names: Mapping[str, str]
    ) -> Run:
        """Runs the program with the kills that are left. names: of the stores, as it has them."""
        kill = plan.kills[done] if done < len(plan.kills) else None
        return runner.run(cwd, kill, plan.power_seed, resumed=done > 0)

    def compare(self, seen: _Seen, stores: Stores) -> None:
        """Checks what stores have to have in common after each run. Raises: Finding."""

    def marks(self, seen: _Seen) -> tuple[int, int | None]:
        """Returns what a `Kill` tells of the run that it ended: acknowledged, found."""
        found = [one.commits for one in seen.stores.found.values()] if seen.stores else []
        return max(seen.returned.values(), default=0), max(found, default=None)

    def end(self, stores: Stores) -> int:
        """Returns how far a whole run got, as `Trial.commits` has it. Raises: Finding: the stores
        do not end together."""
        return max(map(stores.commits, stores.names))

    def require_resumed(self, kills: Sequence[Kill], commits: int, reference: _Reference) -> None:
        """Checks that a trial that ended with so many commits did not start over. Raises:
        Finding."""
        found = kills[-1].found or 0
        slack = len(kills) + 1  # what a program may commit at each start
        if (
            reference.steady
            and found > 2 * slack
            and commits - found > reference.commits - found // 2
        ):
            raise Finding(
                Outcome.LOST, f"it started over: {commits - found} commits after {found} were there"
            )


class _Job(_Program):
    several = True
    noun = "job"
    no_store = "no process of the job opens a store"

    def plans(self, trials: int, reference: _Reference, seed: int) -> list[_Plan]:
        """Draws the kills of each trial. The first kill lies in the part of the run that is the
        trial's, at a persistence point of one rank or at a time, and takes that rank or all ranks.
        Half of the second kills come early, while the job is joined again."""
        if self.at:
            return [_Plan(1, tuple(_kill_of_rank(reference, *one) for one in self.at))]
        chance = random.Random(seed)
        names = list(reference.names)
        plans = []
        for i in range(trials):
            kills = []
            for again in range(2):
                victim = chance.choice(names)
                points = reference.primitives[victim]
                share = (i + chance.random()) / trials
                if again:
                    share = chance.random() * (0.1 if chance.random() < 0.5 else 1.0)
                kind = (i + again * chance.randrange(5)) % 5
                point = int(share * points) + 1 if kind in (0, 2, 3) else 0
                # it may be quicker next time
                delay = 0.0 if point else 0.8 * share * reference.seconds
                kills.append(Kill(point, delay, victim=victim, whole=kind in (2, 4)))
            plans.append(_Plan(i + 1, tuple(kills)))
        return plans

    def run(
        self, runner: Runner, cwd: Path, plan: _Plan, done: int, names: Mapping[str, str]
    ) -> Run:
        return run_job(runner, cwd, plan.kills[done:], names, resumed=done > 0)

    def compare(self, seen: _Seen, stores: Stores) -> None:
        had, seen.common = seen.common, {}
        seen.common = _common(stores)
        for run, before in had.items():
            now = seen.common.get(run)
            if now is None or (
                before.by_job and (now.job != before.job or now.number < before.number)
            ):
                raise Finding(
                    Outcome.LOST,
                    f"all ranks had {before} of {run}, and go on from {now or 'no run'}",
                )
        for run, now in seen.common.items():
            for one in stores.members(run):
                key = one.keys[0]
                told = one.name in stores.found and (
                    seen.agreed.get(one.name) == stores.commits(one.name)
                )  # then commit(agree=True) may have returned
                if told and key.by_job and key != now:
                    raise Finding(
                        Outcome.LOST,
                        f"{one} knew that all ranks had {key}, and they go on from {now}",
                    )

    def marks(self, seen: _Seen) -> tuple[int, int | None]:
        if seen.stores is None:
            return 0, None
        newest = max(map(_count, seen.stores.newest()), default=0)
        return newest, max(map(_count, seen.common.values()), default=None)

    def end(self, stores: Stores) -> int:
        _common(stores)
        for run in stores.runs():
            members = stores.members(run)
            if len({one.keys[0] for one in members}) > 1:
                at = ", ".join(f"{one.name} is at {one.keys[0]}" for one in members)
                raise Finding(Outcome.DIFFERENT, f"the ranks of {run} stand apart: {at}")
        return max((key.step for key in stores.newest()), default=0)

    def require_resumed(self, kills: Sequence[Kill], commits: int, reference: _Reference) -> None:
        """`compare` has seen to it."""


def _common(stores: Stores) -> dict[str, Key]:
    """Returns the newest generation that all ranks can produce, of each run that a job has made.

    Raises: Finding: there is none.
    """
    found = {}
    for run in stores.runs():
        members = stores.members(run)
        if not any(one.record is not None for one in members):
            continue  # ranks without a record know nothing of each other
        key = newest_common(members)
        if key is None:
            raise Finding(Outcome.MANUAL, f"{run}: {'; '.join(explain(members))}")
        found[run] = key
    return found


def _count(key: Key) -> int:
    return key.number if key.by_job else max(key.step, 0)


def _kill_of_rank(reference: _Reference, rank: int, point: int) -> Kill:
    names = list(reference.names)
    if not (0 <= rank < len(names) and 1 <= point <= reference.primitives[names[rank]]):
        told = ", ".join(
            f"rank {rank} ({name}) has {reference.primitives[name]} points"
            for rank, name in enumerate(names)
        )
        raise ValueError(f"rank {rank}, point {point}: {told}")
    return Kill(point, 0.0, victim=names[rank])


# ---- the driver ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Driver:
    """Runs a program and its trials in copies of the folder, below `room`."""

    kind: _Program
    runner: Runner
    room: Path
    verify: Verify | None
    compare: bool
    keep: Path | None

    def reference(self) -> _Reference:
        """Runs the program without kills: twice, if ends are compared."""
        try:
            first = self._undisturbed(self.room / "reference")
            if not self.compare:
                return first
            again = self._undisturbed(self.room / "control")
        except Finding as finding:
            raise ValueError(f"after a run that nobody killed: {finding}") from None
        return replace(
            first,
            differs=frozenset(differing(first.state, again.state)),
            steady=again.commits == first.commits,
        )

    def _undisturbed(self, cwd: Path) -> _Reference:
        noun, results = self.kind.noun, self.runner.program.results
        self.runner.fresh_copy(cwd)
        run = self.kind.run(self.runner, cwd, _Plan(0, ()), 0, {})
        if run.status != 0:
            raise ValueError(
                f"the {noun} ends with status {run.status} without being killed: "
                f"{run.said or 'it prints nothing'}"
            )
        if not run.seen:
            raise ValueError(self.kind.no_store)
        names: dict[str, str] = {}
        primitives: dict[str, int] = {}
        for page in run.seen:
            name = _within(cwd, page.path)
            if name is None:
                raise ValueError(
                    f"the {noun} names a store {page.path}: the path has to be relative, because "
                    "each trial has its own"
                )
            names[name] = page.path
            primitives[name] = max(primitives.get(name, 0), page.primitives)
        if not any(page.acknowledged for page in run.seen):
            raise ValueError(f"the {noun} commits nothing")
        stores = Stores.left(cwd, sorted(names), self.verify)
        if missing := stores.missing:
            raise ValueError(f"a run that nobody killed leaves no store {missing[0]}")
        commits = self.kind.end(stores)
        if missing := [name for name in results if not (cwd / name).is_file()]:
            raise ValueError(f"a run that nobody killed leaves no file {missing[0]}")
        self.runner.check(cwd)
        return _Reference(
            {name: names[name] for name in sorted(names, key=lambda one: (stores.rank(one), one))},
            primitives,
            commits,
            run.seconds,
            DOMAINS.get(run.seen[0].domain, ""),
            stores.state | digest_files(cwd, results),
        )

    def trial(self, plan: _Plan, reference: _Reference) -> Trial:
        cwd, kills = self.room / f"trial{plan.number}", list[Kill]()
        self.runner.fresh_copy(cwd)
        try:
            done, commits = self._resumed_to_its_end(plan, cwd, kills, reference)
        except Finding as finding:
            if self.keep is not None:
                kept = self.keep / f"trial{plan.number}"
                shutil.copytree(cwd, kept, dirs_exist_ok=True, symlinks=True)
            return Trial(plan.number, tuple(kills), finding.outcome, str(finding), None)
        finally:
            shutil.rmtree(cwd, ignore_errors=True)
        detail = "" if done else "it ended before it was killed"
        return Trial(plan.number, tuple(kills[:done]), Outcome.CLEAN, detail, commits)

    def _resumed_to_its_end(
        self, plan: _Plan, cwd: Path, kills: list[Kill], reference: _Reference
    ) -> tuple[int, int]:
        """Runs the program until nothing is left to be resumed, and looks at what each run leaves.
        Returns how many kills came, and what was committed in the end; adds to `kills` those that
        were tried, and what each left. Raises: Finding."""
        names = {
            name: str(cwd.resolve() / name) if os.path.isabs(called) else called
            for name, called in reference.names.items()
        }
        done, seen, over = 0, _Seen(), False
        while not over:
            run = self.kind.run(self.runner, cwd, plan, done, names)
            kills[done:] = plan.kills[done : done + max(run.kills, 1)]
            if run.failed:
                again = "resumed, " if done else ""
                raise Finding(
                    Outcome.MANUAL, f"{again}it ended with status {run.status}: {run.said}"
                )
            seen.note(run, cwd, names)
            try:
                stores = self._look(cwd, names, seen)
            finally:
                acknowledged, found = self.kind.marks(seen)
                for i in range(done, done + run.kills):
                    kills[i] = replace(kills[i], acknowledged=acknowledged, found=found)
            done, over = done + run.kills, run.over
        if missing := stores.missing:
            raise Finding(Outcome.LOST, f"{missing[0]}: the store is gone")
        commits = self.kind.end(stores)
        self.kind.require_resumed(kills[:done], commits, reference)
        state = stores.state | digest_files(cwd, self.runner.program.results)
        apart = set(differing(state, reference.state)) - reference.differs
        if self.compare and apart:
            raise Finding(
                Outcome.DIFFERENT,
                f"not the end of a {self.kind.noun} that nobody killed: "
                f"{', '.join(sorted(apart)[:4])}",
            )
        self.runner.check(cwd)
        return done, commits

    def _look(self, cwd: Path, names: Mapping[str, str], seen: _Seen) -> Stores:
        """Looks at what a run has left. Raises: Finding: a store is damaged or has lost commits, or
        the stores do not belong together."""
        seen.stores = stores = Stores.left(cwd, names, self.verify)
        for name, returned in seen.returned.items():
            if stores.commits(name) < returned:
                raise Finding(
                    Outcome.LOST,
                    f"{name}: {returned} commits had returned, it holds {stores.commits(name)}",
                )
        self.kind.compare(seen, stores)
        return stores


def _test(
    kind: _Program,
    program: Program | Sequence[str],
    *,
    trials: int,
    verify: Verify | None,
    compare: bool,
    seed: int,
    jobs: int,
    folder: str | os.PathLike[str],
    keep: str | os.PathLike[str] | None,
    on_trial: Callable[[Trial], None],
) -> CrashTestResult:
    if trials < 1 or jobs < 1:
        raise ValueError(f"trials={trials!r} and jobs={jobs!r}: at least one")
    start = time.monotonic()
    if not isinstance(program, Program):
        program = Program(program)
    runner = Runner(program, Path(folder).resolve(), terminates=kind.model == "term")
    with tempfile.TemporaryDirectory(prefix="pmstore-crashtest-") as room:
        kept = Path(keep) if keep is not None else None
        driver = _Driver(kind, runner, Path(room), verify, compare, kept)
        reference = driver.reference()
        plans = kind.plans(trials, reference, seed)
        todo = [partial(driver.trial, plan, reference) for plan in plans]
        found = in_turn(todo, runner, jobs, on_trial)
    return CrashTestResult(
        seed=seed,
        model=kind.model,
        domain=reference.domain,
        primitives=max(reference.primitives.values()),
        commits=reference.commits,
        deterministic=not reference.differs,
        seconds=time.monotonic() - start,
        trials=found,
        not_compared=tuple(sorted(reference.differs)),
        stores=tuple(reference.names) if kind.several else (),
    )


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
    if not all(type(point) is int and point >= 1 for point in at):
        raise ValueError(f"at={at!r}: a list of points, numbers from 1 on, such as [150, 160]")
    if at and model == "term":
        raise ValueError(
            "SIGTERM comes at random times, not at persistence points: leave out either"
        )
    return _test(
        _Program(model, at),
        program,
        trials=trials,
        verify=verify,
        compare=compare,
        seed=seed,
        jobs=jobs,
        folder=folder,
        keep=keep,
        on_trial=on_trial,
    )


def job_test(
    program: Program | Sequence[str],
    *,
    trials: int = 20,
    verify: Verify | None = None,
    compare: bool = True,
    seed: int = 1,
    at: Sequence[tuple[int, int]] = (),
    jobs: int = 1,
    folder: str | os.PathLike[str] = ".",
    keep: str | os.PathLike[str] | None = None,
    on_trial: Callable[[Trial], None] = lambda _: None,
) -> CrashTestResult:
    """Starts the job, kills one rank or all of it, and starts it again until it ends, `trials`
    times, in copies of the folder.

    Kills are SIGKILL: of five trials two kill a rank at a persistence point, one at a random time;
    one kills all when a rank gets to a point, one at a random time. A launcher that starts its
    ranks again has them killed again: two kills a trial in all.

    Args:
        program: the command that starts all ranks, on this machine, each with its own store at a
            relative path; or a `Program`.
        verify: gets each rank's store (a copy) after each run; False or an exception is a state
            that should not be.
        compare: the final state of each store has to be that of a job that nobody killed.
        at: one trial instead, whose kills are of these ranks at these points.
        Others: as for `crash_test`.

    Returns: primitives are those of the rank that has most; commits is the last step.

    Raises: ValueError, TypeError: as `crash_test`; undisturbed, the ranks end at different steps.
    """
    return _test(
        _Job("kill", at),
        program,
        trials=trials,
        verify=verify,
        compare=compare,
        seed=seed,
        jobs=jobs,
        folder=folder,
        keep=keep,
        on_trial=on_trial,
    )
