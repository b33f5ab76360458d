"""What the commands share: how a store is opened for them, how they fail, how they print.

Nothing heavy is imported here: no typer, and rich where a bar is drawn.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pmstore._base.sizes import parse_size
from pmstore._base.text import printable
from pmstore.errors import (
    CorruptStoreError,
    DomainError,
    NotAStoreError,
    PmstoreError,
    SnapshotLostError,
    StoreFullError,
    StoreLockedError,
    UncleanCopyError,
    UncleanMachineCrashError,
)
from pmstore.extras import missing
from pmstore.opening import open as open_store
from pmstore.show.units import size as size

if TYPE_CHECKING:
    from rich.console import Console

    from pmstore.store import Store


_OUTPUT = "standard output"


@contextmanager
def answering() -> Iterator[None]:
    """Wraps what writes to the standard output, so that its errors are told from those of files."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or _OUTPUT
        raise


def say(*lines: str) -> None:
    """Prints lines of the answer to the standard output."""
    with answering():
        for line in lines:
            print(line)


def remark(text: str) -> None:
    """Prints a line for the person, beside the answer."""
    print(f"pmstore: {printable(text)}", file=sys.stderr)


def tell(words: str, facts: dict[str, Any], as_json: bool) -> None:
    """Prints what a command did: in words, or as JSON."""
    if as_json:
        say_json(facts)
    else:
        say(words)


def say_json(told: object) -> None:
    """Prints it as JSON, which is not escaped for a terminal."""
    import json

    say(json.dumps(told, indent=2))


