"""Rules asked ahead, commits agreed on with others, and rules in words."""

from __future__ import annotations

import copy
import enum
import math
import pickle
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.scheduler import (
    Agreed,
    Auto,
    CommitPolicy,
    CommitScheduler,
    EveryN,
    EverySeconds,
    Known,
    Wish,
    foresight,
    policy_digest,
    policy_words,
)
from pmstore_lab.simulation.baselines import COCI, CheckFreq, Daly, EveryStep, Young
from pmstore_lab.simulation.driver import Clock


class Loop:
    """Iterations of so many seconds; commits take the seconds of `costs`."""

    def __init__(self, policy: CommitPolicy, iteration: float = 1.0, **costs: float) -> None:
        self.clock = Clock()
        self.iteration = iteration
        self.scheduler = CommitScheduler(
            policy,
            targets={name: self._target(cost) for name, cost in (costs or {"store": 0.5}).items()},
            clock=self.clock,
            known=Known(failure_rate_per_second=0.02),
        )

    def _target(self, cost: float) -> Any:
        def commit() -> None:
            self.clock.now += cost

        return commit

    def step(self, loss: float = 1.0) -> int:
        """Number of the target that committed; -1."""
        self.clock.now += self.iteration
        decision = self.scheduler.step(loss)
        names = [target.name for target in self.scheduler.targets]
        return names.index(decision.target) if decision.target else -1


@pytest.fixture(autouse=True)
def time_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine answers as an idle one."""
    monkeypatch.setattr(foresight, "_ASKING_SECONDS", 60.0)


def seen(scheduler: CommitScheduler) -> str:
    """All of it that numbers say."""
    return repr(
        (
            scheduler.state(),
            [
                [getattr(target, name) for name in target.__slots__ if name != "cost"]
                for target in scheduler.targets
            ],
            {
                name: value
                for name, value in vars(scheduler).items()
                if isinstance(value, (int, float, str))
            },
            scheduler.timer.p99,
            scheduler.timer._cold,
            vars(scheduler.hazard),
            list(scheduler.decisions),
        )
    )


def rules() -> list[CommitPolicy]:
    return [
        EveryStep(),
        EveryN(7),
        EverySeconds(5.5),
        Young(0.05),
        Daly(0.05),
        Young(cost_seconds=1.0),
        CheckFreq(0.06),
        COCI(decay_per_second=-0.01, failure_rate_per_second=0.05),
        Auto("time"),
        Auto("time", max_overhead=0.2),
        Auto("balanced"),
        Auto("progress"),
        Auto("explore"),
    ]


@pytest.mark.parametrize("number", range(len(rules())))
@pytest.mark.parametrize("costs", [{"store": 0.5}, {"store": 0.0625, "disk": 0.75, "far": 3.0}])
def test_a_wish_comes_true(number: int, costs: dict[str, float]) -> None:
    """At every step of a steady loop, from the first one on."""
    loop = Loop(rules()[number], 0.25, **costs)
    hits = 0
    wish = None
    for _ in range(250):
        before = seen(loop.scheduler)
        again = loop.scheduler.foresee(1000)
        assert seen(loop.scheduler) == before
        assert 1 <= again.steps <= 40  # 10 s
        if wish is not None and wish.target >= 0:
            assert again == wish
        wish = again
        committed = loop.step()
        if wish.steps == 1 and wish.target >= 0:
            assert committed == wish.target
            hits += 1
            wish = None
        else:
            # before the first step is timed nothing is known of the next but one
            assert committed == -1
            wish = Wish(wish.steps - 1, wish.target) if wish.steps > 1 else None
    assert hits >= 2
    assert hits == len(loop.scheduler.decisions)


@pytest.mark.parametrize("rule", rules()[-3:])
def test_losses_are_taken_to_stay(rule: CommitPolicy) -> None:
    """While they fall, a wish is what is known now."""
    loop = Loop(rule)
    wish = Wish(1, -1)
    for step in range(300):
        weight = loop.scheduler.worth.weight
        committed = loop.step(math.exp(-0.01 * step))
        if wish.steps == 1 and wish.target >= 0 and loop.scheduler.worth.weight == weight:
            assert committed >= 0
        before = seen(loop.scheduler)
        wish = loop.scheduler.foresee(1000)
        assert seen(loop.scheduler) == before
    assert len(loop.scheduler.decisions) > 5


def test_before_anything_is_timed_it_looks_one_step_ahead() -> None:
    loop = Loop(EveryN(3))
    assert loop.scheduler.foresee(50) == Wish(1, -1)
    loop.step()
    assert loop.scheduler.foresee(50) == Wish(2, 0)
    assert loop.scheduler.foresee(1) == loop.scheduler.foresee(0) == Wish(1, -1)


def test_the_limits_of_looking_ahead() -> None:
    for iteration, steps in ((3.0, 3), (30.0, 1), (0.1, 100)):
        loop = Loop(EveryN(1000), iteration)
        for _ in range(10):
            loop.step()
        assert loop.scheduler.foresee(10**9) == Wish(steps, -1)
        assert loop.scheduler.foresee(2) == Wish(min(2, steps), -1)
    for iteration in (1e-4, 1e-300):
        loop = Loop(EveryN(10**6), iteration)
        for _ in range(10):
            loop.step()
        assert loop.scheduler.foresee(10**9) == Wish(400, -1)


def test_a_rule_that_answers_slowly_is_asked_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foresight, "_ASKING_SECONDS", 1e-3)

    class Slow:
        reason = "slow"

        def decide(self, scheduler: CommitScheduler) -> int:
            return 0 if sum(range(10**6)) == scheduler.steps else -1

    loop = Loop(Slow(), 0.01)
    for _ in range(3):
        loop.step()
    assert loop.scheduler.foresee(1000) == Wish(1, -1)


class Written:
    """A commit in the background that goes on for so many seconds."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.ends = clock, clock.now + seconds

    def done(self) -> bool:
        return self.clock.now >= self.ends


