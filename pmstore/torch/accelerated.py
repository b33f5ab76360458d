"""What Accelerate wraps around optimizers and schedulers: attach takes what is inside."""

from __future__ import annotations

from typing import Any

_INSIDE = {"AcceleratedOptimizer": "optimizer", "AcceleratedScheduler": "scheduler"}


def unwrapped(given: Any) -> Any:
    """The optimizers and schedulers themselves, of one or of a dict or list of such. What
    `accelerator.prepare` returns goes on calling them."""
    if isinstance(given, dict):
        return {key: unwrapped(one) for key, one in given.items()}
    if isinstance(given, (list, tuple)):
        return [unwrapped(one) for one in given]
    kind = type(given)
    if kind.__module__.partition(".")[0] == "accelerate" and kind.__name__ in _INSIDE:
        return getattr(given, _INSIDE[kind.__name__])
    return given
