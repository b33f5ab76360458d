"""run.rewind(steps=1) on a store that holds: training goes on as if the step had never been."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import pythons
import torch
from training import assert_same, contents, make_job, undisturbed

import pmstore

STEPS = 9


@pytest.fixture(params=["/dev/shm", "/var/tmp"], ids=["memory", "disk"])
def path(request: pytest.FixtureRequest) -> Iterator[Path]:
    path = Path(f"{request.param}/pms-hold-run-{os.getpid()}.pm")
    path.unlink(missing_ok=True)
    yield path
    path.unlink(missing_ok=True)


def train(run: Any, job: Any, losses: Any, order: Any, total: int, again: set[int]) -> None:
    """Some steps are taken back after their commit, once."""
    for batch in run.batches(epochs=None):
        place = run.step
        losses[place] = loss = job.step(batch)
        order[place] = batch[2].numpy()
        run.log(loss=loss)
        run.commit()
        if place in again:
            again.discard(place)
            with pytest.raises(TypeError):
                run.rewind(2)
            run.rewind(steps=1)
            assert run.step == place
            with pytest.raises(pmstore.TransactionError):
                run.rewind(steps=1)
        if run.step == total:
            break


@pytest.mark.parametrize(
    "kinds",
    [
        {},
        {"optimizer": "sgd-momentum", "scheduler": "onecycle"},
        {"optimizer": "native-adamw"},
        {"optimizer": "native-sgd"},
    ],
    ids=lambda kinds: "-".join(map(str, kinds.values())) or "plain",
)
def test_a_step_that_was_taken_back_leaves_no_trace(
    tmp_path: Path, path: Path, kinds: dict[str, Any]
) -> None:
    whole = undisturbed(tmp_path / "whole.pm", STEPS, **kinds)
    with pmstore.open(path, hold=True) as store:
        job = make_job(**kinds)
        run = job.attach(store)
        losses = store.require("losses", (STEPS,), "float64")
        order = store.require("order", (STEPS, 6), "int64")
        store.commit()
        train(run, job, losses, order, STEPS, {1, 4, 7})
        run.detach()
        assert_same(whole, contents(store))
        assert store.check().problems == ()


def test_after_a_crash(path: Path) -> None:
    script = dedent("""
        import os, signal, sys, torch, pmstore
        from pmstore.torch import attach
        torch.set_num_threads(1); torch.manual_seed(0)
        model = torch.nn.Linear(4, 4); opt = torch.optim.Adam(model.parameters(), lr=0.1)
        store = pmstore.open(sys.argv[1], hold=True)
        run = attach(store, model=model, optimizer=opt)
        while run.step < 5:
            with run.next_step():
                opt.zero_grad(); model(torch.ones(2, 4)).sum().backward(); opt.step()
            run.commit()
            print(model.weight.detach().sum().item(), flush=True)
        with run.next_step():
            opt.zero_grad(); model(torch.ones(2, 4)).sum().backward(); opt.step()
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    child = pythons.run(["-c", script, str(path)], timeout=300)
    assert child.returncode == -9, child.stderr
    sums = [float(word) for word in child.stdout.split()]
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with pmstore.open(path, hold=True) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer)
        assert run.step == 5
        assert model.weight.detach().sum().item() == sums[4]
        run.rewind(steps=1)
        assert run.step == 4
        assert model.weight.detach().sum().item() == sums[3]


def test_the_first_commit_is_attachs_own(path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    with pmstore.open(path, hold=True) as store:
        run = pmstore.torch.attach(store, model=model)
        with pytest.raises(pmstore.TransactionError, match="at its first commit"):
            run.rewind(steps=1)
        assert store.holds


def test_mirrors_go_back_too(path: Path) -> None:
    tensor = torch.zeros(50_000)
    with pmstore.open(path, hold=True) as store:
        store.mirror("t", tensor)
        for step in range(4):
            tensor.fill_(step)
            store["step"] = step
            store.commit(wait=False).wait()
        tensor.fill_(77)
        store.rewind()
        assert store["step"] == 2
        assert bool((tensor == 2).all())
        assert not store.check().problems
