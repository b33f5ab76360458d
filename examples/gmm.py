"""A Gaussian mixture with full covariances, fitted by EM (Dempster, Laird, Rubin, 1977). Weights,
means and covariances are three slots that flip together: a commit shows the parameters of one
iteration, never a mixture of two.

python -m examples.gmm run.pm      # interrupt or kill it, and start it again
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import pmstore

Array = np.ndarray[Any, np.dtype[Any]]


def log_densities(data: Array, weights: Array, means: Array, covariances: Array) -> Array:
    """(samples, components): of each sample and component, the weight included."""
    result = np.empty((len(data), len(weights)), data.dtype)
    for k, (weight, mean, covariance) in enumerate(zip(weights, means, covariances, strict=True)):
        factor = np.linalg.cholesky(covariance)
        scaled = np.linalg.solve(factor, (data - mean).T)
        log_root = np.log(np.diagonal(factor)).sum()
        result[:, k] = (
            np.log(weight)
            - log_root
            - 0.5 * (len(mean) * np.log(2 * np.pi) + (scaled * scaled).sum(0))
        )
    return result


def fit(
    store: pmstore.Store,
    data: Array,
    components: int,
    iterations: int,
    name: str = "gmm",
    seed: int = 0,
) -> list[Array]:
    """Goes on from the last committed iteration, to `iterations` in all; one commit an iteration.

    data: (samples, features), floating. Returns: weights (components,), means (components,
        features) and covariances (components, features, features), over the heap.
        `store[f"{name}/iteration"]` counts, the list `store[f"{name}/likelihoods"]` has for each
        iteration the mean log-likelihood of the parameters that it began with.
    """
    features = data.shape[1]
    shapes = {
        "weights": (components,),
        "means": (components, features),
        "covariances": (components, features, features),
    }
    slots = [store.slots(f"{name}/{part}", shape, data.dtype) for part, shape in shapes.items()]
    if f"{name}/iteration" not in store:
        with store.transaction():
            first = np.random.default_rng(seed).choice(len(data), components, replace=False)
            for slot, value in zip(
                slots,
                (1 / components, data[first], np.cov(data.T).reshape(features, features)),
                strict=True,
            ):
                slot.next[:] = value
                slot.flip()
            store[f"{name}/iteration"] = 0
    for iteration in range(store[f"{name}/iteration"], iterations):
        joint = log_densities(data, *(slot.current for slot in slots))
        top = joint.max(1, keepdims=True)
        evidence = top + np.log(np.exp(joint - top).sum(1, keepdims=True))
        shares = np.exp(joint - evidence)
        with store.transaction():
            weights, means, covariances = (slot.next for slot in slots)
            counts = shares.sum(0) + 10 * np.finfo(data.dtype).eps
            weights[:] = counts / counts.sum()
            np.divide(shares.T @ data, counts[:, None], out=means)
            for k in range(components):
                apart = data - means[k]
                covariances[k] = (shares[:, k, None] * apart).T @ apart / counts[k]
                covariances[k].flat[:: features + 1] += 1e-6  # keeps it positive definite
            for slot in slots:
                slot.flip()
            store[f"{name}/iteration"] = iteration + 1
            store.list(f"{name}/likelihoods").append(float(evidence.mean()))
    return [slot.current for slot in slots]


def main(path: str, iterations: int = 60) -> None:
    rng = np.random.default_rng(1)
    data = np.concatenate(
        [rng.normal(size=(1_000, 16)) * rng.uniform(0.5, 2, 16) + 4 * k for k in range(5)]
    )
    with pmstore.open(path) as store:
        found = store.get("gmm/iteration")
        print("a new run" if found is None else f"goes on after iteration {found}")
        fit(store, data, components=5, iterations=iterations)
        print(
            f"iteration {store['gmm/iteration']} committed, mean log-likelihood "
            f"{store['gmm/likelihoods'][-1]:.4f}"
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "gmm.pm")
