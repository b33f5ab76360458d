"""A run that is broken off and resumed, again and again, is bit for bit the run that was not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training import (
    BATCHES,
    OPTIMIZERS,
    SCHEDULERS,
    assert_same,
    contents,
    make_job,
    train,
    undisturbed,
)

import pmstore

STEPS = 2 * BATCHES + 3
# Before the first step, after it (lazy state), in an epoch, at its last batch, after the first of
# the next one.
STOPS = (0, 1, 4, BATCHES, BATCHES + 1, 2 * BATCHES, STEPS)

KINDS: list[dict[str, Any]] = [
    *({"optimizer": optimizer} for optimizer in OPTIMIZERS),
    *({"scheduler": scheduler} for scheduler in SCHEDULERS),
    {"model": "conv", "scaler": True},
    {"model": "conv", "optimizer": "sgd-momentum", "scheduler": "onecycle", "scaler": True},
]


def disturbed(path: Path, **kinds: Any) -> dict[str, tuple[str, bytes]]:
    """Trains in pieces, each in a new store object with a new program, and with an unfinished step
    before each stop."""
    for number, stop in enumerate(STOPS):
        random.seed(number)
        store = pmstore.open(path)
        job = make_job(**kinds, seed=1 if number == 0 else 100 + number)
        run = train(store, job, stop, STEPS, half=stop < STEPS)
        assert run.step == stop
        assert run.resumed == (number > 0)
        if stop < STEPS:
            run.detach()
            store.close()  # rolls back, as a crash does
    run.detach()
    result = contents(store)
    assert store.check().problems == ()
    store.close()
    return result


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "-".join(map(str, kinds.values())))
def test_every_kind_resumes_bit_for_bit(tmp_path: Path, kinds: dict[str, Any]) -> None:
    assert_same(
        undisturbed(tmp_path / "whole.pm", STEPS, **kinds),
        disturbed(tmp_path / "pieces.pm", **kinds),
    )


@pytest.mark.parametrize("persistent", [False, True])
def test_with_worker_processes(tmp_path: Path, persistent: bool) -> None:
    kinds = {"num_workers": 2, "persistent_workers": persistent}
    assert_same(
        undisturbed(tmp_path / "whole.pm", STEPS, **kinds),
        disturbed(tmp_path / "pieces.pm", **kinds),
    )


def test_the_state_in_a_store_does_not_change_the_training(tmp_path: Path) -> None:
    """The same bits as plain torch, dropout and data order included."""
    job = make_job(scheduler="cosine")
    losses = [job.step(batch) for _ in range(2) for batch in job.loader]
    plain = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    with pmstore.open(tmp_path / "run.pm") as store:
        train(store, make_job(scheduler="cosine"), len(losses), len(losses))
        assert np.array_equal(store["losses"], losses)
        for name, tensor in plain.items():
            assert torch.equal(store[f"run/model/{name}"], tensor)


def test_what_a_dead_process_wrote_after_its_last_commit_is_gone(path: Path) -> None:
    with pmstore.open(path) as store:
        run = train(store, make_job(), 3, 10)
        run.detach()
        committed = contents(store)
    store = pmstore.open(path)
    job = make_job(seed=2)
    for batch in job.attach(store).batches(epochs=None):
        job.step(batch)
        break
    store["note"] = "never committed"
    assert contents(store) != committed
    store.close()
    with pmstore.open(path) as store:
        assert_same(contents(store), committed)


def test_binding_reads_and_writes_nothing(path: Path) -> None:
    with pmstore.open(path) as store:
        train(store, make_job(), 3, 10)
    with pmstore.open(path) as store:
        before = store.stats()
        job = make_job(seed=2)
        job.attach(store).detach()
        after = store.stats()
        assert (after.commits, after.faults, after.captures) == (
            before.commits,
            before.faults,
            before.captures,
        )
        for name, parameter in job.model.named_parameters():
            assert parameter.data_ptr() == store[f"run/model/{name}"].data_ptr()
