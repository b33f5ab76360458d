"""The course of a run: what is kept of its steps, in bounded room, as of each commit."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.course import Course, Told, read, recorder
from pmstore.course.recorder import BATCH, clock
from pmstore.course.records import Bucket, Step

STEPS = 40_000


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with pmstore.open(tmp_path / "run.pm", size="8MiB") as store:
        yield store


def told(store: pmstore.Store, run: str = "run") -> Told:
    found = read(store, run)
    assert found is not None
    return found


def go(course: Course, first: int, last: int, loss: Any = lambda step: 1.0 / step) -> None:
    """Steps, each committed in its thousandth part of a second."""
    with pytest.MonkeyPatch.context() as patch:
        for step in range(first, last + 1):
            began = clock()
            course.add(step, loss(step), began)
            patch.setattr(recorder, "clock", lambda began=began: began + 0.001)
            course.committed(began, None, step, False)
            patch.undo()


def seen(of: Told) -> int:
    """Steps that it tells of; each of them once, without a gap."""
    at = of.curve[0].first if of.curve else 1
    for one in of.whole():
        assert one.first == at
        assert one.last - one.first < of.width
        at = one.last + 1
    return at - 1


def test_a_long_run_shows_its_whole_curve_in_bounded_room(store: pmstore.Store) -> None:
    course = Course(store, "run")
    most = 0
    for first in range(1, STEPS, 1000):
        go(course, first, first + 999)
        store.commit()
        if "pmstore.course" in store:
            most = max(most, sum(one.nbytes for one in store["pmstore.course/run"].entries()))
    assert most <= 1 << 20
    of = told(store)
    last = seen(of)
    assert STEPS - BATCH <= last <= STEPS
    assert 512 <= len(of.curve) <= 1024
    assert of.curve[0].first == 1
    stretches = list(of.whole())
    assert sum(one.commits for one in stretches) == pytest.approx(last, abs=1)
    assert sum(one.seconds for one in stretches) == pytest.approx(last * 0.001, rel=1e-3)
    for one in (stretches[0], stretches[100], of.curve[-1]):
        losses = [1.0 / step for step in range(one.first, one.last + 1)]
        assert one.loss == pytest.approx(np.mean(losses))
        assert (one.loss_min, one.loss_max) == pytest.approx((losses[-1], losses[0]))


def test_each_commit_holds_the_course_that_led_to_it(tmp_path: Path) -> None:
    """Commits, steps that are not committed, and roll backs in any order: each step that is in the
    last commit is there at most once, and no other."""
    random = np.random.default_rng(5)
    path = tmp_path / "run.pm"
    for _ in range(5):
        with pmstore.open(path, "w", size="8MiB") as store:
            course = Course(store, "run")
            step = committed = 0
            for _ in range(60):
                for _ in range(int(random.integers(1, 90))):
                    step += 1
                    course.add(step, float(step), clock())
                kind = random.integers(3)
                if kind:
                    store.commit()
                    course.committed(clock() - 0.5, None, step, False)
                    committed = step
                else:
                    store.rollback()
                    course.rolled_back(committed)
                    step = committed
            store.rollback()
            of = read(store, "run")
            assert of is None or seen(of) <= committed
            if of is not None:
                assert committed - seen(of) <= BATCH
                for one in of.whole():
                    assert one.loss == pytest.approx((one.first + one.last) / 2)


def test_a_run_of_the_same_name_begins_anew(store: pmstore.Store) -> None:
    go(Course(store, "run"), 1, 5000)
    go(Course(store, "a/b"), 1, 300)
    store.commit()
    course = Course(store, "run")
    go(course, 1, 40)
    store.commit()
    assert seen(told(store)) <= 40
    assert 300 - BATCH <= seen(told(store, "a/b")) <= 300
    assert len(told(store).starts) == 2


def test_steps_go_on_where_another_process_left_them(store: pmstore.Store) -> None:
    go(Course(store, "run"), 1, 3000)
    store.commit()
    last = seen(told(store))
    go(Course(store, "run"), 3001, 6000)
    store.commit()
    of = told(store)
    whole = list(of.whole())
    assert whole[-1].last > 6000 - BATCH
    assert [one.step for one in of.starts] == [0, 3000]
    missing = 3000 - last
    assert sum(one.commits for one in whole) == pytest.approx(whole[-1].last - missing, abs=2)


@pytest.mark.parametrize(
    ("given", "loss", "bad"),
    [
        (None, None, 0),
        (2, 2.0, 0),
        (np.float32(0.5), 0.5, 0),
        (float("nan"), None, 1),
        (float("inf"), None, 1),
        ("text", None, 0),
        (1j, None, 0),
        ([1.0, 2.0], None, 0),
    ],
    ids=str,
)
def test_losses_of_all_kinds(
    store: pmstore.Store, given: Any, loss: float | None, bad: int
) -> None:
    go(Course(store, "run"), 1, 2, lambda step: given)
    store.commit()
    first = next(told(store).whole())
    assert (first.loss if first.loss == first.loss else None) == loss
    assert first.bad == bad


def test_without_room_training_goes_on(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "run.pm", size="1MiB", max_size="1MiB") as store:
        state = store.zeros("state", 100)
        with pytest.raises(pmstore.StoreFullError):
            for number in range(1000):
                store.zeros(f"more/{number}", 500)
        course = Course(store, "run")
        with pytest.warns(RuntimeWarning, match="no room for the course"):
            go(course, 1, 1)
        go(course, 2, 3000)
        state[:] = 1.0
        store.commit()
        assert read(store, "run") is None
        assert store.check().problems == ()


def test_what_is_damaged_is_left_out(store: pmstore.Store) -> None:
    go(Course(store, "run"), 1, 3000)
    store.commit()
    group = store["pmstore.course/run"]
    random = np.random.default_rng(3)
    for _ in range(60):
        with pytest.raises(ZeroDivisionError), store.transaction():
            for name in ("steps", "curve", "starts"):
                array = group[name]
                rows = random.integers(len(array), size=20)
                columns = random.integers(array.shape[1], size=20)
                array[rows, columns] = random.choice(
                    [math.nan, math.inf, -1.0, 1e300, -1e300, 0.5, 2.0**60], size=20
                )
            of = told(store)
            assert all(one.last >= 1 for one in of.whole())
            raise ZeroDivisionError
    group["words"] = {"targets": 3}
    group["decisions"] = "none"
    del group["starts"]
    assert told(store).decisions == ()
    assert told(store).starts == ()
    go(Course(store, "run"), 3001, 3100)
    assert told(store).starts


def test_nothing_of_it_leaves_the_machine(store: pmstore.Store, tmp_path: Path) -> None:
    """Times of work are nobody's business to whom a dump is given."""
    go(Course(store, "run"), 1, 10)
    store["a"] = 1
    store.commit()
    with open(tmp_path / "dump", "wb") as file:
        pmstore.portable.dump(store, file)
    with open(tmp_path / "dump", "rb") as file:
        pmstore.portable.load(file, tmp_path / "other.pm")
    with pmstore.open(tmp_path / "other.pm") as other:
        assert list(other) == ["a"]


def test_columns_are_as_they_are_stored(store: pmstore.Store) -> None:
    """Their order is a format: a store of today is read by a later version."""
    assert [*Step.__members__] == ["STEP", "TIME", "LOSS", "SECONDS", "BYTES", "GIVEN"]
    assert [*Bucket.__members__] == [
        *["WIDTH", "LAST", "TIME", "LOSSES", "LOSS_SUM", "LOSS_MIN", "LOSS_MAX", "BAD"],
        *["COMMITS", "SECONDS", "SLOWEST", "BYTES"],
    ]
    before = time.time()
    go(Course(store, "run"), 1, 3)
    row = told(store).steps[0]
    assert row[Step.STEP] == 1
    assert before - 1 <= row[Step.TIME] <= time.time() + 1
