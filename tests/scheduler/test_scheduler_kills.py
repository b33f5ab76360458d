"""`benchmarks/scheduler_kills.py`: reality beside the simulation, of the same jobs. Here reality is
a process that is only counted: a step takes a millisecond, a commit five."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scheduler_kills
from benchmarks.harness import Budget
from benchmarks.rows import Row
from benchmarks.scheduler_kills import JOB_KILLS, KILLS, PLAIN, POLICIES, Tally

STEP, COMMIT, STEPS = 0.001, 0.005, 600
EVERY = {"every step": 1, "every 100 steps": 100, PLAIN: 1 << 40}


class Machine:
    """What runs the processes."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self.stuck: set[str] = set()

    def life(
        self, folder: Path, name: str, steps: int, tally: Tally, seconds: float | None, mtbf: float
    ) -> bool:
        assert mtbf == pytest.approx(STEPS * STEP / JOB_KILLS)
        left = math.inf if seconds is None else seconds
        self.times.setdefault(name, []).append(left)
        tally.lives += 1
        since, done = 0.0, tally.done
        while done < steps:
            due = name not in self.stuck and (done + 1) % EVERY.get(name, 20) == 0
            if left < STEP + COMMIT * due:
                tally.lost.append(since + left)
                return False
            left -= STEP + COMMIT * due
            since += STEP
            done += 1
            tally.steps.append(STEP)
            tally.ends(COMMIT * due, due)
            if due:
                tally.done, since = done, 0.0
        tally.work, tally.jobs, tally.done = tally.work + steps, tally.jobs + 1, 0
        return True


class Spent(Budget):
    """A budget that is over after so many looks."""

    looks = 400

    @property
    def spent(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(scheduler_kills, "_life", machine.life)
    monkeypatch.setattr(scheduler_kills, "_steps_in", lambda *_: (STEPS, STEPS * STEP))
    monkeypatch.setattr("pmstore_lab.demo._write_data", lambda folder: None)
    return machine


def rows_of(monkeypatch: pytest.MonkeyPatch, budget: Budget | None = None) -> dict[str, Row]:
    found: dict[str, Row] = {}

    def keep(question: str, title: str, rows: Sequence[Row], **_: Any) -> None:
        found.update({row.method: row for row in rows})

    monkeypatch.setattr(scheduler_kills, "report", keep)
    scheduler_kills.main(False, budget or Budget())
    return found


def test_reality_stands_beside_the_simulation(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[Any] = []
    real = scheduler_kills._simulated

    def simulated(name: str, *rest: Any) -> list[float]:
        from pmstore_lab.simulation import figure

        make = figure.scheduler
        with monkeypatch.context() as patch:
            patch.setattr(
                figure,
                "scheduler",
                lambda rule, rate, **k: rates.append((name, rate)) or make(rule, rate, **k),
            )
            return real(name, *rest)

    monkeypatch.setattr(scheduler_kills, "_simulated", simulated)
    rows = rows_of(monkeypatch)
    assert {*rows} == {*POLICIES} - {PLAIN}
    for name, row in rows.items():
        assert row.measured, name
        extra = row.extra
        assert extra["kills"] >= KILLS
        assert extra["jobs"] >= 1
        assert extra["reality"] == pytest.approx(extra["lost"] + extra["added"])
        assert min(extra["its error"], extra["its spread"], extra["simulation"]) > 0
        assert extra["its error"] < extra["reality"]
        # all are killed at the same times
        assert machine.times[name] == machine.times["every step"][: len(machine.times[name])] or (
            machine.times["every step"] == machine.times[name][: len(machine.times["every step"])]
        )
    # the true rate is told where the name says so, and nowhere else
    assert {name for name, rate in rates if rate is not None} == {
        name for name in POLICIES if name.endswith("true rate")
    }
    # A process that does what the simulation supposes costs what that says.
    for name in ("every step", "every 100 steps"):
        extra = rows[name].extra
        far = abs(extra["reality"] - extra["simulation"])
        assert far < 3 * (extra["its error"] + extra["its spread"]), (name, extra)
    assert min(row.ratio or 0.0 for row in rows.values()) == 1.0


def test_a_policy_that_never_ends_is_a_row_that_says_so(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.stuck.add("every step")
    rows = rows_of(monkeypatch, Spent())
    assert not rows["every step"].measured
    assert "not at its end" in rows["every step"].note
    assert rows["every 100 steps"].measured
