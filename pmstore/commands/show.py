"""The command show: one name of a store, with what is in it."""

from __future__ import annotations

from typing import Annotated

import typer

from pmstore.commands import showing
from pmstore.commands.app import Json, Name, StorePath, app


@app.command()
def show(
    path: StorePath,
    name: Name,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Elements or items to print.")
    ] = showing.LIMIT,
    as_json: Json = False,
) -> None:
    """Shows what a name holds, with a small picture of arrays.

    Of an array shape, dtype, statistics, the picture and its first and last elements; a value as it
    is. The picture is a curve or, of few elements, a line of bars (1-d, and lists of numbers),
    shades (2-d, means of neighbours), or a histogram from the least to the greatest. Of slots it
    shows the current version.

    Example: pmstore show run.pm config

    Example: pmstore show run.pm model/fc1.weight --limit 100

    Example: pmstore show run.pm losses --json | jq .mean
    """
    showing.show(path, name, limit, as_json)
