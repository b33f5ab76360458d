"""The command job: what the stores of a job's ranks can produce."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pmstore._base.text import printable
from pmstore.commands.app import Json, app
from pmstore.commands.common import ending, fail, opened, reading, say, say_json, writing
from pmstore.objects.generations import Key, Member, explain, job_name, newest_common
from pmstore.objects.job_record import members, without_run
from pmstore.show.terminal import Column, Terminal


@dataclass(frozen=True)
class _Job:
    """One run, as all the stores of the ranks have it."""

    run: str
    members: list[Member]

    @property
    def common(self) -> Key | None:
        return newest_common(self.members)

    def rows(self) -> list[dict[str, Any]]:
        return [_row(one) for one in sorted(self.members, key=_order)]


def _order(one: Member) -> tuple[int, str]:
    return (one.record.rank if one.record is not None else 1 << 62, one.name)


def _row(one: Member) -> dict[str, Any]:
    record = one.record
    return {
        "store": one.name,
        "uuid": one.uuid,
        "rank": record.rank if record else None,
        "world": record.world if record else None,
        "job": job_name(record.key.job) if record else None,
        "term": record.key.term if record else None,
        "generation": record.key.number if record else None,
        "step": one.run_step,
        "in_doubt": one.held,
        "can_produce": [{**_told(key), "text": str(key)} for key in one.keys],
    }


def _told(key: Key) -> dict[str, Any]:
    return {
        "term": key.term if key.by_job else None,
        "generation": key.number if key.by_job else None,
        "step": key.step if key.step >= 0 else None,
    }


def _gather(paths: list[Path]) -> list[_Job]:
    """Gathers the runs of the stores. A store may lack a run that another one has."""
    found, bare = {}, {}
    for path in paths:
        with closing(opened(path, "r")) as store:
            found[path] = members(store, str(path))
            bare[path] = without_run(store, str(path))
    runs = sorted({run for of in found.values() for run in of})
    return [_Job(run, [found[path].get(run, bare[path]) for path in paths]) for run in runs]


@app.command()
def job(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="STORE...", help="The stores of all ranks.", show_default=False),
    ],
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Makes a run of its own of what this one store has.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Says what the ranks of a job can go on from.

    Each rank can produce the generation that it committed last and, while it is in doubt (it does
    not know that all have that one), the generation before. The job goes on from the newest that
    all can produce. The stores are only read.

    --adopt takes a store out of its job, with its last commit. Use it where the stores of other
    ranks are lost and each rank has the whole model, as with DistributedDataParallel. Copy the
    store, once for each rank, and start the job again. Then all ranks have what was this rank's own
    (generators, attributes).

    Exit code 1 if there is no such generation; the command says why.

    Example: pmstore job /dev/shm/rank0.pm /dev/shm/rank1.pm
    """
    if adopt:
        if len(paths) != 1 or as_json:
            raise fail("--adopt takes one store: that of the rank whose state all are to have", 2)
        _adopt(paths[0])
        return
    with ending():
        jobs = _gather(list(dict.fromkeys(paths)))
    if not jobs:
        raise fail(f"{', '.join(map(str, paths))}: no training run in any of them", 1)
    well = all(one.common is not None for one in jobs)
    if as_json:
        told = [
            {
                "run": one.run,
                "common": None if (key := one.common) is None else _told(key),
                "stores": one.rows(),
                "problems": explain(one.members),
            }
            for one in jobs
        ]
        say_json(told)
    else:
        for one in jobs:
            _show(one, named=len(jobs) > 1)
    if not well:
        raise SystemExit(1)


def _adopt(path: Path) -> None:
    """Takes each run of the store out of its job: a new job may begin with it. Each step of this
    may be done again after a crash."""
    with reading(path, lock=True) as store:
        held, domain, runs = store.holds, store.info().domain, members(store, str(path))
    adopted = {run: one for run, one in runs.items() if one.record is not None}
    if not adopted:
        raise fail(f"{path}: no run of it is in a job", 1)
    if held:
        with ending(), opened(path, "r+", hold=True, domain=domain) as store:
            store._core.pool.release()
    with writing(path, domain=domain) as store:
        for run in adopted:
            del store[f"{run}/job"]
    for run, one in adopted.items():
        say(
            printable(
                f"{path}: the run {run!r} is in no job any more, at step {one.run_step}. To begin "
                "a job with it, copy the store, once for each rank"
            )
        )


def _show(one: _Job, named: bool) -> None:
    rows = []
    for row in one.rows():
        rank = "-" if row["rank"] is None else f"{row['rank']} of {row['world']}"
        numbers = (row[name] for name in ("term", "generation", "step"))
        doubt = " (in doubt)" if row["in_doubt"] else ""
        rows.append(
            (
                *(printable(row["store"]), rank, row["job"] or "-"),
                *("-" if number is None else str(number) for number in numbers),
                " or ".join(map(_short, row["can_produce"])) + doubt,
            )
        )
    columns = [
        *(Column("store", path=True), Column("rank", right=True), Column("job")),
        *(Column(title, right=True) for title in ("term", "generation", "step")),
        Column("can produce", fold=True),
    ]
    if named:
        say(printable(f"run {one.run}"))
    say(*Terminal().table(columns, rows))
    if (common := one.common) is not None:
        say(f"all can produce {common}")
        return
    for reason in explain(one.members):
        say(printable(reason))


def _short(key: dict[str, Any]) -> str:
    if key["generation"] is not None:
        return str(key["generation"])
    return str(key["text"])
