"""The end of a training step: committed, or taken back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pmstore import Store
from pmstore.base.words import counted
from pmstore.course.writer import Course, clock
from pmstore.distributed.meetings import Meeting
from pmstore.distributed.membership import Membership
from pmstore.errors import TransactionError
from pmstore.mirror.pending import PendingCommit
from pmstore.torch._data.source import Source
from pmstore.torch._state.optimizer import OptimizerBinding
from pmstore.torch._step.progress import Progress
from pmstore.torch._step.schedule import Schedule
from pmstore.torch.begun import Begun
from pmstore.torch.errors import AttachError, records
from pmstore.torch.finished import Finished
from pmstore.torch.parts import Pieces
from pmstore.torch.unheld import Unheld


class Steps:
    """Ends the steps of a run and takes them back, so that the store and what Python holds agree.

    Attributes:
        transactions: blocks of `Run.transaction` that are open, one in the other.
        pending: of the last commit that was not waited for.
        loss, given: that the last commit was given, and the last finished step.
        data_unused: no loop over the loader was begun, and nobody was told.
        counts: fields of `RunStats`.
        done: finished steps that no commit holds yet.
        job: this rank's part in it; None: the run is alone.
        course: losses, times and decisions, which the store keeps.
        ends: called when the run is detached, or the store closed.
    """

    def __init__(self, store: Store, name: str, pieces: Pieces, progress: Progress) -> None:
        """The pieces were checked and opened, or have just been written and committed."""
        self.store: Store = store
        self.name: str = name
        self.pieces: Pieces = pieces
        self.progress: Progress = progress
        self.begun: Begun = Begun(store, pieces)
        self.done: Finished = Finished(self)
        self.transactions = 0
        self.pending: PendingCommit | None = None
        self.loss: float | torch.Tensor | None = None
        self.given: float | torch.Tensor | None = None
        self.detached: bool = False
        self.data_unused: bool = pieces.loader is not None
        self.counts: dict[str, int] = {"steps": 0, "commits": 0, "rollbacks": 0}
        self.schedule: Schedule = Schedule(store, name, progress)  # until attach has another
        self.job: Membership | None = None
        self.course: Course = Course(store, name, progress.committed)
        self.ends: list[Callable[[], None]] = []
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
            self.begun.end(committed=True)
        self.store.guard_commits(self)
        self._handles.append(Unheld(self))
        self._handles += self.begun.watch(self.pieces.modules)
        for binding in self.pieces.optimizers.values():
            optimizer: Any = binding.optimizer
            before, after = self._before_update, self._after_update
            self._handles += (
                optimizer.register_step_pre_hook(partial(before, binding)),
                optimizer.register_step_post_hook(partial(after, binding)),
            )
            if self.progress.committed:
                optimizer._opt_called = True  # else a new scheduler warns of a wrong order

    def use(self, schedule: Schedule) -> None:
        self.schedule = schedule
        if schedule.guard is not None:
            self.begun.before = self.stop
            schedule.watch(self.done.secure)

    def detach(self) -> None:
        if self.attached and self.pieces.pack is None and self._torn():
            self.progress.begin_update([])
        self.schedule.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for binding in self.pieces.optimizers.values():
            binding.release()
        if self.pieces.pack is not None and not self.store.closed:
            self.pieces.pack.release()
        self.detached = True
        self._end_all()

    def expect(self, epochs: int | None, source: Source) -> None:
        """How many data epochs the run has in all, and over what."""
        self.course.last_step = self.schedule.expect(epochs, source)

    # ---- the end of a step

    def end(
        self,
        loss: float | torch.Tensor | None,
        *,
        ask: bool = False,
        wait: bool = True,
        agree: bool = False,
    ) -> bool:
        """See `Run.commit`; with ask, which leaves it to the policy, `Run.end_step`."""
        self.schedule.note(ask, self.name)
        if self.job is None:
            return self._end(loss, ask, wait)
        self.require()
        if self.pending is not None:
            self.pending.join()  # then it gets its ticket
        with self.job.turn(commit=not ask) as meeting:
            self.schedule.prepare(meeting)
            committed = self._end(loss, ask, wait, meeting)
        if agree:
            self.job.settle()
        return committed

    def _end(
        self,
        loss: float | torch.Tensor | None,
        ask: bool,
        wait: bool,
        meeting: Meeting | None = None,
    ) -> bool:
        began = clock()
        self.require()
        if self.data_unused and self.begun.updating:
            self.data_unused = False
            warnings.warn(
                f"attach was given a loader, but no batch of it was taken by run.batches(), so "
                f"that the place of the run {self.name!r} in the data is not known: after a resume "
                "the data begins anew. Write `for batch in run.batches(epochs=...)`, or give "
                "attach no loader",
                RuntimeWarning,
                stacklevel=3,
            )
        landed = self.pending is not None
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.join()
            self.course.landed()
        self.progress.settle()
        self.store.refuse_half(but=self)
        self.done.begin()
        committed = False
        try:
            self._write()
            self.given = loss.detach() if isinstance(loss, torch.Tensor) else loss
            self.course.add(self.progress.finished, self.given, began)
            optimizer = next((one.optimizer for one in self.pieces.optimizers.values()), None)
            try:
                # that one: a flush takes what is committed now, and waits for what is under way
                if landed and not wait:
                    self.schedule.flush()
            finally:
                committed = self.schedule.end(loss, optimizer, meeting, ask=ask, wait=wait)
                self.pending = self.schedule.pending
        finally:
            if self.begun.ended:
                self.begun.end(committed=committed and self.pending is None)
        if committed:
            self.committed(began)
        elif self.job is None:
            self.done.set()
        return committed

    def committed(self, began: float) -> None:
        """All finished steps are, or will be as soon as the commit under way is over. began: when
        that was."""
        self.progress.settle()
        self.counts["commits"] += 1
        self.loss = self.given
        self.course.committed(clock() - began, self.schedule.decision)
        self.course.safe(self.progress.finished, under_way=self.pending is not None)
        if self.pending is None:
            self.schedule.flush()

    # ---- told to stop

    def stop(self) -> None:
        """Before a step begins: if the guard was told to stop, finished steps are committed before
        anything of the next is written."""
        if not (self.attached and self.schedule.told) or self._why() or self.store.in_transaction:
            return
        if self.progress.finished != self.progress.committed:
            began = clock()
            self.schedule.stop()
            self.begun.end(committed=True)
            self.committed(began)

    def leave(self) -> None:
        """Before a batch is given out: if the guard was told to stop, the program ends, unless the
        batch belongs to a step that has begun.

        Raises: SystemExit: with status 0; every finished step is committed.
        """
        if self.schedule.told and not self._why():
            self.stop()
            raise SystemExit(0)

    def _write(self) -> None:
        """Brings the store up to date with what Python holds; pending."""
        progress = self.progress
        finished = progress.finished + 1
        progress.place.forwards = self.begun.forwards
        progress.end_of_step(finished)
        self.pieces.write(progress.place)
        progress.write(finished)
        if self.job is not None:
            self.job.write(finished)
        progress.finished = finished
        self.begun.ended = True
        self.counts["steps"] += 1

    def roll_back(self) -> None:
        """See `Run.rollback`."""
        if self.detached:
            raise self._gone()
        self.done.forget()
        # until both sides agree: an interrupt in between is made good by the next call
        self.progress.stale = True
        self.store.rollback()
        self.counts["rollbacks"] += 1
        if self.job is not None:
            self.job.rolled_back()
        self._restore()

    def go_to(self, change: Callable[[], None]) -> None:
        """Takes back what is not committed; then change commits another state, which Python
        follows. If that raises, both are at the last commit.

        Raises: TransactionError: another run of the store is in the middle of a step; what change
            raises.
        """
        self.require()
        self.store.refuse_half(but=self)
        # Other runs of the store see by a roll back that they have to follow. One of nothing would
        # not count.
        self.progress.touch()
        self.roll_back()
        self.progress.stale = True
        try:
            change()
        finally:
            self.store.rollback()  # of nothing, but mirrors follow
            self._restore()

    def rewind_one(self) -> None:
        """To the commit before the last. See `Run.rewind`."""
        if self.progress.committed == 0:
            raise TransactionError(
                f"the run {self.name!r} is at its first commit, which attach made: there is no "
                "step to go back to"
            )
        place = f"{self.name}/given"
        given = self.store.get(place)
        self.go_to(self.store.rewind)
        self.loss = None
        if self.store.get(place) != given:  # settings changed in the step that was taken back
            self.store[place] = given

    # ---- around optimizer.step

    def _before_update(
        self, binding: OptimizerBinding, optimizer: Any, args: Any, kwargs: Any
    ) -> None:
        if not self.attached:
            return
        self.require()
        if self.job is not None:
            if self.pieces.loader is None:
                self.job.updated()
            self.job.begin_ticket()  # of a commit that was not waited for
        pack, gradients = self.pieces.pack, self.pieces.gradients
        if pack is not None:
            pack.fence()
        if (pack is None or not pack.under_way) and self.store.in_transaction:
            raise TransactionError(
                f"optimizer.step() of {self.name!r} inside `with store.transaction()`, which would "
                "commit the step without what Python holds of it: use `with run.transaction()`"
            )
        # so that the step updates what the model computes with; what left the heap is taken in by
        # the commit
        self.pieces.follow()
        assert gradients is not None
        if gradients.unknown and len(args) < 2 and not kwargs.get("closure"):  # else that does
            gradients.refuse_unknown(binding.called, binding.parameters)
        if pack is None:  # else the store holds nothing of a step before its commit
            self.progress.begin_update(binding.writes())
        self.begun.updating = True

    def _after_update(
        self, binding: OptimizerBinding, optimizer: Any, args: Any, kwargs: Any
    ) -> None:
        if not self.attached:
            return
        self.pieces.spend(binding)
        if binding.behind:
            binding.collect()

    # ---- the store asks (see `pmstore.objects.guards.Guard`)

    def half(self) -> str:
        why = self._why()
        return why and (
            f"the run {self.name!r} is in the middle of a training step: {why}, and the step was "
            "not ended by run.end_step(), run.commit() or run.transaction(). End it so, or take it "
            "back with run.rollback(); to evaluate between steps, use model.eval() or "
            "torch.no_grad()"
        )

    def running(self) -> bool:
        if self.rolled_back or self.begun.over or self.schedule.finished:
            return False
        return self.store.written()

    def lost(self, orderly: bool) -> str:
        if self.rolled_back:
            return ""
        committed = self.progress.committed
        steps = self.progress.finished - committed
        finished = f", {counted(steps, 'finished step')} among it" if steps else ""
        if not orderly:
            return (
                f"what the run {self.name!r} wrote since its last commit, with step {committed}, "
                f"is lost{finished}"
                if steps
                else ""
            )
        if why := self._why():
            when = f"in the middle of a training step of the run {self.name!r}: {why}"
        else:
            when = f"by an exit, while the run {self.name!r} was between two steps or within one"
        return (
            f"the store was left {when}. It is as of its last commit, with step {committed}; what "
            f"was written since then is lost{finished}. To keep it, end the step by run.commit(), "
            "or take half a step back by run.rollback() and call store.commit(). With "
            "attach(guard=PreemptionGuard()) a program that is told to stop finishes its step"
        )

    def leaving(self, half: bool) -> bool:
        return False

    def went_back(self) -> None:
        pass

    def raising(self) -> None:
        self.done.keep("the program ends")
        if self.done.none_lost():
            self.schedule.spare()

    def ending(self, kept: bool, raising: bool) -> None:
        pass

    def ended(self) -> None:
        self.schedule.close()
        self._end_all()
        if self.pieces.loader is not None:
            self.pieces.loader.source.close()

    def _end_all(self) -> None:
        while self.ends:
            self.ends.pop()()

    def _why(self) -> str:
        """What has begun the step that is under way; "": none is, or it was rolled back."""
        if self.rolled_back:
            return ""
        return "run.transaction() is open" if self.transactions else self.begun.why

    @property
    def rolled_back(self) -> bool:
        """Whether the store holds nothing of this run that is pending."""
        return self.detached or self.progress.stale or not self.progress.followed

    def _torn(self) -> bool:
        """Whether a step is under way that has written."""
        return (
            bool(self._why())
            and (self.begun.forward or self.begun.updating)
            and (self.begun.written())
        )

    # ---- two sides that agree

    def require(self) -> None:
        """Store and Python agree, or an error says why they cannot.

        Raises: AttachError: detached; TransactionError: rolled back by other means.
        """
        if not self.detached and not self.progress.stale and self.progress.followed:
            return
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
            self.pending = self.loss = self.given = None
            pieces.restore(opened=opened)
            progress.restore()
            if pieces.loader is not None:
                pieces.loader.restore(progress.place)
            self.schedule.rolled_back()
            self.course.rolled_back(progress.committed)
            if pieces.rng is not None:  # last: nothing above may draw a number afterwards
                pieces.rng.restore()
            self.begun.end(committed=True)
            progress.stale = False
