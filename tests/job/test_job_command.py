"""`pmstore job`: what the stores of a job's ranks can produce, and why they have nothing in common.
The records are written by hand; real jobs are in tests/training/."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import pmstore
from pmstore.commands.application import app
from pmstore.objects.generations import NO_RUN, Key, Record, encode

JOB, OTHER = (0x1234567 << 32, 1), (0x7654321 << 32, 2)


def write(path: Path, record: Record | None, step: int) -> None:
    """One commit of a run in a job."""
    with closing(pmstore.open(path, size="4MiB")) as store:
        store._core.pool.hold_for_job()
        store._core.pool.allow()
        store["run/about"] = {}
        store.require("run/progress", (4,), "int64")
        store["run/progress"][0] = step
        if record is not None:
            store.require("run/job", (16,), "int64")[:] = encode(record)
        store.commit()


def train(
    path: Path, rank: int, steps: int, *, world: int = 2, job: tuple[int, int] = JOB, term: int = 1
) -> Path:
    record = Record(Key(job, 1, 0, 0), rank, world, 9, NO_RUN)
    write(path, record, 0)
    for step in range(1, steps + 1):
        if step == steps and term != 1:
            record = record.joined(term)
        record = record.following(step)
        write(path, record, step)
    return path


def job(*paths: Path) -> Result:
    return CliRunner().invoke(app, ["job", *map(str, paths)])


def told(*paths: Path) -> list[dict[str, Any]]:
    answer = CliRunner().invoke(app, ["job", "--json", *map(str, paths)])
    found: list[dict[str, Any]] = json.loads(answer.stdout)
    return found


def squeezed(result: Result) -> list[str]:
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def test_ranks_that_are_one_generation_apart(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shm)
    a, b = train(Path("a.pm"), 0, 5), train(Path("b.pm"), 1, 4)
    before = a.read_bytes()
    result = job(b, a)
    assert result.exit_code == 0, result.output
    assert squeezed(result) == [
        "store rank job term generation step can produce",
        f"{a} 0 of 2 01234567 1 5 5 5 or 4 (in doubt)",
        f"{b} 1 of 2 01234567 1 4 4 4 or 3 (in doubt)",
        "all can produce generation 4 (step 4, term 1)",
    ]
    assert a.read_bytes() == before
    [run] = told(a, b)
    assert run["common"] == {"term": 1, "generation": 4, "step": 4}
    assert [store["in_doubt"] for store in run["stores"]] == [True, True]
    assert run["problems"] == []


def test_what_was_resolved_by_hand_is_final(shm: Path) -> None:
    a, b = train(shm / "a.pm", 0, 5), train(shm / "b.pm", 1, 4)
    assert CliRunner().invoke(app, ["resolve", "--keep", str(a)]).exit_code == 0
    result = job(a, b)
    assert result.exit_code == 1
    assert "the stores are at different generations" in result.stdout
    assert "can produce generation 5 (step 5, term 1)\n" in result.stdout
    [run] = told(a, b)
    assert run["common"] is None
    assert run["stores"][0]["in_doubt"] is False
    assert [key["generation"] for key in run["stores"][1]["can_produce"]] == [4, 3]
    assert CliRunner().invoke(app, ["resolve", "--back", str(b)]).exit_code == 0
    assert told(b)[0]["stores"][0]["generation"] == 3


@pytest.mark.parametrize(
    ("which", "says"),
    [
        ("missing", "the job has 3 ranks: the stores of 2 are missing"),
        ("copy", "have copies of one store, that of rank 0"),
        ("another job", "of different jobs"),
        ("terms", "generation 5 of terms 1, 2 is not the same one"),
        ("no run", "no generation of the job"),
        ("strayed", "changed outside the job: it is at step 9"),
    ],
)
def test_stores_that_do_not_belong_together(shm: Path, which: str, says: str) -> None:
    world = 3 if which == "missing" else 2
    a, b = train(shm / "a.pm", 0, 5, world=world), shm / "b.pm"
    if which == "copy":
        shutil.copyfile(a, b)
    elif which == "no run":
        pmstore.open(b, size="4MiB").close()
    else:
        other = OTHER if which == "another job" else JOB
        train(b, 1, 5 - (which == "terms"), world=world, job=other, term=1 + (which == "terms"))
    if which == "terms":
        for path in (a, b):
            CliRunner().invoke(app, ["resolve", "--keep", str(path)])
    if which == "strayed":
        with closing(pmstore.open(b)) as store:
            store._core.pool.allow()
            store["run/progress"][0] = 9
            store.commit()
    result = job(a, b)
    assert result.exit_code == 1, result.output
    assert says in " ".join(result.stdout.split()), result.stdout
    assert "a.pm) can produce generation 5" in " ".join(result.stdout.split())


def test_runs_without_a_job_and_stores_without_a_run(shm: Path) -> None:
    for name, step in (("a.pm", 7), ("b.pm", 7), ("c.pm", 8)):
        write(shm / name, None, step)
        CliRunner().invoke(app, ["resolve", "--keep", str(shm / name)])
    result = job(shm / "a.pm", shm / "b.pm")
    assert (result.exit_code, squeezed(result)[-1]) == (
        0,
        "all can produce step 7 of a run without a job",
    )
    result = job(shm / "a.pm", shm / "c.pm")
    assert result.exit_code == 1
    assert "different steps" in result.stdout
    pmstore.open(shm / "d.pm", size="4MiB").close()
    assert (job(shm / "d.pm").exit_code, job(shm / "gone.pm").exit_code) == (1, 2)


def test_a_damaged_record(shm: Path) -> None:
    a = train(shm / "a.pm", 0, 2)
    with closing(pmstore.open(a)) as store:
        store._core.pool.allow()
        store["run/job"][8] = 0
        store.commit()
    result = job(a)
    assert result.exit_code == 1
    assert "run/job" in result.stderr
    assert "Traceback" not in result.output


def test_info_tells_of_the_job(shm: Path) -> None:
    a = train(shm / "a.pm", 1, 5)
    told = CliRunner().invoke(app, ["info", str(a)]).stdout
    assert (
        "job       run is rank 1 of 2 in job 01234567, at generation 5 (step 5, term 1)\n" in told
    )
    assert "not known to be committed by all ranks: start the job again" in told
    with pmstore.open(a, "r") as store:
        [job] = store.info().jobs
    assert (job.run, job.rank, job.world, job.term, job.generation, job.step) == (
        *("run", 1, 2, 1, 5, 5),
    )
    about = json.loads(CliRunner().invoke(app, ["info", "--json", str(a)]).stdout)
    assert about["jobs"][0]["generation"] == 5
    assert about["in_doubt"] is True