def confirmed(question: str) -> bool:
    """Returns whether the person says yes; nobody there is a no."""
    print(f"{question} [y/N]: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def utf8(word: str) -> str:
    """Returns a word of the command line as a name of a store: UTF-8, whatever the locale.

    Raises: ValueError.
    """
    if word.isascii():
        return word
    try:
        return os.fsencode(word).decode()
    except UnicodeError:
        raise ValueError(f"{word!r} is not UTF-8, and names of a store are") from None


def fail(message: str, code: int) -> SystemExit:
    """Prints the message, and returns the end of the command, which the caller raises."""
    remark(message)
    return SystemExit(code)


_REMEDIES: list[tuple[type[PmstoreError], str]] = [  # first come, first served
    (NotAStoreError, ": give a store's path"),
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
    (SnapshotLostError, " and could not keep it: try again, or when it writes less"),
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
    except ModuleNotFoundError as error:
        raise fail(str(missing(error)), 2) from None
    except BrokenPipeError:
        raise
    except ANSWERS as error:
        if isinstance(error, OSError) and error.filename == _OUTPUT:
            raise  # `main` tells of it
        raise fail(one_line(error), exit_code(error)) from None
    except KeyboardInterrupt:
        raise fail("stopped", 130) from None


ANSWERS = (
    *(PmstoreError, OSError, ValueError, TypeError, LookupError),
    *(ArithmeticError, RecursionError, MemoryError),
)
"""Errors that say what is wrong with a question, or with what it is about."""


def exit_code(error: BaseException) -> int:
    """Returns the exit code for an error: 1 for bad news, 2 for a wrong question."""
    return 1 if isinstance(error, (CorruptStoreError, UncleanMachineCrashError)) else 2


def one_line(error: BaseException) -> str:
    """Says the error in one line, in the words of the command line."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if isinstance(error, PmstoreError) and error.problem:
        remedy = next((remedy for kind, remedy in _REMEDIES if isinstance(error, kind)), "")
        text = f"{error.path}: {error.problem}{remedy.format(path=error.path)}"
    elif isinstance(error, FileExistsError):
        text = (
            f"{error.filename}: there is something already: give another path, or remove it first"
        )
    elif isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"
    elif isinstance(error, RecursionError):
        text = "nested too deeply"
    elif isinstance(error, MemoryError):
        text = f"not enough memory{f': {text}' if text else ''}"
    return " ".join(text.split()) or type(error).__name__


def existing(path: Path) -> None:
    """Ends the command if there is no file at the path."""
    if path.is_dir():
        raise fail(
            f"{path}: a directory: give a store's file. If it is a tier: pmstore epochs {path}", 2
        )
    if not path.exists():
        if _URL.match(str(path)):
            raise fail(
                f"{path}: a URL: give a store's file. If it is a tier: pmstore restore makes a "
                "store of it",
                2,
            )
        raise fail(f"{path}: no such store", 2)


_URL = re.compile(r"[a-z0-9]+:/")


def regular(path: Path) -> int:
    """Returns how many bytes the file has, which is to be read at any place.

    Raises: OSError; ValueError: it is a pipe or a device, and has no places.
    """
    about = path.stat()
    if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):
        raise ValueError(f"{path}: not a regular file")
    return about.st_size


def opened(path: Path, mode: Any, **options: Any) -> Store:
    """Opens the store. A command that would have to make it ends where there is none."""
    existing(path)
    return open_store(path, mode, **options)


def has_folder(path: Path) -> None:
    """Raises: ValueError: the folder in which the file is to be made is not there."""
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path.parent}: there is no such directory: make it first")


@contextmanager
def making(path: Path, size_: str | int | None) -> Iterator[None]:
    """Wraps the making of a store of this size. Ends the command if there is something already, or
    no folder, and tells how much room that has if it is too little."""
    has_folder(path)
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    try:
        yield
    except StoreFullError:
        place = os.statvfs(path.absolute().parent)
        free = place.f_bavail * place.f_frsize
        raise ValueError(
            f"{path}: no room for {size(parse_size(size_)) if size_ else '64.0 MiB'}: {size(free)} "
            "are free there; nothing was made. Give a smaller --size (a store grows by itself), or "
            "another folder"
        ) from None


@contextmanager
def reading(path: Path, *, lock: bool = False, keep: bool = False) -> Iterator[Store]:
    """Opens the store for reading; its errors end the command. lock: only where nobody else has it
    open; keep: a program that writes to it keeps this commit until the end."""
    with ending(), opened(path, "r", lock=lock) as store:
        if keep:
            store.refresh(keep=True)
        yield store


@contextmanager
def reading_all(path: Path) -> Iterator[Store]:
    """Opens the store to read all of it. Where nobody has it open, nothing is copied into
    memory."""
    with ending():
        try:
            store = opened(path, "r", lock=True)
        except StoreLockedError:
            store = opened(path, "r")
            store.refresh(keep=True)
        with store:
            yield store


@contextmanager
def writing(path: Path, **options: Any) -> Iterator[Store]:
    """Opens the store for one change that happens as a whole or not at all. Its errors end the
    command."""
    with ending(), opened(path, "r+", **options) as store, store.transaction():
        yield store


def find(store: Store, name: str) -> Any:
    """Returns what has the name. Ends the command if nothing has it."""
    try:
        return store[name]
    except KeyError:
        raise fail(
            f"{store.path}: there is no {name!r}; pmstore ls -r {store.path} shows what there is", 2
        ) from None


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a bar on standard error while bytes are worked on, if a person looks. The function that
    it yields is called with the bytes done since the last call."""
    with bar(what) as show:
        done = 0

        def advance(more: int) -> None:
            nonlocal done
            done += more
            show(done, total)

        yield advance


@contextmanager
def bar(what: str, *, objects: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar as `progress` does. The function that it yields is called with the bytes, or
    objects, that are done, and with how many there are in all."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich import progress as rich

    amount: list[rich.ProgressColumn] = (
        [rich.TaskProgressColumn()]
        if objects
        else [rich.DownloadColumn(binary_units=True), rich.TransferSpeedColumn()]
    )
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        *amount,
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def console(*, stderr: bool = False) -> Console:
    """Makes a console of rich's, for what rich draws."""
    from rich.console import Console

    # Made for each command, so that it writes to the standard output of that moment.
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 120)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
