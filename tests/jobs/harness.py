"""Runs a job undisturbed, and killed again and again, and compares.

After each kill the job is started again. Then has to hold: all ranks join, at the same step, in a
term that was never before, with equal parameters and optimizer state; nothing is lost that
`agree=True` or `agreed_step` said all ranks have, and at most one generation of what any rank had
committed. A rank that was not killed has ended, or raised within the timeout. At the end all is bit
for bit as in the run that nobody killed.
"""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from programs.bits import Bits, differences

from crashtests import cases

from .evidence import Broken, Evidence, RankNotes, has_met, read_notes, store_problems, tell
from .registry import Job, load
from .server import JobServer, Ranks

TIMEOUT_SECONDS = 20.0
"""What the programs give attach."""
_SLACK_SECONDS = 60.0
_LIFE_SECONDS = 240.0
KILLS_OF_A_STORE = 9
DOMAINS = ("process", "emulated", "file")
_DISK = "/var/tmp"


@dataclass
class Report:
    """What was found of one job. problems: sentences; none: it is right."""

    name: str
    domain: str
    problems: list[str] = field(default_factory=list)
    lives: int = 0
    joins: int = 0
    """Times that all ranks joined and went on from there."""
    kills: int = 0
    all_at_once: int = 0
    while_joining: int = 0
    apart: int = 0
    """Lives that left ranks at different generations."""
    going_back: int = 0
    """Kills while joining of a rank that was ahead, so that it had to go back."""
    raised: int = 0
    """Ranks that were not killed, and raised in time."""
    lost: int = 0
    """Joins at which a generation was lost."""


@dataclass(frozen=True)
class _Plan:
    """kind: as in `RankLife`, or time, or all (at a time); at: for a time in seconds."""

    kind: str
    rank: int = 0
    at: float = 0

    def of(self, rank: int, domain: str) -> dict[str, Any]:
        if rank == self.rank and self.kind not in ("none", "time", "all"):
            return {"domain": domain, "unit": self.kind, "at": int(self.at)}
        return {"domain": domain}

    def __str__(self) -> str:
        return f"{self.kind} rank {self.rank} at {self.at:.4g}"


def examine(
    job: Job, server: JobServer, domain: str = "process", kills: int = 12, seed: int = 0
) -> Report:
    """Everything that is done with one job: at least so many kills, in one domain."""
    report = Report(job.name, domain)
    memory = _DISK if domain == "file" else "/dev/shm"
    with tempfile.TemporaryDirectory(prefix="pmstore-job-", dir=memory) as folder:
        examination = _Examination(job, server, Path(folder), report, f"{job.name} {domain} {seed}")
        try:
            examination.undisturbed()
            while report.kills < kills:
                examination.one_store(min(KILLS_OF_A_STORE, kills - report.kills))
        except Broken as broken:
            report.problems.append(str(broken))
    return report