def test_a_commit_in_the_background_ends_as_those_before_it() -> None:
    clock = Clock()
    scheduler = CommitScheduler(
        Auto(free_budget=0),
        targets={"disk": lambda: Written(clock, 6.5)},
        clock=clock,
        known=Known(failure_rate_per_second=10.0),
    )
    committed = []
    for step in range(1, 60):
        clock.now += 1.0
        if scheduler.step():
            committed.append(step)
            before = seen(scheduler)
            wish = scheduler.foresee(100)
            assert seen(scheduler) == before
            if len(committed) == 1:
                assert wish == Wish(10, -1)  # how long it takes is not known
            elif len(committed) > 2:
                assert wish == Wish(committed[-1] - committed[-2], 0)
    assert len(committed) > 5


class Counting:
    """Commits every third time that it is asked."""

    reason = "counted"

    def __init__(self, counter: Any) -> None:
        self.counter = counter

    def decide(self, scheduler: CommitScheduler) -> int:
        if isinstance(self.counter, int):
            self.counter += 1
        else:
            self.counter.append(scheduler.steps)
        count = self.counter if isinstance(self.counter, int) else len(self.counter)
        return -1 if count % 3 else 0


@pytest.mark.parametrize("counter", [0, []])
def test_a_rule_with_a_state_is_asked_once_a_step_and_not_ahead(counter: Any) -> None:
    agreed = Agreed(policy := Counting(counter))
    loop = Loop(agreed)
    wishes = []
    for _ in range(7):
        assert loop.step() == -1
        wishes.append(loop.scheduler.foresee(100))
    assert wishes == [Wish(1, -1), Wish(1, -1), Wish(1, 0)] * 2 + [Wish(1, -1)]
    assert policy.counter == (7 if counter == 0 else [1, 2, 3, 4, 5, 6, 7])


def test_what_cannot_be_copied_is_not_asked_ahead() -> None:
    class Single:
        reason = "single"

        def __copy__(self) -> Any:
            raise TypeError("there is one of me")

        def decide(self, scheduler: CommitScheduler) -> int:
            return 0 if scheduler.steps == 3 else -1

    loop = Loop(Agreed(Single()))
    assert [(loop.step(), loop.scheduler.foresee(100).target)[1] for _ in range(4)] == [
        -1,
        -1,
        0,
        -1,
    ]


class Failing:
    __slots__ = ("__n", "reason")

    def __init__(self) -> None:
        self.reason = "never"
        self.__n = 5

    def decide(self, scheduler: CommitScheduler) -> int:
        self.__n += 1
        scheduler.targets[0].work = scheduler.steps = 10**6
        scheduler.timer.mean = 77.0
        raise ArithmeticError("a rule of the user's own")


def test_a_rule_that_raises_changes_nothing() -> None:
    loop = Loop(EveryN(4))
    for _ in range(10):
        loop.step()
    loop.scheduler.policy = Agreed(failing := Failing())
    before = seen(loop.scheduler)
    with pytest.raises(ArithmeticError, match="own"):
        loop.scheduler.foresee(10)
    assert seen(loop.scheduler) == before
    assert failing._Failing__n == 5  # type: ignore[attr-defined]


