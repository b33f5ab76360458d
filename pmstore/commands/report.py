"""The command report: runs as one HTML file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pmstore._base.newfile import write_over
from pmstore.commands.app import Json, app
from pmstore.commands.common import (
    ANSWERS,
    answering,
    ending,
    existing,
    fail,
    one_line,
    remark,
    tell,
)
from pmstore.opening import open as open_store
from pmstore.show.report_page import BEGIN, Reported, reported
from pmstore.show.report_page import report as make
from pmstore.show.units import size


@app.command()
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="STORE...", help="One, those of a sweep, or of all ranks.", show_default=False
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

    It has a curve of each value that the program logged, with kills and rewinds, the speed, the
    settings, which process trained when, with what command, and what each kill cost; then tiers,
    and what commits cost. Curves of several runs lie over each other, and a table has the settings
    that differ. It needs no network, and is made of each store's last commit, also while a program
    trains. If some stores cannot be read, the report is of the others and says so; the exit code is
    then 1.

    Example: pmstore report run.pm -o run.html

    Example: pmstore report sweep/*.pm -o sweep.html
    """
    with ending():
        if output != Path("-"):
            _replaceable(output)
        elif as_json:
            raise fail("--json and the report both go to the output: name a file", 2)
        told: list[Reported] = []
        errors: dict[Path, BaseException] = {}
        for path in dict.fromkeys(paths):
            try:
                told.append(_read(path))
            except ANSWERS as error:
                errors[path] = error
        if not told:
            existing(paths[0])
            raise errors[paths[0]]
        unread = [_line(path, error) for path, error in errors.items()]
        for line in unread:
            remark(line)
        html = make(told, unread=unread).encode(errors="replace")
        mode = 0o666
        for one in told:
            mode &= one.store.permissions
        if output == Path("-"):
            with answering():
                sys.stdout.buffer.write(html)
        else:
            write_over(output, html, mode)
            facts = {"path": str(output), "bytes": len(html), "unread": unread}
            tell(f"{output}: {size(len(html))}", facts, as_json)
    if unread:
        raise SystemExit(1)


def _read(path: Path) -> Reported:
    with open_store(path, "r") as store:
        store.refresh(keep=True)
        return reported(store)


def _line(path: Path, error: BaseException) -> str:
    """Says why the path could not be read, in the words of the other commands."""
    told = "no such store" if isinstance(error, FileNotFoundError) else one_line(error)
    return told if str(path) in told else f"{path}: {told}"


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
