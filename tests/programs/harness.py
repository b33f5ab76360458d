"""Runs a program on plain torch, undisturbed, and disturbed in every way, and compares."""

from __future__ import annotations

import pickle
import random
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crashtests import cases
from pmstore.testing import ForkServer

from .bits import Bits, differences
from .registry import Program, load

KILLS = 5
STOPS_OF_A_KIND = 3
_MOST_LIVES = 60
_TIMEOUT_SECONDS = 120.0
_PACKAGE_FOLDER = Path(__file__).resolve().parents[len(__package__.split("."))]
_DOMAINS = ("process", "process", "emulated", "file")
_IN_MEMORY = _DOMAINS[:3]


@dataclass
class Report:
    """What was found of one program. problems: sentences; none: it is right."""

    name: str
    problems: list[str] = field(default_factory=list)
    kills: int = 0
    in_step: int = 0
    """Kills and stops that are known to have come in the middle of a step."""
    resumed: int = 0
    """Lives that began behind the first step."""
    lives: int = 0
    domain: str = ""


@dataclass(frozen=True)
class _Life:
    """How a life went. counts: moments, calls and primitives, at the end or of the setup."""

    killed: bool
    end: str
    """ended, exit CODE, raised NAME; empty if it was killed."""
    fired: bool
    in_step: bool
    reached: int
    """Steps that the run held when it was first attached; before that, and without torch, the
    store's epoch when it was opened."""
    setup: dict[str, int]
    counts: dict[str, int]
    result: Bits | None
    said: str


def server() -> ForkServer:
    """A process that has imported the programs, and forks."""
    return ForkServer([str(_PACKAGE_FOLDER)])


def examine(
    program: Program,
    forks: ForkServer,
    seed: int = 0,
    kills: int = KILLS,
    stops: int = STOPS_OF_A_KIND,
) -> Report:
    """Everything that is done with one program: so many kills and stops of a kind, or more, until
    one has come within a step, and one life has gone on."""
    chance = random.Random(f"{program.name} {seed}")
    report = Report(program.name, domain=chance.choice(_IN_MEMORY if program.memory else _DOMAINS))
    memory = None if report.domain == "file" else "/dev/shm"
    with tempfile.TemporaryDirectory(prefix="pmstore-program-", dir=memory) as folder:
        _Examination(program, forks, chance, Path(folder), report, kills, stops).run()
    return report


class _Broken(Exception):
    """A life went as it must not: the rest of this kind of disturbance is left out."""


