"""What else a process does with the store of a job: mirrors, runs, children of its own."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import launch  # type: ignore[import-not-found, unused-ignore]
from typer.testing import CliRunner

import pmstore
import pmstore.torch
from pmstore.commands.application import app
from pmstore.job import peers
from pmstore.scheduler import EveryN

Found = dict[str, list[Any]]
JOB = pmstore.torch.Job(timeout=30)


@pytest.fixture(scope="module")
def found() -> Iterator[Found]:
    """By two ranks, which run all these programs: to start them takes longer than they do."""
    programs = [
        *(_mirror_before_attach, _two_runs, _another_run, _interrupted, _child),
        *(_tier_of_ranks, _tier_of_unlike_ranks, _keeps, _waits, _lost, _apart),
    ]
    with tempfile.TemporaryDirectory(
        prefix=f"pmstore-test-{os.getpid()}-", dir="/dev/shm"
    ) as folder:
        yield launch(programs, Path(folder), 2)


class Left(Exception):
    """The program ends like this, as after a kill: nothing more is committed."""


def train(
    run: pmstore.torch.Run, model: torch.nn.Module, optimizer: Any, until: int, **given: Any
) -> None:
    while run.step < until:
        with run.next_step():
            optimizer.zero_grad()
            model(torch.full((2, 3), 0.5)).sum().backward()
            optimizer.step()
        run.commit(**given)


def program(rank: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)}


def attach(store: pmstore.Store, given: dict[str, Any], **more: Any) -> pmstore.torch.Run:
    return pmstore.torch.attach(store, **given, job=JOB, **more)


def leave_apart(path: Path, rank: int, **given: Any) -> None:
    """A job whose rank 0 is a step ahead of rank 1: at 3 and 2."""
    try:
        with pmstore.open(path, size="4MiB", domain="process") as store:
            model = program(rank)
            run = attach(store, model, **given)
            train(run, **model, until=2, agree=True)
            shutil.copy(path, f"{path}.copy")
            train(run, **model, until=3, agree=True)
            raise Left
    except Left:
        pass
    if rank == 1:
        shutil.copy(f"{path}.copy", path)


def _mirror_before_attach(folder: Path, rank: int, results: dict[str, Any]) -> None:
    path, copy = folder / f"run{rank}.pm", folder / f"copy{rank}.pm"
    given = program(rank)
    with pmstore.open(path, size="4MiB", domain="process") as store:
        attach(store, given).detach()
        average = torch.zeros(8)
        store.mirror("average", average)
    try:
        with pmstore.open(path, domain="process") as store:
            average = torch.zeros(8)
            store.mirror("average", average)
            given = program(rank)
            run = attach(store, given)
            for step in range(1, 4):
                average.fill_(step)
                train(run, **given, until=step, agree=True)
                if rank == 1 and step == 2:
                    shutil.copy(path, copy)
            raise Left
    except Left:
        pass
    if rank == 1:
        shutil.copy(copy, path)
    with pmstore.open(path, domain="process") as store:
        average = torch.zeros(8)
        store.mirror("average", average)
        results["before"] = average[0].item()
        given = program(rank)
        run = attach(store, given)
        results["step"], results["after"] = run.step, average[0].item()


def test_mirrors_of_the_program_go_back_too(found: Found) -> None:
    ranks = found["_mirror_before_attach"]
    assert [one["before"] for one in ranks] == [3, 2]
    assert [(one["step"], one["after"]) for one in ranks] == [(2, 2), (2, 2)]


def _two_runs(folder: Path, rank: int, results: dict[str, Any]) -> None:
    def refused(**more: Any) -> str:
        with pytest.raises(pmstore.torch.AttachError) as told:
            pmstore.torch.attach(store, **program(rank), **more)
        return str(told.value)

    with pmstore.open(folder / f"run{rank}.pm", size="4MiB", domain="process") as store:
        alone = pmstore.torch.attach(store, **program(rank), name="alone")
        results["said"] = [refused(name="a", job=JOB)]
        alone.detach()
        given = program(rank)
        run = attach(store, given, name="a")
        train(run, **given, until=2)
        results["said"] += [refused(name="b", job=JOB), refused(name="b")]
        train(run, **given, until=4)
        run.detach()
        given = program(rank)
        other = attach(store, given, name="b")
        train(other, **given, until=3)
        results["step"] = other.step


def test_one_run_of_a_store_is_in_a_job(found: Found) -> None:
    for one in found["_two_runs"]:
        assert ["'alone'" in one["said"][0], *("'a'" in said for said in one["said"][1:])] == (
            [True] * 3
        )
        assert all("detach()" in said for said in one["said"])
        assert one["step"] == 3


def _lost(folder: Path, rank: int, results: dict[str, Any]) -> None:
    """Rank 1's store is lost; each rank has the whole model."""
    path = folder / f"run{rank}.pm"

    def live(until: int) -> tuple[int, list[float]]:
        given = program(0)
        with pmstore.open(path, size="4MiB", domain="process") as store:
            run = attach(store, given)
            began = run.step
            train(run, **given, until=until)
            return began, given["model"].weight.flatten().tolist()

    leave_apart(path, rank)
    if rank == 1:
        path.unlink()
    with pmstore.open(path, size="4MiB", domain="process") as store:
        with pytest.raises(pmstore.MixedStoresError, match="--adopt"):
            attach(store, program(0))
    torch.distributed.barrier()
    if rank == 0:
        adopted = CliRunner().invoke(app, ["job", "--adopt", str(path)])
        results["said"] = adopted.output
        shutil.copy(path, folder / "run1.pm")
        again = CliRunner().invoke(app, ["job", "--adopt", str(path)])
        results["again"] = again.exit_code, again.output
    torch.distributed.barrier()
    results["lives"] = live(5), live(6)


