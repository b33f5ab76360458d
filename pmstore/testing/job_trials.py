"""Crash-tests a job: ranks that train together, each with a store of its own.

    result = job_test(["torchrun", "--standalone", "--nproc-per-node=2", "train.py"], trials=10)
    assert result.ok, result

The command is any that starts the ranks on this machine. A rank is a process that opens a store; it
is known by the store's path. Trials are those of `crash_test`, but for two things. A kill is of one
rank, or of the whole job, launcher included. And whatever is left has to belong together: after
each run all ranks can produce one generation, which is not older than what was found before; at the
end all are at the same one.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pmstore.objects.generations import Key, Member, explain, newest_common
from pmstore.testing.job import JobRun, run_job
from pmstore.testing.outcomes import CrashTestResult, Finding, Kill, Outcome, Trial
from pmstore.testing.runner import DOMAINS, Program, Runner, in_turn
from pmstore.testing.store_state import Examined, Verify, differing, digest_files, examine


@dataclass(frozen=True)
class _Reference:
    """The course of a job that nobody kills.

    Attributes:
        names: stores, by rank where the job's records tell ranks: paths in the folder, to what the
            program calls them.
        primitives: of each.
        step: the last one.
    """

    names: dict[str, str]
    primitives: dict[str, int]
    seconds: float
    domain: str
    step: int
    state: dict[str, str]
    differs: frozenset[str] = frozenset()


def _reference(runner: Runner, cwd: Path, verify: Verify | None) -> _Reference:
    runner.fresh_copy(cwd)
    run = run_job(runner, cwd, (), {}, resumed=False)
    if run.status != 0:
        raise ValueError(f"the job ends with status {run.status} without being killed: {run.said}")
    if not run.seen:
        raise ValueError("no process of the job opens a store")
    home = cwd.resolve()
    names: dict[str, str] = {}
    primitives: dict[str, int] = {}
    for seen in run.seen:
        path = (cwd / seen.path).resolve()
        if not path.is_relative_to(home):
            raise ValueError(
                f"a rank names its store {seen.path}: the path has to be relative, because each "
                "trial has its own"
            )
        name = str(path.relative_to(home))
        names[name] = seen.path
        primitives[name] = max(primitives.get(name, 0), seen.primitives)
    if not any(seen.acknowledged for seen in run.seen):
        raise ValueError("no rank commits anything")
    names = dict(sorted(names.items()))
    left = _Left.behind(cwd, names, verify)
    left.require_equal()
    state = left.state | digest_files(cwd, runner.program.results)
    runner.check(cwd)
    ordered = sorted(names, key=lambda name: (left.rank(name), name))
    if missing := [name for name in runner.program.results if not (cwd / name).is_file()]:
        raise ValueError(f"a run that nobody killed leaves no file {missing[0]}")
    return _Reference(
        {name: names[name] for name in ordered},
        primitives,
        run.seconds,
        DOMAINS.get(run.seen[0].domain, ""),
        left.step(),
        state,
    )


# ---- what a run leaves ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Left:
    """The stores as a run left them, by their names. Stores that are not there yet are left out."""

    stores: dict[str, Examined]
    names: Sequence[str]

    @classmethod
    def behind(cls, cwd: Path, names: Mapping[str, str], verify: Verify | None) -> _Left:
        stores = {}
        for name in names:
            if (cwd / name).exists():
                try:
                    stores[name] = examine(cwd / name, verify, name)
                except Finding as finding:
                    raise Finding(finding.outcome, f"{name}: {finding}") from None
        return cls(stores, list(names))

    @property
    def state(self) -> dict[str, str]:
        return {
            f"{name}: {path}": digest
            for name, examined in self.stores.items()
            for path, digest in examined.state.items()
        }

    def runs(self) -> list[str]:
        return sorted({run for examined in self.stores.values() for run in examined.members})

    def members(self, run: str) -> list[Member]:
        """Returns what each rank's store would bring to a joining of that run."""
        found = []
        for name in self.names:
            if name in self.stores:
                found.append(self.stores[name].members.get(run, self.stores[name].bare))
            else:
                found.append(Member(None, "", held=False, run_step=None, name=name))
        return found

    def rank(self, name: str) -> int:
        members = self.stores[name].members.values() if name in self.stores else ()
        return min((one.record.rank for one in members if one.record is not None), default=0)

    def _last(self) -> list[Key]:
        return [one.keys[0] for run in self.runs() for one in self.members(run)]

    def newest(self) -> int:
        """Returns the newest generation that a rank had committed; of runs without a job, the
        step."""
        return max(map(_count, self._last()), default=0)

    def step(self) -> int:
        return max((key.step for key in self._last()), default=0)

    def common(self) -> dict[str, Key]:
        """Returns the newest generation that all ranks can produce, of each run that a job has
        made.

        Raises: Finding: there is none.
        """
        found = {}
        for run in self.runs():
            members = self.members(run)
            if not any(one.record is not None for one in members):
                continue  # ranks without a record know nothing of each other
            key = newest_common(members)
            if key is None:
                raise Finding(Outcome.MANUAL, f"{run}: {'; '.join(explain(members))}")
            found[run] = key
        return found

    def require_equal(self) -> None:
        """Checks that all ranks are at the same generation and step. Raises: Finding."""
        self.common()
        for run in self.runs():
            members = self.members(run)
            if len({one.keys[0] for one in members}) > 1:
                at = ", ".join(f"{one.name} is at {one.keys[0]}" for one in members)
                raise Finding(Outcome.DIFFERENT, f"the ranks of {run} stand apart: {at}")


