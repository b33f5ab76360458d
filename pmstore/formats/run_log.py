"""Writes what the programs of a run logged as a table for other programs: CSV."""

from __future__ import annotations

import csv
import io
import os
from typing import TYPE_CHECKING

from pmstore._base.newfile import PRIVATE, new_file
from pmstore.course.logged import table_of

if TYPE_CHECKING:
    from pmstore.store import Store


def export_log(
    store: Store, path: str | os.PathLike[str], *, run: str = "run", mode: int = PRIVATE
) -> int:
    """Writes a CSV file with a line for each step that logged something, as of the last commit: the
    step, then a column for each name, empty where the step did not log it. Numbers are written so
    that reading them gives the same float64; `pandas.read_csv(path, index_col="step")` does.

    run: its name. mode: permissions of the file, which is there whole, or not at all. Returns how
    many steps it has.

    Raises: KeyError: the store has no such run; FileExistsError; OSError.
    """
    if f"{run}/progress" not in store:
        raise KeyError(f"{store.path}: no run {run!r}")
    steps, values = table_of(store, run)
    columns = [[repr(v) if v is not None else "" for v in one.tolist()] for one in values.values()]
    with new_file(path, mode) as file, io.TextIOWrapper(file, "utf-8", newline="") as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["step", *values])
        writer.writerows(zip(steps.tolist(), *columns, strict=True))
    return len(steps)
