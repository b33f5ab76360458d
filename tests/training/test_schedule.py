"""`attach(policy=...)`: rules and schedulers, resuming, roll backs, losses as tensors."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import pmstore
from pmstore.scheduler import Auto, CommitPolicy, CommitScheduler, EveryN, EverySeconds, Known
from pmstore.torch import Run, attach
from pmstore_lab.simulation.baselines import COCI, CheckFreq, Daly, EveryStep, Young


def job() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(
    run: Run,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    until: int,
    leave: int | None = None,
) -> None:
    """leave: in which step it is interrupted."""
    for done in run.steps(until):
        optimizer.zero_grad()
        loss = model(torch.full((3, 4), 1.0 + done)).square().mean()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        if done == leave:
            raise KeyboardInterrupt


def policies() -> list[CommitPolicy]:
    return [
        EveryStep(),
        EveryN(4),
        EverySeconds(1e-4),
        Young(0.5),
        Daly(0.5),
        CheckFreq(0.5),
        COCI(decay_per_second=-1.0, failure_rate_per_second=0.5),
        Auto("time"),
        Auto("balanced"),
        Auto("progress"),
        Auto("explore"),
    ]


@pytest.mark.parametrize("number", range(len(policies())))
def test_a_run_left_by_an_exception_resumes_at_its_last_commit(path: Path, number: int) -> None:
    reference, optimizer = job()
    with pmstore.open(path.with_suffix(".plain")) as store:
        train(attach(store, model=reference, optimizer=optimizer), reference, optimizer, 40)
        expected = [p.detach().clone() for p in reference.parameters()]
    lives = 0
    step = 0
    while step < 40:
        model, optimizer = job()
        try:
            with pmstore.open(path) as store:
                run = attach(store, model=model, optimizer=optimizer, policy=policies()[number])
                assert run.scheduler is not None
                assert run.scheduler.steps == run.step == step
                lives += 1
                try:
                    leave = min(step + 15, 39) if lives < 4 else None
                    train(run, model, optimizer, 40, leave)
                finally:
                    step = run.committed
        except KeyboardInterrupt:
            pass
    for parameter, other in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter, other)


def test_what_is_no_policy_is_refused_before_anything_happens(store: pmstore.Store) -> None:
    model, optimizer = job()
    for wrong in ("time", 10, EveryN):
        with pytest.raises(TypeError, match='policy is "auto", or a rule'):
            attach(store, model=model, optimizer=optimizer, policy=wrong)  # type: ignore[arg-type]
    assert len(store) == 0
    attach(store, model=model, optimizer=optimizer)


def test_a_scheduler_of_ones_own_with_two_targets(store: pmstore.Store) -> None:
    model, optimizer = job()
    flushed: list[int] = []
    scheduler = CommitScheduler(
        store=store,
        targets={"store": store.commit, "copy": lambda: flushed.append(store.epoch)},
        # however short a step is, one of them is due at its end
        known=Known(failure_rate_per_second={"store": 1e9, "copy": 1e8}),
    )
    run = attach(store, model=model, optimizer=optimizer, policy=scheduler)
    assert run.scheduler is scheduler
    train(run, model, optimizer, 30)
    assert flushed
    chosen = [decision.target for decision in scheduler.decisions]
    assert {decision.step for decision in scheduler.decisions} == set(range(31))
    # a loop ends with a commit: the run makes it by itself where the rule names another target
    own = chosen[-1] != "store"
    assert run.stats().commits == chosen.count("store") + own > own
    assert run.committed == 30


def test_a_roll_back_takes_the_scheduler_along(store: pmstore.Store) -> None:
    model, optimizer = job()
    run = attach(store, model=model, optimizer=optimizer, policy=EveryN(10))
    assert run.scheduler is not None
    train(run, model, optimizer, 10)
    for _ in range(5):
        with run.next_step():
            optimizer.step()
            run.log(loss=1.0)
    assert run.scheduler.steps == 14
    run.rollback()
    assert (run.step, run.scheduler.steps) == (10, 10)
    assert run.scheduler.targets[0].work == 0.0


def test_a_roll_back_before_the_first_commit(store: pmstore.Store) -> None:
    model, optimizer = job()
    run = attach(store, model=model, optimizer=optimizer, policy=EveryN(10))
    assert run.scheduler is not None
    for _ in range(4):
        with run.next_step():
            optimizer.step()
            run.log(loss=1.0)
    run.rollback()
    assert (run.step, run.scheduler.steps) == (0, 0)
    train(run, model, optimizer, 10)
    assert run.step == 10


def test_a_drop_of_the_learning_rate_begins_a_segment(store: pmstore.Store) -> None:
    model, optimizer = job()
    run = attach(store, model=model, optimizer=optimizer, policy=Auto("progress"))
    assert run.scheduler is not None
    for step in run.steps(60):
        if step == 40:
            optimizer.param_groups[0]["lr"] /= 10
        optimizer.step()
        run.log(loss=math.exp(-step / 20))
    assert run.scheduler.worth.fit._segment == 40.0


class OnADevice:
    """A loss that lies on a GPU: to read it is to wait."""

    class device:
        type = "cuda"

    def detach(self) -> OnADevice:
        return self

    def reshape(self, shape: Any) -> OnADevice:
        return self

    def item(self) -> float:
        raise AssertionError("waited for the device")

    __float__ = item


def test_a_loss_on_a_device_is_never_waited_for() -> None:
    scheduler = CommitScheduler(
        Auto("progress"), targets={"disk": lambda: None}, known=Known(1000, 1e-3)
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(50):
            scheduler.step(OnADevice())
            scheduler.step(torch.zeros((), device="meta"))
    messages = [str(warning.message) for warning in seen if "pmstore" in str(warning.message)]
    assert len(messages) == len(set(messages)) <= 3
    assert not any("waited" in message for message in messages)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_losses_on_cuda_arrive_without_a_wait() -> None:
    scheduler = CommitScheduler(
        Auto("progress"), targets={"disk": lambda: None}, known=Known(1000, 1e-3)
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(200):
            scheduler.step(torch.full((), 1.0 + 100.0 / (step + 1), device="cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    scheduler.step(torch.ones((), device="cuda"))
    assert scheduler.worth.losses_seen > 0
    assert scheduler.worth.fit._rows


def test_auto_is_a_policy_of_attach(store: pmstore.Store) -> None:
    model, optimizer = job()
    run = attach(store, model=model, optimizer=optimizer, policy="auto")
    assert run.scheduler is not None
    assert isinstance(run.scheduler.policy, Auto)
    train(run, model, optimizer, 40)
    assert run.scheduler.decisions


def test_without_a_policy_every_step_commits(store: pmstore.Store) -> None:
    model, optimizer = job()
    run = attach(store, model=model, optimizer=optimizer, policy=None)
    train(run, model, optimizer, 3)
    # and the loop's beginning and end
    assert (run.scheduler, run.committed, run.stats().commits) == (None, 3, 5)
