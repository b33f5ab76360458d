"""Writes what the programs of a run logged as a table for other programs: CSV."""

from __future__ import annotations

import csv
import io
import os
from typing import TYPE_CHECKING

from pmstore._base.newfile import PRIVATE, new_file
from pmstore._base.text import printable
from pmstore.course.logged import names_of, steps_of

if TYPE_CHECKING:
    from pmstore.store import Store


def export_log(
    store: Store, path: str | os.PathLike[str], *, run: str = "run", mode: int = PRIVATE
) -> int:
    """Writes a CSV file with a line for each step that logged something: the step, then a column
    for each name, empty where the step did not log it. What the store holds is written: in the
    program that trains, also what is not committed yet.

    Numbers are written so that reading them gives the same float64. In names, what cannot be
    printed is escaped. `pandas.read_csv(path, index_col="step")` reads it.

    run: its name. mode: permissions of the file, which is there whole, or not at all. Returns how
    many steps it has.

    Raises: KeyError: the store has no such run; FileExistsError; OSError.
    """
    if f"{run}/progress" not in store:
        raise KeyError(f"{store.path}: no run {run!r}")
    names = names_of(store, run)
    count = 0
    with new_file(path, mode) as file, io.TextIOWrapper(file, "utf-8", newline="") as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["step", *map(printable, names)])
        line = [""] * len(names)
        for step, values in steps_of(store, run, len(names)):
            for name, value in values.items():
                line[name] = repr(value)
            writer.writerow([step, *line])
            for name in values:
                line[name] = ""
            count += 1
    return count
