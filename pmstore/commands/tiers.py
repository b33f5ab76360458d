"""flush, trust, restore, epochs: to a storage tier and from it."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from pmstore.base.newfile import PRIVATE
from pmstore.base.words import counted
from pmstore.commands.app import (
    Json,
    Mode,
    StorePath,
    app,
    console,
    fail,
    one_line,
    printable,
    progress,
    reading,
    size,
    writing,
)
from pmstore.errors import PmstoreError

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="The tier: a directory, or a URL such as s3://bucket/run.",
        show_default=False,
    ),
]
Run = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--run", help="Whose epochs (its beginning will do).", show_default=False),
]
Number = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--epoch", help="Which; default: the newest that is whole.", show_default=False),
]
Rank = Annotated[int, typer.Option("--rank", help="Whose store, where several ranks flushed.")]


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:
        raise fail(f"{error.filename}: {error.strerror}", 2) from None
    except (PmstoreError, OSError) as error:
        raise fail(one_line(error), 1) from None
    except ValueError as error:
        raise fail(one_line(error), 2) from None


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, where that is a terminal."""
    columns = (
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    shown = Progress(
        *columns, console=console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    )
    with shown as bars:
        task = bars.add_task(title, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@app.command()
def flush(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="STORE", help="A store that nobody writes to now.", show_default=False
        ),
    ],
    tier: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            metavar="TIER",
            help="One that the store remembers, or a URL; default: all that it had added here.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Flushes the last commit of a store to a tier. Returns when all of it is durable there; the
    store is not changed.

    Without a tier: to those that this file had added on this machine. Others are named, and not
    flushed to (exit code 1): a store that was copied, or came from somebody else, would go wherever
    it says. pmstore trust makes them this file's own.

    Example: pmstore flush run.pm s3://bucket/run
    """
    from pmstore.tiers.handle import FlushStats

    ended: list[tuple[str, int, FlushStats]] = []
    with reading(path) as store:
        names = list(store.tiers) if tier is None else [tier]
        strange = store._open_tiers().strange
        if tier is None:
            names = [name for name in names if name not in strange]
            for name in strange:
                where = f"{name!r} at {store.tiers[name].url!r}"
                typer.echo(
                    f"pmstore: not flushed to {where}: this file did not have that tier added "
                    f"here. If the URL is right: pmstore trust {printable(str(path))}",
                    err=True,
                )
            if strange and not names:
                raise typer.Exit(1)
        elif tier in strange:
            typer.echo(f"pmstore: tier {tier!r} is at {store.tiers[tier].url!r}", err=True)
        if tier is not None and tier not in store.tiers and "/" in tier:
            store.add_tier("url", tier)  # open for reading, it does not remember it
            names = ["url"]
        elif tier is not None and tier not in store.tiers:
            raise fail(
                f"{path}: the store remembers no tier {tier!r} (it has: "
                f"{', '.join(store.tiers) or 'none'}): give a URL",
                2,
            )
        if not names:
            raise fail(f"{path}: the store remembers no tier: give a URL", 2)
        for name in names:
            with _bar(f"flushing to {printable(name)}") as bar, warnings.catch_warnings():
                if name in strange:
                    warnings.simplefilter("ignore")  # what it says was said
                handle = store.flush(name, wait=True, progress=bar)
            assert handle.stats is not None
            ended.append((store.tiers[name].place, handle.epoch, handle.stats))
    if as_json:
        typer.echo(
            json.dumps(
                [{"url": url, "epoch": epoch, **asdict(stats)} for url, epoch, stats in ended],
                indent=2,
            )
        )
    else:
        for url, epoch, stats in ended:
            told = (
                f"epoch {epoch} flushed to {url}: {size(stats.written_bytes)} in "
                f"{stats.seconds:.1f} s"
            )
            typer.echo(printable(told))
    if tier is None and strange:
        raise typer.Exit(1)


@app.command()
def trust(
    path: StorePath, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False
) -> None:
    """Makes the tiers that a store remembers its own here. For a store that was moved, copied or
    restored on purpose.

    It shows where they are, and asks. Whatever is committed to the store may then be written to
    those places, and old epochs there deleted.

    Example: pmstore trust run.pm
    """
    with ExitStack() as stack:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what opening says is said below
            store = stack.enter_context(writing(path))
        tiers = store._open_tiers()
        names = tiers.strange
        for name in names:
            config = store.tiers[name]
            how = [f"every {counted(config.every, 'commit')}"] if config.every else []
            how += [f"keeps {counted(config.keep, 'epoch')}"] if config.keep else []
            typer.echo(printable(f"{name}: {config.url}{''.join(f', {one}' for one in how)}"))
        if not names:
            there = (
                "all tiers that it remembers were added here"
                if store.tiers
                else "it remembers no tier"
            )
            typer.echo(f"{printable(str(path))}: {there}")
            return
        if not yes and not typer.confirm("Flush to these?"):
            raise typer.Exit(1)
        tiers.trust(store, names)
    typer.echo(f"{printable(str(path))}: {counted(len(names), 'tier')} trusted")


@app.command()
def restore(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="STORE", help="The store to make; nothing may be there.", show_default=False
        ),
    ],
    url: Url,
    epoch: Number = None,
    run: Run = None,
    kept: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--kept", help="The state of that name, or step, of run.keep.", show_default=False
        ),
    ] = None,
    rank: Rank = 0,
    domain: Annotated[str, typer.Option("--domain", help="As for pmstore.open.")] = "auto",
    as_json: Json = False,
) -> None:
    """Makes a store of an epoch in a tier. By default of the newest that is whole; every byte is
    checked.

    Epochs that are damaged are passed over, and named. --kept takes a state that a training run
    kept, by its name or step; pmstore epochs shows which there are.

    Example: pmstore restore run.pm s3://bucket/run --epoch 1200
    """
    from pmstore import tiers

    with _told(), _bar(f"restoring {path.name}") as bar:
        named: str | int | None = kept
        if kept is not None and kept.isdecimal():
            reasons = [reason for one in tiers.epochs(url) for reason in one.kept]
            named = kept if any(reason.is_called(kept) for reason in reasons) else int(kept)
        report = tiers.restore(
            path, url, epoch, run=run, kept=named, rank=rank, domain=domain, progress=bar
        )
    typer.echo(json.dumps(asdict(report), indent=2) if as_json else str(report))


@app.command()
def epochs(
    url: Url,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read and check every byte of every epoch.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Lists the epochs of a tier, newest first. Exit code 1 if one of them is damaged.

    Example: pmstore epochs --verify /mnt/checkpoints/run
    """
    from pmstore import tiers
    from pmstore.tiers.patience import STALL_SECONDS, Patience
    from pmstore.tiers.places import open_places
    from pmstore.tiers.reading import verify as read_all

    with _told():
        found = tiers.epochs(url)
        problems = {(one.run, one.epoch): one.problem for one in found}
        if verify:
            backend = open_places(url, patience=Patience(url, STALL_SECONDS))
            for one in found:
                with progress(f"reading epoch {one.epoch}", one.state_bytes) as advance:
                    problems[one.run, one.epoch] = read_all(backend, one, advance)
    if as_json:
        rows = [{**asdict(one), "problem": problems[one.run, one.epoch]} for one in found]
        typer.echo(json.dumps(rows, indent=2))
    elif not found:
        typer.echo(f"{url}: no epoch here")
    else:
        table = Table(box=None, pad_edge=False)
        for title in ("epoch", "run", "ranks", "state", "files", "flushed", "kept", "is"):
            table.add_column(
                title, justify="right" if title in ("epoch", "state", "files") else "left"
            )
        for one in found:
            ranks = f"{len(one.ranks)}/{one.world_size}"
            when = _when(one.time)
            state = problems[one.run, one.epoch] or (
                "whole, every byte read" if verify else "whole"
            )
            table.add_row(
                str(one.epoch),
                one.run,
                ranks,
                size(one.state_bytes),
                size(one.file_bytes),
                when,
                printable("; ".join(f"step {reason.step}: {reason}" for reason in one.kept)),
                state,
            )
        console().print(table)
    if any(problem and problem.startswith("corrupt") for problem in problems.values()):
        raise typer.Exit(1)


def _when(seconds: float) -> str:
    """Local time; "" if the manifest has none that a calendar has."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else ""
    except (ValueError, OverflowError, OSError):
        return ""


@app.command("export-tier")
def export_tier(
    url: Url,
    to: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="The safetensors file to write.", show_default=False),
    ],
    epoch: Number = None,
    group: Annotated[
        str, typer.Option("--group", help="Only what is in this group, such as run/model.")
    ] = "",
    run: Run = None,
    rank: Rank = 0,
    mode: Mode = PRIVATE,
) -> None:
    """Writes an epoch's arrays to a safetensors file. Tensors too; without a store in between.

    Example: pmstore export-tier s3://bucket/run model.safetensors --group run/model
    """
    from pmstore import tiers

    with _told(), _bar(f"writing {to.name}") as bar:
        number, names = tiers.export_safetensors(
            to, url, epoch, group=group, run=run, rank=rank, progress=bar, mode=mode
        )
    typer.echo(f"epoch {number}: {counted(len(names), 'tensor')} written to {to}")
