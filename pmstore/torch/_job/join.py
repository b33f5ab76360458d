"""Joining a job: all ranks come to the newest generation that every one can produce.

tell       what this rank's store can produce, or what is wrong here
choose     the newest generation that all can; none, or programs that differ: all raise
go back    those that are ahead, durably: repeatable after a crash
come to    the epoch of the store that was committed most often
term       one more than any rank has seen, durably
begin      the run is made, or resumed
barrier    nobody trains before every rank has got here; what is wrong here is told again
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol, TypeVar

import msgpack
import numpy as np

from pmstore import Store
from pmstore._base.version import VERSION
from pmstore.errors import (
    CorruptStoreError,
    InDoubtError,
    MixedStoresError,
    PmstoreError,
    TransactionError,
)
from pmstore.job.meetings import Meetings
from pmstore.job.membership import Membership
from pmstore.job.peers import Peers, named
from pmstore.objects.generations import (
    NO_RUN,
    NUMBERS,
    Key,
    Member,
    Record,
    decode,
    encode,
    explain,
    newest_common,
    without_job,
)
from pmstore.objects.job_record import members as stored_members
from pmstore.torch._job.process_group import check_ranks
from pmstore.torch.program import Program
from pmstore.torch.run_errors import AttachError, MismatchError
from pmstore.torch.settings import fingerprint


class Detachable(Protocol):
    """What a rank makes of its run, and takes back if another rank cannot."""

    def detach(self) -> None: ...


_Made = TypeVar("_Made", bound=Detachable)
_TOLD_CHARACTERS = 2000  # of an error
_MOST_COMMITS = 1000  # by which stores of ranks are made alike


class Joining:
    """One rank's part. All ranks make each call, in this order: `tell`, `begin`, `membership`."""

    def __init__(self, store: Store, name: str, peers: Peers) -> None:
        self._store = store
        self._name = name
        self._peers = peers
        self._term = 0
        self._job = (0, 0)
        self._mark = 0
        self._from: Key = NO_RUN  # what the run begins or goes on from
        self._layout: dict[str, Any] = {}

    # ---- tell and choose

    def tell(self, prepare: Callable[[], tuple[Program, str]]) -> tuple[Program, str]:
        """Prepares, and compares with what the others have.

        prepare: checks what the program gives, and touches nothing; returns it, and what its
            policy is.

        Raises: what prepare raises; AttachError: another rank's did; MismatchError: ranks give
            different programs; MixedStoresError: no generation is common to all. At every rank,
            and nothing was written.
        """
        with self._peers.together():
            return self._tell(prepare)

    def _tell(self, prepare: Callable[[], tuple[Program, str]]) -> tuple[Program, str]:
        mine: BaseException | None = None
        told: dict[str, Any] = {}
        try:
            program, policy = prepare()
            check_ranks(program, self._peers.ranks)
            self._layout = _layout(self._name, program, policy)
            told = self._record()
        except Exception as error:
            mine, told = error, _failed(error)
        every = self._exchange(told, mine)
        if len({one["layout"] for one in every}) > 1:
            raise self._different(self._peers.gather(self._layout))
        members = [Member(**{**one["member"], "record": _record_of(one)}) for one in every]
        chosen = newest_common(members)
        if chosen is None:
            reasons = "\n".join(f"  {one}" for one in explain(members))
            raise MixedStoresError(
                f"{self._store.path}: the stores of the job's {self._peers.world} ranks have no "
                f"generation in common. Nothing was changed, and to start the job again does not "
                f"help\n{reasons}"
            )
        self._refuse_doubt_of_others(every, members)
        self._refuse_unlike_epochs(every, chosen)
        self._from = chosen
        self._term = 1 + max(one.record.key.term if one.record else 0 for one in members)
        *job, self._mark = every[0]["proposed"]
        self._job = chosen.job if chosen.by_job else tuple(job)
        return program, policy

    def _exchange(self, told: dict[str, Any], mine: BaseException | None) -> list[Any]:
        every = self._peers.gather(told)
        if mine is not None:
            raise mine
        failed = [rank for rank, one in enumerate(every) if "error" in one]
        if failed:
            said = "; ".join(f"rank {rank}: {every[rank]['error']}" for rank in failed)
            refused = AttachError(
                f"{self._store.path}: {named(failed)} of the job could not attach, so that this "
                f"rank does not either. {said}"
            )
            refused.permanent = any(every[rank]["permanent"] for rank in failed)
            raise refused
        return every

    def _record(self) -> dict[str, Any]:
        """What this store can produce."""
        store = self._store
        pool = store._core.pool
        if pool.in_doubt and store.written():
            raise TransactionError(
                f"{store.path}: something was written before attach (a tier with other settings is "
                "that too), and all ranks may have to go back to an earlier step: call attach "
                "first, or store.rollback()"
            )
        record = self._stored()
        steps = int(store[f"{self._name}/progress"][0]) if self._there else None
        member = Member(
            None, store.info().uuid, pool.in_doubt, steps, self._peers.rank, self._peers.world
        )
        return {
            "member": {**asdict(member), "name": ""},
            "record": None if record is None else encode(record),
            "layout": _digest(self._layout),
            "others": {
                run: [encode(one.record), one.run_step]
                for run, one in stored_members(store, "").items()
                if run != self._name and one.record is not None
            },
            "epoch": store.epoch + (store.written() and not pool.in_doubt),
            "shared": [tier for tier, config in store.tiers.items() if config.world_size > 1],
            "proposed": [secrets.randbits(62) for _ in range(3)],
        }

    def _refuse_doubt_of_others(self, every: Sequence[Any], members: Sequence[Member]) -> None:
        """What is held is one version of the whole store: it may be there for another run's ranks,
        and this one's joining would let go of it."""
        for run in sorted({run for one in every for run in one["others"]}):
            others = [
                _as_of(member, one["others"].get(run))
                for member, one in zip(members, every, strict=True)
            ]
            doubt = any(one.held and one.record is not None for one in others)
            # else it may be this run's, and that one is as it was
            certain = any(
                mine.held and mine.record is None and its.record is not None
                for mine, its in zip(members, others, strict=True)
            )
            apart = len({one.keys[0] for one in others}) > 1
            if doubt and apart and (certain or newest_common(others) is not None):
                raise InDoubtError(
                    f"{self._store.path}: not all ranks have the last commit of the run {run!r}, "
                    "whose job may have to go back: it would not be able to any more. Nothing was "
                    f"changed. First attach that run, at all ranks: attach(..., name={run!r}, "
                    "process_group=...), and detach() it. If its job will not go on: pmstore "
                    "resolve STORE --keep, with the store of each rank"
                )

    def _refuse_unlike_epochs(self, every: Sequence[Any], chosen: Key) -> None:
        """Where a tier of several ranks would take what is not alike: see `_come_to`."""
        epochs = [one["epoch"] for one in every]
        apart, shared = max(epochs) - min(epochs), [one["shared"] for one in every if one["shared"]]
        if shared and apart > (0 if chosen == NO_RUN else _MOST_COMMITS):
            told = ", ".join(f"{epoch:,} times at rank {rank}" for rank, epoch in enumerate(epochs))
            raise AttachError(
                f"{self._store.path}: the stores were committed {told}, and the tier "
                f"{shared[0][0]!r} of several ranks takes what has one number for one state. "
                "Nothing was changed. Before the first attach write and commit alike at all ranks, "
                "or not at all"
            )

    @property
    def _there(self) -> bool:
        return f"{self._name}/about" in self._store

    def _stored(self) -> Record | None:
        """Raises: CorruptStoreError."""
        numbers = self._store.get(f"{self._name}/job")
        try:
            return None if numbers is None else decode(numbers)
        except (ValueError, TypeError) as error:
            raise CorruptStoreError(f"{self._store.path}: {self._name}/job: {error}") from error

    def _different(self, layouts: list[Any]) -> MismatchError:
        flat = [dict(_flat(one)) for one in layouts]
        lines = []
        for key in sorted({key for one in flat for key in one}):
            values = [one.get(key, "not given") for one in flat]
            if any(value != values[0] for value in values):
                told = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
                lines.append(f"{key}: {told}")
        return MismatchError(
            "the ranks of the job do not give attach the same program: give all the same. Nothing "
            "was changed, and to start the job again as it is does not help",
            mismatched=lines,
        )

    # ---- go back and begin

    def begin(self, make: Callable[[Callable[[], None]], _Made]) -> tuple[_Made, bool]:
        """Goes back if this rank is ahead; makes or resumes the run; returns when all ranks have,
        and whether it was resumed.

        make: makes or resumes it. What it is given writes the job's record, in the transaction that
            makes the run or fits it to its program.

        Raises: what make raises; AttachError: another rank's did; PeerLostError.
        """
        store, pool = self._store, self._store._core.pool
        made: _Made | None = None
        mine: BaseException | None = None
        try:
            if store._core.job is not None:  # of a run that was detached
                store._core.job.give_way()
            if not pool.in_doubt:
                store.commit()  # what the program wrote before
            pool.hold_for_job()
            if self._here() != self._from:
                self._go_back()
            # every rank can produce it, so nobody goes further back
            pool.allow()
        except Exception as error:
            mine = error
        epochs = self._meet({"epoch": store.epoch}, mine)
        try:
            self._come_to(max(one["epoch"] for one in epochs))
            made = make(self._write)
        except Exception as error:
            mine = error
        try:
            self._meet({}, mine)
        except BaseException:
            if made is not None:
                made.detach()
            raise
        assert made is not None
        return made, self._from != NO_RUN

    def _meet(self, told: dict[str, Any], mine: BaseException | None) -> list[Any]:
        """All ranks have got here. Raises: mine; AttachError: another rank's; PeerLostError."""
        with self._peers.together():
            return self._exchange(told if mine is None else _failed(mine), mine)

    def _come_to(self, epoch: int) -> None:
        """The store's epoch becomes that of the rank that is furthest: going back is a commit, of
        some ranks alone. Tiers of several ranks take what has one number for one state."""
        store, name = self._store, f"{self._name}/joining"
        if not self._there or epoch - store.epoch > _MOST_COMMITS:
            return
        while store.epoch < epoch:
            # Something has to differ: a commit of what is there already may be none.
            store[name] = store.epoch
            if store.epoch + 1 == epoch:
                del store[name]
            store.commit()
            store._core.pool.allow()
        store.pop(name, None)  # of one that was killed in between; with the joining's own commit

    def _here(self) -> Key:
        record = self._stored()
        if record is not None:
            return record.key
        if not self._there:
            return NO_RUN
        return without_job(int(self._store[f"{self._name}/progress"][0]))

    def _write(self) -> None:
        """The record of the generation that the joining makes; pending.

        It is another one than what may lie in a store that is not here, and than any joining before
        has made: what each rank changes for a program that was edited is part of it.
        """
        record, layout = self._stored(), _digest(self._layout)
        if record is not None:
            record = replace(record.joined(self._term, self._mark), layout=layout)
        else:
            step = int(self._store[f"{self._name}/progress"][0])
            key = Key(self._job, self._term, 0, step, self._mark)
            record = Record(key, self._peers.rank, self._peers.world, layout, self._from)
            self._store.zeros(f"{self._name}/job", (NUMBERS,), "int64")
        self._store[f"{self._name}/job"][:] = encode(record)

    def _go_back(self) -> None:
        """Raises: CorruptStoreError: the version that is held is not what the record says."""
        self._store._go_back(self._store._core.pool.back)  # mirrors of the program's own follow
        self._store.history.took_back()
        if self._here() != self._from:
            raise CorruptStoreError(
                f"{self._store.path}: the version before the last commit is {self._here()}, and "
                f"the record of the last commit says {self._from}"
            )

    def membership(self, policy: str, meetings: Meetings) -> Membership:
        """Once all have got here."""
        numbers: np.ndarray[Any, Any] = self._store[f"{self._name}/job"]
        return Membership(self._store, self._name, self._peers, numbers, policy, meetings)


