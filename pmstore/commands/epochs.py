"""Commands that work with a tier: flush, epochs, restore, trust."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from pmstore._base.text import counted, printable
from pmstore.commands import completion
from pmstore.commands.app import Domain, Json, StorePath, app, text_word
from pmstore.commands.common import (
    bar,
    confirmed,
    ending,
    fail,
    has_folder,
    one_line,
    progress,
    reading,
    remark,
    say,
    say_json,
    size,
    tell,
    writing,
)
from pmstore.errors import TierError
from pmstore.show.terminal import Column, Terminal

if TYPE_CHECKING:
    from pmstore.tiers._epochs.listing import EpochInfo

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
    typer.Option(
        "--run",
        help="Whose epochs (its beginning will do).",
        show_default=False,
        autocompletion=completion.runs,
    ),
]
Number = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--epoch",
        help="Which; default: the newest that is whole.",
        show_default=False,
        autocompletion=completion.epoch_numbers,
    ),
]
Rank = Annotated[int, typer.Option("--rank", help="Whose store, where several ranks flushed.")]


@contextmanager
def _told() -> Iterator[None]:
    """Ends the command at an error, as `ending` does. It adds what only tiers have: epochs that are
    damaged, places that want a key."""
    with ending():
        try:
            yield
        except TierError as error:
            if error.damaged:
                raise fail(one_line(error), 1) from None
            if "NoCredentialsError" not in str(error):
                raise
            raise fail(
                f"{one_line(error)}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a "
                "profile with AWS_PROFILE",
                2,
            ) from None


def _there(url: str) -> None:
    """Ends the command if the URL names a directory that is not there, or a file."""
    path = Path(url.removeprefix("file://"))
    if "://" in str(url.removeprefix("file://")):
        return
    if not path.exists():
        raise fail(f"{url}: no such directory, and so no tier", 2)
    if not path.is_dir():
        raise fail(f"{url}: a file; a tier is a directory, or a URL such as s3://bucket/run", 2)


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
            parser=text_word,
            autocompletion=completion.tiers_of_store,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Flushes the last commit of a store to a tier. Returns when all of it is durable there; the
    store is not changed.

    Without a tier, it flushes to those tiers that this file had added on this machine. Others are
    named, and not flushed to (exit code 1): a store that was copied, or came from somebody else,
    would go wherever it says. pmstore trust makes them this file's own.

    Example: pmstore flush run.pm s3://bucket/run
    """
    from pmstore.tiers._flush.flush import FlushStats

    ended: list[tuple[str, int, FlushStats]] = []
    with reading(path, lock=True) as store:  # its writer flushes to these tiers, too
        names = list(store.tiers) if tier is None else [tier]
        strange = store._open_tiers().strange
        if tier is None:
            names = [name for name in names if name not in strange]
            for name in strange:
                where = f"{name!r} at {store.tiers[name].url!r}"
                remark(
                    f"not flushed to {where}: this file did not have that tier added here. If the "
                    f"URL is right: pmstore trust {path}"
                )
            if strange and not names:
                raise SystemExit(1)
        elif tier in strange:
            remark(f"tier {tier!r} is at {store.tiers[tier].url!r}")
        if tier is not None and tier not in store.tiers and "/" in tier:
            store.add_tier("url", tier)  # a store that is open for reading does not remember it
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
            with bar(f"flushing to {printable(name)}") as show, warnings.catch_warnings():
                if name in strange:
                    warnings.simplefilter("ignore")  # its warning was given above
                handle = store.flush(name, wait=True, progress=show)
            assert handle.stats is not None
            ended.append((store.tiers[name].place, handle.epoch, handle.stats))
    if as_json:
        say_json([{"url": url, "epoch": epoch, **asdict(stats)} for url, epoch, stats in ended])
    else:
        for url, epoch, stats in ended:
            told = (
                f"epoch {epoch} flushed to {url}: {size(stats.written_bytes)} in "
                f"{stats.seconds:.1f} s"
            )
            say(printable(told))
    if tier is None and strange:
        raise SystemExit(1)


