"""The scheduler over real tiers: an accumulator for each, failures of a tier, a store that was
restored from one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore.scheduler import Auto, CommitScheduler, HazardModel, Known
from pmstore.scheduler.target import store_targets
from pmstore.tiers._places.local import LocalPlace
from pmstore_lab.simulation.driver import Clock
from pmstore_lab.simulation.optimum import best_integer

COSTS = {"store": 0.01, "near": 0.5, "far": 8.0}
RATES = {"store": 1e-3, "near": 4e-4, "far": 1e-4}


def priced(clock: Clock, seconds: float, commit: Callable[[], object]) -> Callable[[], object]:
    """A real commit, or a real flush waited for, that takes so many seconds of simulated time."""

    def run() -> None:
        handle = commit()
        if handle is not None:  # over, not done: only then does the scheduler see its end
            assert handle.wait_over(60)  # type: ignore[attr-defined]
            handle.wait()  # type: ignore[attr-defined]
        clock.now += seconds

    return run


def test_each_tier_gets_its_own_epochs_at_its_own_best_interval(shm: Path) -> None:
    clock = Clock()
    with pmstore.open(shm / "run.pm") as store:
        for name in ("near", "far"):
            store.add_tier(name, shm / name)
        targets = {
            name: priced(clock, COSTS[name], commit)
            for name, commit in store_targets(store, "near", "far").items()
        }
        scheduler = CommitScheduler(
            Auto(free_budget=0.0),
            store=store,
            targets=targets,
            clock=clock,
            known=Known(failure_rate_per_second=RATES),
        )
        data = store.zeros("data", 1000)
        flushed: dict[str, list[int]] = {name: [] for name in targets}
        at: dict[str, list[int]] = {name: [] for name in targets}
        for step in range(1, 1700):
            clock.now += 1.0
            data += 1
            decision = scheduler.step()
            if decision.target is not None:
                flushed[decision.target].append(store.epoch)
                at[decision.target].append(step)
    for name in ("near", "far"):
        assert sorted(info.epoch for info in pmstore.tiers.epochs(str(shm / name))) == flushed[name]
    best = {name: best_integer(COSTS[name], RATES[name], 1.0) for name in targets}
    assert best["store"] < best["near"] < best["far"]
    assert set(np.diff(at["far"])[1:]) == {best["far"]}
    start, end = at["far"][-2:]
    for below, above in (("near", "far"), ("store", "near")):
        resets = [step for step in at[below] + at[above] if start <= step <= end]
        gaps = np.diff(sorted({*resets, *(step for step in at["far"] if start <= step <= end)}))
        # never later, and sooner only where one above commits
        assert set(gaps) <= set(range(1, best[below] + 1))
        assert best[below] in gaps
    report = pmstore.restore(shm / "copy.pm", shm / "far")
    assert report.epoch == flushed["far"][-1]
    with pmstore.open(shm / "copy.pm") as copy:
        assert (copy["data"] == at["far"][-1]).all()
        assert CommitScheduler(store=copy, targets=targets).steps == at["far"][-1]


def test_a_tier_that_is_away_costs_one_warning_and_few_tries(shm: Path) -> None:
    clock = Clock()
    with pmstore.open(shm / "run.pm") as store:
        store.add_tier("disk", shm / "tier")
        tries = 0
        flush = store_targets(store, "disk")["disk"]

        def counted() -> object:
            nonlocal tries
            tries += 1
            clock.now += 0.5
            handle = flush()
            assert handle.wait_over(60)  # type: ignore[attr-defined]
            return handle

        scheduler = CommitScheduler(
            store=store,
            targets={"store": store.commit, "disk": counted},
            clock=clock,
            known=Known(failure_rate_per_second=1e-3),
        )
        data = store.zeros("data", 1000)

        def train(steps: int) -> None:
            for _ in range(steps):
                clock.now += 1.0
                data[:] = scheduler.steps + 1
                scheduler.step()

        away = shm / "away"
        train(40)
        assert tries == 1
        store.drain()  # old epochs are deleted after the flush
        (shm / "tier").rename(away)
        (shm / "tier").write_text("no directory")
        with pytest.warns(
            RuntimeWarning, match="a commit to 'disk' failed in the background"
        ) as seen:
            train(1000)
        assert len([w for w in seen if "failed" in str(w.message)]) == 1
        assert 8 <= tries <= 14  # an interval is 81 s
        before = tries
        (shm / "tier").unlink()
        away.rename(shm / "tier")
        train(300)
        assert tries > before
        assert [d.step for d in scheduler.decisions if d.target == "disk"][-1] > 1040
    pmstore.restore(shm / "copy.pm", shm / "tier")
    with pmstore.open(shm / "copy.pm") as copy:
        assert copy["data"][0] > 1040


def test_no_flush_begins_while_old_epochs_are_deleted(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its snapshot would only be held meanwhile."""
    clock = Clock()
    deleting, go_on = threading.Event(), threading.Event()
    delete = LocalPlace.delete

    def slow(backend: LocalPlace, name: str) -> None:
        deleting.set()
        assert go_on.wait(60)
        delete(backend, name)

    with pmstore.open(shm / "run.pm") as store:
        store.add_tier("disk", pmstore.TierConfig(shm / "tier", keep=1))
        handles: list[pmstore.tiers.Flush] = []

        def flush() -> pmstore.tiers.Flush:
            store.commit()
            handles.append(store.flush("disk"))
            return handles[-1]

        scheduler = CommitScheduler(
            Auto(free_budget=0.0),
            store=store,
            targets={"disk": flush},
            clock=clock,
            known=Known(failure_rate_per_second=1.0),
        )
        data = store.zeros("data", 1000)

        def train(steps: int) -> None:
            for _ in range(steps):
                clock.now += 10.0
                data[:] = scheduler.steps + 1
                scheduler.step()

        while not handles:
            train(1)
        store.drain(60)
        monkeypatch.setattr(LocalPlace, "delete", slow)
        try:
            while len(handles) < 2:
                train(1)
            handles[1].wait(60)
            assert deleting.wait(60)
            train(20)
            assert len(handles) == 2
        finally:
            go_on.set()
        store.drain(60)
        train(20)
        assert len(handles) > 2


def test_a_restored_store_knows_of_the_failures_before(shm: Path) -> None:
    with pmstore.open(shm / "run.pm") as store:
        store.add_tier("disk", shm / "tier")
        hazard = HazardModel(store)
        hazard.expose(36_000.0)
        for _ in range(5):
            hazard.failed()
        scheduler = CommitScheduler(store=store, tiers=["disk"], known=Known(hazard=hazard))
        scheduler.step()
        scheduler.commit("disk")
        store.drain()
    (shm / "run.pm").unlink()
    pmstore.restore(shm / "run.pm", shm / "tier")
    for _ in range(2):  # counted once
        with pmstore.open(shm / "run.pm") as store:
            hazard = CommitScheduler(store=store).hazard
            assert hazard.failures[:3] == [5.0, 1.0, 0.0]
            assert hazard.exposure_seconds >= 36_000.0
            assert HazardModel().share(1, 2) < hazard.share(1, 2)
