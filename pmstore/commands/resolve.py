"""The command resolve: what becomes of a version that a store holds."""

from __future__ import annotations

from typing import Annotated

import typer

from pmstore.commands.app import StorePath, app, ending, fail, opened, reading


@app.command()
def resolve(
    path: StorePath,
    keep: Annotated[
        bool, typer.Option("--keep", help="The last commit stays; the one before is let go.")
    ] = False,
    back: Annotated[
        bool, typer.Option("--back", help="Back to the commit before the last.")
    ] = False,
) -> None:
    """Goes back to the held version, or lets go of it.

    A store that was open with hold=True when its program died holds the version before its last
    commit (pmstore info tells).

    Exit code 1 if nothing is held.

    Example: pmstore resolve /dev/shm/run.pm --back
    """
    if keep == back:
        raise fail("say which: --keep or --back", 2)
    with reading(path) as store:
        held = store.holds
    if not held:
        raise fail(f"{path}: nothing is held: the last commit is final", 1)
    with ending(), opened(path, "r+", hold=True) as store:
        if back:
            store.rewind()
        epoch = store.epoch
    typer.echo(f"{path}: {'back: ' if back else ''}epoch {epoch} is final")