@dataclass
class _Found:
    """Remembers what has been seen of a trial so far: it must not be less the next time."""

    commits: dict[str, int]
    common: dict[str, Key]
    agreed: dict[str, int]

    def look(
        self, cwd: Path, names: Mapping[str, str], run: JobRun, verify: Verify | None
    ) -> _Left:
        """Looks at the stores that the run has left, and returns them. Raises: Finding: a store is
        damaged or has lost commits, or no generation is common."""
        for seen in run.seen:
            name = next((name for name, called in names.items() if called == seen.path), None)
            if name is not None:
                self.commits[name] = max(self.commits.get(name, 0), seen.acknowledged)
                self.agreed[name] = max(self.agreed.get(name, 0), seen.agreed)
        left = _Left.behind(cwd, names, verify)
        for name, returned in self.commits.items():
            found = left.stores[name].commits if name in left.stores else 0
            if found < returned:
                raise Finding(
                    Outcome.LOST, f"{name}: {returned} commits had returned, it holds {found}"
                )
            self.commits[name] = found
        common = left.common()
        for name, before in self.common.items():
            if name not in common or _later(before, common[name]):
                raise Finding(
                    Outcome.LOST,
                    f"all ranks had {before} of {name}, and go on from "
                    f"{common.get(name, 'no run')}",
                )
        for name in common:
            self._agreed(left, name, common[name])
        self.common = common
        return left

    def _agreed(self, left: _Left, run: str, common: Key) -> None:
        """Checks a rank that knew that all ranks had its last commit, and has told its program so:
        they must not go on from another state. Raises: Finding."""
        for one in left.members(run):
            key = one.keys[0]
            told = one.name in left.stores and self.agreed.get(one.name) == (
                left.stores[one.name].commits
            )
            if told and key.by_job and key != common:
                raise Finding(
                    Outcome.LOST,
                    f"{one} knew that all ranks had {key}, and they go on from {common}",
                )


def _count(key: Key) -> int:
    return key.number if key.by_job else max(key.step, 0)


def _later(before: Key, now: Key) -> bool:
    return before.by_job and (now.job != before.job or now.number < before.number)


# ---- trials --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    number: int
    kills: tuple[Kill, ...]