class _Examination:
    def __init__(
        self, job: Job, server: JobServer, folder: Path, report: Report, seed: str
    ) -> None:
        self.job = job
        self.server = server
        self.folder = folder
        self.report = report
        self.seed = seed
        self.chance = random.Random(seed)
        self.whole: list[Bits] = []
        self.setup: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self.seconds = 0.0
        self.number = 0
        self.told = ""

    # ---- without disturbance

    def undisturbed(self) -> None:
        """Twice: the second time there is nothing left to do but to join."""
        home, evidence = self._home(), Evidence(self.job)
        began = time.monotonic()
        first = self._live(home, evidence, _Plan("none"))
        self.seconds = time.monotonic() - began
        self.whole = self._results(first)
        again = self._live(home, evidence, _Plan("none"))
        self._compare(self._results(again), "run again after its end")
        self.setup = dict(zip(("moment", "primitive"), first[0].joined_at, strict=True))
        self.counts = first[0].counts
        joined = again[0]
        self.counts["joining"] = joined.counts["joining"]
        self.counts["joining-primitive"] = joined.joined_at[1] - joined.joining_at[1]
        shutil.rmtree(home)

    # ---- killed

    def one_store(self, wanted: int) -> None:
        """Lives on the same stores, each killed, until there were enough; then one to the end."""
        home, evidence = self._home(), Evidence(self.job)
        killed = 0
        ahead: list[int] = []
        for _ in range(4 * wanted + 8):
            plan = self._plan(wanted, ahead, first=not evidence.joins) if killed < wanted else None
            notes = self._live(home, evidence, plan or _Plan("none"))
            here = sum(one.killed for one in notes)
            killed += here
            self.report.kills += here
            if not here:
                self._compare(self._results(notes), f"{killed} kills, {self.told}")
                shutil.rmtree(home)
                return
            dying = [rank for rank, one in enumerate(notes) if one.died_joining]
            self.report.while_joining += len(dying)
            self.report.going_back += len([rank for rank in dying if rank in ahead])
            self.report.all_at_once += here if plan and plan.kind == "all" else 0
            ahead = self._ahead(home, evidence)
            self.report.apart += bool(ahead)
        raise Broken(f"{killed} kills, and the job does not come to its end; {self.told}")

    def _plan(self, wanted: int, ahead: list[int], first: bool) -> _Plan:
        chance, world = self.chance, self.job.world
        rank = chance.randrange(world)
        if ahead and chance.random() < 0.75:  # somebody has to go back now: again
            rank = chance.choice(ahead) if chance.random() < 0.8 else rank
            kind = chance.choice(("joining", "joining-primitive", "joining-primitive"))
            return _Plan(kind, rank, chance.randrange(1, 2 + self.counts[kind] * 5 // 4))
        kinds = ("moment", "moment", "moment", "primitive", "primitive", "time", "all", "joining")
        kind = chance.choice(kinds)
        if kind in ("time", "all"):
            return _Plan(kind, rank, chance.uniform(0, self.seconds / 2))
        if kind == "joining":
            most = self.counts[kind] * (3 if first else 1)
            return _Plan(kind, rank, chance.randrange(1, 2 + most))
        steps = max(2, (self.counts[kind] - self.setup[kind]) * 3 // wanted)
        return _Plan(kind, rank, self.setup[kind] * first + chance.randrange(1, steps))

    def _ahead(self, home: Path, evidence: Evidence) -> list[int]:
        """Ranks whose last commit is newer than that of another."""
        places = []
        for rank in range(self.job.world):
            place, problems = store_problems(home / f"run{rank}.pm")
            if problems and evidence.joins:
                raise Broken(f"rank {rank}'s store: {problems}; {self.told}")
            places.append(place)
        if any(one is None for one in places):
            return []
        return [rank for rank, one in enumerate(places) if one > min(places)]

    # ---- lives

    def _home(self) -> Path:
        self.number += 1
        home = self.folder / f"{self.number}"
        home.mkdir()
        return home

    def _live(self, home: Path, evidence: Evidence, plan: _Plan) -> list[RankNotes]:
        """One start of the job, until nobody is left. Raises Broken, if it went as it must not."""
        self.report.lives += 1
        self.told = f"seed {self.seed!r}, store {self.number}, life {self.report.lives}, {plan}"
        for file in (*home.glob("journal*"), *home.glob("result*")):
            file.unlink()
        world = range(self.job.world)
        given = [[self.job.name, str(home), plan.of(rank, self.report.domain)] for rank in world]
        ranks = self.server.start("life:live", home, given)
        try:
            self._kill(ranks, plan, home)
        finally:
            ranks.end()
        notes = [read_notes(home, rank, ranks.status[rank]) for rank in world]
        self.report.joins += evidence.check(home, notes, self.told)
        self.report.lost += evidence.lost
        self.report.raised += sum(one.end.startswith("raised") for one in notes)
        return notes

    def _kill(self, ranks: Ranks, plan: _Plan, home: Path) -> None:
        began = time.monotonic()
        while -signal.SIGKILL not in ranks.poll().values():
            passed = time.monotonic() - began
            if len(ranks.status) == len(ranks.pids):
                return
            if plan.kind in ("time", "all") and passed >= plan.at:
                for rank in range(self.job.world):
                    if plan.kind == "all" or rank == plan.rank:
                        ranks.signal(rank)
                break
            if passed > _LIFE_SECONDS:
                raise Broken(f"it hangs; {self.told}\n{self._where(ranks, home)}")
            time.sleep(0.002)
        # The others see it by themselves, or are killed by whoever started the job.
        # Before they have met, torch waits long.
        met = all(has_met(home, rank) for rank in range(self.job.world))
        if self.chance.random() < 0.5 or not met:
            ranks.end(self.chance.choice((0, 0.02, 0.1, 0.3)))
        elif not ranks.wait(TIMEOUT_SECONDS + _SLACK_SECONDS):
            raise Broken(
                f"a rank hangs beyond the timeout after a kill; {self.told}\n"
                f"{self._where(ranks, home)}"
            )

    def _where(self, ranks: Ranks, home: Path) -> str:
        left = [rank for rank in range(self.job.world) if ranks.signal(rank, signal.SIGUSR1)]
        time.sleep(0.5)
        return "\n".join(
            f"rank {rank}: " + (home / f"stderr{rank}").read_text(errors="replace")[-3000:]
            for rank in left
        )

    def _results(self, notes: list[RankNotes]) -> list[Bits]:
        if any(one.end != "ended" or one.result is None for one in notes):
            raise Broken(f"it did not end; {self.told}\n{tell(notes)}")
        return [one.result for one in notes if one.result is not None]

    def _compare(self, found: list[Bits], after: str) -> None:
        for rank, (ours, theirs) in enumerate(zip(self.whole, found, strict=True)):
            if told := differences(ours, theirs):
                raise Broken(f"other bits at rank {rank}, {after}: {'; '.join(told)}")


def every() -> list[tuple[Job, str]]:
    """Jobs and domains, in the order of their cases."""
    return [
        (job, domain)
        for _, job in sorted(load().items())
        for domain in DOMAINS
        if domain != "file" or not job.memory
    ]


def _draw(seed: int, _: int) -> tuple[str, tuple[Job, str, int]]:
    (job, domain), moments = cases.turn(every(), seed)
    return f"{job.name}, {domain}, moments {moments}", (job, domain, moments)


def _found(drawn: tuple[Job, str, int], kills: int, server: JobServer) -> cases.Found:
    job, domain, moments = drawn
    report = examine(job, server, domain, kills, moments)
    return cases.Found(cases.numbers(report), report.problems)


CASES = cases.Kind(6, "kills", lambda: len(every()), _draw, _found, JobServer)
