"""What the scheduler learns from the ends of runs: which are failures, and for how long it ran."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lives import mean_ratio  # type: ignore[import-not-found, unused-ignore]

import pmstore
from pmstore._engine.history import Announced
from pmstore.scheduler import (
    CommitScheduler,
    EveryN,
    EverySeconds,
    HazardModel,
    Known,
    PreemptionGuard,
)
from pmstore.testing import ForkServer
from pmstore_lab.simulation.driver import Clock

HOUR = 3600.0
NEVER = 1 << 40


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer([str(Path(__file__).parent), str(Path(__file__).parents[1])]) as server:
        yield server


def counted(path: Path) -> tuple[float, float]:
    """Failures and preemptions, as the next run of the store finds them."""
    with pmstore.open(path) as store:
        hazard = HazardModel(store)
        return sum(hazard.failures), hazard.preemptions


class Loop:
    """Iterations in simulated time, of a scheduler in a real store."""

    def __init__(
        self,
        store: pmstore.Store,
        policy: Any = None,
        *,
        iteration: float = 1.0,
        commit: float = 0.5,
        rate: float | None = None,
        total: int | None = None,
    ) -> None:
        self.clock = Clock()
        self.iteration = iteration
        self.commit = commit
        self.commits: list[float] = []
        self.fails = False
        self.store = store
        self.done = store.require("done", (1,), "int64")
        rule = {} if policy is None else {"policy": policy}
        self.scheduler = CommitScheduler(
            **rule,
            store=store,
            targets={"store": self.save},
            clock=self.clock,
            known=Known(total, rate),
        )

    def save(self) -> None:
        self.clock.now += self.commit
        if self.fails:
            raise OSError("disk on fire")
        self.store.commit()
        self.commits.append(self.clock.now)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.clock.now += self.iteration
            self.done[0] += 1
            self.scheduler.step()


# ---- 2: what loses work is a failure, however the program ends


def _exception(loop: Loop) -> None:
    raise KeyError("in the program")


def _interrupt(loop: Loop) -> None:
    raise KeyboardInterrupt


def _exit_0(loop: Loop) -> None:
    sys.exit(0)  # takes back as any other exit does


def _exit_1(loop: Loop) -> None:
    sys.exit(1)


def _exit_text(loop: Loop) -> None:
    sys.exit("something is wrong")


def _close(loop: Loop) -> None:
    loop.store.close()


def _end(loop: Loop) -> None:
    pass


def _commit_and_close(loop: Loop) -> None:
    loop.store.commit()
    loop.store.close()


@pytest.mark.parametrize("every", [100, 1])
@pytest.mark.parametrize("ends", [_exception, _interrupt, _exit_0, _exit_1, _exit_text])
def test_an_end_by_an_error_is_a_failure(
    path: Path, ends: Callable[[Loop], None], every: int
) -> None:
    """Also right after a commit: the next one will come at another time."""
    for lives in (1, 2, 3):
        with (
            contextlib.suppress(Exception, KeyboardInterrupt, SystemExit),
            pmstore.open(path) as store,
        ):
            loop = Loop(store, EveryN(every))
            loop.run(130)
            ends(loop)
        assert counted(path) == (lives, 0)


@pytest.mark.parametrize(("ends", "failures"), [(_close, 1), (_end, 0), (_commit_and_close, 0)])
def test_an_end_in_order_is_one_if_it_loses_steps(
    path: Path, ends: Callable[[Loop], None], failures: int
) -> None:
    with pmstore.open(path) as store:
        loop = Loop(store, EveryN(100))
        loop.run(130)
        ends(loop)
    assert counted(path) == (failures, 0)


def test_an_error_that_interrupts_no_training_is_none(path: Path) -> None:
    with pytest.raises(KeyError), pmstore.open(path) as store:
        Loop(store, EveryN(100))
        raise KeyError("before the first step")
    assert counted(path) == (0, 0)
    with pytest.raises(KeyError), pmstore.open(path) as store:
        loop = Loop(store, EveryN(100), total=130)
        loop.run(130)
        store.commit()
        raise KeyError("while the figures are drawn")
    assert counted(path) == (0, 0)
    with pmstore.open(path) as store:
        loop = Loop(store, EveryN(100), total=260)
        with contextlib.suppress(KeyError):
            loop.run(50)
            raise KeyError("and the program goes on")
        loop.run(50)
    assert counted(path) == (0, 0)


CHILD = """
import os, signal, sys
import pmstore
from pmstore._engine.history import Announced
from pmstore.scheduler import CommitScheduler, EveryN

