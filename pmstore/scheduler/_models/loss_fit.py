"""Estimates where on its loss curve a run is: the density of progress."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

W_MIN, W_MAX = 0.2, 10.0
_BUCKETS = 160
FIT_STATE = 8 + 4 * _BUCKETS  # numbers of the largest state
_GROWTH = 1.12  # of a bucket's end over the one before
_Floats = np.ndarray[Any, np.dtype[np.float64]]

# Shapes of the falling part of the loss, from 1 at the segment's start to about 0, over z = steps /
# (steps to the job's end): exp(-k z), and (1 + z / z0)^-p, of which p = 1 is the curve of Optimus
# (Peng et al., EuroSys 2018).
_K = np.geomspace(0.5, 400.0, 36)
_Z0 = np.repeat(np.geomspace(3e-5, 3.0, 16), 5)
_P = np.tile(np.array([0.3, 0.5, 0.75, 1.0, 1.5]), 16)


def _shapes(z: _Floats) -> _Floats:
    """Returns the values of all shapes, one row each."""
    falling = np.exp(-np.outer(_K, z))
    power = np.exp(-_P[:, None] * np.log1p(z[None, :] / _Z0[:, None]))
    return np.concatenate([falling, power])


def _slopes(z: float) -> _Floats:
    """Returns -d/dz of all shapes at one place."""
    falling = _K * np.exp(-_K * z)
    power = _P / _Z0 * np.exp(-(_P + 1.0) * np.log1p(z / _Z0))
    return np.concatenate([falling, power])


@dataclass(slots=True)
class _Fit:
    """The result of a refit, for the segment that began at step `start`."""

    start: float
    scale: float  # steps of z = 1
    amplitude: _Floats  # of each shape: loss = floor + amplitude * shape
    weight: _Floats  # posterior of each shape
    drop: _Floats  # of the loss over the whole job, as each shape has it
    trust: float  # 0: nothing is known, 1: the fall is far above the noise


class LossFit:
    """Estimates w(t): the density of loss reduction at step t, relative to its mean over the job.

    Losses go into buckets whose ends grow by 12 %, so that a job of any length needs few and noise
    averages out. A refit weighs each of 116 shapes (exponentials and power laws with floor) by how
    well its least-squares fit explains the buckets, given the noise seen within them, and `weight`
    averages the shapes' densities. The density is pulled to 1 (no knowledge) as the fall seen so
    far sinks into the noise, and clamped to [0.2, 10].

    A refit costs well below 2 ms and happens when a bucket closes, so about 8 times while the job
    doubles in length.

    Args:
        total_steps: of the job; None: twice what it has done so far (a job is as likely as not to
            run as long again).
    """

    __slots__ = (
        *("_count", "_end", "_fit", "_origin", "_rows", "_segment", "_sum", "_sum2", "_sum_step"),
        *("closed", "total_steps"),
    )

    def __init__(self, total_steps: int | None = None) -> None:
        self.total_steps = total_steps
        # count, mean step, mean, variance within; of this segment
        self._rows: list[tuple[float, float, float, float]] = []
        self._segment = 0.0  # step at which it began
        # the job's first level, as the first segment's fit had it
        self._origin: float | None = None
        self._fit: _Fit | None = None
        self._count = 0
        self._sum = self._sum2 = self._sum_step = 0.0
        self._end = 1.0  # of the open bucket, a step
        self.closed: bool = False

    def add(self, step: int, loss: float) -> None:
        """Takes in one loss, which is finite. `closed` is set when it ended a bucket: time for
        `refit`."""
        self._count += 1
        self._sum += loss
        self._sum2 += loss * loss
        self._sum_step += step
        if step >= self._end:
            self._close(step)

    def _close(self, step: float) -> None:
        n = self._count
        if n and len(self._rows) < _BUCKETS:
            mean = self._sum / n
            self._rows.append(
                (float(n), self._sum_step / n, mean, max(self._sum2 / n - mean * mean, 0.0))
            )
            self.closed = True
        self._count = 0
        self._sum = self._sum2 = self._sum_step = 0.0
        since = step - self._segment
        self._end = self._segment + max(since + 1.0, since * _GROWTH)

    def new_segment(self, step: int) -> None:
        """Begins a new segment: the learning rate jumped, and the curve before says little of what
        follows."""
        self._close(step)
        if self._fit is not None and self._origin is None:
            self._origin = self._rows[0][2]
        self._rows.clear()
        self._fit = None
        self._segment = float(step)
        self._end = step + 1.0
        self.closed = False

    # ---- fitting

    def refit(self, step: int) -> None:
        """Weighs the shapes against the buckets."""
        self.closed = False
        rows = np.array(self._rows)
        if len(rows) < 4:
            return
        n, at, mean, within = rows.T
        total = self.total_steps if self.total_steps and self.total_steps > step else 2.0 * step
        scale = max(total - self._segment, 1.0)
        many = n >= 4
        size = np.abs(mean) + 1e-12
        # Noise is proportional to the loss, and neighbouring losses are alike: fewer independent
        # ones than there are.
        if many.any():
            relative = float(
                np.sum(n[many] * within[many] / size[many] ** 2) / np.sum(n[many] - 1.0)
            )
        else:
            relative = float(np.mean(np.diff(mean) ** 2) / 2.0 / np.mean(size) ** 2)
        variance = (relative * 3.0 / n + 0.003**2) * size**2 + 1e-18
        weight = 1.0 / variance
        z = np.maximum(at - 0.5 - self._segment, 0.0) / scale
        shapes = _shapes(z)
        s1, sy = weight.sum(), (weight * mean).sum()
        sx, sxx, sxy = shapes @ weight, (shapes * shapes) @ weight, shapes @ (weight * mean)
        determinant = s1 * sxx - sx * sx
        with np.errstate(divide="ignore", invalid="ignore"):
            amplitude = np.where(
                determinant > 1e-9 * s1 * sxx, (s1 * sxy - sx * sy) / determinant, 0.0
            )
            floor = (sy - amplitude * sx) / s1
            if mean.min() > 0.0:  # a loss that was never negative has no negative floor
                below = floor < 0.0
                amplitude = np.where(below, sxy / sxx, amplitude)
                floor = np.where(below, 0.0, floor)
        amplitude = np.maximum(amplitude, 0.0)
        floor = np.where(amplitude > 0.0, floor, sy / s1)
        error = mean[None, :] - floor[:, None] - amplitude[:, None] * shapes
        chi2 = (error * error) @ weight
        best = float(chi2.min())
        temper = max(1.0, best / max(len(rows) - 3, 1))  # the true curve is none of the shapes
        posterior = np.exp(-0.5 * (chi2 - best) / temper)
        posterior /= posterior.sum()
        ends = _shapes(np.array([1.0]))[:, 0]
        drop = amplitude * (1.0 - ends)
        if self._origin is not None:
            whole = self._origin - (floor + amplitude * ends)
            drop = np.where(whole > 0.0, whole, drop)
        seen = float(posterior @ (amplitude * (1.0 - shapes[:, -1])))
        noise = math.sqrt(relative * 3.0 / float(n.sum())) * float(size.mean()) + 1e-12
        trust = seen**2 / (seen**2 + (4.0 * noise) ** 2)
        self._fit = _Fit(self._segment, scale, amplitude, posterior, np.maximum(drop, 1e-12), trust)

    def weight(self, step: float) -> float:
        """Returns w at that step: 1.0 where nothing is known."""
        fit = self._fit
        if fit is None:
            return 1.0
        z = max(step - fit.start, 0.0) / fit.scale
        total = (
            self.total_steps
            if self.total_steps and self.total_steps > step
            else max(2.0 * step, fit.start + fit.scale)
        )
        density = float(fit.weight @ (fit.amplitude * _slopes(z) / fit.drop)) * total / fit.scale
        if not density > 0.0:
            return W_MIN if fit.trust > 0.5 else 1.0
        return float(min(max(density, W_MIN), W_MAX) ** fit.trust)

    # ---- with the user's state

    def state(self) -> list[float]:
        head = [
            self._segment,
            math.nan if self._origin is None else self._origin,
            self._end,
            float(self._count),
        ]
        flat = [value for row in self._rows for value in row]
        return [*head, self._sum, self._sum2, self._sum_step, float(len(self._rows)), *flat]

    def restore(self, state: Sequence[float], step: int) -> None:
        self._segment, origin, self._end, count, self._sum, self._sum2, self._sum_step, rows = (
            state[:8]
        )
        self._origin = None if math.isnan(origin) else origin
        self._count = int(count)
        flat = state[8 : 8 + 4 * int(rows)]
        self._rows = [
            (flat[i], flat[i + 1], flat[i + 2], flat[i + 3]) for i in range(0, len(flat), 4)
        ]
        self._fit = None
        self.refit(step)
