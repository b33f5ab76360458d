"""What a run has done in this process, in numbers, in a sentence, and by name for loggers."""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass

from pmstore._base.text import counted
from pmstore._engine import inspection
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


# ---- what a run has to tell a logger, as numbers by name


def metrics(steps: Steps) -> dict[str, float]:
    """See `Run.metrics`."""
    store, progress, course = steps.store, steps.progress, steps.course
    place, stats = progress.place.given, store.stats()
    found: dict[str, float] = {
        "step": steps.done,
        "committed_step": progress.committed,
        "data_epoch": place.data_epoch,
        "batch": place.batch - 1,
        "epoch": stats.epoch,
        "commits": steps.counts["commits"],
        "rollbacks": steps.counts["rollbacks"],
        **course.latest(),
        "written_bytes": inspection.written_bytes(store._core.pool),
        "used_bytes": stats.used_bytes,
        "free_bytes": stats.free_bytes,
        "file_bytes": stats.file_bytes,
        "process_bytes": _resident_bytes(),
    }
    if steps.counts["commits"]:
        found["commit_seconds_mean"] = course.commit_seconds / steps.counts["commits"]
    if (scheduler := steps.schedule.scheduler) is not None:
        found["failures_per_second"] = scheduler.hazard_rate
        for target in scheduler.targets:
            if target.price == target.price:
                found[f"target/{target.name}/cost_seconds"] = target.price
            found[f"target/{target.name}/risk_seconds"] = target.risk
    for tier in store.tier_states():
        found[f"tier/{tier.name}/epoch"] = tier.epoch
        found[f"tier/{tier.name}/behind"] = stats.epoch - tier.epoch
        found[f"tier/{tier.name}/written_share"] = tier.share
    return found


def _resident_bytes() -> int:
    """Returns the resident bytes of this process, with the store's pages that it has touched."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # no /proc: the most that it ever was
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
