"""What a run has to tell a logger, as numbers by name."""

from __future__ import annotations

import resource

from pmstore.engine import inspection
from pmstore.torch._step.steps import Steps


def metrics(steps: Steps) -> dict[str, float]:
    """See `Run.metrics`."""
    store, progress, course = steps.store, steps.progress, steps.course
    place, stats = progress.place.given, store.stats()
    found: dict[str, float] = {
        "step": progress.finished,
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
    """Of this process, the store's pages that it has touched among them."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # no /proc: the most that it ever was
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