store = pmstore.open(sys.argv[1])
data = store.require("data", (1,), "int64")
scheduler = CommitScheduler(EveryN(100), store=store)
for _ in range(130):
    data += 1
    scheduler.step()
end = sys.argv[2]
if end == "exit":
    sys.exit(1)
if end == "os._exit":
    os._exit(1)
if end == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        pass
if end == "committed":
    store.commit()
"""


@pytest.mark.parametrize("end", ["exit", "os._exit", "interrupt", "end", "committed"])
def test_programs_without_a_with(path: Path, end: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), end], capture_output=True, check=False
    )
    assert (child.returncode == 0) == (end in ("end", "committed"))
    assert counted(path) == (end != "committed", 0)


def test_a_job_that_errors_end_learns_how_often(shm: Path) -> None:
    job = {"steps": 4000, "iteration": 10.0, "commit": 60.0, "mtbf": 1800.0}
    assert mean_ratio(shm, 2, **job) < 1.1


# ---- 1: a notice is no failure once its commit has landed


@pytest.mark.filterwarnings("ignore:a step takes up to:RuntimeWarning")
def test_a_commit_that_takes_longer_than_the_notice_saves_nothing(shm: Path) -> None:
    job = {"steps": 4000, "iteration": 10.0, "commit": 60.0, "mtbf": 1800.0, "notice": 30.0}
    assert mean_ratio(shm, 2, **job) < 1.1


@pytest.mark.parametrize(("landed", "expected"), [(False, (1, 0)), (True, (0, 1))])
def test_a_kill_during_the_commit_that_a_notice_asked_for(
    path: Path, server: ForkServer, landed: bool, expected: tuple[int, int]
) -> None:
    assert server.run("test_endings:_killed_in_a_commit", [str(path), landed]).killed
    assert counted(path) == expected


def _killed_in_a_commit(ack: Any, path: str, landed: bool) -> None:
    loop = Loop(pmstore.open(path), EveryN(NEVER))
    loop.run(20)
    guard = loop.scheduler.guard = PreemptionGuard(signals=(), clock=loop.clock)
    guard.notify()
    if not landed:
        loop.scheduler.targets[0].commit = lambda: os.kill(os.getpid(), signal.SIGKILL)
    loop.run(1)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("lands", [False, True])
def test_a_commit_in_the_background_counts_when_it_has_landed(path: Path, lands: bool) -> None:
    handle = type("Flush", (), {"done": False, "error": None})()
    with contextlib.suppress(KeyError), pmstore.open(path) as store:
        loop = Loop(store, EveryN(NEVER))
        loop.run(20)
        loop.scheduler.targets[0].commit = lambda: handle
        guard = loop.scheduler.guard = PreemptionGuard(signals=(), clock=loop.clock)
        guard.notify()
        loop.run(1)
        assert not HazardModel(store).announced
        handle.done = lands
        loop.run(1)
        raise KeyError
    assert counted(path) == ((0, 1) if lands else (1, 0))


@pytest.mark.parametrize(("ends_at", "failures"), [(2.0, 1), (4.0, 0)])
def test_an_end_that_was_known_from_the_start_covers_no_failure(
    path: Path, ends_at: float, failures: int
) -> None:
    """Slurm's end of an allocation, 4 hours off. It is no preemption either."""
    with contextlib.suppress(KeyError), pmstore.open(path) as store:
        loop = Loop(store, rate=1 / HOUR)
        guard = loop.scheduler.guard = PreemptionGuard(signals=(), clock=loop.clock)
        guard.notify(4 * HOUR)
        loop.run(10)
        assert not loop.scheduler.stopping
        while loop.clock.now < ends_at * HOUR and not loop.scheduler.stopping:
            loop.run(1)
        assert len(loop.commits) > 50  # the rule went on
        assert loop.scheduler.stopping == (failures == 0)
        raise KeyError
    assert counted(path) == (failures, 0)


# ---- 6: a notice that does not come true expires


