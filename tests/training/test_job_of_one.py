"""A job of one rank, in this process: what a job's run does and refuses, and what `attach` says of
ranks that it was not told of. Jobs of more ranks: tests/jobs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pmstore
import pmstore.torch
from pmstore.job import peers
from pmstore.torch import Job
from pmstore.torch._job import process_group


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    where = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def attach(store: pmstore.Store, **more: Any) -> tuple[pmstore.torch.Run, nn.Module, Any]:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return pmstore.torch.attach(store, model=model, optimizer=optimizer, **more), model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@pytest.mark.usefixtures("one_rank")
def test_a_job_of_one_rank_commits_and_goes_on(shm: Path) -> None:
    for life in range(3):
        with pmstore.open(shm / "run.pm", size="8MiB") as store:
            run, model, optimizer = attach(store, process_group="world")
            assert run.resumed == (life > 0)
            assert run.step == run.agreed_step == 3 * life
            for number in range(3):
                with run.next_step():
                    step(model, optimizer)
                    store["note"] = number
                run.commit(agree=number == 1)
                if number == 1:
                    assert run.agreed_step == run.step
    with pmstore.open(shm / "run.pm", "r") as store:
        assert not store.info().in_doubt
        # 0 is the first joining; its life has the loop's beginning too, the others a joining each;
        # 3 steps and the end of each life
        assert [job.generation for job in store.info().jobs] == [15]
        assert store["note"] == 2


@pytest.mark.usefixtures("one_rank")
def test_only_ends_of_steps_commit_and_nobody_goes_back_alone(shm: Path) -> None:
    with pmstore.open(shm / "run.pm", size="8MiB") as store:
        run, model, optimizer = attach(store, job=Job(timeout=20))
        with run.next_step():
            step(model, optimizer)
        run.commit()
        store["more"] = 1
        with pytest.raises(pmstore.TransactionError, match=r"run\.commit\(\)"):
            store.commit()
        with pytest.raises(pmstore.TransactionError, match="process_group"):
            run.rewind(steps=1)
        with pytest.raises(pmstore.TransactionError, match="process_group"):
            store.rewind()
        assert run.rollback() is None
        assert "more" not in store


@pytest.mark.usefixtures("one_rank")
def test_a_run_is_attached_again_in_the_same_process(shm: Path) -> None:
    with pmstore.open(shm / "run.pm", size="8MiB") as store:
        run, model, optimizer = attach(store, process_group="world")
        with run.next_step():
            step(model, optimizer)
        run.commit()
        run.detach()
        run, model, optimizer = attach(store, process_group="world")
        assert run.resumed
        with run.next_step():
            step(model, optimizer)
        run.commit(agree=True)
    with pmstore.open(shm / "run.pm", "r") as store:
        assert store["run/progress"][0] == 2


@pytest.mark.usefixtures("one_rank")
def test_an_edited_program_is_fitted_in_the_generation_that_joins(shm: Path) -> None:
    with pmstore.open(shm / "run.pm", size="8MiB") as store:
        run, model, optimizer = attach(store, process_group="world")
        with run.next_step():
            step(model, optimizer)
        run.commit()
    with pmstore.open(shm / "run.pm") as store:
        (before,) = store.info().jobs
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with pytest.raises(pmstore.torch.ChangedError, match="lr"):
            pmstore.torch.attach(store, model=model, optimizer=optimizer, process_group="world")
        epoch = store.epoch
        run = pmstore.torch.attach(
            store,
            model=model,
            optimizer=optimizer,
            process_group="world",
            resume=pmstore.torch.Resume(optimizer="settings"),
        )
        assert (optimizer.param_groups[0]["lr"], run.step) == (0.01, 1)
        assert store.epoch == epoch + 1  # one commit: what was fitted is of the new generation
        assert store.info().jobs[0].generation == before.generation + 1
        with run.next_step():
            step(model, optimizer)
        run.commit()


@pytest.mark.usefixtures("one_rank")
def test_who_attaches_alone_leaves_the_job_and_is_told(shm: Path) -> None:
    with pmstore.open(shm / "run.pm", size="8MiB") as store:
        attach(store, process_group="world")
    with pmstore.open(shm / "run.pm") as store:
        with pytest.warns(RuntimeWarning, match="leaves the job"):
            run, model, optimizer = attach(store)
        with run.next_step():
            step(model, optimizer)
        run.commit()
        assert run.agreed_step is None
    with pmstore.open(shm / "run.pm") as store:  # and begins one of its own
        run, _, _ = attach(store, process_group="world")
        assert (run.resumed, run.step) == (True, 1)


def test_a_store_in_doubt_is_not_attached_alone(shm: Path, tmp_path: Path) -> None:
    where = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    try:
        store = pmstore.open(shm / "run.pm", size="8MiB")
        run, model, optimizer = attach(store, process_group="world")
        with run.next_step():
            step(model, optimizer)
        run.commit()
        store.close()  # not left: nobody said that it is final
    finally:
        dist.destroy_process_group()
    with pmstore.open(shm / "run.pm") as store:
        assert "not known to be committed by all ranks" in str(store.info())
        with pytest.raises(pmstore.InDoubtError, match="pmstore resolve"):
            attach(store)


@pytest.mark.usefixtures("one_rank")
def test_what_is_written_before_attach(shm: Path) -> None:
    store = pmstore.open(shm / "run.pm", size="8MiB")
    store["config"] = {"lr": 0.1}
    store.add_tier("disk", str(shm / "tier"))
    run, model, optimizer = attach(store, process_group="world", tiers=["disk"])
    with run.next_step():
        step(model, optimizer)
    run.commit()
    store.close()  # as a crash
    with pmstore.open(shm / "run.pm") as store:
        store["config"] = {"lr": 0.1}  # as it was
        store.add_tier("disk", str(shm / "tier"))
        run, model, optimizer = attach(store, process_group="world", tiers=["disk"])
        with run.next_step():
            step(model, optimizer)
        run.commit()
    store = pmstore.open(shm / "run.pm")
    run, _, _ = attach(store, process_group="world", tiers=["disk"])
    store.close()
    with pmstore.open(shm / "run.pm") as store:
        for write in (
            lambda: store.__setitem__("config", {"lr": 0.2}),
            lambda: store.add_tier("disk", pmstore.TierConfig(str(shm / "tier"), run="another")),
        ):
            write()
            with pytest.raises(
                pmstore.TransactionError, match=r"before attach \(a tier with other"
            ):
                attach(store, process_group="world", tiers=["disk"])
            store.rollback()
        run, _, _ = attach(store, process_group="world", tiers=["disk"])
        assert run.step == 2


@pytest.mark.usefixtures("one_rank")
def test_a_group_that_is_never_made(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rank dies while it connects, gloo itself waits for longer than it is told."""
    over = threading.Event()
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: over.wait())
    monkeypatch.setattr(peers, "_LATER", 0.1)
    try:
        with pmstore.open(shm / "run.pm", size="8MiB") as store:
            with pytest.raises(pmstore.PeerLostError, match=r"come to attach\(\) within 0.2"):
                attach(store, job=Job(timeout=0.2))
            assert list(store) == []
    finally:
        over.set()


def test_ranks_that_attach_was_not_told_of(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(process_group, "_warned", False)
    with pmstore.open(shm / "run.pm", size="8MiB") as store:
        with pytest.warns(RuntimeWarning, match=r"rank 2 of 4.*process_group='world'"):
            run, _, _ = attach(store)
        run.detach()
        attach(store, name="another")  # once


def test_what_is_no_job(shm: Path) -> None:
    with pmstore.open(shm / "run.pm", size="8MiB") as store:
        for given, error, match in (
            ({"process_group": "all"}, TypeError, "'world', or a group"),
            ({"job": "world"}, TypeError, "Job"),
            ({"job": Job(), "process_group": "world"}, TypeError, "process_group=, or job="),
            ({"process_group": "world"}, pmstore.torch.AttachError, "init_process_group"),
        ):
            with pytest.raises(error, match=match):
                attach(store, **given)
        for timeout, error, match in ((0, ValueError, "above 0"), ("5", TypeError, "seconds")):
            with pytest.raises(error, match=match):
                attach(store, job=Job(timeout=timeout))
        assert list(store) == []
