"""The application, and what the commands share: how a store is opened for them, how they fail, how they print."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import pmstore
from pmstore.errors import CorruptStoreError, PmstoreError, UncleanMachineCrashError

__all__ = ["Json", "StorePath", "app", "console", "fail", "milliseconds", "reading", "size"]

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


def fail(message: str, code: int) -> typer.Exit:
    typer.echo(f"pmstore: {message}", err=True)
    return typer.Exit(code)


@contextmanager
def reading(path: Path) -> Iterator[pmstore.Store]:
    """The store, for reading. Its errors end the command."""
    try:
        with pmstore.open(path, mode="r") as store:
            yield store
    except (CorruptStoreError, UncleanMachineCrashError) as error:
        raise fail(str(error), 1) from None
    except (PmstoreError, OSError) as error:
        raise fail(str(error), 2) from None


def console(*, stderr: bool = False) -> Console:
    # Made for each command, so that it writes to the standard output of that moment.
    return Console(stderr=stderr, width=None if sys.stdout.isatty() else 120)


def size(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