@pytest.mark.parametrize("source", ["notify", "empty file", "file", "callable"])
def test_a_notice_that_does_not_come_true_expires(path: Path, tmp_path: Path, source: str) -> None:
    with contextlib.suppress(KeyError), pmstore.open(path) as store:
        loop = Loop(store, rate=1 / HOUR)
        told = tmp_path / "deadline"
        given: Any = f"file:{told}" if "file" in source else "sigterm"
        guard = PreemptionGuard(
            (lambda: 30.0) if source == "callable" else given, signals=(), clock=loop.clock
        )
        loop.run(100)
        loop.scheduler.guard = guard
        if source == "notify":
            guard.notify()
        elif source != "callable":
            told.write_text(f"{time.time() + 30}" if source == "file" else "")
        loop.run(40)
        assert loop.scheduler.stopping
        before = len(loop.commits)
        loop.run(1000)
        assert not loop.scheduler.stopping
        assert len(loop.commits) > before + 10
        assert not loop.scheduler.hazard.announced
        raise KeyError
    assert counted(path) == (1, 0)


def test_a_second_notice_counts_after_one_that_expired(path: Path) -> None:
    with pmstore.open(path) as store:
        loop = Loop(store, EveryN(NEVER), rate=1 / HOUR)
        answers: list[float | None] = [30.0] * 200 + [None] + [30.0] * 100
        guard = loop.scheduler.guard = PreemptionGuard(
            lambda: answers.pop(0), signals=(), clock=loop.clock
        )
        loop.run(190)
        assert loop.commits
        assert not loop.scheduler.stopping
        before = len(loop.commits)
        while len(loop.commits) == before:
            loop.run(1)
        assert guard.noticed()


# ---- 3: exposure is the time that the process lived


def test_every_gap_is_counted(path: Path) -> None:
    with pmstore.open(path) as store:
        loop = Loop(store, EverySeconds(3 * HOUR), iteration=30.0, commit=60.0)
        hazard = loop.scheduler.hazard
        loop.run(5000)
        assert len(loop.commits) >= 12
        loop.scheduler.commit()
        assert hazard.exposure_seconds == pytest.approx(loop.clock.now, rel=1e-9)
        loop.clock.now += 9 * HOUR  # an evaluation that nobody said is one
        with pytest.warns(RuntimeWarning, match="the clock moved"):
            loop.run(1)
        with loop.scheduler.paused():
            loop.clock.now += 2 * HOUR
        loop.scheduler.commit()
        assert hazard.exposure_seconds == pytest.approx(loop.clock.now, rel=1e-9)
        assert loop.scheduler.elapsed_seconds == hazard.exposure_seconds
        lived = hazard.exposure_seconds
        for jump in (1e9, -1e9):  # but not the clock's jumps
            loop.clock.now += jump
            loop.run(1)
        loop.scheduler.commit()
        assert hazard.exposure_seconds == pytest.approx(lived + 2 * 30.0 + 60.0)


def test_the_end_counts_too(path: Path) -> None:
    with pmstore.open(path) as store:
        loop = Loop(store, EveryN(NEVER), rate=1 / HOUR)
        loop.run(5000)
        loop.clock.now += 17.0
    with pmstore.open(path) as store:
        assert HazardModel(store).exposure_seconds == pytest.approx(loop.clock.now)


def test_a_kill_forgets_a_minute_at_most(path: Path, server: ForkServer) -> None:
    """However far the run is, and however rarely it commits."""
    with pmstore.open(path) as store:
        Loop(store, EveryN(NEVER)).scheduler.hazard.expose(1e9)
    assert server.run("test_endings:_killed_late", [str(path)]).killed
    with pmstore.open(path) as store:
        assert HazardModel(store).exposure_seconds >= 1e9 + 9900.0


def _killed_late(ack: Any, path: str) -> None:
    loop = Loop(pmstore.open(path), EveryN(NEVER))
    loop.scheduler.steps = 10_000_000
    loop.scheduler._refresh()
    save = loop.scheduler.hazard.save
    loop.scheduler.hazard.save = lambda now=False: save(now=True)  # type: ignore[method-assign]
    loop.run(10_000)
    os.kill(os.getpid(), signal.SIGKILL)


# ---- 6: a commit that fails


