"""A short stress test, and that it would notice. `make nightly WHAT=stress` is the same for an
hour, with 10,000 kills."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pairwise import ALL

import pmstore
from crashtests.stress import board as b
from crashtests.stress import scenarios
from crashtests.stress.actors import FIRST, Actor, Counter
from crashtests.stress.actors_blocks import Writer
from crashtests.stress.actors_held import Beside, Rewinder
from crashtests.stress.board import Board
from crashtests.stress.content import WrongError, decode, encode
from crashtests.stress.lane import Count, Failure, Lane, Place, drawn, tracks
from crashtests.stress.life import Session
from crashtests.stress.scenarios import Scenario
from crashtests.stress.unit import Filled, Names, Replaced, Unit

ROOT = Path(__file__).resolve().parents[2]


def test_nothing_acknowledged_is_lost_and_no_read_is_wrong() -> None:
    """Every scenario, once a lane, in some domain, with hot ranges or without."""
    lanes, each = (2, 5) if ALL else (1, 3)
    command = [
        sys.executable,
        "-m",
        "crashtests.stress",
        "--seconds",
        "0",
        "--rounds",
        "1",
        "--lives",
        str(each),
        "--lanes",
        str(lanes),
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads((ROOT / "build" / "stress" / "report.json").read_text())
    assert set(report["by_scenario"]) == {scenario.name for scenario in scenarios.named([])}
    assert report["kills"] >= lanes * (each - 1) * len(report["by_scenario"])
    assert report["commits"] > report["kills"]
    assert report["reads"] > report["kills"]


def lives(scenario: Scenario, place: Path, count: int = 6) -> tuple[Count, list[Failure]]:
    """Some lives of one store in domain `process`, in this process's children."""
    total, found = Count(), []

    def tell(new: Count, failure: Failure | None) -> bool:
        total.add(new)
        if failure is not None:
            found.append(failure)
        return failure is not None

    lane = Lane(Place(place / "memory", place / "disk", place / "kept"), count, tell)
    lane.run(tracks([scenario], ["process"], [True], random.Random(7)), 1, lambda: True)
    return total, found


class Hasty(Writer):
    """Acknowledges a block before it is left."""

    def block(self, store: Any, generation: int, fails: bool) -> None:
        self.unit.done(generation)


class Late(Counter):
    """Acknowledges what it has not committed."""

    def commit(self, store: Any, pending: bool = False) -> None:
        pass


class Halver(Writer):
    """Commits in the middle of a change."""

    def block(self, store: Any, generation: int, fails: bool) -> None:
        self.unit.parts[0].write(store, generation)


class Stayer(Rewinder):
    """Says that it went back, and did not."""

    def _go_back(self, store: Any, before: int) -> None:
        self._arrive(before, None)


class Forgetful(Beside):
    """Expects what is not committed yet."""

    def _oldest(self) -> dict[Rewinder, int]:
        return {writer: writer.newest + 9 for writer in self._writers()}


class Stuck(Actor):
    """Does one step, and no other."""

    def step(self, session: Session) -> None:
        while self.words[b.STEPS]:
            pass


class Dying(Actor):
    """Ends the process."""

    def step(self, session: Session) -> None:
        raise SystemError("what no call of a store should raise")


@pytest.mark.parametrize(
    ("liar", "told"),
    [
        (Hasty, "(acknowledged)"),
        (Late, "stored and committed"),
        (Halver, "throughout"),
        (Dying, "SystemError"),
        (Stayer, "expected generation"),
        (Forgetful, "a reader: WrongError"),
    ],
)
def test_a_lie_is_found(liar: type[Actor], told: str, shm: Path) -> None:
    actors = (Rewinder, liar) if liar is Forgetful else (liar,)
    # in the first ones, mostly; on a busy machine a life has time for one commit, or for none
    _, found = lives(Scenario("liar", actors, ("hold",)), shm, 100)
    assert len(found) == 1
    assert told in found[0].text
    assert (Path(found[0].kept) / "report.txt").read_text().endswith(found[0].text + "\n")


@pytest.mark.parametrize("count", [2, 5])
def test_interrupted_it_leaves_no_process(count: int) -> None:
    """Not even a program that would go on until it is killed. count: of processes, when it is
    interrupted: itself and a lane; lanes and lives too."""
    words = [sys.executable, "-m", "crashtests.stress", "--seconds", "600", "--lanes", "2"]
    environment = {**os.environ, "PMSTORE_STRESS_TOKEN": secrets.token_hex()}
    run = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline().startswith("seed 1")
    token = f"PMSTORE_STRESS_TOKEN={environment['PMSTORE_STRESS_TOKEN']}"
    while len(alive(token)) < count:
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    try:
        run.communicate(timeout=300)
        assert run.returncode == 130
        end = time.monotonic() + 60
        while alive(token) and time.monotonic() < end:
            time.sleep(0.01)
        assert alive(token) == []
    finally:
        for pid in alive(token):
            os.kill(pid, signal.SIGKILL)
        run.wait()
        run.stdout.close()


