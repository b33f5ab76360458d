"""The command resolve: what becomes of a version that a store holds."""

from __future__ import annotations

from typing import Annotated

import typer

from pmstore.commands.app import Json, StorePath, app
from pmstore.commands.common import ending, fail, opened, reading, tell


@app.command()
def resolve(
    path: StorePath,
    keep: Annotated[
        bool, typer.Option("--keep", help="The last commit stays; the one before is let go.")
    ] = False,
    back: Annotated[
        bool, typer.Option("--back", help="Back to the commit before the last.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Goes back to the held version, or lets go of it.

    A store that was open with hold=True when its program died holds the version before its last
    commit (pmstore info tells). So does one of a job of several ranks: there it is not known that
    all ranks have the last commit, and the job, attached again, finds out by itself. If you decide
    by hand, all its stores have to be at the same step afterwards (pmstore info tells the steps).

    Exit code 1 if nothing is held.

    Example: pmstore resolve /dev/shm/run.pm --back
    """
    if keep == back:
        raise fail(
            "say which: --keep or --back. The store of a job of several ranks needs neither: start "
            "the job again, and it decides; pmstore job with all its stores tells what it can "
            "go on from",
            2,
        )
    with reading(path, lock=True) as store:  # while a store is written, only its writer knows this
        held, domain = store.holds, store.info().domain
    if not held:
        raise fail(f"{path}: nothing is held: the last commit is final", 1)
    with ending(), opened(path, "r+", hold=True, domain=domain) as store:
        pool = store._core.pool
        if back:
            pool.back()
        else:
            pool.release()
        epoch = store.epoch
    tell(
        f"{path}: {'back: ' if back else ''}epoch {epoch} is final",
        {"path": str(path), "back": back, "epoch": epoch},
        as_json,
    )
