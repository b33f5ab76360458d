"""Runs a drawn program on plain torch, undisturbed, and in lives that end at drawn moments, and
compares."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.server import JobServer, Ranks
from programs.bits import Bits, differences

from crashtests import cases
from pmstore.testing import ForkServer

from .drawing import Program, draw

_LIFE_SECONDS = 200.0
_MOST_LIVES = 40
_DISK = "/var/tmp"
_COUNTS = ("moment", "call", "primitive")
_ENDS = (
    ("moment", "kill"),
    ("moment", "kill"),
    ("call", "kill"),
    ("primitive", "kill"),
    ("moment", "raise"),
    ("moment", "interrupt"),
    ("call", "interrupt"),
    ("moment", "term"),
    ("call", "term"),
)
"""When a life ends, and how."""
_RIGHT = {
    "kill": ("SIGKILL",),
    "raise": ("raised Boom",),
    # one that comes in a callback whose errors Python ignores is lost
    "interrupt": ("raised KeyboardInterrupt", "ended"),
    # sys.exit, or a notice to the guard, which has to be entered
    "term": ("exit 0", "ended", "SIGTERM"),
}
"""How a life may end then."""


@dataclass
class Report:
    """What was found of one program. problems: sentences; none: it is right."""

    program: Program
    problems: list[str] = field(default_factory=list)
    lives: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    """By kind: of lives that were disturbed."""


@dataclass(frozen=True)
class _Plan:
    """unit, at, deed: see `Life`; in a job of that rank. grace: seconds that the other ranks of a
    job have then."""

    unit: str = ""
    at: int = 0
    deed: str = ""
    rank: int = 0
    grace: float = 0.0

    def of(self, rank: int) -> dict[str, Any]:
        if rank == self.rank and self.unit:
            return {"unit": self.unit, "at": self.at, "deed": self.deed}
        return {}


@dataclass(frozen=True)
class _Life:
    """How a life of one rank went. end: ended, exit CODE, raised NAME, or the signal's name."""

    end: str
    fired: bool
    counts: dict[str, int]
    results: list[Bits]
    said: str


def server(forks: ForkServer | None = None) -> JobServer:
    """A process that has imported what programs need, and forks."""
    return JobServer(__package__, ["life"], forks)


def examine(program: Program, forks: JobServer, ends: int = 5) -> Report:
    """Everything that is done with one program: up to so many ends of its lives."""
    report = Report(program)
    memory = _DISK if program.domain == "file" else "/dev/shm"
    with tempfile.TemporaryDirectory(prefix="pmstore-steps-", dir=memory) as folder:
        try:
            _Examination(program, forks, Path(folder), report).run(ends)
        except _Broken as broken:
            report.problems.append(str(broken))
    return report


class _Broken(Exception):
    """Something went as it must not."""


