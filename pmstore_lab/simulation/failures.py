"""When jobs fail: Poisson, Weibull, traces, and public mean times between failures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

PUBLIC_MTBF_HOURS = {"llama3": 54 * 24 / 419, "opt-175b": 7.5, "rsc-1024": 7.9}
"""llama3: 419 unexpected interruptions in 54 days on 16,384 GPUs (Grattafiori et al. 2024, section
    3.3.4); opt-175b: Zhang et al. 2022, the training logbook; rsc-1024: Meta's research clusters,
    jobs on 1,024 GPUs (Kokolis et al., HPCA 2025)."""


def poisson(rng: np.random.Generator, mtbf_seconds: float, until_seconds: float) -> list[float]:
    """Times of failures at a constant rate, in seconds."""
    return _renewal(
        rng.exponential(mtbf_seconds, _enough(until_seconds / mtbf_seconds)), until_seconds
    )


def weibull(
    rng: np.random.Generator, mtbf_seconds: float, until_seconds: float, shape: float = 0.7
) -> list[float]:
    """Times of failures that cluster (shape < 1): a hazard that falls with the time since the last
    failure.

    Source of the shape: Schroeder and Gibson, DSN 2006: 0.7 to 0.8 fits the failures of large
    machines.
    """
    scale = mtbf_seconds / math.gamma(1.0 + 1.0 / shape)
    return _renewal(
        scale * rng.weibull(shape, 2 * _enough(until_seconds / mtbf_seconds)), until_seconds
    )


def spot(rng: np.random.Generator, mtbf_seconds: float, until_seconds: float) -> list[float]:
    """Times of preemptions as on a spot market: the rate goes up and down by a factor of five over
    a day (synthetic)."""
    peak = 5.0 / 3.0 / mtbf_seconds
    times, now = [], 0.0
    phase = rng.uniform(0.0, 2.0 * math.pi)
    while (now := now + rng.exponential(1.0 / peak)) < until_seconds:
        if rng.random() < (3.0 + 2.0 * math.sin(phase + 2.0 * math.pi * now / 86400.0)) / 5.0:
            times.append(now)
    return times


def trace(times: Sequence[float], rng: np.random.Generator, until_seconds: float) -> list[float]:
    """A recorded trace, started at a random place and repeated as often as needed."""
    recorded = np.sort(np.asarray(times, dtype=float))
    length = float(recorded[-1])
    offset = rng.uniform(0.0, length)
    shifted = np.sort((recorded - offset) % length)
    turns = int(until_seconds / length) + 1
    return [
        float(t + k * length)
        for k in range(turns)
        for t in shifted
        if t + k * length < until_seconds
    ]


def read_trace(path: Path) -> list[float]:
    """Seconds of failures, one number a line; empty lines and lines that begin with # are skipped.

    Raises: ValueError for anything else, or fewer than two times; OSError.
    """
    times = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.strip()
        if text and not text.startswith("#"):
            try:
                times.append(float(text))
            except ValueError:
                raise ValueError(f"{path}:{number}: not a number of seconds: {text!r}") from None
    if len(times) < 2 or not all(0.0 <= t < math.inf for t in times) or max(times) == 0.0:
        raise ValueError(
            f"{path}: a trace has at least two times of failures, in seconds from its start"
        )
    return times


def _enough(expected: float) -> int:
    return int(expected + 10.0 * math.sqrt(expected + 1.0)) + 20


def _renewal(gaps: np.ndarray[tuple[int], np.dtype[np.float64]], until: float) -> list[float]:
    times = np.cumsum(gaps)
    return [float(t) for t in times[times < until]]
