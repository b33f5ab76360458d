"""Posterior sampling with SWAG (Maddox et al., 2019): weights are drawn by their moments along
stochastic gradient descent. A commit shows weights and moments of one step.

python -m examples.posterior run.pm      # interrupt or kill it, and start it again
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import pmstore

Array = np.ndarray[Any, np.dtype[Any]]
FIRST = 20  # steps that only approach the posterior


def fit(store: pmstore.Store, data: Array, rank: int, steps: int, rate: float = 1e-3) -> None:
    """Linear regression of the last column of data on the others. Goes on from the last committed
    step, to `steps` in all. rank: how many deviations from the mean are kept."""
    run, inputs, wanted = store.group("posterior"), data[:, :-1], data[:, -1]
    if "iteration" not in run:
        with store.transaction():
            run.zeros("moments", (3, inputs.shape[1]))
            run.zeros("deviations", (rank, inputs.shape[1]))
            run["iteration"] = 0
    weights, sums, squares = run["moments"]
    for step in range(run["iteration"], steps):
        rows = np.random.default_rng((0, step)).integers(len(data), size=32)
        with store.transaction():
            weights -= rate / 32 * (inputs[rows] @ weights - wanted[rows]) @ inputs[rows]
            if step >= FIRST:
                sums[:], squares[:] = sums + weights, squares + weights**2
                run["deviations"][step % rank] = weights - sums / (step + 1 - FIRST)
            run["iteration"] = step + 1


def sample(store: pmstore.Store, count: int, seed: int = 0) -> Array:
    """Weights drawn from the posterior: (count, features)."""
    run, rng = store["posterior"], np.random.default_rng(seed)
    (_, mean, square), deviations = run["moments"] / (run["iteration"] - FIRST), run["deviations"]
    alone = np.sqrt(np.maximum(square - mean**2, 0) / 2) * rng.normal(size=(count, len(mean)))
    together = rng.normal(size=(count, len(deviations))) @ deviations
    return np.asarray(mean + alone + together / np.sqrt(2 * (len(deviations) - 1)))


def main(path: str) -> None:
    inputs = np.random.default_rng(1).normal(size=(10_000, 16))
    noise = np.random.default_rng(2).normal(size=10_000)
    with pmstore.open(path) as store:
        found = store.get("posterior/iteration")
        print("a new run" if found is None else f"goes on after iteration {found}")
        fit(store, np.column_stack([inputs, inputs @ np.arange(16) + noise]), 10, 5_000, rate=0.05)
        print(f"iteration {store['posterior/iteration']} committed:", sample(store, 99).mean(0))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "posterior.pm")
