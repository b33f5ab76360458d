"""`pmstore job` and `pmstore info` say of real jobs what their ranks then do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import pythons

pytest.importorskip("torch", reason="needs torch: pip install 'pmstore[torch]'")

from jobs.server import JobServer
from jobs.trying import Try
from typer.testing import CliRunner

import pmstore
from pmstore.commands.application import app


@pytest.fixture(scope="module")
def server() -> JobServer:
    return JobServer(forks=pythons.server())


def seen(job: Try, *ranks: int) -> tuple[int, dict[str, Any]]:
    paths = [str(job.store(rank)) for rank in ranks or range(job.world)]
    result = CliRunner().invoke(app, ["job", "--json", *paths])
    [run] = json.loads(result.stdout)
    return result.exit_code, run


def test_a_job_that_ended_well_is_at_one_step(server: JobServer, shm: Path) -> None:
    job = Try(server, shm)
    job.right("trains:6")
    status, run = seen(job)
    assert (status, run["common"]["step"], run["problems"]) == (0, 6, [])
    assert not any(store["in_doubt"] for store in run["stores"])
    assert [store["rank"] for store in run["stores"]] == [0, 1]
    status, run = seen(job, 1)
    assert status == 1
    assert "stores of 0 are missing" in run["problems"][0]
    with pmstore.open(job.store(1), "r") as store:
        [told] = store.info().jobs
    assert (told.rank, told.world, told.step) == (1, 2, 6)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_job_that_was_killed_goes_on_from_where_it_says(
    server: JobServer, shm: Path, killed: int
) -> None:
    job = Try(server, shm)
    ranks = job.start("trains_held:500")
    try:
        job.until(killed, 7)
        ranks.signal(killed)
        job.go()
        assert ranks.wait(60), job.said()
    finally:
        ranks.end()
    status, run = seen(job)
    assert status == 0, run
    steps = [store["step"] for store in run["stores"]]
    assert run["common"]["step"] == min(steps)
    assert max(steps) - min(steps) <= 1
    assert all(store["in_doubt"] for store in run["stores"])
    assert job.right("trains:8") == [run["common"]["step"]] * 2
