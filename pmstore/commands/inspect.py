"""Commands that look at a store: info, ls, check."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import pmstore
from pmstore.base.words import counted
from pmstore.commands.app import Json, StorePath, app, console, fail, find, printable, reading, size
from pmstore.errors import CorruptStoreError, TierError
from pmstore.objects.containers import Group, tree
from pmstore.show.picture import SHADES


@app.command()
def info(path: StorePath, as_json: Json = False) -> None:
    """Says what a store is: domain, sizes, commits, recovery.

    And a map of the heap. It has a line for each segment of the file (it begins with one, and each
    growth adds one): 64 cells from the segment's first byte of data to its last, darker the more of
    the cell is in use.

    Example: pmstore info run.pm

    Example: pmstore info run.pm --json | jq .epoch
    """
    with reading(path) as store:
        about, usage, tiers = store.info(), store.usage(), list(_tiers(store))
    if as_json:
        segments = [asdict(segment) for segment in usage]
        typer.echo(json.dumps({**asdict(about), "segments": segments, "tiers": tiers}, indent=2))
        return
    typer.echo(str(about))
    for number, tier in enumerate(tiers):
        told = tier["problem"] or f"{tier['name']} at {tier['url']}"
        if tier["every"]:
            told += f", every {counted(tier['every'], 'commit')}"
        if tier["added_here"] is False:
            told += f"; not added here, and not flushed to by itself: pmstore trust {path}"
        typer.echo(printable(f"{'tiers' if number == 0 else '':<10}{told}"))
    for number, segment in enumerate(usage):
        cells = "".join(
            _cell(used, segment.data_bytes / len(segment.cells)) for used in segment.cells
        )
        share = (
            f"{size(segment.used_bytes)} of {size(segment.data_bytes)} in {segment.blocks:,} blocks"
        )
        typer.echo(f"{'heap' if number == 0 else '':<10}|{cells}| {share}")


def _tiers(store: pmstore.Store) -> Iterator[dict[str, Any]]:
    """What the store remembers of tiers."""
    try:
        strange = store._open_tiers().strange
        for name, tier in store.tiers.items():
            yield {
                "name": name,
                "url": tier.url,
                "every": tier.every,
                "added_here": name not in strange,
                "problem": None,
            }
    except (TierError, CorruptStoreError) as error:  # the rest is told all the same
        yield {"name": None, "url": None, "every": None, "added_here": None, "problem": str(error)}


def _cell(used: int, room: float) -> str:
    share = used / room
    return SHADES[0 if not used else max(1, min(len(SHADES) - 1, round(share * (len(SHADES) - 1))))]


@app.command("ls")
def list_names(
    path: StorePath,
    group: Annotated[
        str, typer.Argument(help="A group in it, such as run/model.", show_default=False)
    ] = "",
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="What is in groups too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Lists the names of a store or group, with what they hold.

    Example: pmstore ls -r run.pm run/model
    """
    with reading(path) as store:
        place = find(store, group) if group else store
        if not isinstance(place, Group):
            raise fail(f"{path}: {group!r} is no group: pmstore show {path} {group}", 2)
        rows = list(_rows(place, f"{group}/" if group else "", recursive))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("name", overflow="fold")
    for title in ("kind", "dtype", "shape"):
        table.add_column(title)
    table.add_column("size", justify="right")
    for row in rows:
        shape = "" if row["shape"] is None else "x".join(map(str, row["shape"])) or "scalar"
        bytes_ = size(row["bytes"]) if row["kind"] not in ("group", "list") else ""
        table.add_row(Text(printable(row["name"])), row["kind"], row["dtype"] or "", shape, bytes_)
    console().print(table)


def _rows(group: Group, prefix: str, recursive: bool) -> Iterator[dict[str, Any]]:
    for entry in tree(group) if recursive else group.entries():
        yield {
            "name": f"{prefix}{entry.name}",
            "kind": entry.kind,
            "dtype": entry.dtype,
            "shape": None if entry.shape is None else list(entry.shape),
            "bytes": entry.nbytes,
        }


@app.command()
def check(path: StorePath, as_json: Json = False) -> None:
    """Checks every invariant of a store, and changes nothing. Exit code 1 if one is broken.

    It walks the log, the allocator's tables and bitmaps, every group and list, and every value and
    description: leaks, overlaps, double ownership. pmstore repair tells what can be mended.

    Example: pmstore check run.pm && echo sound
    """
    with reading(path) as store:
        report = store.check()
    notes = []
    if report.sound_copies != 0b11:
        notes.append(
            f"a copy of the superblock is damaged, the other one is in use: pmstore repair {path} "
            "restores it"
        )
    if as_json:
        told = {"path": str(path), "sound": not report.problems, **asdict(report), "notes": notes}
        typer.echo(json.dumps({**told, "problems": list(report.problems)}, indent=2))
    else:
        for problem in report.problems:
            typer.echo(printable(problem))
        if not report.problems:
            typer.echo(f"{path}: {report}")
        for note in notes:
            typer.echo(f"note: {note}")
    if report.problems:
        raise typer.Exit(1)
