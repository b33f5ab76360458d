"""Forks lives one after the other, kills them, and judges what they left. Several lanes use several
cores."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from crashtests import cases
from crashtests.stress import board as b
from crashtests.stress.board import Board
from crashtests.stress.life import Life, Plan, end_with_parent
from crashtests.stress.scenarios import ALL, DOMAINS, Scenario

OPEN_SECONDS = 60.0
STALL_SECONDS = 60.0
LONG_STEPS = 3


@dataclass(frozen=True)
class Place:
    """Folders: of stores in memory and on a disk, and of what is kept of failures."""

    memory: Path
    disk: Path
    kept: Path


@dataclass(frozen=True)
class Track:
    """A store that lives go on with, one after the other. seed: of what is drawn for them."""

    scenario: Scenario
    domain: str
    hot: bool
    seed: int = field(default=0, compare=False)

    @property
    def case(self) -> int:
        return self.seed * len(TRACKS) + TRACKS.index(self)

    def __str__(self) -> str:
        return f"{self.scenario.name} {self.domain}{'' if self.hot else ' hot=False'}"


@dataclass
class Count:
    """What was done."""

    kills: int = 0
    at_primitives: int = 0
    power_failures: int = 0
    lives: int = 0
    opens: int = 0
    commits: int = 0
    reads: int = 0
    refused: int = 0
    failures: int = 0
    by_scenario: dict[str, int] = field(default_factory=dict)
    """Kills."""

    def add(self, other: Count) -> None:
        for name, value in asdict(other).items():
            if name != "by_scenario":
                setattr(self, name, getattr(self, name) + value)
        for name, kills in other.by_scenario.items():
            self.by_scenario[name] = self.by_scenario.get(name, 0) + kills


@dataclass(frozen=True)
class Failure:
    """What was found wrong. kept: the folder with the store as the life found it, and as it left
    it."""

    track: str
    life: int
    case: int | None
    """None: its scenario is none of ALL."""
    text: str
    kept: str


def tracks(
    scenarios: list[Scenario], domains: list[str], hot: list[bool], rng: random.Random
) -> Iterator[Track]:
    """For ever: each scenario in turn, in another domain each time. Every combination comes before
    one comes again."""
    decks: dict[str, list[tuple[str, bool]]] = {}
    while True:
        for scenario in rng.sample(scenarios, len(scenarios)):
            deck = decks.setdefault(scenario.name, [])
            if not deck:
                deck += rng.sample(
                    every := [(d, h) for d in domains or DOMAINS for h in hot], len(every)
                )
            yield Track(scenario, *deck.pop(), rng.randrange(1000))


TRACKS = [Track(*one) for one in itertools.product(ALL, DOMAINS, (True, False))]


def drawn(case: int, _: int = 0) -> tuple[str, Track]:
    track, seed = cases.turn(TRACKS, case)
    return f"{track}, lives {seed}", replace(track, seed=seed)


class Lane:
    """tell: is called after every life with what was new; it says whether to stop at once."""

    def __init__(
        self, place: Place, lives: int, tell: Callable[[Count, Failure | None], bool]
    ) -> None:
        self.place = place
        self.lives = lives
        self.tell = tell

    def run(self, every: Iterator[Track], least: int, until: Callable[[], bool]) -> None:
        """least: so many tracks at least. until: true when it is time to stop after these."""
        for done, track in enumerate(every):
            if (done >= least and until()) or self._follow(track):
                return

    def _follow(self, track: Track) -> bool:
        """A store, from life to life, and a last look, or until something is wrong. True: stop at
        once."""
        folder = (
            self.place.disk if track.domain == "file" else self.place.memory
        ) / f"lane{os.getpid()}"
        board = Board()
        before = Count()
        self.random = random.Random(track.seed)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            for number in range(self.lives + 1):
                plan = self._plan(track, number, folder)
                new, text = self._live(track, plan, board)
                total = Count(
                    commits=board.total(b.COMMITS),
                    reads=board.total(b.READS),
                    refused=board.total(b.REFUSED),
                )
                for name in ("commits", "reads", "refused"):
                    setattr(new, name, getattr(total, name) - getattr(before, name))
                before = total
                failure = self._keep(track, plan, folder, text) if text else None
                new.failures = int(failure is not None)
                stop = self.tell(new, failure)
                if stop or failure:
                    return stop
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return False

    def _plan(self, track: Track, number: int, folder: Path) -> Plan:
        rng = self.random
        look = number == self.lives
        # One in three dies at a primitive, a part of these in the open (recovery, creation). Else
        # at a random time. The last one goes on until everybody got somewhere.
        long = number == self.lives - 1
        opening = rng.randrange(1, 150) if rng.random() < 0.15 else 0
        power = rng.getrandbits(48) if track.domain != "process" and rng.random() < 0.2 else None
        if power is not None:
            opening = rng.choice((rng.randrange(1, 200), rng.randrange(1, 5000)))
        if long or look:
            opening, power = 0, None
        memory = rng.choice(("", "64K", "1M")) if track.domain == "file" else ""
        traits = dict.fromkeys(track.scenario.traits, True)
        if "compacts" in traits:
            # of a file that another takes the place of nothing is known to have been durable
            traits["compacts"] = power is None and rng.random() < 0.3
        if "hold" in traits:
            traits["hold"] = rng.random() < 0.8
        return Plan(
            number=number,
            seed=rng.getrandbits(40),
            path=folder / "store.pm",
            folder=folder,
            domain=track.domain,
            hot=track.hot,
            switch_seconds=rng.choice((0.005, 1e-6, 1e-6)),
            only_look=look,
            show_first=look or rng.random() < 0.1,
            examine=look or rng.random() < 0.2,
            kill_opening=opening,
            kill_running=rng.randrange(1, 3000)
            if not opening and not long and rng.random() < 0.25
            else 0,
            power_seed=power,
            long=long,
            memory=memory,
            **traits,
        )

    def _live(self, track: Track, plan: Plan, board: Board) -> tuple[Count, str]:
        """One life, and what was wrong with it, or ""."""
        rng = self.random
        early = rng.random() < 0.15 and not plan.long and not plan.only_look
        delay = rng.uniform(0, 0.02) if early else rng.expovariate(1 / 0.05)
        if plan.path.exists():
            shutil.copyfile(plan.path, plan.folder / "before.pm")
        board.words[b.PHASE] = b.STARTED
        looked = board.words[b.LOOKED]
        parent, child = os.getpid(), os.fork()
        if child == 0:
            _live(track, plan, board, parent)
        ours, status, stalled = _kill(child, board, track, delay, early, plan.long)
        died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        new = Count(
            lives=1,
            kills=int(died),
            at_primitives=int(died and not ours),
            opens=board.words[b.LOOKED] - looked,
        )
        new.power_failures = int(died and not ours and plan.power_seed is not None)
        new.by_scenario = {track.scenario.name: int(died)}
        if board.failure:
            return new, board.failure
        if stalled or not (died or (plan.only_look and status == 0)):
            said = (plan.folder / "output").read_text(errors="replace")[-20_000:]
            return new, f"{stalled or f'it ended by itself, with wait status {status:#x}'}\n{said}"
        return new, ""

    def _keep(self, track: Track, plan: Plan, folder: Path, text: str) -> Failure:
        name = (
            f"{time.strftime('%H%M%S')}-{track.scenario.name}-{track.domain}-"
            f"{os.getpid()}-{plan.number}"
        )
        kept = self.place.kept / name
        shutil.copytree(folder, kept)
        case = track.case if track in TRACKS else None
        failure = Failure(str(track), plan.number, case, text, str(kept))
        (kept / "report.txt").write_text(f"{failure.track}\n{plan}\n\n{text}\n")
        return failure


def _live(track: Track, plan: Plan, board: Board, parent: int) -> NoReturn:
    """In the child."""
    try:
        end_with_parent(parent)
        out = os.open(plan.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
        Life(plan, board, track.scenario.make).run()
    except BaseException as error:
        board.fail(f"the life itself: {error!r}")
    finally:
        os._exit(1)


def _kill(
    child: int, board: Board, track: Track, delay: float, early: bool, long: bool
) -> tuple[bool, int, str]:
    """Waits until it is time, and kills. Whether that killed it, the wait status, and how it
    stalled, if it did.

    early: the time begins with the fork, else when the actors run. long: until each actor has taken
        some steps.
    """
    began = time.monotonic()
    running, stalled = 0.0, ""
    steps: list[int] = []
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return False, status, ""
        now = time.monotonic()
        if not running and board.words[b.PHASE] == b.RUNNING:
            running = now
            steps = _steps(board, track)
        if early and now - began >= delay:
            break
        if running and not early:
            behind = [
                i
                for i, (old, new) in enumerate(zip(steps, _steps(board, track), strict=True))
                if new - old < LONG_STEPS
            ]
            if long and behind and now - running > STALL_SECONDS:
                stalled = f"no progress in {STALL_SECONDS:.0f} s by actors {behind} of {track}"
                break
            if now - running >= delay and not (long and behind):
                break
        if now - began > OPEN_SECONDS + STALL_SECONDS:
            stalled = f"the open of {track} takes longer than {OPEN_SECONDS:.0f} s"
            break
        time.sleep(0.0005)
    if stalled:
        os.kill(child, signal.SIGUSR1)
        time.sleep(1.0)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status, stalled


def _steps(board: Board, track: Track) -> list[int]:
    return [board.actor(i)[b.STEPS] for i in range(len(track.scenario.actors))]


def leave(code: int) -> NoReturn:
    """Ends a lane's process without running what others registered at exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _found(track: Track, lives: int, _: None) -> cases.Found:
    words = ["--case", str(track.case), "--lives", str(lives), "--seconds", "0"]
    return cases.program("-m", "crashtests.stress", *words)


CASES = cases.Kind(12, "lives", lambda: len(TRACKS), drawn, _found)
