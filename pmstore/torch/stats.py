"""What a run has done in this process, in numbers and in a sentence."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from pmstore.base.words import counted
from pmstore.torch._step.steps import Steps

_log = logging.getLogger("pmstore")


@dataclass(frozen=True, slots=True)
class RunStats:
    """What a run has done in this process. As a str it is a sentence.

    Attributes:
        seconds: since attach. commit_seconds: that steps' commits kept the program.
        stake_seconds, stake_steps: the most that passed from one commit to the next: so much work,
            at the worst, a kill could have taken back.
    """

    steps: int
    commits: int
    rollbacks: int
    seconds: float
    commit_seconds: float
    stake_seconds: float
    stake_steps: int

    def __str__(self) -> str:
        share = self.commit_seconds / self.seconds if self.seconds > 0.0 else 0.0
        return (
            f"{counted(self.steps, 'step')} in {self.seconds:.3g} s, "
            f"{counted(self.commits, 'commit')}, which took {share:.2%} of the time; at risk at "
            f"most: {self.stake_seconds:.3g} s of work, {counted(self.stake_steps, 'step')}"
        )


def stats_of(steps: Steps) -> RunStats:
    course = steps.course
    stake = course.staked()
    return RunStats(
        **steps.counts,
        seconds=course.seconds,
        commit_seconds=course.commit_seconds,
        stake_seconds=stake.seconds,
        stake_steps=stake.steps,
    )


def log_end(steps: Steps) -> None:
    """When a run ends. One that has ended no step says nothing."""
    if steps.counts["steps"]:
        _log.info("%s: run %r: %s", steps.store.path, steps.name, stats_of(steps))
