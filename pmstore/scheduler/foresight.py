"""Finds when a scheduler's rule will commit, by asking the rule itself."""

from __future__ import annotations

import copy
import time
from collections.abc import Collection
from dataclasses import dataclass

from pmstore.scheduler._rules.agreed import Agreed
from pmstore.scheduler._rules.outlook import NEVER, CommitPolicy, Outlook
from pmstore.scheduler._rules.rule_text import attributes, changeless
from pmstore.scheduler.target import Target

_AHEAD_SECONDS = 10.0  # seconds of iterations
_QUESTIONS = 400
_ASKING_SECONDS = 1e-3  # of the processor
_BUSY = object()


@dataclass(frozen=True, slots=True)
class Wish:
    """Says what a rule will want, as far as is known now.

    Attributes:
        steps: from now, at least 1.
        target: number of the target that the rule commits to after so many steps; -1: to none, and
            nothing is known of later steps: ask again then.
    """

    steps: int
    target: int


def foresee(
    rule: CommitPolicy, outlook: Outlook, limit_steps: int, busy: Collection[int], now: float
) -> Wish:
    """Asks the rule about the steps that follow, until it commits. It is asked as if each step took
    the mean time of an iteration, and losses, rates and prices stayed.

    It looks `limit_steps` ahead, but no more than 10 s of iterations, 400 questions, or the
    questions that fit into 1 ms. So with iterations of 0.1 ms it looks 40 ms ahead. Before the
    first iteration has been timed it looks one step ahead. A commit in the background ends when it
    has taken as long as those before it. A target whose first one is under way stays busy, and so
    do those whose numbers are in `busy`.

    Rule and scheduler stay as they are: copies are asked. A rule that keeps a state of its own has
    to be asked once in each step, and is not asked ahead: the answer is then what it says of the
    step that has just ended (its own `decide` is called), for the next step. So it is followed one
    step later.

    now: of the scheduler's clock. Raises: what the rule raises.
    """
    rule = rule.policy if isinstance(rule, Agreed) else rule
    mean = outlook.timer.mean
    asked = _copy_of(rule)
    if asked is not None:
        far = int(min(limit_steps, _QUESTIONS, _AHEAD_SECONDS / mean if mean > 0.0 else 1))
        wish = _ask(asked, _Ahead(outlook, busy, now), max(far, 1))
        if wish is not None:
            return wish
    return Wish(1, _due(rule, outlook))


def _copy_of(rule: CommitPolicy) -> CommitPolicy | None:
    """Returns a copy of the rule, to be asked in its place; None: a copy would share what the rule
    may change."""
    if not all(map(changeless, attributes(rule).values())):
        return None
    try:
        return copy.copy(rule)
    except Exception:  # a rule can be anything
        return None


def _ask(rule: CommitPolicy, ahead: _Ahead, far: int) -> Wish | None:
    """Asks the rule step by step. Returns what it will want; None: answering changes the rule."""
    before = attributes(rule)
    end = time.thread_time() + _ASKING_SECONDS
    number, steps = NEVER, 0
    while number < 0 and steps < far:
        steps += 1
        ahead.step()
        number = _due(rule, ahead.outlook)
        if steps == 1 and attributes(rule) != before:
            break
        if time.thread_time() > end:
            break
    if attributes(rule) != before:
        return None
    return Wish(steps, number)


def _due(rule: CommitPolicy, outlook: Outlook) -> int:
    """Returns the number of the target that the rule commits to; -1: none, or one that failed a
    short while ago."""
    number = rule.decide(outlook)
    if number < 0 or outlook.targets[number].work < outlook.targets[number].retry_work:
        return NEVER
    return outlook.targets[number].number


class _Ahead:
    """A copy of what a rule looks at, that goes on as `CommitScheduler.step` does."""

    def __init__(self, outlook: Outlook, busy: Collection[int], now: float) -> None:
        self.outlook = ahead = copy.copy(outlook)
        timer = outlook.timer
        ahead.timer = copy.copy(timer) if timer.warm else copy.deepcopy(timer)  # to be added to
        ahead.targets = [copy.copy(target) for target in outlook.targets]
        ahead.targets_down = ahead.targets[::-1]
        self._now = now
        self._flying = [target for target in ahead.targets if target.handle is not None]
        for number in busy:
            ahead.targets[number].handle = _BUSY

    def step(self) -> None:
        outlook, timer = self.outlook, self.outlook.timer
        dt = timer.mean
        if self._flying:
            dt = timer.busy or dt
            self._now += dt
            self._flying = [target for target in self._flying if not self._lands(target)]
        elif not timer.warm:
            timer.add(dt)
        outlook.steps += 1
        outlook.work_seconds += dt
        outlook.elapsed_seconds += dt
        for target in outlook.targets:
            target.work += dt
            target.risk += target.hazard * dt * target.work
            target.steps += 1

    def _lands(self, target: Target) -> bool:
        """Ends the target's commit in the background if it will have ended by now. Returns whether
        it has."""
        seconds = target.cost.background
        if target.handle is _BUSY or seconds == 0.0 or self._now - target.launched < seconds:
            return False
        target.handle = None
        return True
