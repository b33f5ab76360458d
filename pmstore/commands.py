"""The commands of `pmstore`, with typer and rich.

Exit codes: 0 well; 1 the answer is bad news (a damaged store, a run that differs); 2 the question was wrong (no such
store, a missing package, bad options). Errors are one message without a traceback.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import pmstore
from pmstore.errors import CorruptStoreError, PmstoreError, UncleanMachineCrashError
from pmstore.store import SURVIVES

if TYPE_CHECKING:
    from pmstore.demo import JobReport, Report

__all__ = ["app"]

app = typer.Typer(
    name="pmstore",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    help="Training state in a persistent heap: look at stores, and see it work.",
)

StorePath = Annotated[Path, typer.Argument(metavar="STORE", help="The store's file.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Answer as JSON.")]


def _fail(message: str, code: int) -> typer.Exit:
    typer.echo(f"pmstore: {message}", err=True)
    return typer.Exit(code)


@contextmanager
def _reading(path: Path) -> Iterator[pmstore.Store]:
    """The store, for reading. Its errors end the command."""
    try:
        with pmstore.open(path, mode="r") as store:
            yield store
    except (CorruptStoreError, UncleanMachineCrashError) as error:
        raise _fail(str(error), 1) from None
    except (PmstoreError, OSError) as error:
        raise _fail(str(error), 2) from None


@app.command()
def info(path: StorePath, as_json: Json = False) -> None:
    """Says what a store is: domain, sizes, commits, what the last open had to undo.

    Example: pmstore info run.pm
    """
    with _reading(path) as store:
        about = store.info()
    typer.echo(json.dumps(asdict(about), indent=2) if as_json else str(about))


@app.command("ls")
def list_names(
    path: StorePath,
    group: Annotated[str, typer.Argument(help="A group in it, such as run/model.", show_default=False)] = "",
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="What is in groups too.")] = False,
    as_json: Json = False,
) -> None:
    """Lists the names of a store or group, with what they hold.

    Example: pmstore ls -r run.pm run/model
    """
    with _reading(path) as store:
        try:
            place: Any = store[group] if group else store
        except KeyError:
            raise _fail(f"{path}: there is no {group!r}; pmstore ls {path} shows what there is", 2) from None
        if not _is_group(place):
            raise _fail(f"{path}: {group!r} is no group but {_kind(place)['kind']}", 2)
        rows = list(_rows(place, f"{group}/" if group else "", recursive))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("name", "kind", "dtype", "shape"):
        table.add_column(title)
    table.add_column("size", justify="right")
    for row in rows:
        shape = "x".join(map(str, row["shape"])) if row["shape"] is not None else ""
        size = _size(row["bytes"]) if row["bytes"] is not None else ""
        table.add_row(row["name"], row["kind"], row["dtype"] or "", shape, size)
    _console().print(table)


def _rows(group: Any, prefix: str, recursive: bool) -> Iterator[dict[str, Any]]:
    for name in group:
        item = group[name]
        yield {"name": f"{prefix}{name}", **_kind(item)}
        if recursive and _is_group(item):
            yield from _rows(item, f"{prefix}{name}/", True)


def _is_group(item: Any) -> bool:
    return hasattr(item, "keys") and not isinstance(item, dict)


def _kind(item: Any) -> dict[str, Any]:
    if _is_group(item):
        return {"kind": "group", "dtype": None, "shape": None, "bytes": None}
    if isinstance(item, np.ndarray):
        return {"kind": "array", "dtype": str(item.dtype), "shape": list(item.shape), "bytes": item.nbytes}
    if hasattr(item, "data_ptr"):
        return {
            "kind": "tensor",
            "dtype": str(item.dtype).removeprefix("torch."),
            "shape": list(item.shape),
            "bytes": item.numel() * item.element_size(),
        }
    return {"kind": type(item).__name__, "dtype": None, "shape": None, "bytes": None}


@app.command()
def check(path: StorePath, as_json: Json = False) -> None:
    """Checks every invariant of a store's file, without changing it. Exit code 1 if one is broken.

    Example: pmstore check run.pm && echo sound
    """
    with _reading(path) as store:
        problems = [str(problem) for problem in store.check().problems]
    if as_json:
        typer.echo(json.dumps({"path": str(path), "sound": not problems, "problems": problems}, indent=2))
    elif problems:
        for problem in problems:
            typer.echo(problem)
    else:
        typer.echo(f"{path}: sound")
    if problems:
        raise typer.Exit(1)


@app.command()
def demo(
    steps: Annotated[int | None, typer.Option(min=10, help="Training steps, each a commit. [default: 400]")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the training and of the kills. [default: drawn and shown]")] = None,
    domain: Annotated[str, typer.Option(help="auto, dax, file, process or emulated.")] = "auto",
    folder: Annotated[Path | None, typer.Option("--dir", help="Where to put its files. [default: a temporary folder]")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the files there.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A fifth of the steps.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Of torch, in each training process.")] = 1,
    as_json: Json = False,
) -> None:
    """Trains on real images, is killed twice with SIGKILL, resumes, and compares bit for bit with an undisturbed run.

    Exit code 1 if anything differs.

    Example: pmstore demo --quick
    Example: pmstore demo --domain file --dir . --keep
    """
    try:
        for needed in ("torch", "mlxtend"):  # say what is missing before anything starts
            importlib.import_module(needed)
        from pmstore.demo import JOBS, DemoError, Settings, run_demo
        from pmstore.demo import as_json as report_as_json
    except ModuleNotFoundError as error:
        raise _fail(f"the demo needs {error.name}: pip install 'pmstore[demo]'", 2) from None
    if domain not in ("auto", *SURVIVES):
        raise _fail(f"unknown domain {domain!r}: use auto, {', '.join(SURVIVES)}", 2)
    chosen = seed if seed is not None else int.from_bytes(os.urandom(3), "little")
    settings = Settings(steps or (80 if quick else 400), chosen, domain, folder, keep, threads)
    console = _console(stderr=as_json)
    console.print(f"seed {chosen}, {settings.steps} steps, {threads} thread{'s' * (threads > 1)}")
    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as bars:
            tasks = {name: bars.add_task(name, total=settings.steps, start=False) for name in JOBS}

            def show(name: str, done: int) -> None:
                if not bars.tasks[tasks[name]].started:
                    bars.start_task(tasks[name])
                bars.update(tasks[name], completed=done)

            report = run_demo(settings, show)
    except KeyboardInterrupt:
        raise _fail("stopped; nothing is left behind" if not keep else "stopped", 130) from None
    except (DemoError, PmstoreError, OSError, ValueError) as error:
        raise _fail(str(error), 1) from None
    if as_json:
        typer.echo(json.dumps({"seed": chosen, **report_as_json(report)}, indent=2))
    else:
        _show(console, report)
    if not report.ok:
        raise typer.Exit(1)


def _table(jobs: list[JobReport]) -> Table:
    table = Table(title="the same training, three times", title_justify="left")
    table.add_column("")
    for job in jobs:
        table.add_column(job.name, justify="right")
    plain = len(jobs) - 1  # the last keeps no store, and is not killed
    bare = jobs[plain].median_train_seconds  # in a store, some of a commit's work is done while the step writes
    rows: list[tuple[str, list[str]]] = [
        ("steps", [f"{job.steps}" for job in jobs]),
        ("kills", [str(len(job.kills)) if index < plain else "-" for index, job in enumerate(jobs)]),
        ("training step, median", [_milliseconds(job.median_train_seconds) for job in jobs]),
        ("commit, median", [_milliseconds(job.median_commit_seconds) for job in jobs]),
        ("commit, share of step time", [f"{job.commit_share:.1%}" for job in jobs]),
        ("step and commit, against a plain step", [f"{job.median_step_seconds / bare:.2f} x" for job in jobs]),
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
            f"kill {number} {kill.where}, after step {kill.at_step}: resumed at step {kill.resumed_at_step}; lost "
            f"{_milliseconds(kill.lost_work_seconds)} of work and {kill.restart_seconds:.2f} s to start a new process, "
            f"of which open and attach took {_milliseconds(kill.attach_seconds)}"
        )
    domain = jobs[0].domain
    console.print(f"domain {domain}: a commit survives {SURVIVES.get(domain, '')}; state {_size(jobs[0].state_bytes)}")
    if report.ok:
        console.print(
            f"[bold green]bitwise equal[/]: all {report.compared} names (parameters, optimizer state, losses, batch "
            "order, generators, ...) of the killed and the undisturbed run; parameters and losses of plain torch too"
        )
    else:
        for name in report.differences:
            console.print(f"[bold red]differs[/] after the kills: {name}", highlight=False)
        for name in report.plain_differences:
            console.print(f"[bold red]differs[/] from plain torch: {name}", highlight=False)
    if report.folder is not None:
        console.print(f"files kept in {report.folder}")


def _console(*, stderr: bool = False) -> Console:
    # Made for each command, so that it writes to the standard output of that moment.
    return Console(stderr=stderr, width=None if sys.stdout.isatty() else 120)


def _size(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
