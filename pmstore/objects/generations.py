"""Generations of a job: what a rank's store says of them, and which one all ranks can produce.

A *generation* is a global commit. Each rank keeps what it knows of the last one, and of the one
before, as 16 numbers in its run (`Record`). Two generations are the same only if their keys are.
Nothing here reads a store or sends a message.

>>> first = Record(Key((5, 6), 1, 0, 0), 0, 2, 99, NO_RUN)
>>> ahead = first.following(1)
>>> decode(encode(ahead)) == ahead
True
>>> behind = Member(replace(first, rank=1), uuid="b", held=True, run_step=0, rank=1, world=2)
>>> newest_common([Member(ahead, uuid="a", held=True, run_step=1, rank=0, world=2), behind])
Key(job=(5, 6), term=1, number=0, step=0, mark=0)
>>> told = explain([Member(ahead, uuid="a", held=False, run_step=1, rank=0, world=2), behind])
>>> print(told[0].partition(":")[0])
the stores are at different generations, and no rank holds the one that another is at
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

FORMAT = 1
NUMBERS = 16
"""How many numbers a record has, each of 64 bits with a sign."""


@dataclass(frozen=True, slots=True)
class Key:
    """Says which state of a run it is. Two states are the same generation only if all of the key is
    equal.

    Attributes:
        job: two random numbers; zeros of a state that no job made.
        term: in which the generation was made. Each joining begins a new one, from 1 on, and makes
            its first generation.
        number: of the generation, from 0 on.
        step: of the run.
        mark: of all that the run did in that term until then. It begins with a random number, which
            all ranks share, and changes with each batch of `run.batches` (without a
            loader, with each update by an optimizer) and each roll back. So two
            stores at the same step, of which one left out a commit, was rolled back alone, or was
            copied and trained apart, are told from each other.
    """

    job: tuple[int, int]
    term: int
    number: int
    step: int
    mark: int = 0

    @property
    def by_job(self) -> bool:
        return self.term > 0

    def __str__(self) -> str:
        if self.by_job:
            return f"generation {self.number} (step {self.step}, term {self.term})"
        return "no run" if self == NO_RUN else f"step {self.step} of a run without a job"


NO_RUN = Key((0, 0), -1, -1, -1)
"""The state of a store before a job made the run in it."""


def without_job(step: int) -> Key:
    """Returns the key of a state that no job made: the run was never in one, or has not joined
    yet."""
    return Key((0, 0), 0, 0, step)


@dataclass(frozen=True, slots=True)
class Record:
    """The content of the array `<run>/job`.

    Attributes:
        key: of the last commit.
        rank, world: of this store in the job, and how many there are.
        layout: a digest of what all ranks must have alike.
        previous: of the commit before the last.
    """

    key: Key
    rank: int
    world: int
    layout: int
    previous: Key

    def following(self, step: int, mark: int = 0) -> Record:
        """Returns the record of the next generation, which ends with that step."""
        key = replace(self.key, number=self.key.number + 1, step=step, mark=mark)
        return replace(self, key=key, previous=self.key)

    def joined(self, term: int, mark: int = 0) -> Record:
        """Returns the record of the generation that a joining makes: the first one of its term, at
        the same step."""
        key = replace(self.key, number=self.key.number + 1, term=term, mark=mark)
        return replace(self, key=key, previous=self.key)


def encode(record: Record) -> list[int]:
    """Returns the numbers of the array `<run>/job`, int64."""
    key, previous = record.key, record.previous
    head = [FORMAT, *key.job, key.mark, key.term, key.number, key.step]
    placed = [record.rank, record.world, record.layout]
    return [*head, *placed, previous.term, previous.number, previous.step, previous.mark, 0, 0]


def decode(array: Iterable[Any]) -> Record:
    """Returns the record that the array holds.

    Raises: ValueError: it holds none, or one of a newer format.
    """
    numbers = [int(number) for number in array]
    if len(numbers) != NUMBERS:
        raise ValueError(f"a job's record has {NUMBERS} numbers, not {len(numbers)}")
    if numbers[0] != FORMAT:
        raise ValueError(
            f"a job's record of format {numbers[0]}; this version of pmstore knows {FORMAT}"
        )
    job, mark = (numbers[1], numbers[2]), numbers[3]
    term, number, step, rank, world, layout = numbers[4:10]
    key = Key(job, term, number, step, mark)
    term, number, step, mark = numbers[10:14]
    previous = Key(job if term > 0 else (0, 0), term, number, step, mark)
    sound = (
        job != (0, 0)
        and min(key.term - 1, key.number, key.step, key.mark) >= 0
        and 0 <= rank < world
        and not any(numbers[14:])
        and (previous == NO_RUN or _may_precede(previous, key))
    )
    if not sound:
        raise ValueError(f"a job's record that no job wrote: {numbers}")
    return Record(key, rank, world, layout, previous)


def _may_precede(previous: Key, key: Key) -> bool:
    if not 0 <= previous.step <= key.step or previous.mark < 0:
        return False
    if not previous.by_job:  # a run that the job took in
        return previous == without_job(previous.step) and key.number == 0
    return previous.number == key.number - 1 and previous.term <= key.term


@dataclass(frozen=True, slots=True)
class Member:
    """What one rank brings to a joining.

    Attributes:
        record: of its store; None: there is no run, or no job has made it.
        uuid: of the store.
        held: whether it holds the version before its last commit.
        run_step: of the last commit; None: there is no run.
        rank, world: as given now; None where a store is looked at without its program.
        name: of the store, for messages.
    """

    record: Record | None
    uuid: str
    held: bool
    run_step: int | None
    rank: int | None = None
    world: int | None = None
    name: str = ""

    @property
    def keys(self) -> tuple[Key, ...]:
        """The states that the store can produce, the newest first."""
        if self.record is None:
            return (NO_RUN if self.run_step is None else without_job(self.run_step),)
        here, before = self.record.key, self.record.previous
        return (here, before) if self.held and before != here else (here,)

    @property
    def strayed(self) -> bool:
        """Whether the run was trained outside its job."""
        return self.record is not None and self.run_step != self.record.key.step

    def __str__(self) -> str:
        rank = self.rank
        if rank is None and self.record is not None:
            rank = self.record.rank
        if rank is None:
            return self.name or "a store"
        return f"rank {rank} ({self.name})" if self.name else f"rank {rank}"


def newest_common(members: Sequence[Member]) -> Key | None:
    """Returns the newest state that every member can produce. `NO_RUN` is a state too. Returns None
    if there is no such state, or the stores do not belong together: `explain` says why."""
    return None if _misplaced(members) else _common(members)


def explain(members: Sequence[Member]) -> list[str]:
    """Says why there is no newest common generation, and what each member can produce: a sentence
    each. The list is empty if there is one."""
    reasons = _misplaced(members)
    if not reasons and _common(members) is not None:
        return []
    if not reasons:
        reasons = _apart(members)
    can = [f"{one} can produce {' and '.join(map(str, one.keys))}" for one in members]
    return [*reasons, *can]


def _common(members: Sequence[Member]) -> Key | None:
    if not members:
        return None
    others = [one.keys for one in members[1:]]
    return next((key for key in members[0].keys if all(key in keys for keys in others)), None)


def _misplaced(members: Sequence[Member]) -> list[str]:
    """Says which stores do not belong where they are, whatever their generations are.

    It says nothing where all can go back to before the job: several starts may have been killed
    while each began a job of its own.
    """
    common = _common(members)
    if common is not None and not common.by_job:
        return []
    recorded = [(one, one.record) for one in members if one.record is not None]
    reasons = []
    jobs = _grouped((record.key.job, one) for one, record in recorded)
    if len(jobs) > 1:
        reasons.append(
            "the stores are of different jobs: "
            + "; ".join(f"{_listed(ones)} of job {job_name(job)}" for job, ones in jobs)
            + ". Give each rank the store that it had"
        )
    twice: set[int] = set()
    places = _grouped(((record.key.job, record.rank, one.uuid), one) for one, record in recorded)
    for (_, rank, _), ones in places:
        if len(ones) > 1:
            twice.update(map(id, ones))
            reasons.append(
                f"{_listed(ones)} have copies of one store, that of rank {rank}: give each rank "
                "the store that it had"
            )
    alike = Counter((record.key.job, record.rank) for _, record in recorded)
    for one, record in recorded:
        if id(one) in twice:
            continue
        if one.rank is not None and one.rank != record.rank:
            reasons.append(
                f"{one} was given the store of rank {record.rank}: give each rank the store that "
                "it had"
            )
        elif one.rank is None and alike[record.key.job, record.rank] > 1:
            reasons.append(f"{one} is not the only store of that rank")
        if one.world is not None and one.world != record.world:
            reasons.append(
                f"{one} was one of {record.world} ranks, and there are {one.world} now: start the "
                "job with as many as before"
            )
    for one, record in recorded:
        if one.strayed:
            now = "gone" if one.run_step is None else f"at step {one.run_step}"
            reasons.append(
                f"the run of {one} was changed outside the job: it is {now}, and the job's last "
                f"generation there is of step {record.key.step}"
            )
    if len(jobs) == 1 and all(one.rank is None for one in members):
        world = max(record.world for _, record in recorded)
        missing = sorted(set(range(world)) - {record.rank for _, record in recorded})
        if len(members) < world:  # else those without a record may be the missing ones
            told = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            reasons.append(f"the job has {world} ranks: the stores of {told} are missing")
    return reasons


def _apart(members: Sequence[Member]) -> list[str]:
    """Says why stores that may belong together have no state in common."""
    without = [one for one in members if one.record is None]
    if without and len(without) < len(members):
        return [
            (
                f"{_listed(without)} {'has' if len(without) == 1 else 'have'} no generation of the "
                "job, the others do: give each rank the store that it had. If that is lost, and "
                "each rank has the whole model (DistributedDataParallel): pmstore job --adopt "
                "STORE makes a run of one rank's store, to be copied for all ranks"
            )
        ]
    if without:
        return [
            (
                "the stores are at different steps of runs that were made without a job: begin "
                "with stores at the same step"
            )
        ]
    made: dict[int, set[Key]] = defaultdict(set)
    for one in members:
        for key in one.keys:
            if key.by_job:
                made[key.number].add(key)
    reasons = []
    for number, keys in sorted(made.items()):
        terms = sorted({key.term for key in keys})
        if len(terms) > 1:
            reasons.append(
                f"generation {number} of terms {', '.join(map(str, terms))} is not the same one: "
                "the ranks did not commit it together"
            )
        elif len(keys) > 1:
            reasons.append(
                f"generation {number} is not the same one at all ranks: one of them left out a "
                "commit, or rolled back alone, or its store is of a copy that was trained apart"
            )
    return reasons or [
        (
            "the stores are at different generations, and no rank holds the one that another is "
            "at: give each rank its newest store, or all ranks copies that were made while the job "
            "did not run"
        )
    ]


def _grouped(pairs: Iterable[tuple[Any, Member]]) -> list[tuple[Any, list[Member]]]:
    found: dict[Hashable, list[Member]] = defaultdict(list)
    for key, one in pairs:
        found[key].append(one)
    return list(found.items())


def _listed(members: Sequence[Member]) -> str:
    told = [str(one) for one in members[:8]] + ["..."] * (len(members) > 8)
    return ", ".join(told[:-1]) + (" and " if len(told) > 1 else "") + told[-1]


def job_name(job: tuple[int, int]) -> str:
    """Returns the job's name as messages show it: the first 8 hexadecimal digits, which are enough
    to tell jobs apart."""
    return f"{job[0] & (2**64 - 1):016x}"[:8]
