"""A training run whose state is in a store, as the program that trains sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pmstore import Store
from pmstore.errors import TransactionError
from pmstore.mirror.pending import PendingCommit
from pmstore.scheduler import CommitScheduler
from pmstore.tiers.handle import Flush
from pmstore.torch.batches import DataLoops
from pmstore.torch.errors import AttachError
from pmstore.torch.kept import Keeper, KeptState
from pmstore.torch.steps import Steps
from pmstore.torch.transaction import RunTransaction


@dataclass(frozen=True, slots=True)
class RunStats:
    """What a run has done in this process."""

    steps: int
    commits: int
    rollbacks: int


class Run:
    """A training run in a store; made by `pmstore.torch.attach`.

    Between two commits the program trains as it would without a store: parameters, buffers and
    optimizer state are the same objects, whose memory is the heap (of a mirrored run: where it
    was). A commit makes everything the next step depends on the state that survives, in one
    transaction: the tensors, the optimizer's hyperparameters, scheduler, scaler, generators, place
    in the data, and whatever else was written to the store.

    Use it in one thread.

    Raises (commit, rollback, transaction, batches): AttachError after `detach`; CorruptStoreError
    if what a roll back reads is not as a run was stored; ClosedStoreError, ForkedStoreError.
    """

    def __init__(self, steps: Steps, *, resumed: bool) -> None:
        self.name = steps.name
        self.resumed = resumed
        """Whether attach found a stored run, and the training goes on from there."""
        self._steps = steps
        self._loops = DataLoops(steps)
        self._keeper = Keeper(steps)

    @property
    def store(self) -> Store:
        return self._steps.store

    @property
    def step(self) -> int:
        """Steps that were ended, by `commit` or a transaction, over all processes of this run."""
        return self._steps.progress.finished

    @property
    def committed(self) -> int:
        """Those of them that the store's last commit holds: where the run would go on after a kill.
        Fewer than `step` with a policy that leaves commits out, or while one is under way."""
        return self._steps.progress.committed

    @property
    def data_epoch(self) -> int:
        """The pass over the data that the batch which `batches` gave last is of, counted from 0."""
        return self._steps.progress.place.given.data_epoch

    @property
    def batch(self) -> int:
        """Index within its data epoch of the batch that `batches` gave last; -1 before the
        first."""
        return self._steps.progress.place.given.batch - 1

    @property
    def attached(self) -> bool:
        """Whether it was neither detached nor its store closed."""
        return self._steps.attached

    @property
    def scheduler(self) -> CommitScheduler | None:
        """What decides about commits; None: every step commits."""
        return self._steps.schedule.scheduler

    @property
    def stopping(self) -> bool:
        """Whether the guard given to attach was told to stop and the last commit has been made:
        leave the loop. `batches` does so by itself."""
        return self._steps.schedule.finished

    def stats(self) -> RunStats:
        return RunStats(**self._steps.counts)

    def __repr__(self) -> str:
        if not self.attached:
            return f"<pmstore.torch.Run {self.name!r}, detached>"
        return (
            f"<pmstore.torch.Run {self.name!r}, step "
            f"{self.step}{', resumed' if self.resumed else ''}>"
        )

    # ---- the end of a step

    def commit(self, loss: float | torch.Tensor | None = None, *, wait: bool = True) -> bool:
        """Ends a step: writes what Python holds into the store and, if the policy says so, commits
        the store.

        Everything pending in the store is part of the commit. Without a policy every step commits.
        A step that does not commit is in the store all the same, pending: leaving
        `with pmstore.open(...)` normally commits it too.

        Args:
            loss: of this step, for the policy.
            wait: False: the commit is under way on return, and `pending` is its handle. The next
                step goes on meanwhile. It waits where it would write into the store, or write what
                is still being copied (`optimizer.step()` of a mirrored run). The next commit waits
                for this one and raises its error. With a policy `wait` has no effect: a policy
                measures what commits cost, so every commit is waited for.

        Returns: whether it committed. Then the step is durable on return, as far as the store's
            domain reaches; with `wait=False` it is durable once `pending` is done.

        Raises:
            MismatchError: a tensor was replaced by one that does not fit its place in the store.
                Nothing was committed.
            TransactionError: inside a transaction block (which commits by itself), or the store was
                rolled back by other means.
            StoreFullError: no room for new optimizer state. Nothing was committed; roll back.
        """
        if self._steps.transactions:
            raise TransactionError("commit() inside `with run.transaction()`: leaving it commits")
        return self._steps.end(loss, wait)

    @property
    def pending(self) -> PendingCommit | None:
        """The handle of the last `commit(wait=False)`; None once another commit, or a roll back,
        has followed it."""
        return self._steps.pending

    def rollback(self) -> None:
        """Takes everything back to the last commit: the store, and what Python holds.

        The tensors stay the objects they are and hold the committed values again. Optimizer state
        that was made since then vanishes, gradients are those of the commit, and `batches` gives
        the batch after the last committed one again. May be repeated if it was interrupted.
        """
        self._steps.roll_back()

    # ---- earlier states

    def keep(
        self,
        name: str | None = None,
        *,
        n: int | None = None,
        best: str | None = None,
        value: float | None = None,
        mode: Literal["min", "max"] = "min",
        tier: str | None = None,
    ) -> Flush | None:
        """Keeps the state of the last commit, so that `rewind` can go back to it.

            run.keep("before-finetune")  # under a name, until the name is given again
            run.keep(n=3)  # the newest three that this call kept
            run.keep(best="loss")  # the commit with the lowest loss so far
            run.keep(best="accuracy", value=accuracy, mode="max", n=2)

        Call it after `commit`, as often as you would write a checkpoint. It is an epoch of a tier:
        what changed since the last one is written, in the background, and it stays whatever the
        tier's `keep` says. All of the store is kept, not the run alone. `pmstore epochs` lists it,
        and `pmstore restore --kept` makes a store of it, also when this one is lost.

        With a policy, or after steps that were not committed, it is the state of the last commit;
        best="loss" then judges by the loss of that step. The same commit is not kept twice as one
        of the best.

        Args:
            name: of the state.
            n: how many states of this call stay (those of other names of `best` are counted
                apart).
            best: a figure, whose best n states stay (one, if n is not said). "loss" is what
                `commit(loss)` was given.
            value: of the figure; only for another one than the loss, or instead of it. nan is never
                the best.
            mode: whether the lowest or the highest value is the best one.
            tier: of the store, by its name; None: a folder of its own, `<path>.kept`, made at the
                first call. It lies on the same disk, or in the same memory, as the store.

        Returns: the flush under way (`wait` waits until the state is durable in the tier); None: it
            is none of the best, and nothing was done. Leaving the store's `with` waits for it.

        Raises: TransactionError inside a transaction block; TierError, OSError: of the keep before,
            if nobody was told; ValueError, TypeError for arguments.
        """
        return self._keeper.keep(name, n, best, value, mode, tier)

    def kept(self) -> list[KeptState]:
        """The states that `rewind` can go back to, oldest first. Waits for those under way.

        Those in `<path>.kept`, also of a store that was there before this one, as before a restore
        or `pmstore compact`; and this store's own in its tiers.

        Raises: TierError, OSError.
        """
        return self._keeper.kept()

    def rewind(self, steps: int | None = None, *, to: int | str | None = None) -> None:
        """Takes everything back to an earlier state, while the process goes on, as if it had
        stopped there: the whole store, with all lists, values and arrays, and what Python holds.
        What is not committed is dropped.

        The store's content becomes that of the kept state in one transaction: after a crash it is
        the old or the new one. It is a commit like any other, with an epoch of its own. Training
        goes on bit for bit as it did from there. Objects of the program are those they were; arrays
        of the store that it holds show the earlier values, but for those whose name had another
        shape, dtype or kind then, or was not there: look these up again. Other runs in the store
        have to follow: call their `rollback()`. Tiers that the store remembers stay as they are.

        States that were kept later stay in the list. Of two of the same step the newer one counts.

        With `to` it needs room beside the store for a copy of the state while it lasts. With
        `steps` it needs nothing, but a store that was opened with hold=True (see `pmstore.open`).

        Args:
            steps: 1: to the commit before the last, once: a further commit is needed before the
                next time. With optimizers on slots, not once the next step has begun.
            to: a step, or the name that the state was given by `keep`.

        Raises: NotKeptError, which lists what there is; MismatchError: the state is of another
            model, optimizer or other pieces, or (ChangedError) of a time when the program gave
            other settings; TransactionError inside a transaction block, or the store does not hold
            the commit before the last;
            StoreFullError, TierError, OSError. In every case store and program are at the last
            commit.
        """
        if (to is None) == (steps is None) or steps not in (None, 1):
            raise TypeError(
                "rewind(steps=1): to the commit before the last; or rewind(to=step), "
                "rewind(to='name'): to a state that run.keep kept"
            )
        if to is None:
            self._steps.rewind_one()
        else:
            self._keeper.rewind(to)

    def transaction(self, loss: float | torch.Tensor | None = None) -> RunTransaction:
        """A transaction block that ends a step: it commits, as `commit` does, when it is left
        normally, and rolls back when it raises.

        What was written since the last commit, before the block began, is part of the step too
        (batch statistics of the forward pass, for example): it commits or rolls back with the
        block. Transaction blocks nest; the outermost counts.

            with run.transaction() as step:
                ...
                step.loss = loss

        Durable when it was left: as after `commit`. Raises there what `commit` raises; then it was
        rolled back.
        """
        self._steps.require()
        return RunTransaction(self._steps, loss)

    def detach(self) -> None:
        """Ends the run: the optimizer's hooks are removed, and commit and batches raise.

        Writes nothing. Tensors in the heap stay there: whoever writes them still writes the store.
        """
        self._steps.detach()
        self._loops.close()

    # ---- data

    def batches(self, epochs: int | None = 1, ahead: int | None = None) -> Iterator[Any]:
        """The batches of the loader from where the run is, in the order in which they would have
        come had it never stopped.

        A batch counts as taken when the step that used it commits. After a resume or a roll back
        the first batch is the one after the last that counts. Breaking out and calling again goes
        on with the next batch. One loop at a time.

        Args:
            epochs: how many data epochs the run has in all, from its start; None: no end.
            ahead: how many batches the program holds at a commit that it has not trained on: 1 for
                Lightning and for a loop that takes the next batch before it trains on this one, 2
                for most prefetchers to CUDA. A commit then stores the place of the batch that was
                trained on, and those held come again after a resume. After a roll back the loop
                has to be begun anew. None: it holds none; what looks otherwise raises. 0: it holds
                none, however it looks.

        Raises:
            SystemExit: with status 0: the guard given to attach was told to stop, and the last
                step is committed.
            AttachError: no loader was given to attach.
            RuntimeError: in a loop, once another loop has begun or the run was detached.
            ValueError: the loader gave no batch in a whole data epoch; ahead is negative; epochs is
                1 and that data epoch has come to its end in an earlier loop.
            LookaheadError: the program holds other batches than `ahead` says. `commit` and
                `transaction` raise it too, and commit nothing.
        """
        self._steps.require()
        if ahead is not None and ahead < 0:
            raise ValueError(f"ahead={ahead}: how many batches the program holds, 0 or more")
        loader = self._steps.pieces.loader
        if loader is None:
            raise AttachError("the run has no loader: give it to attach(..., loader=...)")
        return self._loops.batches(loader.source, epochs, ahead)
