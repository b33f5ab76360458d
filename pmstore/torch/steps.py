"""The end of a training step: committed, or taken back."""

from __future__ import annotations

from typing import Any

import torch

from pmstore import Store
from pmstore.errors import TransactionError
from pmstore.mirror.pending import PendingCommit
from pmstore.torch.errors import AttachError, records
from pmstore.torch.pieces import Pieces
from pmstore.torch.progress import Progress
from pmstore.torch.schedule import Schedule


class Steps:
    """Ends the steps of a run and takes them back, so that the store and what Python holds agree.

    Attributes:
        transactions: blocks of `Run.transaction` that are open, one in the other.
        pending: of the last commit that was not waited for.
        counts: fields of `RunStats`.
    """

    def __init__(self, store: Store, name: str, pieces: Pieces, progress: Progress) -> None:
        """The pieces were checked and opened, or have just been written and committed."""
        self.store = store
        self.name = name
        self.pieces = pieces
        self.progress = progress
        self.transactions = 0
        self.pending: PendingCommit | None = None
        self.detached = False
        self.counts = {"steps": 0, "commits": 0, "rollbacks": 0}
        self.schedule = Schedule(store, name, progress)  # until attach has another
        self._handles: list[Any] = []

    @property
    def attached(self) -> bool:
        return not self.detached and not self.store.closed

    # ---- attach

    def bind(self, *, resumed: bool) -> None:
        """Makes the program's tensors the store's."""
        if resumed:
            self._restore(opened=True)
        else:
            for binding in self.pieces.bindings:
                binding.bind()
            self.progress.settle()
        self.store.guard_commits(self._refuse_half_a_step)
        if self.pieces.optimizer is not None:
            optimizer: Any = self.pieces.optimizer.optimizer
            self._handles.append(optimizer.register_step_pre_hook(self._before_update))
            self._handles.append(optimizer.register_step_post_hook(self._after_update))
            if self.progress.committed:
                # What a scheduler of this process would otherwise take for a call in the wrong
                # order, and warn.
                optimizer._opt_called = True

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.pieces.optimizer is not None:
            self.pieces.optimizer.release()
        if self.pieces.pack is not None and not self.store.closed:
            self.pieces.pack.release()
        self.detached = True

    # ---- the end of a step

    def end(self, loss: float | torch.Tensor | None, wait: bool = True) -> bool:
        """See `Run.commit`."""
        self.require()
        landed = self.pending is not None
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.join()
        self.progress.settle()
        self._write()
        if self.schedule.scheduler is None and not wait:
            try:
                # that one: a flush takes what is committed now, and waits for what is under way
                if landed:
                    self.schedule.flush()
            finally:
                self.pending = self.store.commit(wait=False)
                self.counts["commits"] += 1
            return True
        optimizer = self.pieces.optimizer
        if not self.schedule.commit(loss, optimizer.optimizer if optimizer is not None else None):
            return False
        self.progress.settle()
        self.counts["commits"] += 1
        self.schedule.flush()
        return True

    def _write(self) -> None:
        """Brings the store up to date with what Python holds; pending."""
        progress, gradients = self.progress, self.pieces.gradients
        finished = progress.finished + 1
        progress.end_of_step(finished)
        self.pieces.write(progress.place)
        progress.write(finished)
        if gradients is not None:
            gradients.spent = False
        progress.finished = finished
        progress.updating = False
        self.counts["steps"] += 1

    def roll_back(self) -> None:
        """See `Run.rollback`."""
        if self.detached:
            raise self._gone()
        # until both sides agree: an interrupt in between is made good by the next call
        self.progress.stale = True
        self.store.rollback()
        self.counts["rollbacks"] += 1
        self._restore()

    # ---- around optimizer.step

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.attached:
            return
        self.require()
        pack = self.pieces.pack
        if pack is not None:
            pack.fence()
        if (pack is None or not pack.under_way) and self.store.in_transaction:
            raise TransactionError(
                f"optimizer.step() of {self.name!r} inside `with store.transaction()`, which would "
                "commit the step without what Python holds of it: use `with run.transaction()`"
            )
        assert self.pieces.optimizer is not None
        # so that the step updates what the model computes with; what left the heap is taken in by
        # the commit
        self.pieces.follow()
        if pack is None:  # else the store holds nothing of a step before its commit
            self.progress.begin_update(self.pieces.optimizer.writes())
        self.progress.updating = True

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.attached:
            return
        assert self.pieces.optimizer is not None
        assert self.pieces.gradients is not None
        self.pieces.gradients.spent = True
        if self.pieces.optimizer.behind:
            self.pieces.optimizer.collect()

    def _refuse_half_a_step(self) -> None:
        """Asked by the store before it commits."""
        progress = self.progress
        if progress.updating and not self.detached and not progress.stale and progress.followed:
            raise TransactionError(
                f"the run {self.name!r} is in the middle of a training step: optimizer.step() has "
                "written, and the step was not ended by run.commit() or run.transaction(). End it "
                "so, or take it back with run.rollback()"
            )

    # ---- two sides that agree

    def require(self) -> None:
        """Store and Python agree, or an error says why they cannot.

        Raises: AttachError: detached; TransactionError: rolled back by other means.
        """
        if self.detached:
            raise self._gone()
        if self.progress.stale:
            self.store.rollback()
            self._restore()
        elif not self.store.closed and not self.progress.followed:
            raise TransactionError(
                "the store was rolled back by other means than run.rollback(), so that what Python "
                "holds (generators, scheduler, place in the data) is no longer what the store "
                "holds: call run.rollback() now, and instead"
            )

    def _gone(self) -> AttachError:
        return AttachError(f"the run {self.name!r} was detached")

    def _restore(self, *, opened: bool = False) -> None:
        """Makes the Python side what the store's last commit says. May be repeated.

        Raises: CorruptStoreError.
        """
        pieces, progress = self.pieces, self.progress
        with records(self.store.path, self.name):
            progress.stale = True
            self.pending = None
            pieces.restore(opened=opened)
            progress.restore()
            if pieces.loader is not None:
                pieces.loader.restore(progress.place)
            self.schedule.rolled_back()
            if pieces.rng is not None:  # last: nothing above may draw a number afterwards
                pieces.rng.restore()
            progress.stale = False