def test_a_rule_that_chooses_no_target_there_is() -> None:
    class Wild:
        reason = "wild"

        def decide(self, scheduler: CommitScheduler) -> int:
            return 5

    loop = Loop(Agreed(Wild()))
    loop.step()
    with pytest.raises(IndexError):
        loop.scheduler.foresee(10)


def test_agreed_commits_happen_when_agreed_and_at_no_other_step() -> None:
    loop = Loop(agreed := Agreed(EveryN(2)), store=0.1, disk=0.4)
    assert isinstance(agreed, CommitPolicy)
    assert loop.scheduler.foresee(10) == Wish(1, -1)
    assert [loop.step() for _ in range(3)] == [-1, -1, -1]
    assert loop.scheduler.foresee(10) == Wish(1, 0)  # of the rule that it stands for
    agreed.agree(5, 1)
    agreed.agree(6, 1)
    assert [loop.step() for _ in range(4)] == [-1, -1, 1, -1]
    agreed.agree(8, 0)
    assert [loop.step() for _ in range(3)] == [0, -1, -1]
    decisions = loop.scheduler.decisions
    assert [(one.step, one.target) for one in decisions] == [(6, "disk"), (8, "store")]
    assert {one.reason for one in decisions} == {"agreed by all ranks"}
    store, disk = loop.scheduler.targets
    assert (store.cost.blocking(), disk.cost.blocking()) == pytest.approx((0.1, 0.4))
    assert (store.steps, disk.steps) == (2, 4)


def test_agreed_commits_and_a_roll_back(shm: Path) -> None:
    with pmstore.open(shm / f"foresight-{id(shm)}", size="8MB") as store:
        scheduler = CommitScheduler(agreed := Agreed(EveryN(100)), store=store)
        agreed.agree(5, 0)
        assert [bool(scheduler.step()) for _ in range(9)] == [False] * 4 + [True] + [False] * 4
        store.rollback()
        scheduler.rolled_back()
        assert scheduler.steps == 5
        assert not scheduler.step()
        assert len(scheduler.decisions) == 1


# ---- in words


class Colour(enum.Enum):
    RED = 1


BASELINES = "pmstore_lab.simulation.baselines"


class Own:
    reason = "own"

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)

    def decide(self, scheduler: CommitScheduler) -> int:
        return -1


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (None, "every step"),
        (EveryStep(), f"{BASELINES}.EveryStep(interval=1)"),
        (EveryN(np.int64(1000)), "EveryN(interval=1000)"),
        (EverySeconds(10), "EverySeconds(seconds=10)"),
        (
            Young(np.float64(0.25)),
            f"{BASELINES}.Young(cost_seconds=None, failure_rate_per_second=0.25)",
        ),
        (CheckFreq(), f"{BASELINES}.CheckFreq(overhead=0.035)"),
        (
            COCI(decay_per_second=-1, unit_seconds=60),
            f"{BASELINES}.COCI(decay=-1, failure_rate_per_second=None, level=1, unit=60)",
        ),
        (
            Auto("explore", free_budget=0),
            (
                "Auto(free_budget=0, loss_budget=None, max_loss=None, max_overhead=None, "
                "objective='explore')"
            ),
        ),
        (
            Own(
                b=[1, (2.0, None)], a={"x": 1.5, "b": True}, c=Colour.RED, _d=1, e=object(), f=[{1}]
            ),
            f"{__name__}.Own(a={{'b': True, 'x': 1.5}}, b=[1, [2, None]], c=Colour.RED)",
        ),
    ],
)
def test_rules_in_words(policy: CommitPolicy | None, words: str) -> None:
    assert policy_words(policy) == words
    assert policy_digest(policy) == policy_digest(copy.copy(policy))


def test_digests_tell_rules_apart_and_are_the_same_in_every_process() -> None:
    digests = [policy_digest(one) for one in (*rules(), EveryN(8), Own(a=1), Own(a=2), None)]
    assert len(set(digests)) == len(digests)
    assert all(len(one) == 16 and int(one, 16) >= 0 for one in digests)
    used = Auto()
    loop = Loop(used)
    for _ in range(30):
        loop.step()
    assert used.reason
    assert policy_digest(used) == policy_digest(Auto())
    program = (
        "from pmstore.scheduler import *; from pmstore_lab.simulation.baselines import Young; "
        "print(policy_digest(Young(1 / 3)), policy_digest(Auto('balanced')))"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert said.split() == [
        policy_digest(Young(1 / 3)),
        policy_digest(pickle.loads(pickle.dumps(Auto("balanced")))),
    ]


def test_a_deque_in_a_rule_is_a_state() -> None:
    loop = Loop(Own(seen=deque([1])))
    loop.step()
    assert loop.scheduler.foresee(10) == Wish(1, -1)