class _Examination:
    def __init__(self, program: Program, forks: JobServer, folder: Path, report: Report) -> None:
        self.program = program
        self.forks = forks
        self.folder = folder
        self.report = report
        self.chance = random.Random(f"ends {program.seed} 0")
        self.whole: list[list[Bits]] = []
        """By stage and rank."""
        self.counts: list[list[dict[str, int]]] = []
        self.told: list[_Told] = []
        self.plans: list[str] = []

    def run(self, ends: int) -> None:
        self._undisturbed()
        if not (self.program.workers and self.program.noisy):  # each batch has a seed of its own
            self._plain()
        self._disturbed(ends)

    # ---- without disturbance

    def _undisturbed(self) -> None:
        """The last start is made twice: the second time there is nothing left to do."""
        home = self._home("whole")
        for stage in range(len(self.program.stages)):
            lives = self._live(home, stage, _Plan("call", -1), "undisturbed")
            self.whole.append([one.results[0] for one in self._ended(lives, "undisturbed")])
            self.counts.append([one.counts for one in lives])
        again = self._live(home, len(self.program.stages) - 1, _Plan(), "again")
        self._compare(-1, again, "run again after its end")
        self.told = [_Told.read(home / f"told{rank}") for rank in range(self.program.world)]
        for one in self.told:
            if one.twice:
                raise _Broken(f"undisturbed, the logger was told twice of {one.twice}")

    def _plain(self) -> None:
        lives = self._ended(self._live(self._home("plain"), -1, _Plan(), "plain"), "plain torch")
        for stage, whole in enumerate(self.whole):
            for rank, life in enumerate(lives):
                ours, theirs = life.results[stage], dict(whole[rank])
                if "/optimizer/state/0" not in ours:  # one on slots has it from attach on
                    made = [path for path in theirs if path.startswith("/optimizer/state")]
                    theirs = {path: one for path, one in theirs.items() if path not in made}
                    theirs["/optimizer/state"] = ours["/optimizer/state"]
                self._same(ours, theirs, f"stage {stage}, as on plain torch")

    # ---- with

    def _disturbed(self, ends: int) -> None:
        home = self._home("disturbed")
        for stage in range(len(self.program.stages)):
            wanted = -(-ends * (stage + 1) // len(self.program.stages))
            while True:
                plan = self._plan(stage) if len(self.plans) < wanted else _Plan()
                lives = self._live(home, stage, plan, str(plan))
                if not self._end_came(lives, plan):
                    break
                self.plans.append(f"{plan.unit} {plan.at} {plan.deed} of rank {plan.rank}")
                self.report.ends[f"{plan.deed} at a {plan.unit}"] += 1
            self._compare(stage, lives, f"ended by {', '.join(self.plans) or 'nothing'}")
        for rank, whole in enumerate(self.told):
            told = _Told.read(home / f"told{rank}")
            if told.values != whole.values or told.disorder:
                raise _Broken(f"the logger of rank {rank} was told other values; {self.plans}")

    def _plan(self, stage: int) -> _Plan:
        """In a job, whose ranks end together, lives end by a kill of one, or a notice."""
        chance, rank = self.chance, self.chance.randrange(self.program.world)
        unit, deed = chance.choice(_ENDS)
        if self.program.world > 1 and not (deed == "term" and self.program.guard):
            deed = "kill"
        seen = self.counts[stage][rank][unit]
        at = 1 + min(int(chance.expovariate(3 / max(seen, 1))), seen)
        return _Plan(unit, at, deed, rank, chance.choice((0.0, 0.02, 0.5)))

    def _end_came(self, lives: list[_Life], plan: _Plan) -> bool:
        """Whether the life was ended, and as it had to. Raises: _Broken."""
        ended = all(one.end == "ended" for one in lives)
        if not plan.unit or ended:
            self._ended(lives, f"after {self.plans}, {plan}")
            return False
        one = lives[plan.rank]
        if one.end in _RIGHT[plan.deed]:
            if plan.deed != "kill":  # together
                self._right_beside(lives, plan)
            return True
        raise _Broken(f"{one.end}, after {self.plans}, {plan}: {one.said}")

    def _right_beside(self, lives: list[_Life], plan: _Plan) -> None:
        # a notice that comes before the guard is entered kills its rank
        right = _RIGHT[plan.deed]
        if lives[plan.rank].end == "SIGTERM":
            right = (*right, "raised PeerLostError")
        for one in lives:
            if one.end not in right:
                ends = ", ".join(each.end for each in lives)
                raise _Broken(f"{ends}, after {self.plans}, {plan}: {one.said}")

    # ---- lives

    def _home(self, name: str) -> Path:
        home = self.folder / name
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        return home

    def _live(self, home: Path, stage: int, plan: _Plan, told: str) -> list[_Life]:
        """One start of the program: a life of each rank."""
        self.report.lives += 1
        for file in (*home.glob("journal*"), *home.glob("result*")):
            file.unlink()
        ranks = range(self.program.world)
        more = {"forgets": self.program.forgets}
        given = [[self.program.seed, stage, str(home), plan.of(rank) | more] for rank in ranks]
        started = self.forks.start("life:live", home, given)
        try:
            self._wait(started, plan, home, told)
        finally:
            started.end()
        return [_read(home, rank, started.status[rank]) for rank in ranks]

    def _wait(self, started: Ranks, plan: _Plan, home: Path, told: str) -> None:
        end = time.monotonic() + _LIFE_SECONDS
        while len(started.poll()) < self.program.world:
            if -signal.SIGKILL in started.status.values():
                started.end(plan.grace)
                return
            if time.monotonic() > end:
                left = [rank for rank in range(self.program.world) if started.signal(rank, 10)]
                time.sleep(0.5)
                said = "\n".join((home / f"stderr{rank}").read_text()[-3000:] for rank in left)
                raise _Broken(f"it hangs, {told}, after {self.plans}\n{said}")
            time.sleep(0.01)

    # ---- what comes out

    def _ended(self, lives: list[_Life], when: str) -> list[_Life]:
        for one in lives:
            if one.end != "ended" or not one.results:
                raise _Broken(f"{one.end}, {when}: {one.said}")
        return lives

    def _compare(self, stage: int, lives: list[_Life], when: str) -> None:
        for rank, life in enumerate(self._ended(lives, when)):
            self._same(self.whole[stage][rank], life.results[0], f"rank {rank}, {when}")

    def _same(self, ours: Bits, theirs: Bits, when: str) -> None:
        if told := differences(ours, theirs):
            raise _Broken(f"other bits, {when}: {'; '.join(told)}")


@dataclass(frozen=True)
class _Told:
    """What the logger of a rank was told in all lives. values: the last ones, by step and name.

    twice: a step, of those that were told twice. disorder: steps did not come in order."""

    values: dict[tuple[int, str], float]
    twice: tuple[int, str] | None
    disorder: bool

    @classmethod
    def read(cls, file: Path) -> _Told:
        values: dict[tuple[int, str], float] = {}
        twice, disorder = None, False
        newest = (0.0, -1)
        seen: set[tuple[int, str, float]] = set()
        for line in file.read_text().splitlines() if file.exists() else ():
            born, step, given = json.loads(line)
            disorder |= born == newest[0] and step < newest[1]
            newest = (born, step)
            for name, value in given.items():
                values[step, name] = value
                twice = (step, name) if (step, name, value) in seen else twice
                seen.add((step, name, value))
        return cls(values, twice, disorder)


def _read(home: Path, rank: int, status: int) -> _Life:
    """What a rank left."""
    said = (home / f"stderr{rank}").read_text(errors="replace").strip()[-1500:]
    journal, result = home / f"journal{rank}", home / f"result{rank}"
    lines = [line.split() for line in journal.read_text().splitlines()] if journal.exists() else []
    ends = [line for line in lines if line[0] in ("ended", "exit", "raised")]
    end = ends[-1] if ends else [""]
    whole = end[0] == "ended"
    return _Life(
        end=end[0] if whole else " ".join(end) or signal.Signals(-status).name,
        fired=any(line[0] == "fired" for line in lines),
        counts=dict(zip(_COUNTS, map(int, end[1:]), strict=True)) if whole else {},
        results=pickle.loads(result.read_bytes()) if result.exists() else [],
        said=said,
    )


def _found(program: Program, ends: int, forks: JobServer) -> cases.Found:
    report = examine(program, forks, ends)
    return cases.Found(Counter(lives=report.lives) + report.ends, report.problems)


CASES = cases.Kind(
    6, "ends", lambda: 400, lambda seed, _: (str(one := draw(seed)), one), _found, server
)
