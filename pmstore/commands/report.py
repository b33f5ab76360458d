"""The command report: runs as one HTML file."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from pmstore._base.newfile import write_over
from pmstore.commands.app import Json, app
from pmstore.commands.common import answering, ending, fail, opened, tell
from pmstore.show.report import BEGIN, Reported
from pmstore.show.report import report as make
from pmstore.show.snapshot_of_runs import gather, tier_contents
from pmstore.show.units import size


@app.command()
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="STORE...", help="A store, or those of several ranks.", show_default=False
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="An older report is replaced; - is the output."
        ),
    ] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Writes a report of training runs as one HTML file.

    It needs no network, and tells of the loss with its commits, what they cost, decisions and why,
    the heap, tiers and their epochs. Several stores stand side by side. It is made of each store's
    last commit, also while a program trains.

    Example: pmstore report run.pm -o run.html
    """
    with ending():
        if output != Path("-"):
            _replaceable(output)
        elif as_json:
            raise fail("--json and the report both go to the output: name a file", 2)
        told = []
        for path in dict.fromkeys(paths):
            with closing(opened(path, "r")) as store:
                told.append(Reported(gather(store), tier_contents(store)))
        html = make(told).encode(errors="replace")
        mode = 0o666
        for one in told:
            mode &= one.store.permissions
        if output == Path("-"):
            with answering():
                sys.stdout.buffer.write(html)
            return
        write_over(output, html, mode)
    tell(f"{output}: {size(len(html))}", {"path": str(output), "bytes": len(html)}, as_json)


def _replaceable(path: Path) -> None:
    """Ends the command where there is anything but a report: a store named after -o is not lost."""
    if not path.exists():
        return
    if path.is_file():
        with path.open("rb") as file:
            begin = file.read(len(BEGIN))
        if begin in (b"", BEGIN):
            return
    raise fail(f"{path}: there is something else than a report: give another path", 2)
