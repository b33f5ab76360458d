"""Reads what a program logged of a run, out of its store: `<run>/log/names`, and arrays
`<run>/log/0`, `/1`, ... of rows (step, number of the name from 1, value) in the order of the steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from pmstore.course.buckets import Rows
from pmstore.objects.containers import Group

if TYPE_CHECKING:
    from pmstore.store import Store

ROWS = 1024
"""Of one array."""
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


def rows_of(store: Store, run: str, names: int) -> Rows:
    """Returns the rows of so many names, in the order of the steps; what is no row is left out."""
    rows = np.concatenate([np.zeros((0, 3)), *arrays_of(store, run)])
    steps, numbers = rows[:, 0], rows[:, 1]
    with np.errstate(all="ignore"):
        whole = (np.floor(steps) == steps) & (np.floor(numbers) == numbers)
        rows = rows[whole & (steps >= 0) & (steps < _MOST) & (numbers >= 1) & (numbers <= names)]
    if (rows[1:, 0] < rows[:-1, 0]).any():
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
    return np.asarray(rows)


def steps_of(store: Store, run: str, names: int) -> Iterator[tuple[int, dict[int, float]]]:
    """Yields each step that logged something, ascending, with the values by the number of their
    name, from 0. Of a name that was logged twice in a step, the last value counts. names: how many
    there are; rows of others are left out."""
    for step, group in groupby(rows_of(store, run, names), key=itemgetter(0)):
        yield int(step), {int(name) - 1: float(value) for _, name, value in group}