def test_a_lost_store_is_made_of_another_ranks(found: Found) -> None:
    zero, one = found["_lost"]
    assert "the run 'run' is in no job any more, at step 3" in zero["said"]
    assert zero["again"][0] == 1
    assert "no run of it is in a job" in zero["again"][1]
    assert [began for began, _ in zero["lives"]] == [3, 5]
    assert zero["lives"] == one["lives"]


def _apart(folder: Path, rank: int, results: dict[str, Any]) -> None:
    """Rank 1's store is committed alone, many times, between two joinings."""
    path = folder / f"run{rank}.pm"
    for _ in range(2):
        with pmstore.open(path, size="4MiB", domain="process") as store:
            given = program(rank)
            run = attach(store, given)
            train(run, **given, until=run.step + 2)
            results.setdefault("epochs", []).append(store.epoch)
        if rank == 1:
            with pmstore.open(path) as store:
                for number in range(12):
                    store["beside"] = number
                    store.commit()


def test_stores_that_were_committed_apart_come_together(found: Found) -> None:
    zero, one = found["_apart"]
    assert zero["epochs"] == one["epochs"]


def _another_run(folder: Path, rank: int, results: dict[str, Any]) -> None:
    path = folder / f"run{rank}.pm"
    results["steps"] = []
    for first, second in (("a", "b"), ("b", "a")):  # the second time both are there
        leave_apart(path, rank, name=first)
        with pmstore.open(path, domain="process") as store:
            with pytest.raises(pmstore.InDoubtError, match=f"attach that run.*name='{first}'"):
                attach(store, program(rank), name=second)
            given = program(rank)
            run = attach(store, given, name=first)
            results["steps"].append(run.step)
            run.detach()
            run = attach(store, program(rank), name=second)
            results["steps"].append(run.step)
            run.detach()


def test_a_run_does_not_end_what_another_one_may_go_back_to(found: Found) -> None:
    for one in found["_another_run"]:
        assert one["steps"] == [2, 0, 2, 2]


def _interrupted(folder: Path, rank: int, results: dict[str, Any]) -> None:
    given = program(rank)
    with pmstore.open(folder / f"run{rank}.pm", size="4MiB", domain="process") as store:
        run = attach(store, given)
        train(run, **given, until=1)
        pools = type(store._core.pool)
        allow = pools.allow

        def interrupt(pool: Any) -> None:
            pools.allow = allow  # type: ignore[method-assign]
            raise KeyboardInterrupt

        if rank == 0:
            pools.allow = interrupt  # type: ignore[method-assign, assignment]
        try:
            train(run, **given, until=2)
        except KeyboardInterrupt:
            run.commit()  # the step that is under way
        train(run, **given, until=4, agree=True)
        results["steps"] = [run.step, run.agreed_step]


def test_a_wait_for_the_others_that_was_interrupted_is_repeated(found: Found) -> None:
    for one in found["_interrupted"]:
        assert one["steps"] == [4, 4]


