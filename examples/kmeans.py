"""KMeans (Lloyd, 1982) whose centres are slots: an iteration computes all new ones from the old, so
a commit copies nothing.

python -m examples.kmeans run.pm      # interrupt or kill it, and start it again
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import pmstore

Array = np.ndarray[Any, np.dtype[Any]]


def fit(
    store: pmstore.Store,
    data: Array,
    clusters: int,
    iterations: int,
    name: str = "kmeans",
    seed: int = 0,
) -> Array:
    """Goes on from the last committed iteration, to `iterations` in all or to convergence; one
    commit an iteration.

    data: (samples, features), floating. Returns: the centres, (clusters, features), over the heap;
        the count of iterations done is `store[f"{name}/iteration"]`.
    """
    centres = store.slots(f"{name}/centres", (clusters, data.shape[1]), data.dtype)
    if f"{name}/iteration" not in store:
        with store.transaction():
            centres.next[:] = data[
                np.random.default_rng(seed).choice(len(data), clusters, replace=False)
            ]
            centres.flip()
            store[f"{name}/iteration"] = 0
    for iteration in range(store[f"{name}/iteration"], iterations):
        old = centres.current
        nearest = np.argmin((old * old).sum(1) - 2 * data @ old.T, axis=1)
        order = np.argsort(nearest, kind="stable")
        counts = np.bincount(nearest, minlength=clusters)
        starts = np.cumsum(counts) - counts
        with store.transaction():
            new = centres.next
            for k, (start, count) in enumerate(zip(starts, counts, strict=True)):
                # an empty cluster stays where it was
                new[k] = data[order[start : start + count]].mean(0) if count else old[k]
            centres.flip()
            store[f"{name}/iteration"] = iteration + 1
        if np.array_equal(old, new):
            break
    result: Array = centres.current
    return result


def main(path: str, iterations: int = 60) -> None:
    data = (
        np.random.default_rng(1).normal(size=(10_000, 16))
        + np.random.default_rng(2).integers(0, 4, (10_000, 1)) * 3
    )
    with pmstore.open(path) as store:
        found = store.get("kmeans/iteration")
        print("a new run" if found is None else f"goes on after iteration {found}")
        fit(store, data, clusters=16, iterations=iterations)
        print(f"iteration {store['kmeans/iteration']} committed")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "kmeans.pm")
