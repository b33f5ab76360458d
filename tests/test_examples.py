"""The examples compute what they should, and a run that is killed again and again ends in the same
bits as one that is not."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

import pmstore
from pmstore.testing import ForkServer

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from examples import gmm, gpu, kmeans  # noqa: E402

ITERATIONS = 25


def blobs() -> np.ndarray[Any, np.dtype[np.float64]]:
    rng = np.random.default_rng(3)
    return np.concatenate(
        [rng.normal(size=(150, 6)) * rng.uniform(0.5, 1.5, 6) + 2 * k for k in range(4)]
    )


def state(store: pmstore.Store, name: str) -> list[bytes]:
    parts = ["centres"] if name == "kmeans" else ["weights", "means", "covariances"]
    return [store[f"{name}/{part}"].current.tobytes() for part in parts]


def run(ack: Callable[[int], None], name: str, path: str, domain: str) -> None:
    """In a child that dies. One iteration at a time, so that each is acknowledged."""
    with pmstore.open(path, size="2MiB", domain=domain) as store:  # type: ignore[arg-type]
        fit = {"kmeans": kmeans.fit, "gmm": gmm.fit}[name]
        for iteration in range(store.get(f"{name}/iteration", 0) + 1, ITERATIONS + 1):
            fit(store, blobs(), 7, iteration)
            ack(store[f"{name}/iteration"])


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer([str(Path(__file__).parent), str(ROOT)]) as made:
        yield made


@pytest.mark.parametrize("name", ["kmeans", "gmm"])
def test_kills_do_not_change_a_bit(server: ForkServer, shm: Path, name: str, domain: str) -> None:
    whole, killed = shm / "whole.pm", shm / "killed.pm"
    assert server.run("test_examples:run", [name, str(whole), domain]).exit_code == 0
    rng = random.Random(name + domain)
    acknowledged, deaths = 0, 0
    for turn in range(60):
        how: dict[str, Any] = (
            {"delay_seconds": rng.uniform(0.005, 0.1)}
            if turn % 3 == 2
            else {"kill_at": rng.randrange(1, 90)}
        )
        result = server.run("test_examples:run", [name, str(killed), domain], **how)
        deaths += result.killed
        acknowledged = max(acknowledged, result.acknowledged)
        if not result.killed:
            assert result.exit_code == 0, result
            break
        if killed.exists():
            with pmstore.open(killed, "r", domain=domain) as store:  # type: ignore[arg-type]
                assert store.get(f"{name}/iteration", 0) >= acknowledged
    else:
        assert server.run("test_examples:run", [name, str(killed), domain]).exit_code == 0
    assert deaths > 0
    with pmstore.open(whole, "r") as one, pmstore.open(killed, "r") as other:
        assert one[f"{name}/iteration"] == other[f"{name}/iteration"]
        assert state(one, name) == state(other, name)
        assert other.check().problems == ()


def test_kmeans_agrees_with_scikit_learn(store: pmstore.Store) -> None:
    data = blobs()
    start = kmeans.fit(store, data, 7, 0).copy()
    ours = kmeans.fit(store, data, 7, 100)
    assert 1 < store["kmeans/iteration"] < 100  # it converged
    theirs = KMeans(7, init=start, n_init=1, max_iter=100, tol=0, algorithm="lloyd").fit(data)
    np.testing.assert_allclose(ours, theirs.cluster_centers_, rtol=1e-9)


def test_kmeans_keeps_an_empty_cluster(store: pmstore.Store) -> None:
    data = np.zeros((4, 2))
    data[3] = 9
    centres = kmeans.fit(store, data, 3, 10, seed=0)
    assert np.isfinite(centres).all()


def test_gmm_agrees_with_scikit_learn(store: pmstore.Store) -> None:
    data = blobs()
    weights, means, covariances = (part.copy() for part in gmm.fit(store, data, 4, 0))
    likelihoods = []
    for iteration in range(1, 21):
        ours = gmm.fit(store, data, 4, iteration)
        likelihoods.append(store["gmm/likelihood"])
    # as EM promises
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(likelihoods))
    precisions = np.linalg.inv(covariances)
    model = GaussianMixture(
        4,
        max_iter=20,
        tol=0,
        reg_covar=1e-6,
        weights_init=weights,
        means_init=means,
        precisions_init=precisions,
    )
    with pytest.warns(ConvergenceWarning):
        theirs = model.fit(data)
    for mine, reference in zip(
        ours, (theirs.weights_, theirs.means_, theirs.covariances_), strict=True
    ):
        np.testing.assert_allclose(mine, reference, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["kmeans", "gmm"])
def test_as_a_program(shm: Path, name: str) -> None:
    command = [sys.executable, "-m", f"examples.{name}", str(shm / "run.pm")]
    first = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    again = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert first.stdout.startswith("a new run\niteration ")
    assert again.stdout.startswith("goes on after iteration ")


def test_mirrored_training_goes_on(shm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In host memory; the bits of an interrupted run are those of one that was not."""
    whole = gpu.train(str(shm / "whole.pm"), 12, "cpu")
    gpu.train(str(shm / "parts.pm"), 5, "cpu")
    parts = gpu.train(str(shm / "parts.pm"), 12, "cpu")
    assert all(one.equal(other) for one, other in zip(whole, parts, strict=True))
    assert "goes on after step 5 on cpu\nstep 12 committed" in capsys.readouterr().out
