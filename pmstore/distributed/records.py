"""What a store says of the jobs of its runs, read without the program."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pmstore.base.held import Held
from pmstore.distributed.generations import Member, Record, decode, job_name
from pmstore.engine.reports import JobState
from pmstore.errors import CorruptStoreError
from pmstore.objects.containers import tree

if TYPE_CHECKING:
    from pmstore.store import Store  # which asks here for what it tells of itself


def jobs(store: Store) -> tuple[JobState, ...]:
    """Of each run that is in a job. Of a damaged store: none."""
    try:
        found = members(store, store.path)
    except CorruptStoreError:  # which check tells
        return ()
    return tuple(
        JobState(
            run=run,
            job=job_name(one.record.key.job),
            rank=one.record.rank,
            world=one.record.world,
            term=one.record.key.term,
            generation=one.record.key.number,
            step=one.record.key.step,
        )
        for run, one in found.items()
        if one.record is not None
    )


def stored_runs(store: Store) -> list[str]:
    """The names of its training runs, those of groups in groups too."""
    found = (
        entry.name.removesuffix("/progress")
        for entry in tree(store)
        if entry.name.endswith("/progress")
        and (entry.kind, entry.dtype, entry.shape) == ("array", "int64", (4,))
    )
    return [run for run in found if f"{run}/about" in store]


def members(store: Store, name: str) -> dict[str, Member]:
    """What the store would bring to a joining of each of its runs. name: of the store, for
    messages.

    Raises: CorruptStoreError: a run has a record that no job wrote.
    """
    return {run: _member(store, run, name) for run in stored_runs(store)}


def without_run(store: Store, name: str) -> Member:
    """What it would bring to a joining of a run that it does not have."""
    pool = store._core.pool
    return Member(None, pool.info.uuid.hex(), pool.in_doubt, None, name=name)


def _member(store: Store, run: str, name: str) -> Member:
    step = int(store[f"{run}/progress"][0])
    record = read_record(store, run, store.path)
    return replace(without_run(store, name), record=record, run_step=step)


def read_record(held: Held, run: str, path: str) -> Record | None:
    """What a job wrote of the run; None: it is in none. held: a store, or what is asked like one.
    path: for messages.

    Raises: CorruptStoreError: no job wrote it.
    """
    try:
        return decode(held[f"{run}/job"]) if f"{run}/job" in held else None
    except (ValueError, TypeError) as error:
        raise CorruptStoreError(f"{path}: {run}/job: {error}") from error
