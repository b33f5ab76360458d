"""Streams that estimators learn from, for tests and for the fork server that kills them. Keep its
imports few."""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.cluster import MiniBatchKMeans
from sklearn.decomposition import IncrementalPCA
from sklearn.linear_model import SGDClassifier, SGDRegressor
from sklearn.neural_network import MLPClassifier

import pmstore
from pmstore.integrations.sklearn import persist

MADE: dict[str, Callable[[], Any]] = {
    "kmeans": lambda: MiniBatchKMeans(5, random_state=3, reassignment_ratio=0.3, n_init=2),
    "sgd": lambda: SGDClassifier(random_state=np.random.RandomState(5), average=30),
    "sgd-global": lambda: SGDClassifier(loss="modified_huber", learning_rate="adaptive", eta0=0.1),
    "regressor": lambda: SGDRegressor(random_state=1, average=True),
    "pca": lambda: IncrementalPCA(3),
    "mlp": lambda: MLPClassifier((7,), random_state=2),
    "mlp-sgd": lambda: MLPClassifier((7,), solver="sgd", nesterovs_momentum=True, random_state=2),
}


def feed(estimator: Any, kind: str, batch: int) -> None:
    chance = np.random.default_rng(batch)
    X = chance.normal(size=(40, 6))
    if kind in ("kmeans", "pca"):
        estimator.partial_fit(X)
    elif kind == "regressor":
        estimator.partial_fit(X, X.sum(axis=1))
    else:
        y = np.array(["a", "b", "c"])[chance.integers(3, size=40)]
        estimator.partial_fit(X, y, classes=["a", "b", "c"])


def digest(estimator: Any) -> str:
    """Of all that pickle writes: of the same state, the same."""
    whole = pickle.loads(pickle.dumps(estimator))  # equal strings are one object, or are not
    state = dict(sorted(vars(whole).items()))
    return hashlib.sha256(repr(_bits(state)).encode()).hexdigest()


def _bits(value: Any) -> Any:
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.dtype.str, value.shape, value.flags.c_contiguous, value.tobytes("A")
    if isinstance(value, dict):
        return {key: _bits(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_bits(part) for part in value]
    if isinstance(value, type):
        return repr(value)
    if isinstance(value, np.random.RandomState):
        return _bits(value.get_state(legacy=False))
    if hasattr(value, "__dict__"):
        return type(value).__qualname__, _bits(vars(value))
    reduced = getattr(value, "__reduce__", None)
    plain = (bool, int, float, str, bytes, type(None), np.generic)
    return repr(value) if isinstance(value, plain) else str(reduced() if reduced else value)


def never_stopped(kind: str, batches: int) -> Any:
    """Without pmstore."""
    np.random.seed(7)
    estimator = MADE[kind]()
    for batch in range(batches):
        feed(estimator, kind, batch)
    return estimator


def tell_whole(ack: Callable[[int], None], path: str, kind: str, batches: int) -> None:
    """The digest of one that was never stopped, in a process like those that are: estimators keep
    the number of threads that they may use, which other tests change."""
    warnings.simplefilter("error")
    Path(path).write_text(digest(never_stopped(kind, batches)))


def learn(ack: Callable[[int], None], path: str, kind: str, batches: int, block: bool) -> None:
    """As a program that is started again and again: it goes on where the store says."""
    warnings.simplefilter("error")
    np.random.seed(7)
    with pmstore.open(path, size="1MiB") as store:
        estimator = persist(MADE[kind](), store, "it")
        done = store["it/batches"]
        ack(done)
        for batch in range(done, batches):
            if block:
                with store.transaction():
                    feed(estimator, kind, batch)
                    store["seen"] = batch + 1
            else:
                feed(estimator, kind, batch)
                store["seen"] = batch + 1
                store.commit()
            assert store["seen"] == store["it/batches"]
            ack(batch + 1)


def example(ack: Callable[[int], None], path: str, batches: int) -> None:
    from examples.sklearn_stream import main

    main(path, batches)
