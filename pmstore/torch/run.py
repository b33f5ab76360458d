"""A training run whose state is in a store, as the program that trains sees it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from pmstore import Store
from pmstore.errors import TransactionError
from pmstore.scheduler import CommitScheduler
from pmstore.tiers._flush.flush import Flush
from pmstore.torch._data.batch_source import Source
from pmstore.torch._step.by_hand import NextStep
from pmstore.torch._step.epoch import Epoch
from pmstore.torch._step.log import LogFunction, ScalarWriter, number
from pmstore.torch._step.loops import Loops, Options, check_count
from pmstore.torch._step.state import ENDED, IDLE, MARKED, OPEN, Event, Kind
from pmstore.torch._step.steps import Steps
from pmstore.torch.checkpoints import Keeper, KeptState
from pmstore.torch.run_errors import AttachError
from pmstore.torch.run_stats import RunStats, log_end, metrics, stats_of

if TYPE_CHECKING:
    import pandas


class Run:
    """A training run in a store; made by `pmstore.torch.attach`.

    The time of a run is tiled by steps. Whatever a program does in a step (to the model, the
    optimizer, the store, generators, what it logs) is kept whole or taken back whole. After a crash
    each step that is not kept is done again from its beginning; each that is kept, never.

    A step begins when a loop of the run hands something out, and ends when the next is asked for:

        for epoch in run.epochs(10):  # the epochs that are not over
            for inputs, targets in epoch:  # the batches of it that were not trained on
                loss = mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.log(loss=loss)
            schedule.step()  # the end of an epoch is kept whole or taken back whole, too
            run.log(accuracy=evaluate(model))

    `batches` goes over epochs without their ends; `steps` counts without data; `next_step` is a
    step by hand, for loops of any other kind. What stands before a loop, and in an epoch before its
    first batch, is a head: its effect counts once. On a resume Python runs it again, with the
    numbers that it drew before (but before steps by hand), and the loop takes back what it has
    written. Plain variables are the program's: `state` is the place for those that are to be kept.

    At the end of a step the policy (see `attach`) says whether it is committed. A crash, an error,
    Ctrl-C or an exit that leaves the `with` of the store takes back what is not. Leaving it
    normally commits.

    `break` and `return` leave a step open, and nobody knows whether it is complete: write
    `end_step` or `stop` before. One thread iterates, trains and ends steps.

    Raises (all that change the run): AttachError after `detach`; CorruptStoreError if what a roll
    back reads is not as a run was stored; ClosedStoreError, ForkedStoreError.
    """

    def __init__(self, steps: Steps, *, resumed: bool) -> None:
        self.name: str = steps.name
        self.resumed: bool = resumed
        """Whether attach found a stored run, and the training goes on from there."""
        self._steps = steps
        self._loops = Loops(steps)
        self._keeper = Keeper(steps)
        steps.ends.append(partial(log_end, steps))

    @property
    def store(self) -> Store:
        return self._steps.store

    @property
    def step(self) -> int:
        """Steps that have ended, over all processes of this run: of batches, of `steps` and by
        hand. One by hand counts as soon as its block is left."""
        return self._steps.done

    @property
    def committed(self) -> int:
        """Those of them that the store's last commit holds: where the run would go on after a kill.
        Fewer than `step` with a policy that leaves commits out, or while one is under way."""
        return self._steps.progress.committed

    @property
    def agreed_step(self) -> int | None:
        """The newest step that every rank of a job is known to have committed: no crash goes
        further back. None: the run is in no job.

        Raises: PeerLostError, MixedStoresError, as the next commit would.
        """
        return None if self._steps.job is None else self._steps.job.looked.step

    @property
    def data_epoch(self) -> int:
        """The pass over the data that the batch which was handed out last is of, counted from 0."""
        return self._steps.progress.place.given.data_epoch

    @property
    def batch(self) -> int:
        """Index within its data epoch of the batch that was handed out last; -1 before the
        first."""
        return self._steps.progress.place.given.batch - 1

    @property
    def last_in_step(self) -> bool:
        """Whether the batch that was handed out last is the last of its step: of a loop with
        `every`, the one to update after."""
        return self._loops.last_in_step

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
        """Whether the run is over: `stop` was called, or the guard was told to stop and the last
        commit has been made. Loops of the run end by themselves; loops of your own ask this."""
        steps = self._steps
        return steps.step.stopping or steps.progress.stopped or steps.schedule.finished

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

    # ---- loops

    def epochs(
        self,
        n: int | None,
        *,
        batches: int | None = None,
        every: int = 1,
        ahead: int | None = None,
        device: Any = None,
        name: str = "",
    ) -> Iterator[Epoch]:
        """The epochs of the run that are not over: numbers, from 0, that are iterated for their
        batches. An epoch is over when the next one is asked for. What stands behind its batches,
        its tail, is done once, as a step is: kept whole or taken back whole.

        After a resume in mid-epoch that epoch is handed out again: what stands before its batches
        runs again, and is taken back; the batches go on behind the last one that was committed.

        Args:
            n: epochs that the run has in all, from its start; None: no end. With more than at an
                earlier start a run that was over, or stopped, goes on.
            batches: at most so many of an epoch.
            every, ahead, device: as in `batches`.
            name: of the loop. One with a name counts its own epochs.

        Raises: as `batches`.
        """
        source = self._source()
        check_count(n, "n", 0, (None,))
        return self._loops.epochs(source, n, _options(every, ahead, device, batches), name)

    def batches(
        self,
        epochs: int | None = 1,
        *,
        every: int = 1,
        ahead: int | None = None,
        device: Any = None,
        name: str = "",
    ) -> Iterator[Any]:
        """The batches of the loader from where the run is, in the order in which they would have
        come had it never stopped. Each is a step, which ends when the next batch is asked for.

        Args:
            epochs: data epochs that the run has in all, from its start; None: no end.
            every: so many batches are one step: gradients are accumulated. The last step of an
                epoch may have fewer. `last_in_step` says when to update.
            ahead: how many batches the program holds that it has not trained on, beside the one
                that it trains on: prefetchers hold one or two. It trains on them in the order in
                which they were handed out, each in `with run.next_step():`. 0: it holds none, but
                may pass over some. None: it holds none, and does something with the first batch
                before it asks for the second.
            device: batches come as copies on that device; the next one is copied while this one is
                trained on.
            name: of the loop. One with a name counts its own epochs.

        Raises:
            SystemExit: with status 0: the guard given to attach was told to stop, and all is
                committed.
            AttachError: no loader was given to attach.
            LookaheadError: the program holds other batches than `ahead` says.
            TransactionError: another step is open, or was left by `break`; a step ends in another
                thread than it began; half an update is in it.
            RuntimeError: another loop has begun; loops begin in another order than at an earlier
                start; an earlier loop of the program has used up what this one counts.
            ValueError: the loader gave no batch in a whole data epoch. What a commit raises.
        """
        source = self._source()
        check_count(epochs, "epochs", 0, (None,))
        return self._loops.batches(source, epochs, _options(every, ahead, device, None), name)

    def steps(self, n: int, *, name: str = "") -> Iterator[int]:
        """Steps without data: numbers, from 0, until the run has made n of them, in all its
        processes. Each ends when the next is asked for.

        name: of the loop. One with a name counts its own steps. Raises: as `batches`.
        """
        self._steps.require()
        check_count(n, "n", 0)
        return self._loops.steps(n, name)

    def next_step(self) -> NextStep:
        """A step by hand: `with run.next_step(): ...`. It begins when the block is entered, and
        ends when the next step, or a loop of the run, begins. Leaving the block normally says that
        it is complete; an error takes it back.

            while run.step < 1000:
                with run.next_step():
                    train_on(next(stream))

        Raises: (on entering) as `batches`.
        """
        self._steps.require()
        return NextStep(self._steps, self._loops)

    def _source(self) -> Source:
        self._steps.require()
        loader = self._steps.pieces.loader
        if loader is None:
            raise AttachError("the run has no loader: give it to attach(..., loader=...)")
        return loader.source

    # ---- in a step

    def log(self, **values: Any) -> None:
        """Notes numbers of the step, by name: `run.log(loss=loss, accuracy=0.9)`. The last value of
        a name counts. They are kept and taken back with the step, so that a step which is done
        again is logged once. "loss" is what the policy sees, and `keep(best="loss")`.

        values: numbers, or tensors of one element. One on an accelerator is not waited for: it is
            stored with one of the next commits.

        Outside of a step they belong to the head of the next loop, or to what stands behind the
        last one, and have the number of the step before; as those do that are logged in a step
        behind its `commit`.

        Raises: TypeError, ValueError: no number, or several.
        """
        step = self._steps.step
        for name, value in values.items():
            if value.__class__ is not float:
                values[name] = number(name, value)
        if step.state is OPEN or step.state is MARKED:
            step.values.update(values)
        else:
            self._steps.require()
            self._steps.log.add(self.step, values)

    @overload
    def history(self, name: None = None) -> pandas.DataFrame: ...

    @overload
    def history(self, name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]: ...

    def history(self, name: str | None = None) -> Any:
        """What was logged under a name, in all processes of the run: steps (int64) and values
        (float64), of steps that have ended. A value of an epoch's head or tail has the number of
        the last step before it.

        Without a name: a pandas DataFrame with a column for each name, in the order of first use,
        and a line for each step that logged something, under its number (the index `step`). It is
        nan where a step did not log the name. What was logged as "step" is the column "step.1".

        Raises: KeyError: nothing was logged under it; ModuleNotFoundError: pandas is not there.
        """
        self._steps.require()
        step, log = self._steps.step, self._steps.log
        ended = [(self.step, step.values)] if step.left and step.values else []
        return log.table(ended).frame() if name is None else log.history(name, ended)

    @property
    def state(self) -> dict[str, Any]:
        """Plain values of the program that are kept and taken back with its steps:
        `run.state["beta"] = 0.99 * run.state.get("beta", 1.0)`. Numbers, strings, collections,
        arrays and tensors; always the same dict, to be changed in place. Copied at each commit."""
        return self._steps.state.values

    def log_to(self, writer: ScalarWriter | LogFunction, *, name: str | None = None) -> None:
        """Tells a logger the logged values of steps that are committed, each step once and in
        order, also across kills. Where the logger stands lies in the store; after a kill just
        behind a commit the steps of that commit may be told twice, with the same numbers. Steps
        that were committed before, and not told, are told with the next commit.

            run.log_to(SummaryWriter())  # of torch.utils.tensorboard
            run.log_to(wandb.log)
            run.log_to(mlflow.log_metrics)

        writer: is called as writer(values, step=step) with a dict of floats; or has
            `add_scalar(tag, value, step)`. It is called where a step ends, and stays the caller's
            to close. One that raises is warned of, and told of the same steps again after the next
            commit.
        name: by which it is known at the next start. None: the name of its type or function.

        Raises: TypeError: it is no logger; ValueError: the loggers are others than before.
        """
        self._steps.require()
        if name is None:
            name = getattr(writer, "__qualname__", type(writer).__qualname__)
        self._steps.log.log_to(writer, name)

    def end_step(self) -> None:
        """Says that the open step is complete, before a `break` or `return`. It ends nothing: what
        follows it in the step is kept with it.

        Raises: TransactionError: outside of a step; the second time in one.
        """
        self._steps.require()
        self._mark("run.end_step()")

    def stop(self) -> None:
        """Ends the run: the open step is complete, and the loop hands out nothing more. It is
        stored, so that it holds after a kill; a loop that asks for more epochs or steps than before
        opens the run again. The tail of the epoch is still done.

        Raises: TransactionError: outside of a step.
        """
        self._steps.require()
        step = self._steps.step
        if step.state is not MARKED and step.state is not ENDED:
            self._mark("run.stop()")
        step.stopping = True

    def _mark(self, called: str) -> None:
        step = self._steps.step
        if step.kind is Kind.HEAD and step.state is not IDLE and called != "run.stop()":
            raise TransactionError(
                f"{called} in the head of an epoch: it ends with the epoch's first batch"
            )
        step.go(Event.MARK, called)

    def commit(self, *, agree: bool = False) -> None:
        """Ends the open step here, and commits it: durable on return, as far as the store's domain
        reaches. For what relies on that: a message that is sent, a file that is renamed.

        No policy is asked. What follows in the step goes with the next one: a kill in between takes
        it back, and does not do it again. Where nothing was done since a step ended it commits what
        is pending, and counts no step.

        agree: in a job, True: return when every rank has committed the step. Then no crash takes it
            back. Else that is known at the next commit, and a crash before may take this one step
            back.

        Raises:
            TransactionError: in a head, which is committed with its loop or epoch; in a tail, where
                the program holds batches; after another `commit` in the same step; half an update
                is in it; the store was rolled back by other means.
            MismatchError: a tensor was replaced by one that does not fit its place in the store.
            StoreFullError: no room for new optimizer state. In both cases nothing was committed.
            PeerLostError, MixedStoresError: in a job: a rank was lost, or did something else than
                the others. For good: end the process, and start the job again.
        """
        self._loops.check_commit()
        self._loops.commit(agree=agree)

    def rollback(self) -> None:
        """Takes everything back to the last commit: the store, and what Python holds. Steps that
        have ended and are not committed go, too (`step` then says `committed`).

        The tensors stay the objects they are and hold the committed values again. Optimizer state
        that was made since then vanishes, gradients are those of the commit, and the loop hands out
        the batch after the last committed one. What the program does in the rest of the step goes
        with the next one. May be repeated if it was interrupted.

        Raises: RolledBackError, when it is done: the last commit lies before this epoch's first
            batch, or before the end of a loop that is over. The program has to begin that loop, or
            its loops from the first, again, as the message says.
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
        """Keeps the present state, so that `rewind` can go back to it. In a step it is the state at
        the end of the step, which is committed for it; behind its `commit`, what that committed.

            run.keep("before-finetune")  # under a name, until the name is given again
            run.keep(n=3)  # the newest three that this call kept
            run.keep(best="loss")  # the step with the lowest loss so far
            run.keep(best="accuracy", value=accuracy, mode="max", n=2)

        Call it as often as you would write a checkpoint. It is an epoch of a tier: what changed
        since the last one is written, in the background, and it stays whatever the tier's `keep`
        says. All of the store is kept, not the run alone. `pmstore epochs` lists it, and `pmstore
        restore --kept` makes a store of it, also when this one is lost.

        The same commit is not kept twice as one of the best.

        In a job, whose ranks commit at the same steps, it is the state of the next commit, and its
        loss; between two loops, of the last one. It waits until all ranks have that commit. Any
        rank may call it.

        Args:
            name: of the state.
            n: how many states of this call stay (those of other names of `best` are counted
                apart).
            best: a figure, whose best n states stay (one, if n is not said). "loss" is what
                `run.log(loss=...)` was given in the step.
            value: of the figure; only for another one than the loss, or instead of it. nan is never
                the best.
            mode: whether the lowest or the highest value is the best one.
            tier: of the store, by its name; None: a folder of its own, `<path>.kept`, made at the
                first call. It lies on the same disk, or in the same memory, as the store.

        Returns: between two loops, and behind `commit`, the flush under way (`wait` waits until
            the state is durable in the tier); None: in a step, or it is none of the best, and
            nothing was done. Leaving the store's `with` waits for it.

        Raises: TransactionError inside a transaction block; TierError, OSError: of the keep
            before, if nobody was told; PeerLostError, MixedStoresError, in a job; ValueError,
            TypeError for arguments. In a step some of them are raised where it ends.
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

        Raises: RolledBackError, when it is done, as `rollback`; NotKeptError, which lists what
            there is; MismatchError: the state is of another model, optimizer or other pieces, or
            (ChangedError) of a time when the program gave other settings; TransactionError inside a
            transaction block, or the store does not hold the commit before the last;
            StoreFullError, TierError, OSError. But for the first, store and program are at the last
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

    def detach(self) -> None:
        """Ends the run: finished steps, and one that is complete, are committed; hooks are removed;
        commit and batches raise.

        A step that is open, and that nobody said is complete, is not committed, and its writes stay
        in the tensors. These stay in the heap: whoever writes them still writes the store.

        Raises: what a commit raises; then `rollback` first.
        """
        self._steps.detach()
        self._loops.close()


def _options(every: int, ahead: int | None, device: Any, limit: int | None) -> Options:
    """Raises: TypeError, ValueError."""
    check_count(every, "every", 1)
    check_count(ahead, "ahead", 0, (None,))
    check_count(limit, "batches", 1, (None,))
    if ahead and (every > 1 or device is not None):
        raise ValueError(
            f"ahead={ahead}: the program holds batches and makes each step by hand, so that every= "
            "and device= say nothing: leave them out"
        )
    return Options(every, ahead, device, limit)