def _record_of(told: Mapping[str, Any]) -> Record | None:
    return None if told["record"] is None else decode(told["record"])


def _as_of(member: Member, told: list[Any] | None) -> Member:
    """What it brings of another run."""
    if told is None:
        return replace(member, record=None, run_step=None)
    return replace(member, record=decode(told[0]), run_step=told[1])


def _layout(name: str, program: Program, policy: str) -> dict[str, Any]:
    """What all ranks must give alike. What they may differ in: data, and generators."""
    settings: dict[str, Any] = fingerprint(program)
    settings.pop("loader", None)
    return {
        "pmstore": VERSION,
        "format of the run": program.format,
        "name": name,
        "policy": policy,
        "pieces": program.given(),
        "optimizers": {key: _class(one) for key, one in program.optimizers.items()},
        "tensors": {
            f"{key}/{tensor}" if key else tensor: f"{tuple(one.shape)} {one.dtype}"
            for key, model in program.models.items()
            for tensor, one in model.state_dict(keep_vars=True).items()
            if hasattr(one, "shape")
        },
        "settings": settings,
    }


def _class(piece: object) -> str:
    return f"{type(piece).__module__}.{type(piece).__qualname__}"


def _flat(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, (list, tuple)) and any(isinstance(one, dict) for one in value):
        items = list(enumerate(value))  # an optimizer's groups
    else:
        return [(path, value)]
    return [
        pair for key, one in items for pair in _flat(one, f"{path}, {key}" if path else str(key))
    ]


def _digest(layout: dict[str, Any]) -> int:
    return int.from_bytes(hashlib.blake2b(msgpack.packb(layout), digest_size=7).digest(), "big")


def _failed(error: BaseException) -> dict[str, Any]:
    """What the others are told of it."""
    return {"error": _said(error), "permanent": getattr(error, "permanent", False)}


def _said(error: BaseException) -> str:
    kind = type(error).__name__
    text = str(error) if isinstance(error, PmstoreError) else f"{kind}: {error}"
    return text if len(text) <= _TOLD_CHARACTERS else text[: _TOLD_CHARACTERS - 3] + "..."
