"""Commands that look at a store: info, ls, check."""

from __future__ import annotations

from typing import Annotated

import typer

from pmstore.commands import answers
from pmstore.commands.app import GroupName, Json, StorePath, app


@app.command()
def info(path: StorePath, as_json: Json = False) -> None:
    """Says what a store is: domain, sizes, commits, recovery.

    It also draws a map of the heap. The map has a line for each segment of the file (the file
    begins with one, and each growth adds one). A line has 64 cells (fewer, where there is little
    room) from the segment's first byte of data to its last. The more of a cell is in use, the
    darker it is.

    Example: pmstore info run.pm

    Example: pmstore info run.pm --json | jq .epoch
    """
    answers.info(path, as_json)


@app.command()
def ls(
    path: StorePath,
    group: GroupName = "",
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="What is in groups too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Lists the names of a store or group, with what they hold.

    Sizes are bytes of data; of slots, those of one version. For groups and lists it tells how many
    names or items they have.

    Example: pmstore ls -r run.pm run/model
    """
    answers.ls(path, group, recursive, as_json)


@app.command()
def check(path: StorePath, as_json: Json = False) -> None:
    """Checks every invariant of a store, and changes nothing. Exit code 1 if one is broken.

    It walks the log, the allocator's tables and bitmaps, every group and list, and every value and
    description: leaks, overlaps, double ownership. pmstore repair tells what can be mended.

    Example: pmstore check run.pm && echo sound
    """
    answers.check(path, as_json)