def _child(folder: Path, rank: int, results: dict[str, Any]) -> None:
    given = program(rank)
    with pmstore.open(folder / f"run{rank}.pm", size="4MiB", domain="process") as store:
        run = attach(store, given)
        train(run, **given, until=1)
        if (child := os.fork()) == 0:
            code = 1
            try:
                run.commit()
            except pmstore.ForkedStoreError:
                code = 7
            finally:
                os._exit(code)
        results["child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        train(run, **given, until=3)
        results["step"] = run.step


def test_a_child_says_nothing_to_the_other_ranks(found: Found) -> None:
    for one in found["_child"]:
        assert (one["child"], one["step"]) == (7, 3)


def _tier(folder: Path, rank: int) -> pmstore.TierConfig:
    return pmstore.TierConfig(
        folder / "tier",
        rank=rank,
        world_size=2,
        run="job",
        replicated=["run/model/*", "run/optimizer/*"],
        chunk_bytes=4096,
    )


def _tier_of_ranks(folder: Path, rank: int, results: dict[str, Any]) -> None:
    """A rank goes back, which is a commit, and the other does not."""
    path = folder / f"run{rank}.pm"
    leave_apart(path, rank)
    with pmstore.open(path, domain="process") as store:
        given = program(rank)
        run = attach(store, given)
        store.add_tier("t", _tier(folder, rank))
        results["epochs"] = [store.epoch]
        train(run, **given, until=5, agree=True)
        store.flush("t", wait=True)
        results["epochs"].append(store.epoch)


def test_epochs_of_ranks_are_alike_after_one_has_gone_back(found: Found) -> None:
    """Else a tier of both would take two steps for one."""
    first, second = found["_tier_of_ranks"]
    assert first == second


def _tier_of_unlike_ranks(folder: Path, rank: int, results: dict[str, Any]) -> None:
    with pmstore.open(folder / f"run{rank}.pm", size="4MiB", domain="process") as store:
        for number in range(rank):
            store["note"] = number
            store.commit()
        store.add_tier("t", _tier(folder, rank))
        try:
            attach(store, program(rank))
        except pmstore.torch.AttachError as error:
            results["said"] = str(error)


def test_a_tier_of_ranks_that_have_committed_otherwise_is_refused(found: Found) -> None:
    for one in found["_tier_of_unlike_ranks"]:
        assert "'t' of several ranks" in one["said"]


def _keeps(folder: Path, rank: int, results: dict[str, Any]) -> None:
    given = program(rank)
    with pmstore.open(folder / f"run{rank}.pm", size="4MiB", domain="process") as store:
        run = attach(store, given, policy=EveryN(4))
        train(run, **given, until=1)
        if rank == 0:
            handle = run.keep("first")
            assert handle is not None
            assert run._steps.job is not None
            results["agreed"] = run._steps.job.agreed.step  # without a look at the ticket
        train(run, **given, until=2)
        for wanted in ({"name": "now"}, {"best": "accuracy", "value": 0.5, "mode": "max"}):
            with run.next_step():
                given["optimizer"].step()
                assert run.keep(**wanted) is None  # not before all ranks commit
        results["before"] = [one.step for one in run.kept()]
        run.commit()
        handle = run.keep(n=2)
        assert handle is not None
        results["kept"] = [[one.step, *one.names, *one.values] for one in run.kept()]


def test_what_is_kept_is_what_all_ranks_have(found: Found) -> None:
    first, second = found["_keeps"]
    last = [4, "now", ["accuracy", 0.5]]
    assert first == {"agreed": 1, "before": [1], "kept": [[1, "first"], last]}
    assert second == {"before": [], "kept": [last]}


def _waits(folder: Path, rank: int, results: dict[str, Any]) -> None:
    """Rank 1 does not commit before rank 0 has said that it waits."""
    told = folder / "told"

    class Tell(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.write_text(record.getMessage())

    given = program(rank)
    handler, seconds = Tell(logging.WARNING), peers._TELL_SECONDS
    try:
        with pmstore.open(folder / f"run{rank}.pm", size="4MiB", domain="process") as store:
            run = attach(store, given)
            if rank == 0:  # from here on: on a busy machine either may come late to attach
                logging.getLogger("pmstore").addHandler(handler)
                peers._TELL_SECONDS = 0.1
            while rank == 1 and not told.exists():
                time.sleep(0.01)
            train(run, **given, until=1, agree=True)
            results["said"] = told.read_text()
    finally:
        logging.getLogger("pmstore").removeHandler(handler)
        peers._TELL_SECONDS = seconds


def test_who_waits_for_long_says_so(found: Found) -> None:
    for one in found["_waits"]:
        assert "rank 0 of 2 has waited" in one["said"]
        assert "rank 1 did not commit" in one["said"]
        assert "attach(job=Job(timeout=...))" in one["said"]
