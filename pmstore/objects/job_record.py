"""What a store says of the jobs of its runs, read without the program."""

from __future__ import annotations

from dataclasses import replace

from pmstore._base.mapping_protocol import Held
from pmstore._engine.store_info import JobState
from pmstore.errors import CorruptStoreError
from pmstore.objects.containers import Group, tree
from pmstore.objects.generations import Member, Record, decode, job_name


def jobs(store: Group) -> tuple[JobState, ...]:
    """Returns the state of each run that is in a job; of a damaged store, none."""
    try:
        found = members(store, store._core.path)
    except CorruptStoreError:  # `check` tells of the damage
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


def stored_runs(store: Group) -> list[str]:
    """Returns the names of the store's training runs, also of those in groups within groups."""
    found = (
        entry.name.removesuffix("/progress")
        for entry in tree(store)
        if entry.name.endswith("/progress")
        and (entry.kind, entry.dtype, entry.shape) == ("array", "int64", (4,))
    )
    return [run for run in found if f"{run}/about" in store]


def members(store: Group, name: str) -> dict[str, Member]:
    """Returns what the store would bring to a joining of each of its runs. name: of the store, for
    messages.

    Raises: CorruptStoreError: a run has a record that no job wrote.
    """
    return {run: _member(store, run, name) for run in stored_runs(store)}


def without_run(store: Group, name: str) -> Member:
    """Returns what the store would bring to a joining of a run that it does not have. name: of the
    store, for messages."""
    pool = store._core.pool
    return Member(None, pool.info.uuid.hex(), pool.in_doubt, None, name=name)


def _member(store: Group, run: str, name: str) -> Member:
    step = int(store[f"{run}/progress"][0])
    record = read_record(store, run, store._core.path)
    return replace(without_run(store, name), record=record, run_step=step)


def read_record(held: Held, run: str, path: str) -> Record | None:
    """Returns the record that a job wrote of the run; None if the run is in no job. held: a store,
    or an object with a store's look-ups. path: for messages.

    Raises: CorruptStoreError: no job wrote it.
    """
    try:
        return decode(held[f"{run}/job"]) if f"{run}/job" in held else None
    except (ValueError, TypeError) as error:
        raise CorruptStoreError(f"{path}: {run}/job: {error}") from error
