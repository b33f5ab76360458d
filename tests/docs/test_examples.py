"""The examples compute what they should, and a run that is killed again and again ends in the same
bits as one that is not."""

from __future__ import annotations

import itertools
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

import pmstore
from pmstore.testing import ForkServer, job_test

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from examples import gmm, gpu, kmeans, posterior  # noqa: E402

ITERATIONS = 25


def blobs() -> np.ndarray[Any, np.dtype[np.float64]]:
    rng = np.random.default_rng(3)
    return np.concatenate(
        [rng.normal(size=(150, 6)) * rng.uniform(0.5, 1.5, 6) + 2 * k for k in range(4)]
    )


def state(store: pmstore.Store, name: str) -> list[bytes]:
    if name == "posterior":
        return [store[f"{name}/{part}"].tobytes() for part in ("moments", "deviations")]
    parts = ["centres"] if name == "kmeans" else ["weights", "means", "covariances"]
    return [store[f"{name}/{part}"].current.tobytes() for part in parts]


def run(ack: Callable[[int], None], name: str, path: str, domain: str) -> None:
    """In a child that dies. One iteration at a time, so that each is acknowledged."""
    with pmstore.open(path, size="2MiB", domain=domain) as store:  # type: ignore[arg-type]
        fit: Callable[..., Any] = {
            "kmeans": kmeans.fit,
            "gmm": gmm.fit,
            "posterior": posterior.fit,
        }[name]
        for iteration in range(store.get(f"{name}/iteration", 0) + 1, ITERATIONS + 1):
            fit(store, blobs(), 7, iteration)
            ack(store[f"{name}/iteration"])


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer([str(Path(__file__).parent), str(ROOT)]) as made:
        yield made


@pytest.mark.parametrize("name", ["kmeans", "gmm", "posterior"])
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
        likelihoods.append(store["gmm/likelihoods"][-1])
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


def test_samples_are_of_the_posterior(store: pmstore.Store) -> None:
    """Around the solution of least squares, with the covariance that SWAG's paper gives."""
    rng = np.random.default_rng(5)
    inputs = rng.normal(size=(2000, 4))
    wanted = inputs @ [1.0, -2.0, 3.0, 0.0] + rng.normal(size=2000)
    data = np.column_stack([inputs, wanted])
    rank, steps = 6, posterior.FIRST + 1500
    posterior.fit(store, data, rank, steps, rate=0.05)
    drawn = posterior.sample(store, 100_000)
    best = np.linalg.lstsq(inputs, wanted, rcond=None)[0]
    np.testing.assert_allclose(drawn.mean(0), best, atol=0.1)
    trace = []  # the same descent, without a store
    weights = np.zeros(4)
    for step in range(steps):
        rows = np.random.default_rng((0, step)).integers(len(data), size=32)
        weights = weights - 0.05 / 32 * (inputs[rows] @ weights - wanted[rows]) @ inputs[rows]
        trace.append(weights)
    after = np.array(trace[posterior.FIRST :])
    means = np.cumsum(after, 0) / np.arange(1, len(after) + 1)[:, None]
    deviations = (after - means)[-rank:]
    covariance = (np.diag(after.var(0)) + deviations.T @ deviations / (rank - 1)) / 2
    np.testing.assert_allclose(np.cov(drawn.T), covariance, rtol=0.1, atol=2e-5)


@pytest.mark.parametrize("name", ["kmeans", "gmm", "posterior"])
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


def test_data_parallel_ranks_go_on_together(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is killed, in its training; torchrun starts both again. The bits are those of a job that
    nobody killed. torchrun itself forks them: each rank would take seconds to import torch."""
    (shm / "program").mkdir()
    shutil.copy(ROOT / "examples" / "ddp.py", shm / "program")
    monkeypatch.setattr(tempfile, "tempdir", str(shm))
    for name in ("OMP_NUM_THREADS", "PET_RUN_PATH"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PET_START_METHOD", "fork")
    command = [sys.executable, "ddp.py", ".", "2"]
    result = job_test(command, folder=shm / "program", at=[(1, 400)])
    assert result.ok, str(result)
    (kill,) = result.trials[0].kills
    assert (kill.victim, kill.primitive) == ("ddp1.pm", 400)
    assert not any("model" in name or "optimizer" in name for name in result.not_compared)