class _Examination:
    def __init__(
        self,
        program: Program,
        forks: ForkServer,
        chance: random.Random,
        folder: Path,
        report: Report,
        kills: int,
        stops: int,
    ) -> None:
        self.kills, self.stops = kills, stops
        self.program = program
        self.forks = forks
        self.chance = chance
        self.folder = folder
        self.report = report
        self.whole: Bits = {}
        self.setup: dict[str, int] = {}
        self.counts: dict[str, int] = {}

    def run(self) -> None:
        try:
            if self.program.refused:
                self._refused()
                return
            self._undisturbed()
        except _Broken as broken:
            self.report.problems.append(f"undisturbed: {broken}")
            return
        if not self.program.plain:
            self._guarded("plain torch", self._plain)
        for deed in self.program.stops:
            self._guarded(deed, lambda deed=deed: self._disturbed(deed))

    def _guarded(self, what: str, part: Any) -> None:
        try:
            part()
        except _Broken as broken:
            self.report.problems.append(f"{what}: {broken}")

    # ---- without disturbance

    def _undisturbed(self) -> None:
        """Twice: the second time there is nothing left to do, and all is counted the first time."""
        home = self._home("whole")
        first = self._live(home, unit="call", at=-1)
        self.whole = self._ended(first)
        self.setup, self.counts = first.setup, first.counts
        again = self._ended(self._live(home))
        self._compare(again, "the program run again after its end")

    def _refused(self) -> None:
        life = self._live(self._home("refused"))
        words = self.program.refused.split("|")
        if not (life.end.startswith("raised") and any(word in life.said for word in words)):
            raise _Broken(f"it is not refused: {life.end}: {life.said}")

    def _plain(self) -> None:
        self._compare(self._ended(self._live(self._home("plain"), plain=True)), "plain torch")

    # ---- with

    def _disturbed(self, deed: str) -> None:
        """Lives on one store, each disturbed once, until one ends by itself; on other stores, until
        there were enough."""
        wanted = self.kills if deed == "kill" else self.stops
        fired = in_step = resumed = lives = 0
        while fired < wanted or not in_step or not resumed:
            home = self._home(deed)
            while True:
                lives += 1
                if lives > _MOST_LIVES:
                    raise _Broken(f"{fired} in {lives} lives, {in_step} of them within a step")
                enough = fired >= wanted and in_step and resumed
                plan = {} if enough else self._plan(deed, 1 if fired >= wanted else wanted)
                life = self._live(home, **plan)
                resumed += life.reached > 0
                if not self._disturbance_came(life, deed):
                    break
                fired += 1
                in_step += life.in_step
            self._compare(self._ended(life), f"{fired} times ({deed})")
        self.report.kills += fired if deed == "kill" else 0
        self.report.in_step += in_step
        self.report.resumed += resumed

    def _plan(self, deed: str, times: int) -> dict[str, Any]:
        """Where to disturb: mostly in the steps of the program, sometimes before them."""
        units = {"kill": ("moment", "moment", "call", "primitive"), "term": ("moment", "call")}
        unit = self.chance.choice(units.get(deed, ("moment",)))
        if deed == "raise":
            deed = self.chance.choice(("raise", "interrupt"))
        setup, all_of_them = self.setup.get(unit, 0), self.counts[unit]
        if self.chance.random() < 0.1 and setup > 1 and deed != "break":
            return {"unit": unit, "deed": deed, "at": self.chance.randrange(1, setup)}
        of_steps = max(2, (all_of_them - setup) * 2 // times)
        return {"unit": unit, "deed": deed, "at": setup + self.chance.randrange(1, of_steps)}

    def _disturbance_came(self, life: _Life, deed: str) -> bool:
        """Whether it came, and the life ended as it had to. Raises: _Broken."""
        if deed == "kill":
            if not life.killed and life.end != "ended":
                raise _Broken(f"{life.end} after a kill, at step {life.reached}: {life.said}")
            return life.killed
        if not life.fired:
            self._ended(life)
            return False
        right = {
            # one in a callback whose errors Python ignores is lost
            "term": ("exit 0", "ended"),
            "raise": ("raised Boom", "raised KeyboardInterrupt"),
            # out of a step, that is, or of a loop that is none of the run's
            "break": ("raised UnfinishedStepError", "raised TransactionError", "ended"),
        }
        if life.end not in right[deed]:
            raise _Broken(f"{life.end or 'killed'}: {life.said}")
        return True

    # ---- lives

    def _home(self, name: str) -> Path:
        home = self.folder / name
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        return home

    def _live(self, home: Path, **plan: Any) -> _Life:
        self.report.lives += 1
        (home / "result").unlink(missing_ok=True)
        plan["domain"] = self.report.domain
        given = [self.program.name, str(home), plan]
        began = time.monotonic()
        module = "extras" if self.program.needs else "life"
        ran = self.forks.run(
            f"{__package__}.{module}:live", given, timeout_seconds=_TIMEOUT_SECONDS
        )
        if time.monotonic() - began > _TIMEOUT_SECONDS:
            raise _Broken("it did not end")
        said = (home / "stderr").read_text(errors="replace").strip()[-800:]
        lines = [line.split() for line in (home / "journal").read_text().splitlines()]
        reached = [list(map(int, line[1:])) for line in lines if line[0] == "reached"][:2]
        fired = [line for line in lines if line[0] == "fired"]
        end = [line for line in lines if line[0] in ("ended", "exit", "raised")]
        if not ran.killed and not end:
            raise _Broken(f"the harness failed: {said}")
        names = ("moment", "call", "primitive")
        result = home / "result"
        return _Life(
            killed=ran.killed,
            end=" ".join(end[-1][:1] if end[-1][0] == "ended" else end[-1]) if end else "",
            fired=bool(fired),
            in_step=any(line[2] == "1" for line in fired),
            reached=reached[-1][0] if reached else 0,
            setup=dict(zip(names, reached[-1][1:], strict=True)) if reached else {},
            counts=dict(zip(names, map(int, end[-1][1:]), strict=True))
            if end and end[-1][0] == "ended"
            else {},
            result=pickle.loads(result.read_bytes()) if result.exists() else None,
            said=said,
        )

    def _ended(self, life: _Life) -> Bits:
        if life.end != "ended" or life.result is None:
            raise _Broken(f"{life.end or 'killed'}: {life.said}")
        return life.result

    def _compare(self, found: Bits, after: str) -> None:
        if told := differences(self.whole, found):
            raise _Broken(f"other bits, {after}: {'; '.join(told)}")


def every() -> list[Program]:
    """In the order of their cases."""
    return [program for _, program in sorted(load().items())]


def _draw(seed: int, _: int) -> tuple[str, tuple[Program, int]]:
    program, moments = cases.turn(every(), seed)
    return f"{program.name}, moments {moments}", (program, moments)


def _found(drawn: tuple[Program, int], kills: int, forks: ForkServer) -> cases.Found:
    program, moments = drawn
    stops = max(1, kills * STOPS_OF_A_KIND // KILLS)
    report = examine(program, forks, moments, kills, stops)
    return cases.Found(cases.numbers(report), report.problems)


CASES = cases.Kind(KILLS, "kills", lambda: len(every()), _draw, _found, server)
