"""Rules of steps and seconds, and which rule a program means by `policy=`."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import get_args

from pmstore.scheduler._rules.auto import AUTO, Auto, Objective
from pmstore.scheduler._rules.outlook import NEVER, CommitPolicy, Outlook


def positive(value: float, what: str) -> float:
    try:
        fits = 0.0 < value < math.inf
    except TypeError:
        raise TypeError(f"{what} must be a positive number, not {value!r}") from None
    if not fits:
        raise ValueError(f"{what} must be a positive number, not {value!r}")
    return float(value)


class OneTarget:
    """A rule about the first target alone. `pmstore.torch.attach(tiers=...)` then flushes to the
    tiers beside its commits."""


class EveryN(OneTarget):
    """Commits every `steps` steps, counted from the start of the run, not of the process."""

    def __init__(self, steps: int) -> None:
        """Takes the number of steps between commits. Raises: ValueError: steps is not at least 1;
        TypeError: it is no whole number."""
        told = f"steps is the number of steps between commits, at least 1, not {steps!r}"
        try:
            interval = operator.index(steps)
        except TypeError:
            raise TypeError(told) from None
        if interval < 1:
            raise ValueError(told)
        self.interval = interval
        self.reason: str = f"every {steps} steps"

    def decide(self, outlook: Outlook, /) -> int:
        return 0 if outlook.steps % self.interval == 0 else NEVER


class EverySeconds(OneTarget):
    """Commits when that many seconds of work are at stake."""

    def __init__(self, seconds: float) -> None:
        self.seconds: float = positive(seconds, "seconds")
        self.reason: str = f"every {seconds:g} s"

    def decide(self, outlook: Outlook, /) -> int:
        return 0 if outlook.targets[0].work >= self.seconds else NEVER


def rule_of(policy: object) -> CommitPolicy:
    """Returns the rule that a program means by `policy=`: "auto", or a rule.

    Raises: TypeError.
    """
    if isinstance(policy, str) and policy == AUTO:
        return Auto()
    if isinstance(policy, CommitPolicy):
        return policy
    instead = ""
    if isinstance(policy, str) and policy in get_args(Objective):
        instead = f": the objective {policy!r} is Auto({policy!r})"
    elif isinstance(policy, type):
        instead = f": make one of it, {policy.__name__}(...)"
    elif isinstance(policy, Mapping):
        instead = ": what is committed to goes into targets="
    raise TypeError(
        'policy is "auto", or a rule of pmstore.scheduler, such as EveryN(100) or '
        f"EverySeconds(60), not {policy!r}{instead}"
    )
