"""Reads what a program logged of a run, out of its store: `<run>/log/names`, and arrays
`<run>/log/0`, `/1`, ... of rows (step, number of the name from 1, value) in the order of the steps.

One table, `Logged`, is what `run.history()` returns and what all files of a log are made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pmstore.course.buckets import Rows
from pmstore.errors import NoSuchNameError
from pmstore.extras import optional
from pmstore.objects.containers import Group

if TYPE_CHECKING:
    import pandas

    from pmstore.store import Store

ROWS = 1024
"""Of one array."""
STEP = "step"
"""Names the column of the steps. A column that was logged under this name is `step.1`."""
_NUMBER = re.compile("[0-9]{1,9}")
_MOST = 2.0**53


def names_of(store: Store, run: str) -> list[str]:
    """Returns the names that were logged, in the order of first use; none if what stands there is
    no list."""
    stored = store.get(f"{run}/log/names")
    return [str(name) for name in stored] if isinstance(stored, list) else []


def arrays_of(store: Store, run: str, *, newest: bool = False) -> Iterator[Rows]:
    """Yields the arrays of rows, oldest first, without those that are damaged. newest: newest
    first."""
    group = store.get(f"{run}/log")
    if not isinstance(group, Group):
        return
    numbers = sorted((int(name) for name in group if _NUMBER.fullmatch(name)), reverse=newest)
    for number in numbers:
        rows = store.get(f"{run}/log/{number}")
        if isinstance(rows, np.ndarray) and rows.dtype == np.float64 and rows.shape[1:] == (3,):
            yield rows[:ROWS]


def sound_rows(arrays: Iterable[Rows], names: int) -> Rows:
    """Returns the rows in the order of the steps, without those that no program wrote. names: how
    many there are."""
    rows = np.concatenate([np.zeros((0, 3)), *arrays])
    steps, numbers = rows[:, 0], rows[:, 1]
    with np.errstate(all="ignore"):
        whole = (np.floor(steps) == steps) & (np.floor(numbers) == numbers)
        rows = rows[whole & (steps >= 0) & (steps < _MOST) & (numbers >= 1) & (numbers <= names)]
    if (rows[1:, 0] < rows[:-1, 0]).any():
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
    return np.asarray(rows)


class Logged:
    """What was logged, as a table: a line for each step that logged something, a column for each
    name.

    Attributes:
        names: of the columns, in the order of first use, as the program gave them.
        steps: ascending (int64).
    """

    def __init__(self, names: Sequence[str], rows: Iterable[Rows]) -> None:
        """Makes the table of arrays of rows. Of a name that was logged twice in a step, the last
        value counts."""
        self.names: Sequence[str] = names
        found = sound_rows(rows, len(names))
        begins = np.append(True, found[1:, 0] != found[:-1, 0])[: len(found)]
        self.steps: np.ndarray[Any, np.dtype[np.int64]] = found[begins, 0].astype(np.int64)
        self._first = np.append(np.flatnonzero(begins), len(found))  # row of each step, and the end
        self._line = np.cumsum(begins) - 1  # of each row
        self._column = found[:, 1].astype(np.int64) - 1
        self._value = found[:, 2].copy()

    def labels(self, *taken: str, names: Iterable[str] | None = None) -> list[str]:
        """Returns a label for each column, all different and none of those that are taken: the
        name, or, as pandas calls a second column of a name, `name.1`. names: instead of the
        columns' own."""
        given = list(self.names if names is None else names)
        used, labels = {*taken, *given}, list[str]()
        first = set(given) - set(taken)
        for name in given:
            label, number = name, 0
            if name in first:
                first.remove(name)
            else:
                while label in used:
                    number += 1
                    label = f"{name}.{number}"
                used.add(label)
            labels.append(label)
        return labels

    def dense(self) -> tuple[Rows, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Returns the values, a row for each column, nan where the step did not log it; and whether
        it did."""
        shape = len(self.names), len(self.steps)
        values, given = np.full(shape, np.nan), np.zeros(shape, bool)
        values[self._column, self._line] = self._value
        given[self._column, self._line] = True
        return values, given

    def frame(self) -> pandas.DataFrame:
        """Returns the table as a data frame. See `pmstore.exchange.read_log`.

        Raises: ModuleNotFoundError: pandas is not there.
        """
        with optional:
            import pandas
        frame: pandas.DataFrame = pandas.DataFrame(
            self.dense()[0].T,
            index=pandas.Index(self.steps, name=STEP),
            columns=self.labels(STEP),
            copy=False,
        )
        return frame

    def parts(self, cells: int) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yields the table in parts of about so many cells, which bounds what they take as text: of
        each the steps, and of its values, in the order in which they were logged, the line in the
        part, the column, and the value."""
        lines = max(1, cells // max(1, len(self.names)))
        for begin in range(0, len(self.steps), lines):
            steps = self.steps[begin : begin + lines]
            rows = slice(self._first[begin], self._first[begin + len(steps)])
            yield steps, self._line[rows] - begin, self._column[rows], self._value[rows]


def logged(store: Store, run: str) -> Logged:
    """Reads what the store holds of the run's log.

    Raises: KeyError: the store has no such run.
    """
    if f"{run}/progress" not in store:
        raise NoSuchNameError(f"{store.path}: no run {run!r}")
    return Logged(names_of(store, run), arrays_of(store, run))
