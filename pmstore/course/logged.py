"""Reads what a program logged of a run, out of its store: `<run>/log/names`, and arrays
`<run>/log/0`, `/1`, ... of rows (step, number of the name from 1, value) in the order of the steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from pmstore.course.buckets import Rows
from pmstore.objects.containers import Group

if TYPE_CHECKING:
    from pmstore.store import Store

ROWS = 1024
"""Of one array."""
_NUMBER = re.compile("[0-9]{1,9}")
_LETTERS = 80
"""Of a name, as it is told."""
_MOST = 2.0**53


def names_of(store: Store, run: str) -> list[str]:
    """Returns the names that were logged, in the order of first use; none if what stands there is
    no list."""
    stored = store.get(f"{run}/log/names")
    return [str(name)[:_LETTERS] for name in stored] if isinstance(stored, list) else []


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


def table_of(store: Store, run: str) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
    """Returns the steps (int64, ascending, each once), and for each name its values: a masked array
    of float64, masked where a step did not log it. Of a name that was logged twice in a step, the
    last value counts."""
    names = names_of(store, run)
    parts = [np.array(rows) for rows in arrays_of(store, run)]
    rows = np.concatenate([np.zeros((0, 3)), *parts])
    with np.errstate(all="ignore"):
        sound = (rows[:, 0] >= 0) & (rows[:, 0] < _MOST) & (rows[:, 1] >= 1)
        rows = rows[sound & (rows[:, 1] <= len(names))]
    steps, places = np.unique(rows[:, 0].astype(np.int64), return_inverse=True)
    values: dict[str, Any] = {}
    for number, name in enumerate(names, 1):
        column = np.ma.masked_all(len(steps), np.float64)  # type: ignore[no-untyped-call]
        of_name = rows[:, 1] == number
        column[places[of_name]] = rows[of_name, 2]  # the last one stays
        values[name] = column
    return steps, values
