"""The application, and what the commands share: how a store is opened for them, how they fail, how
they print."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

import pmstore
from pmstore.errors import (
    CorruptStoreError,
    DomainError,
    NotAStoreError,
    PmstoreError,
    StoreFullError,
    StoreLockedError,
    UncleanCopyError,
    UncleanMachineCrashError,
)
from pmstore.extras import missing

app = typer.Typer(
    name="pmstore",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Training state in a persistent heap: look at stores, change them, carry them elsewhere, "
    "and see it work.\n\n"
    "Exit codes: 0 well; 1 bad news (a damaged store); 2 a wrong question. Names in groups are "
    "paths: run/model/w. "
    "pmstore --install-completion completes commands and names of stores in the shell.\n\n"
    "Example: pmstore ls -r run.pm\n\n"
    "Example: pmstore show --help",
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pmstore {pmstore.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Say it, and end."),
    ] = False,
) -> None:
    """Options of the application itself."""


_PLAIN = re.compile(r"[\w./@%+,][\w./@%+,=-]*")
"""Names that mean themselves to every shell."""


def _offered(name: str) -> str | None:
    """The name as the shell that asks may have it on its command line: a stranger chose the names
    in a stranger's store.

    bash inserts what it gets, so it is quoted here. Other shells quote by themselves, but there
    typer's scripts evaluate what they get: a name is plain, or has blanks, or is not offered. Nor
    is one with control characters, or like an option.
    """
    if _PLAIN.fullmatch(name):
        return name
    if not name.isprintable() or name.startswith("-"):
        return None
    if os.environ.get("_PMSTORE_COMPLETE") != "complete_bash":
        return (
            name if _PLAIN.fullmatch(name.replace(" ", "_")) and not name.startswith(" ") else None
        )
    try:
        shlex.split(os.environ.get("COMP_WORDS", ""))
    except ValueError:  # a quote is open, where a backslash means something else
        return None
    # not within quotes: typer wants it to begin as the word does
    return re.sub(r"([^\w./@%+,=-])", r"\\\1", name)


def _complete_name(context: typer.Context, incomplete: str) -> list[str]:
    """Names of the store that was given, for the shell."""
    try:
        folder, _, _ = incomplete.rpartition("/")
        with pmstore.open(context.params["path"], mode="r") as store:
            place = store[folder] if folder else store
            found = (
                (f"{folder}/" if folder else "") + entry.name + "/" * (entry.kind == "group")
                for entry in place.entries()
            )
            return [
                told
                for name in found
                if name.startswith(incomplete) and (told := _offered(name)) is not None
            ]
    except Exception:  # a shell that completes is no place for messages
        return []


def _permissions(text: str | int) -> int:
    try:
        mode = text if isinstance(text, int) else int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise typer.BadParameter(f"{text} are no permissions: give three octal digits, as 640")
    return mode


StorePath = Annotated[
    Path, typer.Argument(metavar="STORE", help="The store's file.", show_default=False)
]
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A name in it, or a path.",
        show_default=False,
        autocompletion=_complete_name,
    ),
]
Names = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME...",
        help="Names in it, or paths.",
        show_default=False,
        autocompletion=_complete_name,
    ),
]
Mode = Annotated[
    int,
    typer.Option(
        "--mode",
        parser=_permissions,
        metavar="OCTAL",
        show_default=False,
        help="Permissions of the file, as 640. [default: 600, only you read it]",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Answer as JSON.")]


def printable(text: str) -> str:
    """A name as it may go to a terminal: what is in a file that somebody made must not steer it."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def fail(message: str, code: int) -> typer.Exit:
    typer.echo(f"pmstore: {printable(message)}", err=True)
    return typer.Exit(code)


_REMEDIES: list[tuple[type[PmstoreError], str]] = [  # first come, first served
    (
        NotAStoreError,
        ": give a store's path, or, to have a new store there, remove it and pmstore create {path}",
    ),
    (
        CorruptStoreError,
        ": pmstore restore makes a store of an epoch in a tier; or take a copy of the file",
    ),
    (
        UncleanCopyError,
        (
            ": close the original and copy it again, or give it a tier; pmstore repair accepts "
            "this one as it is"
        ),
    ),
    (
        UncleanMachineCrashError,
        ": pmstore restore makes a store of an epoch in a tier; pmstore repair accepts this one",
    ),
    (StoreLockedError, ": stop it, or wait until it is done"),
    (StoreFullError, ": remove something with pmstore rm, or free space on the file system"),
    (DomainError, ": use --domain file, or process on tmpfs"),
]
"""What to do about an error on the command line: messages of errors are written for programs in
Python."""


@contextmanager
def ending() -> Iterator[None]:
    """Makes what goes wrong inside the end of the command: one line, and an exit code."""
    try:
        yield
    except (CorruptStoreError, UncleanMachineCrashError) as error:
        raise fail(one_line(error), 1) from None
    except ModuleNotFoundError as error:
        raise fail(str(missing(error)), 2) from None
    except BrokenPipeError:
        raise
    except FileExistsError as error:
        raise fail(
            f"{error.filename}: there is something already: give another path, or remove it first",
            2,
        ) from None
    except (PmstoreError, OSError, ValueError, TypeError, KeyError) as error:
        raise fail(one_line(error), 2) from None
    except KeyboardInterrupt:
        raise fail("stopped", 130) from None


def one_line(error: BaseException) -> str:
    """The error in the words of the command line."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if isinstance(error, PmstoreError) and error.problem:
        remedy = next((remedy for kind, remedy in _REMEDIES if isinstance(error, kind)), "")
        text = f"{error.path}: {error.problem}{remedy.format(path=error.path)}"
    elif isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"
    return " ".join(text.split())


def existing(path: Path) -> None:
    """Ends the command where there is nothing."""
    if not path.exists():
        raise fail(f"{path}: no such store; pmstore create {path} makes one", 2)


def opened(path: Path, mode: Any, **options: Any) -> pmstore.Store:
    """The store; a command that would have to make it ends where there is none."""
    if mode in ("r", "r+"):
        existing(path)
    return pmstore.open(path, mode, **options)


@contextmanager
def reading(path: Path) -> Iterator[pmstore.Store]:
    """The store, for reading. Its errors end the command."""
    with ending(), opened(path, "r") as store:
        yield store


@contextmanager
def writing(
    path: Path, mode: Literal["r+", "a", "x"] = "r+", **options: Any
) -> Iterator[pmstore.Store]:
    """The store, for one change that happens as a whole or not at all. Its errors end the
    command."""
    with ending(), opened(path, mode, **options) as store, store.transaction():
        yield store


def find(store: pmstore.Store, name: str) -> Any:
    """What has the name. Ends the command if nothing has."""
    try:
        return store[name]
    except KeyError:
        raise fail(
            f"{store.path}: there is no {name!r}; pmstore ls -r {store.path} shows what there is", 2
        ) from None


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while bytes are worked on, if a person looks. The function is called
    with bytes done since."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    shown = Progress(
        *columns,
        TimeRemainingColumn(),
        console=console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with shown as bars:
        task = bars.add_task(what, total=total)
        yield lambda done: bars.update(task, advance=done)


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
