"""Writes what the programs of a run logged for other programs: CSV, Parquet, and event files of
TensorBoard. What is logged is a table (`pmstore.course.logged`), and all of them have its numbers.
"""

from __future__ import annotations

import csv
import errno
import io
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from pmstore._base.newfile import PRIVATE, new_file
from pmstore._base.text import printable
from pmstore.course.logged import STEP, Logged, logged
from pmstore.course.reader import Told, read
from pmstore.extras import optional

if TYPE_CHECKING:
    import pandas

    from pmstore.store import Store

_CELLS = 1 << 16
"""Of the table that are text at a time."""


def read_log(store: Store, *, run: str = "run") -> pandas.DataFrame:
    """Returns what the programs of a run logged: a line for each step that logged something, under
    its number (the index `step`, int64), and a column of float64 for each name, in the order of
    first use. It is nan where a step did not log the name. What the store holds is read: in the
    program that trains, also what is not committed yet; `Run.history` is for that program.

    A name of the program that is `step` has the column `step.1`.

    run: its name. Raises: KeyError: the store has no such run; ModuleNotFoundError: pandas is not
    there.
    """
    return logged(store, run).frame()


def export_log(
    store: Store, path: str | os.PathLike[str], *, run: str = "run", mode: int = PRIVATE
) -> int:
    """Writes a file with a line for each step that logged something: the step, then a column for
    each name, empty where the step did not log it. What the store holds is written: in the program
    that trains, also what is not committed yet. A path that ends in `.parquet` makes it Parquet,
    any other CSV. A name that is `step` has the column `step.1`.

    CSV: numbers are written so that reading them gives the same float64. In names, what cannot be
    printed is escaped, and one that begins with =, +, - or @ has a ' before it, or a spreadsheet
    would take it for a formula. `pandas.read_csv(path, index_col="step")` reads it.

    Parquet: float64, null where the step did not log the name. `pandas.read_parquet(path)` reads
    it.

    run: its name. mode: permissions of the file, which is there whole, or not at all. Returns how
    many steps it has.

    Raises: KeyError: the store has no such run; ModuleNotFoundError: pyarrow is not there, for
    Parquet; FileExistsError; OSError.
    """
    log = logged(store, run)
    write = _write_parquet if Path(path).suffix.lower() == ".parquet" else _write_csv
    with new_file(path, mode) as file:
        write(log, file)
    return len(log.steps)


def _write_csv(log: Logged, file: BinaryIO) -> None:
    with io.TextIOWrapper(file, "utf-8", newline="") as text:
        names = log.labels(STEP, names=map(_header, log.names))
        csv.writer(text, lineterminator="\n").writerow([STEP, *names])
        for steps, lines, columns, values in log.parts(_CELLS):
            cells = np.full((len(steps), 1 + len(names)), "", object)
            cells[:, 0] = list(map(str, steps.tolist()))
            cells[lines, 1 + columns] = list(map(repr, values.tolist()))
            text.writelines(f"{','.join(line)}\n" for line in cells.tolist())


def _header(name: str) -> str:
    name = printable(name)
    return f"'{name}" if name.startswith(("=", "+", "-", "@")) else name


def _write_parquet(log: Logged, file: BinaryIO) -> None:
    with optional:
        import pyarrow
        import pyarrow.parquet
    values, given = log.dense()
    columns = [pyarrow.array(log.steps)]
    columns += [
        pyarrow.array(value, mask=~there) for value, there in zip(values, given, strict=True)
    ]
    table = pyarrow.Table.from_arrays(columns, names=[STEP, *log.labels(STEP)])
    pyarrow.parquet.write_table(table, file)


def export_tensorboard(
    store: Store, folder: str | os.PathLike[str], *, run: str = "run", mode: int = PRIVATE
) -> int:
    """Writes an event file for TensorBoard into a folder, which is made if it is not there: a curve
    for each name. What the store holds is written, as by `export_log`.

    TensorBoard takes a folder for a run, and joins what all event files in it have. So a folder
    that has one is refused: give each export one of its own.

    The wall times are those at which the steps ended, as far as the store has them: of the newest
    512, and of about 1,000 more over the whole run; between them they are estimates. Values are
    float32, as TensorBoard has them. In names, what cannot be printed is escaped.

    run: its name. mode: permissions of the file, which is there whole, or not at all. Returns how
    many steps it has.

    Raises: KeyError: the store has no such run; FileExistsError: the folder has event files;
    ModuleNotFoundError: tensorboard is not there; OSError.
    """
    with optional:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    log = logged(store, run)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    if any(place.glob("*tfevents*")):  # as TensorBoard looks for them
        raise FileExistsError(
            errno.EEXIST,
            "the folder has event files, and TensorBoard would join the curves: give another "
            "folder, or remove it first",
            str(place),
        )
    names = log.labels(names=map(printable, log.names))
    began = time.time()
    times = _times(read(store, run), log.steps, began)
    path = place / f"events.out.tfevents.{began:.0f}.pmstore"
    with new_file(path, mode, part_name="pmstore") as file:  # a TensorBoard may be reading there
        writer = RecordWriter(file)
        writer.write(Event(wall_time=began, file_version="brain.Event:2").SerializeToString())
        at = 0
        for steps, lines, columns, values in log.parts(_CELLS):
            of_steps: list[dict[int, float]] = [{} for _ in steps]
            for line, column, value in zip(
                lines.tolist(), columns.tolist(), values.tolist(), strict=True
            ):
                of_steps[line][column] = value
            for step, told in zip(steps.tolist(), of_steps, strict=True):
                summary = Summary(
                    value=[
                        Summary.Value(tag=names[column], simple_value=value)
                        for column, value in told.items()
                    ]
                )
                event = Event(wall_time=times[at], step=step, summary=summary)
                writer.write(event.SerializeToString())
                at += 1
    return len(log.steps)


def _times(course: Told | None, steps: Any, otherwise: float) -> list[float]:
    """Returns when the steps ended, since 1970. Between two that the course of the run has, time
    passes evenly; what a process was not there for passed before its first step."""
    points: list[tuple[float, float]] = []
    if course is not None:
        points = [(stretch.last, stretch.time) for stretch in course.whole()]
        points += [(start.step + 0.5, start.time) for start in course.starts]
    if not points:
        return [otherwise] * len(steps)
    of, when = zip(*sorted(points), strict=True)
    found: list[float] = np.interp(steps, of, when).tolist()
    return found
