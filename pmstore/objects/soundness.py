"""Finds out whether all that a store holds decodes."""

from __future__ import annotations

from collections.abc import Callable

from pmstore._engine.constants import GROUP, LIST, VALUE
from pmstore._engine.pool import Found, Pool
from pmstore.errors import CorruptStoreError, FormatVersionError
from pmstore.objects import array, slots, values


def problems(pool: Pool, looked: Callable[[], object]) -> list[str]:
    """Says in words what does not decode, each with its path. looked: called for each name, and
    each item of a list. REQUIRES: the store's lock, and sound directories."""
    told = []
    for raw, found in pool.tree():
        looked()
        try:
            if found.kind == GROUP:
                if found.meta:
                    slots.check(pool, found)
            elif found.kind == LIST:
                _check_items(pool, found.data, looked)
            else:
                _check_object(found)
        except CorruptStoreError as error:
            told.append(f"{raw.decode()!r}: {error}")
        except FormatVersionError:
            pass  # sound, and to be read where it was written
    return told


def _check_items(pool: Pool, items: int, looked: Callable[[], object]) -> None:
    for at in range(pool.list_count(items)):
        looked()
        found = pool.item(items, b"", at, True)
        if found is None:
            raise CorruptStoreError("a list is shorter than it says")
        try:
            _check_object(found)
        except CorruptStoreError as error:
            raise CorruptStoreError(f"item {at}: {error}") from error


def _check_object(found: Found) -> None:
    if found.kind == VALUE:
        values.decode(found.meta)
        return
    descriptor = array.Descriptor.unpack(found.meta)
    if not descriptor.torch:  # torch is not imported for this
        array.check_bytes(descriptor, array.numpy_dtype(descriptor).itemsize, found.data_bytes)
