"""The application, and the arguments and options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from pmstore._base.version import VERSION
from pmstore._engine.store_info import SURVIVES
from pmstore.commands import completion
from pmstore.commands.common import utf8
from pmstore.commands.lazy import Commands


class _Application(typer.Typer):
    def command(self, *words: Any, **options: Any) -> Callable[[Any], Any]:
        """Registers a command. Whether a file can be read is left to what opens it, which says so
        in the words of all commands."""
        register = super().command(*words, **options)

        def take(command: Any) -> Any:
            command.__annotations__ = get_type_hints(command, include_extras=True)
            for hint in command.__annotations__.values():
                for about in getattr(hint, "__metadata__", ()):
                    about.readable = False
            return register(command)

        return take


app: typer.Typer = _Application(
    name="pmstore",
    cls=Commands,
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
Commands.application = app
completion.answer_the_first_tab()


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pmstore {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Say it, and end."),
    ] = False,
) -> None:
    """Declares the options of the application itself."""


def _permissions(text: str | int) -> int:
    try:
        mode = text if isinstance(text, int) else int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise typer.BadParameter(f"{text} are no permissions: give three octal digits, as 640")
    return mode


def text_word(word: str) -> str:
    """Parses arguments and options that are names or text."""
    try:
        return utf8(word)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


StorePath = Annotated[
    Path, typer.Argument(metavar="STORE", help="The store's file.", show_default=False)
]
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A name in it, or a path.",
        show_default=False,
        parser=text_word,
        autocompletion=completion.names,
    ),
]
GroupName = Annotated[
    str,
    typer.Argument(
        metavar="GROUP",
        help="A group in it, such as run/model.",
        show_default=False,
        parser=text_word,
        autocompletion=completion.groups,
    ),
]
InGroup = Annotated[
    str,
    typer.Option(
        "--group",
        metavar="GROUP",
        help="Only this group, such as run/model.",
        show_default=False,
        parser=text_word,
        autocompletion=completion.groups,
    ),
]
Domain = Annotated[
    str,
    typer.Option(
        "--domain",
        help=f"What a commit survives: auto, {', '.join(SURVIVES)}.",
        autocompletion=completion.one_of("auto", *SURVIVES),
    ),
]
Names = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME...",
        help="Names in it, or paths.",
        show_default=False,
        parser=text_word,
        autocompletion=completion.names,
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
Everything = Annotated[bool, typer.Option("--all", "-a", help="Also what pmstore keeps beside.")]
Recursive = Annotated[bool, typer.Option("--recursive", "-r", help="What is in groups too.")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, help="Elements or items to print.")]
Commands.types = globals()
