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

    For an array it shows shape, dtype, statistics, the picture, and the first and last elements. A
    value is shown as it is. Arrays of one dimension, and lists of numbers, are drawn as a curve, or
    as a line of bars if there are few elements. Arrays of two dimensions are drawn in shades (means
    of neighbours). Others, and very large ones, are drawn as a histogram from the least to the
    greatest. For slots it shows the current version.

    Example: pmstore show run.pm config

    Example: pmstore show run.pm model/fc1.weight --limit 100

    Example: pmstore show run.pm losses --json | jq .mean
    """
    showing.show(path, name, limit, as_json)
