"""The command `pmstore`. The commands themselves are in `pmstore.commands.program`, which needs the
extra `cli`."""

from __future__ import annotations

import os
import sys
import warnings
from typing import TextIO


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One line, as errors are."""
    from pmstore.commands.app import printable

    print(f"pmstore: {printable(str(message))}", file=sys.stderr)


def main() -> None:
    """Entry point of the command line."""
    try:
        from pmstore.commands.program import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        print(
            f"pmstore: the command line needs {error.name}: pip install 'pmstore[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    warnings.showwarning = _show_warning
    try:
        app()
        sys.stdout.flush()
    except (
        OSError
    ) as error:  # of standard output: a full disk. (click ends a broken pipe silently.)
        print(f"pmstore: {error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        sys.exit(2)