def alive(token: str) -> list[int]:
    """Processes that have it in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if token.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def test_an_actor_that_stands_still_is_found(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crashtests.stress.lane.STALL_SECONDS", 2.0)
    _, found = lives(Scenario("stuck", (Writer, Stuck)), shm, 1)
    assert "no progress" in found[0].text
    assert "in step" in found[0].text  # where each thread stood


def test_honest_actors_are_believed(shm: Path) -> None:
    total, found = lives(Scenario("honest", (Writer, Counter)), shm)
    assert found == []
    assert total.kills == 6
    assert total.opens >= 6  # the last look too


def test_a_plan_follows_from_the_seed(shm: Path) -> None:
    every = scenarios.named([])

    def plans(seed: str) -> list[Any]:
        lane = Lane(Place(shm, shm, shm), 9, lambda count, failure: False)
        found = []
        for track in islice(tracks(every, [], [True, False], random.Random(seed)), 100):
            assert drawn(track.case)[1] == track
            lane.random = random.Random(track.seed)
            found.append(lane._plan(track, 0, shm))
        return found

    assert plans("1") == plans("1")
    assert plans("1") != plans("2")


def test_every_combination_comes_before_one_comes_again() -> None:
    every = tracks(list(scenarios.ALL), [], [True, False], random.Random(3))
    count = len(scenarios.ALL) * len(scenarios.DOMAINS) * 2
    seen = [next(every) for _ in range(count)]
    assert len(set(seen)) == count


# ---- the oracle ----------------------------------------------------------------------------------


@pytest.fixture
def unit(store: pmstore.Store) -> Unit:
    made = Unit("u", 3, Board().actor(0)[FIRST:], (Filled, Replaced, Names))
    with store.transaction():
        made.create(store)
    return made


def test_a_unit_is_of_one_generation(store: pmstore.Store, unit: Unit) -> None:
    assert unit.settle(store) == 0
    for _ in range(12):
        generation = unit.begin()
        with store.transaction():
            unit.write(store, generation)
        assert unit.settle(store) == generation == unit.acknowledged
    assert unit.within(store, 5) == 12
    with pytest.raises(WrongError, match="expected generation 13 to 12, found 12"):
        unit.within(store, 13)


def test_a_lost_generation_is_told(store: pmstore.Store, unit: Unit) -> None:
    unit.done(unit.begin())
    with pytest.raises(WrongError, match=r"expected generation 1 \(acknowledged\) or 1, found 0"):
        unit.settle(store)


@pytest.mark.parametrize("part", range(3))
def test_a_half_is_told(store: pmstore.Store, unit: Unit, part: int) -> None:
    unit.write(store, unit.begin(), [unit.parts[part]])
    with pytest.raises(WrongError, match=r"expected|found"):
        unit.read(store)


def test_what_was_undone_is_told(store: pmstore.Store, unit: Unit) -> None:
    unit.write(store, -unit.begin())
    with pytest.raises(WrongError, match="generation 1 was undone, and is there"):
        unit.settle(store)


def test_a_missing_object_is_told(store: pmstore.Store, unit: Unit) -> None:
    del store["u/1"]
    with pytest.raises(WrongError, match="u/1' is missing"):
        unit.settle(store)


def test_another_object_is_told(store: pmstore.Store, unit: Unit) -> None:
    store["u/0"][:] = encode(77, 0)
    with pytest.raises(WrongError, match=r"found .*object 77 generation 0"):
        unit.settle(store)


def test_content_says_whose_it_is() -> None:
    assert decode(encode(40, 7)) == "object 40 generation 7"
    assert decode(encode(40, -7)) == "object 40 generation 7 of an undone block"
    # exact in a tensor of float64
    assert float(encode(8 * 1024, 1 << 31)) == encode(8 * 1024, 1 << 31)
    assert np.full(3, encode(8 * 1024, 5))[0] >> 32 == 8 * 1024


def test_a_board_keeps_the_first_failure() -> None:
    board = Board()
    assert board.failure == ""
    board.fail("first")
    board.fail("second")
    assert board.failure == "first"


def test_counts_add_up() -> None:
    one = Count(kills=2, reads=3, by_scenario={"a": 2})
    one.add(replace(one, by_scenario={"a": 1, "b": 4}))
    assert (one.kills, one.reads, one.by_scenario) == (4, 6, {"a": 3, "b": 4})
