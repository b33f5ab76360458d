"""A training run whose state is in a store, as the program that trains sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch

from pmstore import Store
from pmstore.errors import TransactionError
from pmstore.mirror.pending import PendingCommit
from pmstore.scheduler import CommitScheduler
from pmstore.tiers.handle import Flush
from pmstore.torch._data.batches import DataLoops
from pmstore.torch._step.by_hand import RunTransaction
from pmstore.torch._step.losses import check_loss
from pmstore.torch._step.steps import Steps
from pmstore.torch.checkpoints import Keeper, KeptState
from pmstore.torch.errors import AttachError
from pmstore.torch.metrics import metrics
from pmstore.torch.stats import RunStats, log_end, stats_of


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
        self.name: str = steps.name
        self.resumed: bool = resumed
        """Whether attach found a stored run, and the training goes on from there."""
        self._steps = steps
        self._loops = DataLoops(steps)
        self._keeper = Keeper(steps)
        steps.ends.append(partial(log_end, steps))

    @property
    def store(self) -> Store:
        return self._steps.store

    @property
    def step(self) -> int:
        """Steps that were ended, by `end_step`, `commit` or a transaction, over all processes of
        this run."""
        return self._steps.progress.finished

    @property
    def committed(self) -> int:
        """Those of them that the store's last commit holds: where the run would go on after a kill.
        Fewer than `step` with a policy that leaves commits out, or while one is under way."""
        return self._steps.progress.committed

    @property
    def agreed_step(self) -> int | None:
        """In a job, the newest step that every rank is known to have committed: no crash goes
        further back. None: the run is in no job.

        Raises: PeerLostError, MixedStoresError, as the next commit would.
        """
        return None if self._steps.job is None else self._steps.job.looked.step

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
        """`print(run.stats())` says what commits cost, and how much work they put at risk. The same
        sentence is logged when the run ends, by `logging.getLogger("pmstore")`, as INFO."""
        return stats_of(self._steps)

    def metrics(self) -> dict[str, float]:
        """What a logger wants to know, now, as in `wandb.log(run.metrics())`. Waits for nothing,
        nor for a loss that an accelerator still computes.

        step, committed_step, data_epoch, batch; epoch: commits of the store over all its life;
        commits, rollbacks: of the run in this process. loss: the newest that is known.
        steps_per_second: over some seconds. commit_seconds, commit_seconds_mean: that `commit` kept
        the program, where it committed; commit_share: of the time since attach. stake_seconds_most,
        stake_steps_most: that passed from one commit to the next. written_bytes: by commits since
        the open. used_bytes, free_bytes, file_bytes: of the store; process_bytes: resident memory
        of this process.

        With a policy: failures_per_second, as estimated; target/<name>/cost_seconds and
        target/<name>/risk_seconds (see `pmstore.scheduler.Decision`). For each tier that was
        flushed to: tier/<name>/epoch, the newest that counts; tier/<name>/behind, commits since
        then; tier/<name>/written_share of the flush under way, 1 if none is.

        What is not known yet is not in it.

        Raises: AttachError after `detach`; ClosedStoreError.
        """
        self._steps.require()
        return metrics(self._steps)

    def __repr__(self) -> str:
        if not self.attached:
            return f"<pmstore.torch.Run {self.name!r}, detached>"
        return (
            f"<pmstore.torch.Run {self.name!r}, step "
            f"{self.step}{', resumed' if self.resumed else ''}>"
        )

    # ---- the end of a step

    def end_step(self, loss: float | torch.Tensor | None = None, *, wait: bool = True) -> bool:
        """Ends a step, and commits the store if the policy says so: the word for the loop.

            for inputs, targets in run.batches(epochs=3):
                ...
                optimizer.step()
                run.end_step(loss)

        With attach's default policy, "auto", every step commits where that costs next to nothing:
        in memory. On a disk, where each commit waits, steps are committed once a second (`attach`
        says how to choose another bound). A kill takes back the steps since the last commit, and
        nothing else; the run goes on from it in the same bits.

        A step that is not committed yet is written into the store all the same, pending. It is
        committed with the next step that is; by `commit`, `validation` or `keep`; when `with
        pmstore.open(...)` is left normally; and when the program is told to stop (attach's
        `guard`). Where an error, Ctrl-C or `sys.exit` leaves the `with`, it is committed if the
        next step has written nothing yet, as far as that is known; else a warning says what is
        lost.

        Args:
            loss: of this step, for the policy, the course of the run and `keep(best="loss")`: a
                number, or a tensor of one element.
            wait: as in `commit`.

        Returns: whether it committed. Then the step is durable, as after `commit`.

        Raises: what `commit` raises.
        """
        self._refuse_in_a_block("end_step")
        check_loss(loss)
        return self._steps.end(loss, ask=True, wait=wait)

    def commit(
        self, loss: float | torch.Tensor | None = None, *, wait: bool = True, agree: bool = False
    ) -> None:
        """Ends a step: writes what Python holds into the store, and commits the store. On return
        the step is durable, as far as the store's domain reaches; with `wait=False` it is durable
        once `pending` is done.

        Everything pending in the store is part of the commit, steps that `end_step` left pending
        among it. No policy is asked.

        Args:
            loss: as in `end_step`.
            wait: False: the commit is under way on return, and `pending` is its handle. The next
                step goes on meanwhile. It waits where it would write into the store, or write what
                is still being copied (`optimizer.step()` of a mirrored run). The end of the next
                step waits for this commit and raises its error. The last commit before a `guard`
                stops the run is waited for, and so are all with a CommitScheduler of your own.
            agree: in a job, True: return when every rank has committed the step. Then no crash
                takes it back. Else that is known at the next commit, and a crash before may take
                this one step back.

        Raises:
            MismatchError: a tensor was replaced by one that does not fit its place in the store.
                Nothing was committed.
            TransactionError: inside a transaction block (which commits by itself), or the store was
                rolled back by other means.
            StoreFullError: no room for new optimizer state. Nothing was committed; roll back.
            PeerLostError, MixedStoresError: in a job: a rank was lost, or did something else than
                the others. For good: end the process, and start the job again.
            ValueError: agree, without wait; the loss has several elements. TypeError: it is no
                number. The step goes on then.
        """
        if agree and not wait:
            raise ValueError("commit(agree=True) waits for all ranks: leave out wait=False")
        self._refuse_in_a_block("commit")
        check_loss(loss)
        self._steps.end(loss, wait=wait, agree=agree)

    def _refuse_in_a_block(self, called: str) -> None:
        if self._steps.transactions:
            raise TransactionError(
                f"{called}() inside `with run.transaction()`: leaving it ends the step and commits"
            )

    @property
    def pending(self) -> PendingCommit | None:
        """The handle of the last commit with `wait=False`; None once another step has ended, or was
        rolled back."""
        return self._steps.pending

    def rollback(self) -> None:
        """Takes everything back to the last commit: the store, and what Python holds. Steps that
        `end_step` left pending go, too (`step` then says `committed`).

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
        """Keeps the present state, so that `rewind` can go back to it. Finished steps that are not
        committed yet are committed for it.

            run.keep("before-finetune")  # under a name, until the name is given again
            run.keep(n=3)  # the newest three that this call kept
            run.keep(best="loss")  # the step with the lowest loss so far
            run.keep(best="accuracy", value=accuracy, mode="max", n=2)

        Call it between two steps, as often as you would write a checkpoint. It is an epoch of a
        tier: what changed since the last one is written, in the background, and it stays whatever
        the tier's `keep` says. All of the store is kept, not the run alone. `pmstore epochs` lists
        it, and `pmstore restore --kept` makes a store of it, also when this one is lost.

        What was written since the last step ended, by the program itself, may be part of it. The
        same commit is not kept twice as one of the best.

        In a job, whose ranks commit at the same steps, it is the state of the last commit, and its
        loss. It waits until all ranks have that commit (after one with `wait=False` it does not: a
        crash may take the job back from it). Any rank may call it.

        Args:
            name: of the state.
            n: how many states of this call stay (those of other names of `best` are counted
                apart).
            best: a figure, whose best n states stay (one, if n is not said). "loss" is what
                `end_step(loss)` was given.
            value: of the figure; only for another one than the loss, or instead of it. nan is never
                the best.
            mode: whether the lowest or the highest value is the best one.
            tier: of the store, by its name; None: a folder of its own, `<path>.kept`, made at the
                first call. It lies on the same disk, or in the same memory, as the store.

        Returns: the flush under way (`wait` waits until the state is durable in the tier); None: it
            is none of the best, and nothing was done. Leaving the store's `with` waits for it.

        Raises: TransactionError inside a transaction block; in a job, for a name or a value, where
            the last step is not committed (`commit` ends it so); TierError, OSError: of the keep
            before, if nobody was told; PeerLostError, MixedStoresError, in a job; ValueError,
            TypeError for arguments.
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
        if self._steps.job is not None:
            raise self._steps.job.alone("rewind()")
        if to is None:
            self._steps.rewind_one()
        else:
            self._keeper.rewind(to)

    def transaction(self, loss: float | torch.Tensor | None = None) -> RunTransaction:
        """A transaction block that ends a step: it commits, as `commit` does, when it is left
        normally, and rolls back when it raises: to the last commit, so steps that `end_step` left
        pending go, too.

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

    def validation(self) -> AbstractContextManager[None]:
        """Around an evaluation between two steps: `with run.validation(): ...`.

        Entering commits what is pending, so that a kill meanwhile takes no step back. The time is
        not taken for that of a slow step. Ranks of a job commit at the same steps: there it commits
        nothing, and all ranks or one may enter it.

        Raises: TransactionError in the middle of a step; what a commit raises.
        """
        return self._steps.done.validation()

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
