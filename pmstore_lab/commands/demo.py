"""The command demo."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pmstore._engine.store_info import SURVIVES
from pmstore.commands.app import Domain, Json, app
from pmstore.commands.common import console, fail, milliseconds, say, size
from pmstore.errors import PmstoreError
from pmstore.extras import install

if TYPE_CHECKING:
    from pmstore_lab.demo import JobReport, Report


@app.command()
def demo(
    steps: Annotated[
        int | None, typer.Option(min=10, help="Training steps, each a commit. [default: 400]")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Of the training and of the kills. [default: drawn and shown]"),
    ] = None,
    domain: Domain = "auto",
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Where to put its files. [default: a temporary folder]"),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the files there.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A fifth of the steps.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Of torch, in each training process.")] = 1,
    as_json: Json = False,
) -> None:
    """Trains, is killed twice, resumes, and compares bit for bit.

    With real images, SIGKILL, and a run that nobody disturbs. Exit code 1 if anything differs.

    Example: pmstore demo --quick

    Example: pmstore demo --domain file --dir . --keep
    """
    try:
        for needed in ("torch", "mlxtend"):  # say what is missing before anything starts
            importlib.import_module(needed)
        from pmstore_lab.demo import JOBS, DemoError, Settings, run_demo
        from pmstore_lab.demo import as_json as report_as_json
    except ModuleNotFoundError as error:
        raise fail(f"the demo needs {error.name}: {install('demo')}", 2) from None
    if domain not in ("auto", *SURVIVES):
        raise fail(f"unknown domain {domain!r}: use auto, {', '.join(SURVIVES)}", 2)
    chosen = seed if seed is not None else int.from_bytes(os.urandom(3), "little")
    settings = Settings(steps or (80 if quick else 400), chosen, domain, folder, keep, threads)
    out = console(stderr=as_json)
    out.print(f"seed {chosen}, {settings.steps} steps, {threads} thread{'s' * (threads > 1)}")
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=out) as bars:
            tasks = {name: bars.add_task(name, total=settings.steps, start=False) for name in JOBS}

            def show(name: str, done: int) -> None:
                if not bars.tasks[tasks[name]].started:
                    bars.start_task(tasks[name])
                bars.update(tasks[name], completed=done)

            report = run_demo(settings, show)
    except KeyboardInterrupt:
        raise fail("stopped; nothing is left behind" if not keep else "stopped", 130) from None
    except (DemoError, PmstoreError, OSError, ValueError) as error:
        raise fail(str(error), 1) from None
    if as_json:
        say(json.dumps({"seed": chosen, **report_as_json(report)}, indent=2))
    else:
        _show(out, report)
    if not report.ok:
        raise SystemExit(1)


def _table(jobs: list[JobReport]) -> Table:
    table = Table(title="the same training, three times", title_justify="left")
    table.add_column("")
    for job in jobs:
        table.add_column(job.name, justify="right")
    plain = len(jobs) - 1  # the last keeps no store, and is not killed
    # in a store, some of a commit's work is done while the step writes
    bare = jobs[plain].median_train_seconds
    rows: list[tuple[str, list[str]]] = [
        ("steps", [f"{job.steps}" for job in jobs]),
        (
            "kills",
            [str(len(job.kills)) if index < plain else "-" for index, job in enumerate(jobs)],
        ),
        ("training step, median", [milliseconds(job.median_train_seconds) for job in jobs]),
        ("commit, median", [milliseconds(job.median_commit_seconds) for job in jobs]),
        ("commit, share of step time", [f"{job.commit_share:.1%}" for job in jobs]),
        (
            "step and commit, against a plain step",
            [f"{job.median_step_seconds / bare:.2f} x" for job in jobs],
        ),
        ("accuracy on held-out images", [f"{job.accuracy:.1%}" for job in jobs]),
        ("wall time, with process starts", [f"{job.wall_seconds:.1f} s" for job in jobs]),
    ]
    for title, cells in rows:
        table.add_row(title, *cells)
    return table


def _show(console: Console, report: Report) -> None:
    jobs = list(report.jobs.values())
    console.print(_table(jobs))
    for number, kill in enumerate((kill for job in jobs for kill in job.kills), start=1):
        console.print(
            f"kill {number} {kill.where}, after step {kill.at_step}: resumed at step "
            f"{kill.resumed_at_step}; lost {milliseconds(kill.lost_work_seconds)} of work and "
            f"{kill.restart_seconds:.2f} s to start a new process, of which open and attach took "
            f"{milliseconds(kill.attach_seconds)}"
        )
    domain = jobs[0].domain
    console.print(
        f"domain {domain}: a commit survives {SURVIVES.get(domain, '')}; state "
        f"{size(jobs[0].state_bytes)}"
    )
    if report.ok:
        console.print(
            f"[bold green]bitwise equal[/]: all {report.compared} names (parameters, optimizer "
            "state, losses, batch order, generators, ...) of the killed and the undisturbed run; "
            "parameters and losses of plain torch too"
        )
    else:
        for name in report.differences:
            console.print(f"[bold red]differs[/] after the kills: {name}", highlight=False)
        for name in report.plain_differences:
            console.print(f"[bold red]differs[/] from plain torch: {name}", highlight=False)
    if report.folder is not None:
        console.print(f"files kept in {report.folder}")
