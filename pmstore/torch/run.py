"""A training run whose state is in a store."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch

from pmstore import Store
from pmstore.errors import TransactionError
from pmstore.mirror.pending import PendingCommit
from pmstore.scheduler import CommitPolicy, CommitScheduler, OneTarget
from pmstore.torch import rng
from pmstore.torch.errors import AttachError, records
from pmstore.torch.gradients import GradientKeeper
from pmstore.torch.loader import Position, Source
from pmstore.torch.mirrored import MirroredModel, MirroredOptimizer, Pack
from pmstore.torch.model import ModelBinding
from pmstore.torch.optimizer import OptimizerBinding
from pmstore.torch.part import Part
from pmstore.torch.rng import RngParts
from pmstore.torch.stateful import StatefulPart

__all__ = ["Pieces", "Run", "RunStats"]

# Places in the array <name>/progress.
STEP, EPOCH, BATCH, MIDSTEP = range(4)


@dataclass(slots=True)
class Pieces:
    """What a run keeps in the store. Made by `attach`."""

    progress: np.ndarray[Any, np.dtype[np.int64]]
    model: ModelBinding | None
    optimizer: OptimizerBinding | None
    statefuls: list[StatefulPart]
    rng: RngParts | None
    gradients: GradientKeeper | None
    source: Source | None
    start: Part | None  # generators at the epoch's start
    generators: Part | None  # the loader's generators now
    pack: Pack | None = None  # of a run whose tensors are mirrored


@dataclass(frozen=True, slots=True)
class RunStats:
    """What a run has done in this process."""

    steps: int
    commits: int
    rollbacks: int


class Run:
    """A training run in a store; made by `pmstore.torch.attach`.

    Between two commits the program trains as it would without a store: parameters, buffers and
    optimizer state are the same objects, whose memory is the heap. A commit makes everything the
    next step depends on the state that survives, in one transaction: the tensors, the optimizer's
    hyperparameters, scheduler, scaler, generators, place in the data, and whatever else was written
    to the store.

    Use it in one thread.
    """

    def __init__(self, store: Store, name: str, pieces: Pieces, *, resumed: bool) -> None:
        self.name = name
        self.resumed = resumed
        """Whether attach found a stored run, and the training goes on from there."""
        self._store = store
        self._pieces = pieces
        self._scheduler: CommitScheduler | None = None  # every step commits
        # the scheduler is the run's own: it is told how long the job will be
        self._lays_plans = False
        self._tiers: tuple[str, ...] = ()  # flushed after each commit if they are idle
        self._position = Position()
        self._start_written: object = self  # what `pieces.start` holds; nothing known yet
        self._drawn: list[bytes] | None = None  # what `pieces.generators` holds, if known
        self._done = 0  # steps finished, committed or not
        self._committed = 0
        self._epoch = store.epoch  # of the store, when _committed was last brought up to date
        self._rollbacks = store.rollbacks  # of the store, that the Python side has followed
        self._updating = False  # the optimizer has begun to write, and the step is not ended
        self._spent = pieces.optimizer is None  # the optimizer has used the gradients
        self._stale = False  # the heap was rolled back, and the Python side is not yet
        self._turn = 0  # counts roll backs, so that a loop over the data knows
        self._loop: object | None = None
        self._block = 0
        self._counts = {"steps": 0, "commits": 0, "rollbacks": 0}
        self._handles: list[Any] = []
        self._attached = True
        self._pending: PendingCommit | None = None

    # ---- what a program asks

    @property
    def store(self) -> Store:
        return self._store

    @property
    def step(self) -> int:
        """Finished steps that the store's last commit holds, over all processes of this run."""
        self._settle()
        return self._committed

    @property
    def data_epoch(self) -> int:
        """The pass over the data that the batch which `batches` gave last is of, counted from 0."""
        return self._position.data_epoch

    @property
    def batch(self) -> int:
        """Index within its epoch of the batch that `batches` gave last; -1 before the first."""
        return self._position.batch - 1

    @property
    def attached(self) -> bool:
        return self._attached and not self._store.closed

    @property
    def scheduler(self) -> CommitScheduler | None:
        """What decides about commits; None: every step commits."""
        return self._scheduler

    def stats(self) -> RunStats:
        return RunStats(**self._counts)

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
                step goes on meanwhile; where it would write what is still being copied
                (optimizer.step() of a mirrored run) or into the store, it waits. The next commit
                waits for this one and raises its error. With a policy, which measures what commits
                cost, commits are waited for.

        Returns: whether it committed; then the step is durable as far as the store's domain
            reaches.

        Raises:
            MismatchError: a tensor was replaced by one that does not fit its place in the store.
                Nothing was committed.
            TransactionError: inside a transaction (which commits by itself), or the store was
                rolled back by other means.
            StoreFullError: no room for new optimizer state. Nothing was committed; roll back.
        """
        if self._block:
            raise TransactionError(
                "commit() inside `with run.transaction()`: leaving the block commits"
            )
        return self._finish(loss, wait)

    @property
    def pending(self) -> PendingCommit | None:
        """Of the last `commit(wait=False)`."""
        return self._pending

    def rollback(self) -> None:
        """Takes everything back to the last commit: the store, and what Python holds.

        Optimizer state made since then vanishes, gradients are those of the commit, `batches` gives
        the batch after the last committed one again.
        """
        if not self._attached:
            raise AttachError(f"the run {self.name!r} was detached")
        # until both sides agree: an interrupt in between is made good by the next call
        self._stale = True
        self._store.rollback()
        self._counts["rollbacks"] += 1
        self._restore()

    def transaction(self, loss: float | torch.Tensor | None = None) -> RunTransaction:
        """A block that ends a step: commits when it is left normally, as `commit`, and rolls back
        when it raises.

        What was written before the block since the last commit (batch statistics of the forward
        pass, for example) is part of the step: it commits or rolls back with the block. Blocks
        nest; the outermost counts.

            with run.transaction() as step:
                ...
                step.loss = loss
        """
        self._require()
        return RunTransaction(self, loss)

    def detach(self) -> None:
        """Ends the run: the optimizer's hooks are removed, commit and batches raise. The tensors
        stay in the store."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._pieces.optimizer is not None:
            self._pieces.optimizer.release()
        if self._pieces.pack is not None and not self._store.closed:
            self._pieces.pack.release()
        self._attached = False
        self._loop = None

    def _finish(self, loss: float | torch.Tensor | None, wait: bool = True) -> bool:
        self._require()
        landed = self._pending is not None
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.join()
        self._settle()
        done = self._done + 1
        self._write(done)
        self._done = done
        self._updating = False
        self._counts["steps"] += 1
        before = self._store.epoch
        if self._scheduler is None and not wait:
            try:
                # that one: a flush takes what is committed now, and waits for what is under way
                if landed:
                    self._flush()
            finally:
                self._pending = self._store.commit(wait=False)
                self._counts["commits"] += 1
            return True
        if self._scheduler is None:
            self._store.commit()
        else:
            if self._pieces.optimizer is not None:
                self._scheduler.learning_rate(
                    self._pieces.optimizer.optimizer.param_groups[0]["lr"]
                )
            self._scheduler.step(loss)
            if self._store.epoch == before:
                return False
        self._settle()
        self._counts["commits"] += 1
        self._flush()
        return True

    def _flush(self) -> None:
        for tier in self._tiers:
            self._store.flush_if_idle(tier)

    def _schedule(
        self, policy: CommitPolicy | CommitScheduler | None, tiers: tuple[str, ...] = ()
    ) -> None:
        """Puts a policy in charge of the commits. A rule gets a scheduler, which chooses among the
        tiers if the rule can."""
        tiers = tuple(tier for tier in tiers if not self._store.tiers[tier].every)
        if policy is None or isinstance(policy, OneTarget):
            self._tiers, tiers = tiers, ()
        if isinstance(policy, CommitScheduler):
            unknown = set(tiers) - {target.name for target in policy.targets}
            if unknown:
                raise AttachError(
                    f"the scheduler has no tier {min(unknown)!r}: make it with "
                    f"CommitScheduler(policy, store=store, tiers=[{min(unknown)!r}])"
                )
        elif policy is not None:
            policy = CommitScheduler(policy, store=self._store, tiers=tiers, run=self.name)
            self._lays_plans = True
        self._scheduler = policy
        if policy is not None:
            policy.steps = self._done  # the run may have had another policy before

    def _write(self, done: int) -> None:
        """Brings the store up to date with what Python holds; pending."""
        self._follow()
        if self._pieces.model is not None:
            self._pieces.model.take_in()
        if self._pieces.optimizer is not None:
            self._pieces.optimizer.sync()
        self._write_rest(done)

    def _write_rest(self, done: int) -> None:
        """Everything but model and optimizer, and the tensors of those that are mirrored."""
        pieces = self._pieces
        if pieces.pack is not None:
            pieces.pack.write(
                (pieces.model.tensors() if isinstance(pieces.model, MirroredModel) else [])
                + (
                    pieces.optimizer.tensors()
                    if isinstance(pieces.optimizer, MirroredOptimizer)
                    else []
                )
            )
        if pieces.gradients is not None:
            pieces.gradients.write(self._parameters(), spent=self._spent)
        for stateful in pieces.statefuls:
            stateful.write()
        if pieces.rng is not None:
            pieces.rng.write()
        position = self._position
        if pieces.source is not None and pieces.start is not None and pieces.generators is not None:
            if self._start_written is not position.start:  # once an epoch
                pieces.start.write(position.start)
                self._start_written = position.start
            states = [generator.get_state() for generator in pieces.source.generators]
            drawn = [state.numpy().tobytes() for state in states]
            if drawn != self._drawn:  # once an epoch
                pieces.generators.write(states)
                self._drawn = drawn
        pieces.progress[:] = (done, position.data_epoch, position.batch, 0)
        self._spent = pieces.optimizer is None

    def _parameters(self) -> list[tuple[str, torch.Tensor]]:
        named = self._pieces.model.parameters if self._pieces.model is not None else []
        return named + (
            self._pieces.optimizer.extra_parameters if self._pieces.optimizer is not None else []
        )

    def _follow(self) -> None:
        """Notices parameters that are other objects now."""
        pieces = self._pieces
        if pieces.optimizer is not None:
            pieces.optimizer.take_in()
        if pieces.model is not None:
            replaced = pieces.model.follow()
            if replaced and pieces.optimizer is not None:
                pieces.optimizer.replace(replaced)

    # ---- around optimizer.step

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Declares what the optimizer is about to write: captured in one go, without a fault for
        each piece."""
        if not self.attached:
            return
        self._require()
        pack = self._pieces.pack
        if pack is not None:
            pack.fence()
        if (pack is None or not pack.under_way) and self._store.in_transaction:
            raise TransactionError(
                f"optimizer.step() of {self.name!r} inside `with store.transaction()`, which would "
                "commit the step without what Python holds of it: use `with run.transaction()`"
            )
        pieces = self._pieces
        assert pieces.optimizer is not None
        # so that the step updates what the model computes with; what left the heap is taken in by
        # the commit
        self._follow()
        if pack is None:  # else the store holds nothing of a step before its commit
            self._store.will_write(pieces.progress, *pieces.optimizer.writes())
            pieces.progress[MIDSTEP] = 1
        self._updating = True

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.attached:
            return
        self._spent = True
        assert self._pieces.optimizer is not None
        if self._pieces.optimizer.behind:
            self._pieces.optimizer.collect()

    def _refuse_half_a_step(self) -> None:
        """Asked by the store before it commits."""
        if (
            self._updating
            and self._attached
            and not self._stale
            and self._store.rollbacks == self._rollbacks
        ):
            raise TransactionError(
                f"the run {self.name!r} is in the middle of a training step: optimizer.step() has "
                "written, and the step was not ended by run.commit() or run.transaction(). End it "
                "so, or take it back with run.rollback()"
            )

    # ---- data

    def batches(self, epochs: int | None = 1) -> Iterator[Any]:
        """The batches of the loader from where the run is, in the order they would have come in had
        it never stopped.

        A batch counts as taken by the step in whose commit it was; after a resume or a roll back
        the first batch is the one after it. Breaking out and calling again goes on with the next
        batch.

        Args:
            epochs: how many the run has in all, from its start; None: no end.

        Raises:
            AttachError: no loader was given to attach.
        """
        self._require()
        if self._pieces.source is None:
            raise AttachError("the run has no loader: give it to attach(..., loader=...)")
        return self._batches(self._pieces.source, epochs)

    def _batches(self, source: Source, epochs: int | None) -> Iterator[Any]:
        loop = self._loop = object()
        while epochs is None or self._position.data_epoch < epochs:
            self._expect(source, epochs)
            turn = self._turn
            batches = source.open_at(self._position)
            for batch in batches:
                self._position.batch += 1
                yield batch
                if self._loop is not loop:
                    raise RuntimeError(
                        "another loop over run.batches() has begun, or the run was detached: one "
                        "at a time"
                    )
                self._require()
                if self._turn != turn:
                    break  # rolled back: go on after the last committed batch
            else:
                if self._position.batch == 0:
                    raise ValueError("the loader gave no batch in a whole epoch")
                self._position = Position(self._position.data_epoch + 1)
            del batches  # worker processes end here, not when the next epoch's have started
        if self._scheduler is not None and self._lays_plans:
            self._scheduler.expect(self._done)

    def _expect(self, source: Source, epochs: int | None) -> None:
        """Tells the scheduler how many steps the job has: as many for each batch as it had so
        far."""
        if (
            self._scheduler is None
            or not self._lays_plans
            or epochs is None
            or not isinstance(source.loader, Sized)
        ):
            return
        try:
            length = len(source.loader)
        except TypeError:  # a DataLoader over an IterableDataset without a length
            return
        taken = self._position.data_epoch * length + self._position.batch
        share = self._done / taken if taken and self._done else 1.0
        self._scheduler.expect(max(round(epochs * length * share), 1))

    # ---- two sides that agree

    def _require(self) -> None:
        if not self._attached:
            raise AttachError(f"the run {self.name!r} was detached")
        if self._stale:
            self._store.rollback()
            self._restore()
        elif not self._store.closed and self._store.rollbacks != self._rollbacks:
            raise TransactionError(
                "the store was rolled back by other means than run.rollback(), so that what Python "
                "holds (generators, scheduler, place in the data) is no longer what the store "
                "holds: call run.rollback() now, and instead"
            )

    def _settle(self) -> None:
        """Notices a commit, whoever made it and whatever interrupted what followed: the store says
        what it holds."""
        if self._store.closed:
            return
        epoch = self._store.epoch
        if epoch != self._epoch:
            self._committed = int(self._pieces.progress[STEP])
            self._epoch = epoch

    def _bind(self) -> None:
        """First binding. The pieces were checked and opened, or have just been written and
        committed."""
        pieces = self._pieces
        if self.resumed:
            self._restore(opened=True)
        else:
            if pieces.model is not None:
                pieces.model.bind()
            if pieces.optimizer is not None:
                pieces.optimizer.bind()
            self._settle()
        self._store.guard_commits(self._refuse_half_a_step)
        if pieces.optimizer is not None:
            optimizer = pieces.optimizer.optimizer
            self._handles.append(optimizer.register_step_pre_hook(self._before_update))
            self._handles.append(optimizer.register_step_post_hook(self._after_update))

    def _restore(self, *, opened: bool = False) -> None:
        """Makes the Python side what the store's last commit says. May be repeated.

        Raises: CorruptStoreError.
        """
        with records(self._store.path, self.name):
            self._read_back(opened)

    def _read_back(self, opened: bool) -> None:
        self._stale = True
        self._pending = None
        pieces = self._pieces
        if pieces.model is not None:
            pieces.model.bind()
        if pieces.pack is not None:
            held = pieces.pack.open()
            for binding in (pieces.model, pieces.optimizer):
                if isinstance(binding, (MirroredModel, MirroredOptimizer)):
                    binding.load(held)
        if pieces.optimizer is not None:
            if not opened:
                pieces.optimizer.open()
            pieces.optimizer.restore()
        if pieces.gradients is not None:
            pieces.gradients.forget()
            pieces.gradients.restore(self._parameters())
        for stateful in pieces.statefuls:
            stateful.restore()
        step, data_epoch, batch, _ = (int(number) for number in pieces.progress)
        self._position = Position(data_epoch, batch)
        if pieces.source is not None and pieces.start is not None and pieces.generators is not None:
            pieces.start.forget()
            pieces.generators.forget()
            self._drawn = None
            self._position.start = self._start_written = start = pieces.start.read()
            if start is not None:
                # now, and not when the next batch is asked for
                rng.check(start, pieces.source.generators)
            elif batch:
                raise ValueError("the data have been read from, and where from is not there")
            for generator, state in zip(
                pieces.source.generators, pieces.generators.read(), strict=True
            ):
                generator.set_state(state)
        self._done = self._committed = step
        self._epoch = self._store.epoch
        self._updating = False
        self._spent = pieces.optimizer is None
        self._rollbacks = self._store.rollbacks
        self._turn += 1
        if self._scheduler is not None:
            self._scheduler.rolled_back()
            self._scheduler.steps = step
        if pieces.rng is not None:  # last: nothing above may draw a number afterwards
            pieces.rng.forget()
            pieces.rng.restore()
        self._stale = False


class RunTransaction:
    """What `Run.transaction` returns.

    Attributes:
        loss: of the step, for the policy; may be set in the block.
    """

    __slots__ = ("_run", "loss")

    def __init__(self, run: Run, loss: float | torch.Tensor | None) -> None:
        self._run = run
        self.loss = loss

    def __enter__(self) -> RunTransaction:
        self._run._require()
        self._run._block += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        run = self._run
        run._block -= 1
        if run._block:
            return False
        if kind is not None:
            if run.attached:
                run.rollback()
            return False
        try:
            run._finish(self.loss)
        except BaseException:
            # Not committed, or committed and interrupted after it: both ways the last commit is
            # what holds.
            run.rollback()
            raise
        return False