@pytest.mark.parametrize("policy", [None, EveryN(1), EverySeconds(5)], ids=["auto", "n", "seconds"])
@pytest.mark.parametrize("measured", [False, True])
def test_a_failing_commit_backs_off(store: pmstore.Store, policy: Any, measured: bool) -> None:
    loop = Loop(store, policy, commit=8.0, rate=1 / HOUR)
    if measured:
        loop.run(1000)
        assert loop.commits
    loop.fails = True
    began, work = loop.clock.now, loop.scheduler.work_seconds
    raised = 0
    for _ in range(2000):
        try:
            loop.run(1)
        except OSError:
            raised += 1
    assert raised >= 2
    wasted = loop.clock.now - began - (loop.scheduler.work_seconds - work)
    assert wasted < 0.1 * (loop.clock.now - began)
    loop.fails = False
    before = len(loop.commits)
    loop.run(300)
    assert len(loop.commits) > before
    assert loop.scheduler.targets[0].steps < 300


def test_one_that_is_asked_for_is_tried_at_once(store: pmstore.Store) -> None:
    loop = Loop(store, EverySeconds(5), commit=8.0)
    loop.fails = True
    with pytest.raises(OSError, match="on fire"):
        loop.run(100)
    loop.run(1)
    with pytest.raises(OSError, match="on fire"):
        loop.scheduler.commit()
    guard = loop.scheduler.guard = PreemptionGuard(signals=(), clock=loop.clock)
    guard.notify()
    for _ in range(3):  # it is the last chance: again and again
        with pytest.raises(OSError, match="on fire"):
            loop.run(1)


def test_the_time_that_is_set_aside_is_that_of_the_target(store: pmstore.Store) -> None:
    scheduler = CommitScheduler(
        EveryN(NEVER), store=store, targets={"fast": lambda: None, "slow": lambda: None}
    )
    fast, slow = scheduler.targets
    fast.cost.add(0.1)
    slow.cost.add(60.0)
    guard = PreemptionGuard(signals=())
    assert guard.needed(scheduler.timer, fast.cost) < 1.0
    assert guard.needed(scheduler.timer, slow.cost) > 60.0


# ---- 6: the first measured cost


def test_the_first_measured_cost_outlives_a_crash(path: Path, server: ForkServer) -> None:
    assert server.run("test_endings:_dies_after_its_first_commit", [str(path)]).killed
    with pmstore.open(path) as store:
        loop = Loop(store, commit=8.0, rate=1 / HOUR)
        assert loop.done[0] > 0  # that commit survived
        assert loop.scheduler.targets[0].price == pytest.approx(8.0)
        loop.run(100)
        assert not loop.commits  # it need not be measured again
        other = CommitScheduler(store=store, run="of another name")
        assert other.targets[0].cost.count == 0


def _dies_after_its_first_commit(ack: Any, path: str) -> None:
    loop = Loop(pmstore.open(path), commit=8.0, rate=1 / HOUR)
    while not loop.commits:
        loop.run(1)
    os.kill(os.getpid(), signal.SIGKILL)


# ---- the record


def test_a_failure_is_counted_once(path: Path, server: ForkServer) -> None:
    """Also where the process is killed while it closes the store."""
    assert server.run("test_endings:_killed_while_it_closes", [str(path)]).killed
    assert counted(path) == (1, 0)


def _killed_while_it_closes(ack: Any, path: str) -> None:
    closing: Any = pmstore.Store
    closing._end = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # what follows `ending`
    with pmstore.open(path) as store:
        loop = Loop(store, EveryN(100))
        loop.run(130)
        raise KeyError


@pytest.mark.parametrize(
    ("announced", "expected"),
    [
        (Announced.NOTHING, (1, 0)),
        (Announced.PREEMPTION, (1, 0)),
        (Announced.COUNTED, (0, 0)),  # a moment ago
    ],
)
def test_a_last_commit_that_is_taken_back_saved_nothing(
    path: Path, announced: Announced, expected: tuple[int, int]
) -> None:
    """In a job: another rank had not got so far."""
    with pmstore.open(path) as store:
        HazardModel(store).announce(announced)
    with pmstore.open(path) as store:
        store.history.took_back()
        hazard = HazardModel(store)
        assert (sum(hazard.failures), hazard.preemptions) == expected
        assert not hazard.announced
    assert counted(path) == expected
