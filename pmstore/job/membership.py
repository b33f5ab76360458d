"""This rank's part in its job while the run trains: generations, tickets, and what may be let go.

Protocol: commit first, agree later, be able to go back once. A rank commits generation g, which
holds g - 1, then starts ticket g. Only when that has completed, which proves that all ranks have
committed g, may g - 1 be let go: by the next commit, or by writing a slot that is part of it. So
ranks are one generation apart at most, and those ahead hold the one before.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch

from pmstore import Store
from pmstore.errors import MixedStoresError, PeerLostError, PmstoreError, TransactionError
from pmstore.job import ticket
from pmstore.job.meetings import Meeting, Meetings
from pmstore.job.peers import Peers
from pmstore.objects.generations import Key, decode, encode
from pmstore.objects.guards import Guard

_STEP = 6  # place in the record, pending or not
_DONE = {
    ticket.COMMIT: "has committed",
    ticket.ASK: "has not committed",
    ticket.LEAVING: "leaves its store with",
    ticket.FINAL: "has left its store with",
}
_NOT_DONE = "did not commit, roll back or end as this rank did"
_NOT_LEFT = (
    "did not leave its store, as this rank did: all ranks leave `with pmstore.open` together"
)
_FACTOR = 6364136223846793005  # of Knuth's generator (MMIX): no two short histories have one mark
_MARKS = 1 << 62
_DETAILS_SECONDS = 10.0  # for what ranks say of a failure that is certain


class _Flying(NamedTuple):
    """A ticket that is under way, and what it was started for."""

    work: Any
    numbers: torch.Tensor
    fields: ticket.Fields
    key: Key
    told: int
    """When it was started, as the meetings count."""


class Membership(Guard):
    """Guards the store for its job (see `pmstore.objects.guards`): only ends of steps commit.

    Attributes:
        agreed: the newest generation that every rank is known to have.
        finished: this rank has left the job, with all others.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        peers: Peers,
        numbers: np.ndarray[Any, Any],
        policy: str,
        meetings: Meetings,
    ) -> None:
        """Begins the membership. REQUIRES: all ranks have committed what `numbers`, the job's
        record in the store, says.

        policy: in words. meetings: when all ranks commit; the first one is now.
        """
        self._store = store
        self._name = name
        self._peers = peers
        self._numbers = numbers
        self._policy = policy
        self._meetings = meetings
        self._record = decode(numbers)  # of the last commit
        self._epoch = store.epoch  # when that was looked at
        self._mark = self._record.key.mark
        self._done: Counter[str] = Counter()
        self._due = False  # a commit without a ticket
        self._flying: _Flying | None = None
        self._ours = False  # a commit of the run's own is under way
        self._kind = ticket.COMMIT
        self._half = False  # this rank, or after a ticket any, leaves in the middle of a step
        self._lost: PmstoreError | None = None
        self._over = False  # another has taken its place
        self.agreed: Key = self._record.key
        self.finished: bool = False
        store._core.pool.allow()
        store._core.job = self
        store._guard_commits(self)
        self.begin_ticket()

    @property
    def peers(self) -> Peers:
        return self._peers

    # ---- the end of a step

    @contextmanager
    def turn(self, commit: bool) -> Iterator[Meeting | None]:
        """Wraps the end of a step, at all ranks alike. It waits first until every rank has the last
        commit. What this step commits gets its ticket. It yields what all ranks have agreed to do
        at this step.

        commit: all ranks commit it, whatever they have agreed on.

        Raises: PeerLostError, MixedStoresError: as `settle`.
        """
        self.settle()
        self._ours = True
        try:
            yield self._meetings.end_step(commit)
        finally:
            self._ours = False
        self.begin_ticket()

    def write(self, step: int) -> None:
        """Writes the record of the generation that the next commit makes; it is pending."""
        self._notice()
        self._numbers[:] = encode(self._record.following(step, self._mark))

    def took_batch(self) -> None:
        """Counts a batch that is given out. All ranks take the same number from one commit to the
        next: so a commit that one rank left out is noticed."""
        self._did("batches", 1)

    def updated(self) -> None:
        """Counts an update by an optimizer, for a run without a loader, as `took_batch` counts
        batches."""
        self._did("optimizer updates", 1)

    def rolled_back(self) -> None:
        """Counts a roll back of the run to its last commit. All ranks have to do that together."""
        self._did("rollbacks", 2)
        self._meetings.rolled_back()

    def _did(self, what: str, sign: int) -> None:
        self._done[what] += 1
        self._mark = (self._mark * _FACTOR + sign) % _MARKS

    def _notice(self) -> None:
        """Notices that a commit has happened, whatever interrupted what followed."""
        epoch = self._store.epoch
        if epoch != self._epoch:
            self._epoch = epoch
            self._record = decode(self._numbers)
            self._due = True

    # ---- tickets

    def begin_ticket(self) -> None:
        """Starts the ticket of a commit that is durable, or of a meeting without a commit, if it
        has none yet.

        Raises: ForkedStoreError.
        """
        if self._store._core.process != os.getpid():
            self._store._core.pool.allow()  # raises: store and connections are the parent's
        self._notice()
        if self._lost is not None or not (self._due or self._meetings.asking):
            return
        key, digest = self._record.key, self._digest()
        if self._due:
            fields = ticket.Fields(key.number, key.step, self._kind, key.mark, digest)
        else:
            step = int(self._numbers[_STEP])
            fields = ticket.Fields(key.number, step, ticket.ASK, self._mark, digest)
        wants = self._meetings.wish(ask=self._kind == ticket.COMMIT).encode()
        numbers = ticket.pack(fields, [-int(self._half), *wants])
        try:
            leaves = fields.kind in (ticket.LEAVING, ticket.FINAL)
            work = self._peers.start_min(numbers, _NOT_LEFT if leaves else _NOT_DONE)
            self._flying = _Flying(work, numbers, fields, key, self._meetings.told())
            self._due = False
        except PeerLostError as error:
            self._break(error)
        except BaseException as error:
            # nobody knows whether the others count it
            self._break(
                PeerLostError(
                    f"rank {self._peers.rank} of {self._peers.world}: interrupted by "
                    f"{type(error).__name__} while it told the other ranks of its commit: end the "
                    "process, and start the job again"
                )
            )
            raise

    def _digest(self) -> int:
        key = self._record.key
        told = msgpack.packb([key.job, key.term, self._name, self._policy])
        return int.from_bytes(hashlib.blake2b(told, digest_size=7).digest(), "big")

    def settle(self) -> None:
        """Waits until every rank has this one's last commit; then what it holds may be let go.

        Raises: PeerLostError: a rank has died, or did not come. MixedStoresError: ranks have
            committed different things. Both for good: the store stays at its last commit, held.
        """
        self.begin_ticket()
        if self._lost is not None:
            raise self._lost
        if self._flying is None:
            return
        flying = self._flying
        try:
            self._peers.wait(flying.work)
        except PeerLostError as error:
            raise self._break(error) from error
        least, greatest, (half, *wants) = ticket.unpack(flying.numbers)
        if least != greatest:
            raise self._break(self._apart(flying.fields, least, greatest))
        self.agreed = flying.key
        self._half = half < 0
        self._store._core.pool.allow()
        self._meetings.heard(flying.told, wants)
        self._flying = None  # at the end: what an interrupt leaves out is done by the next call

    @property
    def looked(self) -> Key:
        """The generation `agreed`, after a look whether a ticket has completed meanwhile."""
        if self._lost is None and self._flying is not None and self._flying.work.is_completed():
            self.settle()
        return self.agreed

    def _break(self, error: PmstoreError) -> PmstoreError:
        self._lost, self._flying = error, None
        return error

    def _apart(
        self, mine: ticket.Fields, least: ticket.Fields, greatest: ticket.Fields
    ) -> PmstoreError:
        """Returns the error that says what each rank did. All ranks have seen the same ticket, and
        get here, but for those that wait for this one in the program's own collectives: they fail
        when this one has ended."""
        did = " and ".join(f"{count} {what}" for what, count in self._done.items())
        said = (
            f"{_DONE[mine.kind]} step {mine.step}, generation {mine.generation} of term "
            f"{self._record.key.term}, policy {self._policy}, after {did}"
        )
        try:
            every = self._peers.gather([said], _DETAILS_SECONDS)
            self._peers.part()
            lines = [f"  rank {rank}: {told}" for rank, (told,) in enumerate(every)]
        except PeerLostError:
            lines = [f"  rank {self._peers.rank}: {said}; other ranks differ"] + [
                f"  {what}: from {low} to {high}"
                for what, low, high in zip(mine._fields, least, greatest, strict=True)
                if low != high and what in ("generation", "step")
            ]
        return MixedStoresError(
            f"{self._store.path}: the ranks of the job have not done the same. All have to commit "
            "the same steps, of as many batches or updates, roll back together and end "
            "together; this commit does not count. Mend the program: started again, the job goes "
            "on from the generation before\n" + "\n".join(lines)
        )

    # ---- the store asks (see `pmstore.objects.guards.Guard`)

    def half(self) -> str:
        if self._ours or self._over or self.finished:
            return ""
        return (
            f"{self._store.path} is in a job of {self._peers.world} ranks, whose stores are "
            "committed together: the end of a step or run.commit(), at all ranks, commits what was "
            "written to it too"
        )

    def lost(self) -> str:
        if not (self._kind == ticket.LEAVING and self._half):
            return ""
        return (
            f"{self._store.path}: a rank of the job left its store in the middle of a step, so "
            "that no rank commits any more. It is as of its last commit, with step "
            f"{self._record.key.step}; what was written since then is lost"
        )

    def leaving(self) -> bool:
        """Leaves the job with what is pending. Raises: PeerLostError, MixedStoresError."""
        return self.leave()

    def leave(self, *, half: bool = False) -> bool:
        """Commits what is pending as a last generation, which all ranks have before any lets go of
        the version before it. If a rank is in the middle of a step, no rank commits any more: so
        they say first that they leave, and how. half: this rank is in the middle of a step. Returns
        whether it has committed.

        Raises: PeerLostError, MixedStoresError.
        """
        if self.finished or self._over:
            return self.finished
        if self._store._mirrors is not None:
            self._store._mirrors.join()
        self.settle()
        self._kind, self._half, self._due = ticket.LEAVING, half, True
        self.settle()
        if not self._half:
            self._kind = ticket.FINAL
            with self.turn(commit=True):
                self.write(int(self._numbers[_STEP]))
                self._store.commit()
            self.settle()
            self._store._core.pool.release()
            self.finished = True
        self._peers.part()
        return self.finished

    def alone(self, what: str) -> TransactionError:
        return TransactionError(
            f"{what} of {self._store.path}, in a job of {self._peers.world} ranks, whose stores "
            "have to go back together: end the job, call it in a program of each rank's own "
            "without process_group, and start the job from the stores again"
        )

    def give_way(self) -> None:
        self._over = True

    def ended(self) -> None:
        self._store._core.job = None