@app.command()
def trust(
    path: StorePath,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Makes the tiers that a store remembers its own here. Use it for a store that was moved,
    copied or restored on purpose.

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
            if not as_json:
                say(printable(f"{name}: {config.url}{''.join(f', {one}' for one in how)}"))
        if not names:
            there = (
                "all tiers that it remembers were added here"
                if store.tiers
                else "it remembers no tier"
            )
            tell(f"{printable(str(path))}: {there}", {"path": str(path), "trusted": []}, as_json)
            return
        if not yes and (as_json or not confirmed("Flush to these?")):
            raise fail("nothing was done: --yes does it without asking", 1)
        tiers.trust(store, names)
    tell(
        f"{printable(str(path))}: {counted(len(names), 'tier')} trusted",
        {"path": str(path), "trusted": list(names)},
        as_json,
    )


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
            "--kept",
            help="The state of that name, or step, of run.keep.",
            show_default=False,
            autocompletion=completion.kept,
        ),
    ] = None,
    rank: Rank = 0,
    domain: Domain = "auto",
    as_json: Json = False,
) -> None:
    """Makes a store of an epoch in a tier. By default it takes the newest epoch that is whole.
    Every byte is checked.

    Epochs that are damaged are passed over, and named. --kept takes a state that a training run
    kept, by its name or step; pmstore epochs shows which there are.

    Example: pmstore restore run.pm s3://bucket/run --epoch 1200
    """
    from pmstore import tiers

    with _told(), bar(f"restoring {printable(path.name)}") as show:
        has_folder(path)
        _there(url)
        named: str | int | None = kept
        if kept is not None and kept.isdecimal():
            reasons = [reason for one in tiers.epochs(url) for reason in one.kept]
            named = kept if any(reason.is_called(kept) for reason in reasons) else int(kept)
        report = tiers.restore(
            path, url, epoch, run=run, kept=named, rank=rank, domain=domain, progress=show
        )
    tell(str(report), asdict(report), as_json)


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
    from pmstore._base.workers import Patience
    from pmstore.tiers._epochs.content import verify as read_all
    from pmstore.tiers._places.url import STALL_SECONDS, open_places

    with _told():
        _there(url)
        found = tiers.epochs(url)
        problems = {(one.run, one.epoch): one.problem for one in found}
        if verify:
            place = open_places(url, asks=Patience(STALL_SECONDS))
            for one in found:
                with progress(f"reading epoch {one.epoch}", one.state_bytes) as advance:
                    problems[one.run, one.epoch] = read_all(place, one, advance)
    if as_json:
        rows = [{**asdict(one), "problem": problems[one.run, one.epoch]} for one in found]
        say_json(rows)
    elif not found:
        say(f"{url}: no epoch here")
    else:
        say(*_table(Terminal(), found, problems, verify))
    if any(problem and problem.startswith("corrupt") for problem in problems.values()):
        raise SystemExit(1)


def _table(
    out: Terminal,
    found: Sequence[EpochInfo],
    problems: dict[tuple[str, int], str | None],
    verified: bool,
) -> list[str]:
    digits = 8  # of a run's name: they are enough to tell runs apart
    while len({one.run[:digits] for one in found}) < len({one.run for one in found}):
        digits += 1
    if out.width is None or out.width >= _WHOLE_RUNS:
        digits = len(max((one.run for one in found), key=len))
    columns = [
        *(Column("epoch", right=True), Column("run"), Column("ranks")),
        *(Column("state", right=True), Column("files", right=True), Column("flushed", fold=True)),
        *(Column("is", fold=True), Column("kept", fold=True)),
    ]
    rows: list[tuple[str, ...]] = []
    styles: list[tuple[str, ...]] = []
    for one in found:
        problem = problems[one.run, one.epoch]
        kept = "; ".join(f"step {reason.step}: {reason}" for reason in one.kept)
        whole = "whole, every byte read" if verified else "whole"
        rows.append(
            (
                *(str(one.epoch), one.run[:digits], f"{len(one.ranks)}/{one.world_size}"),
                *(size(one.state_bytes), size(one.file_bytes), _when(one.time)),
                *(printable(problem or whole), printable(kept)),
            )
        )
        styles.append(("", "dim", "", "", "", "", "red" if problem else "green", ""))
    if not any(one.kept for one in found):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return out.table(columns, rows, [row[: len(columns)] for row in styles])


_WHOLE_RUNS = 110
"""Columns from which on runs are told with all their digits: fewer will do for --run."""


def _when(seconds: float) -> str:
    """Writes a time as local time; "" if the manifest has none, or one that no calendar has."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else ""
    except (ValueError, OverflowError, OSError):
        return ""
