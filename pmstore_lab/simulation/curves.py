"""Loss curves with noise, and the density of progress that belongs to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Curve:
    """A loss over u, the share of the job that is done.

    Attributes:
        loss: of an array of u in [0, 1].
        lr_drops: places u at which the learning rate falls; the training program knows these.
    """

    name: str
    loss: Callable[[Floats], Floats]
    lr_drops: tuple[float, ...] = ()

    def progress(self, u: Floats) -> Floats:
        """Share of the whole fall of the loss that has been made at u: W(u), from 0 to 1. Its slope
        is w, with mean 1."""
        first, last = self.loss(np.array([0.0, 1.0]))
        return np.asarray((first - self.loss(u)) / (first - last))


def _staircase(u: Floats) -> Floats:
    """Exponentials that start anew where the learning rate drops by ten, as in ResNet training (He
    et al. 2016, figure 4)."""
    u = np.asarray(u, dtype=float)
    after = [np.maximum(u - start, 0.0) for start in (0.0, 1 / 3, 2 / 3)]
    parts = [
        amplitude * (-np.expm1(-20.0 * v))
        for amplitude, v in zip((1.5, 0.45, 0.15), after, strict=True)
    ]
    return np.asarray(2.5 - parts[0] - parts[1] - parts[2])


CURVES: dict[str, Curve] = {
    curve.name: curve
    for curve in (
        Curve("exponential", lambda u: 0.3 + 2.0 * np.exp(-6.0 * u)),
        Curve("power law", lambda u: 1.7 + 8.0 * (1.0 + u / 0.01) ** -0.5),
        Curve("optimus", lambda u: 0.2 + 1.0 / (10.0 * u + 0.5)),
        Curve("staircase", _staircase, (1 / 3, 2 / 3)),
    )
}
"""Exponential, power law (as of language models), Optimus 1/(a k + b) + c (Peng et al., EuroSys
2018), staircase."""


def noisy(
    losses: Floats,
    rng: np.random.Generator,
    white: float = 0.08,
    drift: float = 0.03,
    memory: float = 0.9,
) -> Floats:
    """Losses with relative noise: white, and an AR(1) part of standard deviation `drift` and
    correlation `memory`."""
    steps = rng.standard_normal(len(losses)) * drift * np.sqrt(1.0 - memory**2)
    kernel = memory ** np.arange(int(np.ceil(np.log(1e-4) / np.log(memory))))
    slow = np.convolve(steps, kernel)[: len(losses)]
    return np.asarray(losses * (1.0 + white * rng.standard_normal(len(losses)) + slow))
