"""Roll back takes the Python side back too: what is trained afterwards is what would have been
trained without."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from training import BATCHES, assert_same, contents, make_job, mlp, train, undisturbed

import pmstore
from pmstore.torch import attach

STEPS = BATCHES + 4


class Oops(Exception):
    pass


def train_with_failures(store: pmstore.Store, job: Any, fail_at: set[int], total: int) -> int:
    """Some steps raise once, at their very end."""
    run = job.attach(store, policy=None)
    losses = store.require("losses", (total,), "float64")
    order = store.require("order", (total, 6), "int64")
    failures = 0
    for batch in run.batches(epochs=None):
        place = run.step
        try:
            losses[place] = job.step(batch)
            order[place] = batch[2].numpy()
            run.log(loss=losses[place])
            if place in fail_at:
                fail_at.discard(place)
                store["trace"] = "of the failure"
                raise Oops
        except Oops:
            failures += 1
            run.rollback()
            assert run.step == place
            assert "trace" not in store
            continue
        if run.step + 1 == total:
            run.commit()
            break
    run.detach()
    return failures


@pytest.mark.parametrize(
    "kinds",
    [
        {},
        {"optimizer": "sgd-momentum", "scheduler": "onecycle"},
        {"model": "conv", "scaler": True, "scheduler": "sequential"},
        {"optimizer": "lbfgs"},
        pytest.param({"num_workers": 2}, id="data_loader"),
    ],
    ids=lambda kinds: "-".join(map(str, kinds.values())) or "plain",
)
def test_failed_steps_leave_no_trace(tmp_path: Path, kinds: dict[str, Any]) -> None:
    whole = undisturbed(tmp_path / "whole.pm", STEPS, **kinds)
    with pmstore.open(tmp_path / "failing.pm") as store:
        fail_at = {0, 3, BATCHES - 1, BATCHES, BATCHES + 1}
        assert train_with_failures(store, make_job(**kinds), fail_at, STEPS) == 5
        assert_same(whole, contents(store))
        assert store.check().problems == ()


def test_lazily_made_state_vanishes(store: pmstore.Store) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    run = attach(store, model=model, optimizer=optimizer)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(Oops), run.next_step():
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 7
        optimizer.param_groups[0]["new"] = 1
        assert len(optimizer.state) == 6
        raise Oops
    assert len(optimizer.state) == 0
    assert "new" not in optimizer.param_groups[0]
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert tensor.data_ptr() == store[f"run/model/{name}"].data_ptr()


def test_generators_go_back(store: pmstore.Store) -> None:
    run = attach(store, model=mlp())
    drawn = (
        random.random(),
        np.random.rand(),
        torch.rand(1).item(),
        random.gauss(0, 1),
        np.random.randn(),
    )
    run.rollback()
    again = (
        random.random(),
        np.random.rand(),
        torch.rand(1).item(),
        random.gauss(0, 1),
        np.random.randn(),
    )
    assert again == drawn


def test_a_parameter_that_left_the_heap_comes_back(store: pmstore.Store) -> None:
    model = mlp()
    run = attach(store, model=model)
    before = model[0].weight.detach().clone()
    model[0].weight.data = torch.zeros(16, 8)
    run.rollback()
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.data_ptr() == store["run/model/0.weight"].data_ptr()


def test_a_scaler_in_the_middle_of_a_step(store: pmstore.Store) -> None:
    job = make_job(scaler=True)
    assert job.scaler is not None
    run = job.attach(store)
    for _ in range(2):
        with pytest.raises(Oops), run.next_step():
            job.scaler.scale(job.model(torch.randn(4, 8)).sum()).backward()
            job.scaler.unscale_(job.optimizer)
            raise Oops


def test_an_accumulation_goes_on_where_it_was(tmp_path: Path) -> None:
    """Gradients that the optimizer has not used yet are state: a commit between two of four
    batches."""

    def program(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = mlp()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def steps(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer, until: int) -> None:
        for number in range(run.step, until):
            with run.next_step():
                inputs = torch.full((4, 8), float(number)) + torch.rand(4, 8)
                model(inputs).square().sum().backward()
                if number % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=number > 4)
            run.commit()

    with pmstore.open(tmp_path / "whole.pm") as store:
        run = attach(store, model=(made := program(1))[0], optimizer=made[1])
        steps(run, *made, until=11)
        run.detach()
        whole = contents(store)
    for until in (1, 2, 3, 4, 5, 7, 10, 11):
        with pmstore.open(tmp_path / "pieces.pm") as store:
            run = attach(store, model=(made := program(until))[0], optimizer=made[1])
            steps(run, *made, until=until)
            with run.next_step():
                made[0](torch.ones(4, 8)).sum().backward()
                run.rollback()
            run.detach()
            pieces = contents(store)
    assert_same(whole, pieces)


def test_what_others_put_beside_gradients_stays(store: pmstore.Store) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 8)).sum().backward()
    run = attach(store, model=model, optimizer=optimizer)
    store["run/gradients/mine"] = 1
    for _ in run.steps(3):
        optimizer.step()
        run.commit()
    assert list(store["run/gradients"]) == ["mine"]


@pytest.mark.parametrize("mirror", [False, True])
def test_gradients_are_kept_once_and_no_longer_than_needed(tmp_path: Path, mirror: bool) -> None:
    """A loop that ran before attach left some, of which nobody knows whether they are spent; after
    a step they are."""
    with pmstore.open(tmp_path / "run.pm") as store:
        model = mlp()
        apart = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([*model.parameters(), apart])
        (model(torch.ones(4, 8)).sum() + apart.sum()).backward()
        names = [name for name, _ in model.named_parameters()]
        names.append(f"optimizer..{len(names)}")
        run = attach(store, model=model, optimizer=optimizer, mirror=mirror)
        assert list(store["run/gradients"]) == names
        for accumulated in range(2):
            # once may be the end of an accumulation, which needs the blocks again
            for _ in range(2):
                assert list(store["run/gradients"]) == names
                with run.next_step():
                    optimizer.step()
                run.commit()
            assert "run/gradients" not in store
            if accumulated:
                break
            with run.next_step():
                (model(torch.ones(4, 8)).sum() + apart.sum()).backward()
            run.commit()
            assert list(store["run/gradients"]) == names
            run.rollback()
            assert all(
                torch.equal(store[f"run/gradients/{name}"], one.grad)
                for name, one in model.named_parameters()
            )
        run.rollback()
        assert model[0].weight.grad is not None
        assert "run/gradients" not in store
        assert not store.check().problems


def test_a_step_that_cannot_be_written_is_taken_back_by_the_program(store: pmstore.Store) -> None:
    model = mlp()
    run = attach(store, model=model)
    before = model[0].bias.detach().clone()
    with run.next_step():
        model[0].bias.data.fill_(9)
        model[0].weight.data = torch.zeros(3)
    for _ in range(2):
        with pytest.raises(pmstore.torch.MismatchError):
            run.commit()
    run.rollback()
    assert run.step == 0
    assert torch.equal(model[0].bias, before)
    assert model[0].weight.shape == (16, 8)
    with run.next_step():
        pass
    run.commit()
    assert run.step == 1


@pytest.mark.parametrize("call", range(1, 60, 4))
def test_an_interrupt_anywhere_leaves_a_usable_run(tmp_path: Path, call: int) -> None:
    """KeyboardInterrupt at the n-th call inside commit or roll back: afterwards the run is where a
    commit left it."""
    import sys

    whole = undisturbed(tmp_path / "whole.pm", 6)
    with pmstore.open(tmp_path / "run.pm") as store:
        job = make_job()
        train(store, job, 2, 6).detach()
        run = job.attach(store)
        for what in ("commit", "rollback"):
            loop = run.batches(epochs=None)
            batch = next(loop)
            store["losses"][run.step] = job.step(batch)
            store["order"][run.step] = batch[2].numpy()
            run.log(loss=store["losses"][run.step])
            left = call * 9

            def interrupt(frame: Any, event: str, argument: Any) -> None:
                nonlocal left
                # In our own frames: weakref callbacks and the like swallow what they raise.
                if event in ("call", "c_call") and "/pmstore/" in frame.f_code.co_filename:
                    left -= 1
                    if left == 0:
                        sys.setprofile(None)
                        raise KeyboardInterrupt

            sys.setprofile(interrupt)
            try:
                getattr(run, what)()
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
            run.rollback()
            assert run.step in (2, 3)
        run.detach()
        train(store, make_job(seed=9), 6, 6).detach()
        assert_same(whole, contents(store))
