"""The command `pmstore`: its standard streams, its words, and how it ends. The commands themselves
are in the modules that table.py names, and need the extra `cli`."""

from __future__ import annotations

import os
import sys
import warnings

from pmstore._base.version import VERSION

TYPE_CHECKING = False  # as typing's, which takes longer to import than `--version` to answer
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TextIO

_FAULT = 3
"""Exit code of a fault of pmstore itself."""


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Prints a warning in one line, as errors are printed."""
    _remark(str(message))


def _remark(text: str) -> None:
    from pmstore._base.text import printable

    print(f"pmstore: {printable(text)}", file=sys.stderr)


def _stand_in() -> None:
    """Opens /dev/null in the place of standard streams that are closed: otherwise a store that is
    opened would take the place of one of them, and have messages written into it.

    What is written to a closed standard output fails as it would have without this.
    """
    if sys.stdin is not None and sys.stdout is not None and sys.stderr is not None:
        return
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # takes the least number that is free
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def main() -> None:
    """Runs the command line, and ends the process with its exit code."""
    _stand_in()
    if hasattr(sys.stdout, "reconfigure"):  # what the locale cannot show is shown as an escape
        sys.stdout.reconfigure(errors="backslashreplace")
    warnings.showwarning = _show_warning
    words = sys.argv[1:]
    try:
        code = _run(words)
        sys.stdout.flush()
    except SystemExit as end:
        code = _flushed(end)
    except KeyboardInterrupt:
        _remark("stopped")
        code = 130
    except OSError as error:
        code = _lost(error)
    except Exception as error:
        if os.environ.get("PMSTORE_TRACEBACK"):
            raise
        _remark(
            f"a fault of pmstore: {type(error).__name__}: {error} (PMSTORE_TRACEBACK=1 shows where)"
        )
        code = _FAULT
    sys.exit(code)


def _run(words: list[str]) -> int:
    if words == ["--version"]:
        print(f"pmstore {VERSION}")
        return 0
    if "_PMSTORE_COMPLETE" not in os.environ:
        answer = plain(words)
        if answer is not None:
            answer()
            return 0
    try:
        from pmstore.commands.application import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        from pmstore.extras import install

        _remark(f"the command line needs {error.name}: {install('cli')}")
        return 2
    try:
        code = app(prog_name="pmstore", standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return _wrong_words(error)
    return code if isinstance(code, int) else 0


_FLAGS = {
    "--json": "as_json",
    **dict.fromkeys(("-r", "--recursive"), "recursive"),
    **dict.fromkeys(("-a", "--all"), "everything"),
}


def plain(words: Sequence[str]) -> Callable[[], None] | None:
    """Returns what answers plain words of a plain command (`table.py`); None: they are left to
    typer, which knows all words."""
    from pmstore.commands.table import TABLE

    if not words or words[0] not in TABLE or not TABLE[words[0]].plain:
        return None
    from importlib import import_module
    from inspect import signature
    from pathlib import Path

    from pmstore.commands.common import ending, utf8

    command = getattr(import_module(f"pmstore.commands.{TABLE[words[0]].module}"), words[0])
    takes = signature(command).parameters.values()
    needed = [one.name for one in takes if one.default is one.empty]
    names = needed + [one.name for one in takes if one.default == ""]
    flags = {flag for flag in words[1:] if flag.startswith("-")}
    given = [word for word in words[1:] if word not in flags]
    chosen = {_FLAGS.get(flag, flag) for flag in flags}
    if not chosen <= {one.name for one in takes} or not len(needed) <= len(given) <= len(names):
        return None

    def answer() -> None:
        with ending():
            told = dict(zip(names[1:], map(utf8, given[1:]), strict=False))
        command(Path(given[0]), **told, **dict.fromkeys(chosen, True))

    return answer


def _wrong_words(error: Any) -> int:
    """Says what is wrong with the words of the command line, and returns the exit code. The errors
    are typer's own, whichever version of click it brings."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return int(error.exit_code)
    told = " ".join(error.format_message().split()).rstrip(".")
    more = f" ({context.command_path} --help tells more)" if context is not None else ""
    _remark(f"{told}{more}")
    return int(error.exit_code)


def _flushed(end: SystemExit) -> int:
    """Returns the exit code once the answer is out."""
    code = end.code if isinstance(end.code, int) else 0 if end.code is None else 2
    try:
        sys.stdout.flush()
    except OSError as error:
        return _lost(error)
    return code


def _lost(error: OSError) -> int:
    """Says that the answer could not be written, and returns the exit code. Where nobody reads on
    (`| head`), there is nothing to say."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    if isinstance(error, BrokenPipeError):
        return 1
    _remark(f"standard output: {error.strerror or error}")
    return 2
