"""Losses that the device computes reach the scheduler, and nobody waits for them."""

from __future__ import annotations

import time

import torch

from pmstore.scheduler._models.losses import Losses
from tools.gpu_check.device import Settings
from tools.gpu_check.outcome import Outcome, require

_STEPS = 400
_DELAY = 0.05  # seconds of work that the device has to do before the loss is there


def check(settings: Settings, outcome: Outcome) -> None:
    warned: list[str] = []
    losses = Losses(lambda _, text: warned.append(text))
    values = [torch.full((), 100.0 / (step + 1), device=settings.device) for step in range(_STEPS)]
    list(losses.read(0, values[0]))  # its first use makes pinned memory
    settings.synchronize()
    list(losses.read(0, None))
    if settings.cuda:
        outcome.figures["a loss behind 50 ms of work holds the program, ms"] = 1e3 * _held(
            settings, losses, values[0]
        )
        torch.cuda.set_sync_debug_mode("error")
    else:
        outcome.left_out.append("that no loss is waited for: host memory has nothing to wait for")
    read: list[tuple[int, float]] = []
    try:
        for step in range(_STEPS):
            settings.delay(1e-4)
            read += losses.read(step, values[step])
    finally:
        if settings.cuda:
            torch.cuda.set_sync_debug_mode("default")
    settings.synchronize()
    read += losses.read(_STEPS, None)
    require(not warned, f"warned of {warned}")
    require(read, "no loss arrived")
    for step, value in read:
        require(
            abs(value - 100.0 / (step + 1)) <= 1e-5 * value,
            f"the loss of step {step} arrived as {value}",
        )
    outcome.figures |= {"losses given": _STEPS, "losses read": len(read)}


def _held(settings: Settings, losses: Losses, value: torch.Tensor) -> float:
    """Seconds that the program is held by a loss that is not there yet."""
    settings.delay(_DELAY)
    start = time.perf_counter()
    list(losses.read(0, value))
    held = time.perf_counter() - start
    settings.synchronize()
    list(losses.read(0, None))
    require(held < _DELAY / 2, f"reading a loss waited for the device, {1e3 * held:.3g} ms")
    return held
