"""Writes arrays into a group of a store, in place where they fit: what is the same is not written,
and the file does not grow."""

from __future__ import annotations

from typing import Any

import numpy as np

from pmstore.objects.containers import Group

Array = np.ndarray[Any, np.dtype[Any]]


def put(group: Group, name: str, array: Array) -> None:
    """Makes the array of that name hold this one's elements. It has this one's order of axes if
    that is dense, by rows or by columns; otherwise it lies by rows. It stays where it is if shape,
    dtype and order are the same.

    Raises: as assigning to a name of a group does.
    """
    in_columns = array.flags.f_contiguous and not array.flags.c_contiguous
    dense = np.asarray(array, order="F" if in_columns else "C")
    held = group.get(name)
    if (
        not isinstance(held, np.ndarray)
        or (held.shape, held.dtype) != (dense.shape, dense.dtype)
        or held.flags.c_contiguous != dense.flags.c_contiguous
    ):
        group[name] = dense
    elif not np.array_equal(_bytes(held), _bytes(dense)):
        held[...] = dense


def put_history(group: Group, name: str, history: Array) -> None:
    """Makes the first elements of the array of that name these, one-dimensional. Where they have
    grown, only what is new is written; there is room for as many again."""
    held = group.get(name)
    if held is None or held.dtype != history.dtype or len(held) < len(history):
        room = np.zeros(1 << len(history).bit_length(), history.dtype)
        room[: len(history)] = history
        group[name] = room
        return
    first = held[: len(history)]
    differs = np.flatnonzero(_bytes(first) != _bytes(history))
    if len(differs):
        at = differs[0] // history.itemsize
        first[at:] = history[at:]


def _bytes(dense: Array) -> Array:
    return dense.ravel("K").view(np.uint8) if dense.size and dense.itemsize else np.empty(0, "u1")
