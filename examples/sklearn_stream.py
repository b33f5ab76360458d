"""Estimators of scikit-learn that learn from a stream, and go on after any stop, bit for bit:

python -m examples.sklearn_stream run.pm 300      # kill it, and start it again
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice

import numpy as np
from sklearn.decomposition import IncrementalPCA
from sklearn.linear_model import SGDClassifier

import pmstore
from pmstore.integrations.sklearn import persist

CLASSES = np.array(["cat", "dog", "owl"])


def stream() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches, always the same ones."""
    chance = np.random.default_rng(0)
    while True:
        labels = chance.integers(3, size=100)
        yield (
            chance.normal(size=(100, 20)) + labels[:, None] * np.linspace(0, 1, 20),
            CLASSES[labels],
        )


def main(path: str, batches: int) -> None:
    with pmstore.open(path) as store:
        pca = persist(IncrementalPCA(5), store, "pca")
        classifier = persist(SGDClassifier(random_state=0), store, "classifier")
        done = store["classifier/batches"]
        print("begins after batch", done, flush=True)
        for X, y in islice(stream(), done, batches):
            with store.transaction():  # both learn from a batch, or neither
                pca.partial_fit(X)
                classifier.partial_fit(pca.transform(X), y, classes=CLASSES)
        X, y = next(stream())
        print(f"right: {classifier.score(pca.transform(X), y):.2f}")
        print("weights", classifier.coef_.tobytes().hex()[:64])


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["stream.pm"], int((sys.argv[2:3] or [300])[0]))