def _plan(trials: int, reference: _Reference, seed: int) -> list[_Plan]:
    """Draws the kills of each trial. The first kill lies in the part of the run that is the
    trial's, at a persistence point of one rank or at a time, and takes that rank or all ranks. Half
    of the second kills come early, while the job is joined again."""
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
            delay = 0.0 if point else 0.8 * share * reference.seconds  # it may be quicker next time
            kills.append(Kill(point, delay, victim=victim, whole=kind in (2, 4)))
        plans.append(_Plan(i + 1, tuple(kills)))
    return plans


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
    names = {
        name: str(cwd.resolve() / name) if os.path.isabs(called) else called
        for name, called in reference.names.items()
    }
    kills = list(plan.kills)
    done, found = 0, _Found({}, {}, {})
    try:
        while True:
            run = run_job(runner, cwd, kills[done:], names, resumed=done > 0)
            if run.status != 0 and not run.kills:
                again = "started again, " if done else ""
                raise Finding(
                    Outcome.MANUAL, f"{again}it ended with status {run.status}: {run.said}"
                )
            done += run.kills
            left = found.look(cwd, names, run, verify)
            common = max(map(_count, found.common.values()), default=None)
            for i in range(done - run.kills, done):
                kills[i] = replace(kills[i], acknowledged=left.newest(), found=common)
            if run.status == 0:
                break
        left.require_equal()
        state = left.state | digest_files(cwd, runner.program.results)
        apart = [
            name for name in differing(state, reference.state) if name not in reference.differs
        ]
        if compare and apart:
            raise Finding(
                Outcome.DIFFERENT,
                f"not the end of a job that nobody killed: {', '.join(apart[:4])}",
            )
        runner.check(cwd)
    except Finding as finding:
        if keep is not None:
            shutil.copytree(cwd, keep / f"trial{plan.number}", dirs_exist_ok=True, symlinks=True)
        return Trial(plan.number, tuple(kills), finding.outcome, str(finding), None)
    finally:
        shutil.rmtree(cwd, ignore_errors=True)
    detail = "" if done else "it ended before it was killed"
    return Trial(plan.number, tuple(kills[:done]), Outcome.CLEAN, detail, left.step())


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

    Returns: primitives are those of the rank that has most; commits is the last
        step.

    Raises: ValueError, TypeError: as `crash_test`; undisturbed, the ranks end at different steps.
    """
    if trials < 1 or jobs < 1:
        raise ValueError(f"trials={trials!r} and jobs={jobs!r}: at least one")
    start = time.monotonic()
    if not isinstance(program, Program):
        program = Program(program)
    with tempfile.TemporaryDirectory(prefix="pmstore-crashtest-") as temporary:
        room = Path(temporary)
        runner = Runner(program, Path(folder).resolve(), terminates=False)
        try:
            reference = _reference(runner, room / "reference", verify)
            if compare:
                control = _reference(runner, room / "control", verify)
                differs = frozenset(differing(reference.state, control.state))
                reference = replace(reference, differs=differs)
        except Finding as finding:
            raise ValueError(f"after a run that nobody killed: {finding}") from None
        plans = _plan(trials, reference, seed)
        if at:
            plans = [_Plan(1, tuple(_ordered(reference, *one) for one in at))]
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
        "kill",
        reference.domain,
        max(reference.primitives.values()),
        reference.step,
        not reference.differs,
        time.monotonic() - start,
        found,
        tuple(sorted(reference.differs)),
        tuple(reference.names),
    )


def _ordered(reference: _Reference, rank: int, point: int) -> Kill:
    names = list(reference.names)
    if not (0 <= rank < len(names) and 1 <= point <= reference.primitives[names[rank]]):
        told = ", ".join(
            f"rank {rank} ({name}) has {reference.primitives[name]} points"
            for rank, name in enumerate(names)
        )
        raise ValueError(f"rank {rank}, point {point}: {told}")
    return Kill(point, 0.0, victim=names[rank])
