"""The end of a training step: committed, or taken back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

import torch

from pmstore import Store
from pmstore._base.text import counted as words
from pmstore.course.recorder import Course, clock
from pmstore.errors import TransactionError
from pmstore.job.meetings import Meeting
from pmstore.job.membership import Membership
from pmstore.mirror.pending_commit import PendingCommit
from pmstore.torch._data.batch_source import Source
from pmstore.torch._random.defaults import HeadDraws
from pmstore.torch._state.optimizer import OptimizerBinding
from pmstore.torch._step.commit_schedule import Schedule
from pmstore.torch._step.foreign_trainers import Others
from pmstore.torch._step.log import Log
from pmstore.torch._step.progress import Progress, RunState
from pmstore.torch._step.state import (
    ENDED,
    IDLE,
    MARKED,
    OPEN,
    BeforeForward,
    Event,
    Kind,
    OpenStep,
)
from pmstore.torch.parts import Pieces
from pmstore.torch.run_errors import AttachError, RolledBackError, UnfinishedStepError, records

_log = logging.getLogger("pmstore")


class Steps:
    """Ends the steps of a run and takes them back, so that the store and what Python holds agree.

    What Python holds goes into the store with a commit. A step that is finished and not committed
    writes nothing beyond its tensors; the next commit, or leaving the store normally, keeps it.

    Attributes:
        step: the one that is open.
        pending: the last commit, if it was not waited for.
        loss: that the last commit was given; given: the last finished step.
        data_unused: no loop over the loader was begun, and nobody was told.
        counts: fields of `RunStats`.
        job: this rank's part in it; None: the run is alone.
        course: losses, times and decisions, which the store keeps.
        log: what `run.log` was given. state: plain values of the program. heads: what is drawn in
            heads.
        at_end: called once, after the commit of the open step.
        ends: called when the run is detached, or the store closed.
        went_back_to: given the kind of the step that was open, and whether anything was taken back,
            says what of the program's way is lost (see `Loops`).
        went_on: called before a step ends that the program has left, and said is complete.
        caught_up: no loop that was begun in an earlier life is still to come.
        unsaved: a step, a head or a tail has ended that no commit holds.
    """

    def __init__(self, store: Store, name: str, pieces: Pieces, progress: Progress) -> None:
        """The pieces were checked and opened, or have just been written and committed."""
        self.store: Store = store
        self.name: str = name
        self.pieces: Pieces = pieces
        self.progress: Progress = progress
        self.step: OpenStep = OpenStep()
        self.pending: PendingCommit | None = None
        self.loss: float | torch.Tensor | None = None
        self.given: float | torch.Tensor | None = None
        self.detached: bool = False
        self.data_unused: bool = pieces.loader is not None
        self.counts: dict[str, int] = {"steps": 0, "commits": 0, "rollbacks": 0}
        self.schedule: Schedule = Schedule(store, name, progress)  # until attach has another
        self.job: Membership | None = None
        self.course: Course = Course(store, name, progress.committed)
        self.log: Log = Log(store, name)
        self.state: RunState = RunState(store, name)
        self.heads: HeadDraws = HeadDraws(store, f"{name}/heads")
        self.at_end: list[Callable[[], object]] = []
        optimizers = [one.optimizer for one in pieces.optimizers.values()]
        self.others: Others = Others(name, optimizers, pieces.keepers, pieces.parameters)
        self.ends: list[Callable[[], None]] = [self.others.unwatch]
        self.went_back_to: Callable[[Kind | None, bool], str] = lambda kind, pending: ""
        self.went_on: Callable[[], None] = lambda: None
        self.caught_up: bool = True
        self.unsaved: bool = False
        self._guards = store._guards
        self._handle = store._core.pool.handle
        self._rollbacks = self._handle.rollbacks
        self._handles: list[Any] = []
        self._optimizer: Any = next(iter(optimizers), None)

    @property
    def attached(self) -> bool:
        return not self.detached and not self.store.closed

    # ---- attach

    def bind(self, *, resumed: bool) -> None:
        """Makes the program's tensors the store's."""
        with self.pieces.moving():
            if resumed:
                self._restore(opened=True)
            else:
                for binding in self.pieces.bindings:
                    binding.bind()
                self.pieces.placement.note()
        self.caught_up = not self.progress.loops
        self._rates = self._rates_now()
        self.store._guard_commits(self)
        self.others.watch()
        before_forward = BeforeForward(self.step)
        self._handles += [
            model.register_forward_pre_hook(before_forward) for model in self.pieces.modules
        ]
        for binding in self.pieces.optimizers.values():
            optimizer: Any = binding.optimizer
            before, after = self._before_update, self._after_update
            self._handles += (
                optimizer.register_step_pre_hook(partial(before, binding)),
                optimizer.register_step_post_hook(partial(after, binding)),
            )
            if self.progress.committed:
                optimizer._opt_called = True  # else a new scheduler warns of a wrong order

    @property
    def done(self) -> int:
        """Finished steps, and one by hand that is complete, as its block was left."""
        return self.progress.finished + self.step.left

    def use(self, schedule: Schedule) -> None:
        self.schedule = schedule
        schedule.capture = self._capture

    def detach(self) -> None:
        if self.attached and not self.rolled_back:
            if self.step.state is MARKED or self.step.state is ENDED:
                self.went_on()
                self.end(commit=True)
            elif self.step.state is IDLE and self.unsaved:
                self.end(commit=True)
            self._land()
        used = self.step.used and self.step.state is not IDLE
        if self.attached and self.pieces.placement.in_store and used:
            self.progress.begin_update([])  # half a step stays in the tensors: the store says so
        self.schedule.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.pieces.release()
        self.detached, self.progress.agreed = True, -1
        self._guards.let_go(self)
        self._end_all()

    def expect(self, epochs: int | None, source: Source) -> None:
        """How many data epochs the run has in all, and over what."""
        self.course.last_step = self.schedule.expect(epochs, source)

    # ---- a step

    def begin(self, kind: Kind) -> None:
        """A step begins. The store holds the run from now on, until a loop is over.

        Raises: TransactionError: a step of this run is open.
        """
        self._guards.held = self
        self.others.moved = None  # what the program trained between two steps is its own
        self.step.begin(kind)

    def ask(self, *, commit: bool = False) -> None:
        """The next step is asked for: the one that is open ends. If the guard was told to stop, so
        does the program. commit: whatever the policy says.

        Raises: SystemExit: with status 0; all is committed. TransactionError; what a commit raises.
        """
        if self._rollbacks() != self.progress.agreed:
            self.require()
        if commit or self.step.state is not IDLE:
            self.end(commit=commit)
        if self.schedule.guarded and self.schedule.told:
            self._leave()

    def end(self, *, commit: bool = False) -> None:
        """The open step ends, if one is, and the policy says whether to commit; commit: it does in
        any case."""
        step = self.step
        if step.state is not IDLE:
            if step.thread != get_ident() or step.task is not None:
                step.check_caller()
            if step.updating:
                step.check_whole()
        if commit or step.state is OPEN or step.state is MARKED:
            end = self._finish if self.job is None else self._meet
            end(commit)
        step.state = IDLE
        step.within = False

    def boundary(self) -> None:
        """Commits what is pending, and ends the step that is open, if one is: a loop begins or is
        over. The store need not hold the run."""
        self.require()
        self.end(commit=True)
        self._guards.let_go(self)

    def settle(self) -> None:
        """Commits what is pending, if anything is. Ranks of a job do that together, whether one of
        them alone has written something or not."""
        self._land()
        if self.job is not None or self.unsaved or self.store.written():
            self.boundary()
        else:
            self._guards.let_go(self)
        self.pieces.placement.note()

    def commit(self, *, agree: bool) -> None:
        """See `Run.commit`."""
        self.require()
        step = self.step
        if step.kind is Kind.HEAD and step.state is not IDLE:
            raise TransactionError(
                "run.commit() in the head of an epoch: what stands there is committed with its "
                "first batch"
            )
        if step.state is OPEN or step.state is MARKED:
            step.check_caller()
            step.check_whole()
            apart = step.kind is Kind.HAND and not step.within  # its block was left
            if apart and step.stopping:
                self.progress.stopped = True
            end = self._finish if self.job is None else self._meet
            end(True)
            step.go(Event.COMMIT)
            if agree and self.job is not None:
                self.job.settle()
            if apart:
                step.close()
                self._guards.let_go(self)
            return
        self._land()
        if step.state is IDLE:
            self._note_changes()
        if self.store.written():
            if step.state is ENDED:
                raise TransactionError(
                    "run.commit(): this step was ended by run.commit(), and what was written "
                    "since then goes with the next one"
                )
            raise TransactionError(
                "run.commit() outside of a step: what was written since the last one is the head "
                "of the next loop and is committed with its beginning, or when `with "
                "pmstore.open(...)` is left. store.commit() keeps what is set up before a loop, "
                "and is done again at each start of the program"
            )
        if agree and self.job is not None:
            self.job.settle()

    def _note_changes(self) -> None:
        """What the program has changed outside of steps, in tensors and in `Run.state`, is written;
        pending."""
        self.pieces.capture_tensors()
        if self.state.values or self.state.stored:
            self.state.capture()

    def _meet(self, commit: bool) -> None:
        """Does what `_finish` does, in a job, whose ranks do it together."""
        assert self.job is not None
        if self.pending is not None:
            self.pending.join()  # then it gets its ticket
        with self.job.turn(commit=commit) as meeting:
            step = self.step
            of_step = step.state is OPEN or step.state is MARKED
            self.schedule.prepare(meeting, of_step and step.kind.counted)
            self._finish(commit, meeting)

    def _finish(self, commit: bool, meeting: Meeting | None = None) -> None:
        """The open step ends, if one is, and the policy says whether to commit; commit: it does in
        any case. With a tail its epoch is over."""
        began = clock()
        landed = self.pending is not None and self._land()
        progress, step, schedule = self.progress, self.step, self.schedule
        counted = False
        if step.state is OPEN or step.state is MARKED:
            counted = step.kind.counted
            if not counted and step.kind is Kind.TAIL:
                progress.over = progress.head
        before, values = progress.finished, step.values
        if self.at_end and self.job is None:
            commit = True
        wait = commit or self.pieces.placement.in_store or schedule.foreign
        loss = None
        self._guards.committing = self
        try:
            if counted:
                progress.finished = before + 1
                if self.others.moved is not None or self.others.suspects:
                    self.others.check(used=step.used)
                self.given = loss = values.get("loss") if values else None
                self.course.add(before + 1, loss, began)
            if values:
                self.log.add(progress.finished, values)
                step.values = {}
            if landed and not wait:
                schedule.flush()  # takes what is committed now, and waits for what is under way
            committed = schedule.end(
                loss, self._optimizer, meeting, counted=counted, commit=commit, wait=wait
            )
            self.pending = schedule.pending
        except BaseException:
            try:
                self.pieces.placement.wait_over()
            finally:
                progress.settle()
                if counted and progress.committed > before:  # interrupted behind the commit
                    step.state = ENDED
                    step.values = {}
                else:
                    progress.finished = before
            raise
        finally:
            self._guards.committing = None
        self.counts["steps"] += counted
        self.unsaved = not committed
        step.used = False
        if values:
            step.values = {}
        if committed:
            if step.state is not IDLE:  # whatever a tier, or a logger, raises now
                step.state = ENDED
            self._committed(began)

    def tell_unused(self) -> None:
        self.data_unused = False
        _log.warning(
            "%s: attach was given a loader, but no batch of it was taken from the run %r, so that "
            "its place in the data is not known: after a resume the data begins anew. Iterate "
            "run.epochs() or run.batches(), or give attach no loader",
            *(self.store.path, self.name),
        )

    def _capture(self) -> None:
        """Brings the store up to date with what Python holds; pending."""
        progress = self.progress
        self.pieces.capture(progress.place)
        progress.capture(progress.finished)
        log, state = self.log, self.state
        if log.waiting or log.loggers:
            log.capture()
        if state.values or state.stored:
            state.capture()
        if self.job is not None:
            self.job.write(progress.finished)

    def _committed(self, began: float) -> None:
        """All finished steps are, or will be as soon as the commit under way is over. began: when
        that was."""
        progress, under_way = self.progress, self.pending is not None
        self.counts["commits"] += 1
        self.loss = self.given
        self.course.committed(began, self.schedule.decision, progress.finished, under_way)
        if not under_way:
            if self.log.loggers:
                self.log.tell()
            if self.schedule.flushes:
                self.schedule.flush()
        while self.at_end:
            self.at_end.pop(0)()

    def _land(self) -> bool:
        """The commit that was not waited for is over. Returns whether there was one.

        Raises: what that commit raises.
        """
        if self.pending is None:
            return False
        pending, self.pending = self.pending, None
        pending.join()
        self.course.landed()
        self.progress.settle()
        self.log.tell()
        return True

    def _leave(self) -> None:
        """The guard was told to stop. Raises: SystemExit: with status 0; all is committed."""
        if self.job is not None:
            self.job.leave()
        elif not self.schedule.finished:
            began = clock()
            self._guards.committing = self
            try:
                self._land()
                self.schedule.stop()
                self._committed(began)
            finally:
                self._guards.committing = None
        raise SystemExit(0)

    # ---- going back

    def roll_back(self) -> None:
        """See `Run.rollback`."""
        if self.detached:
            raise self._gone()
        pending = self.unsaved or self.store.written()
        kind = self._open_kind
        self.go_back()
        self.counts["rollbacks"] += 1
        self._check_way(kind, pending)

    @property
    def _open_kind(self) -> Kind | None:
        return None if self.step.state is IDLE else self.step.kind

    def _check_way(self, kind: Kind | None, pending: bool) -> None:
        if told := self.went_back_to(kind, pending):
            raise RolledBackError(
                f"the run {self.name!r} was taken back to step {self.progress.committed}, {told}"
            )

    def changed(self) -> bool:
        """Whether the program has written into the store, or set other learning rates, since it was
        attached. (Nothing is asked of its own objects.)"""
        return self.store.written() or self._rates != self._rates_now()

    def _rates_now(self) -> list[Any]:
        return [
            group.get("lr")
            for binding in self.pieces.optimizers.values()
            for group in binding.optimizer.param_groups
        ]

    def go_back(self) -> None:
        """Takes store and program back to the last commit."""
        self.step.close(Event.BACK)
        self.step.values = {}
        self.step.stopping = False
        self.at_end.clear()
        # until both sides agree: an interrupt in between is made good by the next call
        self.progress.agreed = -1
        self.store.rollback()
        if self.job is not None:
            self.job.rolled_back()
        self._restore()
        self._guards.let_go(self)

    def go_to(self, change: Callable[[], None]) -> None:
        """Takes back what is not committed; then change commits another state, which Python
        follows. If that raises, both are at the last commit.

        Raises: TransactionError: another run of the store is in the middle of a step; what change
            raises. RolledBackError: the program's loops have to begin again.
        """
        self.require()
        kind, before = self._open_kind, self.done
        self._guards.committing = self
        try:
            self._guards.before_commit()
            # Other runs of the store see by a roll back that they have to follow. One of nothing
            # would not count.
            self.progress.touch()
            self.go_back()
            self.course.lives.keep(self.progress.committed)
            self.progress.agreed = -1
            try:
                change()
            finally:
                self.store.rollback()  # of nothing, but mirrors follow
                self._restore()
            self.course.lives.rewound(before, self.progress.committed)
        finally:
            self._guards.committing = None
        self._check_way(kind, True)

    def rewind_one(self) -> None:
        """Takes store and program back to the commit before the last. See `Run.rewind`."""
        if self.progress.committed == 0:
            raise TransactionError(
                f"the run {self.name!r} is at its first commit, which attach made: there is no "
                "step to go back to"
            )
        place = f"{self.name}/given"
        given = self.store.get(place)

        def change() -> None:
            self.store.rewind()
            if self.store.get(place) != given:  # settings changed in the step that was taken back
                self.store[place] = given

        self.loss = None
        self.go_to(change)

    # ---- around optimizer.step

    def _before_update(
        self, binding: OptimizerBinding, optimizer: Any, args: Any, kwargs: Any
    ) -> None:
        if self._handle.closed:
            return
        if self._rollbacks() != self.progress.agreed:
            self.require()
        self.step.update()
        if self.job is not None:
            if self.pieces.loader is None:
                self.job.updated()
            self.job.begin_ticket()  # of a commit that was not waited for
        placement, gradients = self.pieces.placement, self.pieces.gradients
        # so that the step updates what the model computes with; what left the heap is taken in by
        # the commit
        self.pieces.follow()
        assert gradients is not None
        if gradients.dead and len(args) < 2 and not kwargs.get("closure"):  # else that does
            gradients.refuse_unknown(binding.called, binding.parameters)
        if placement.in_store:
            self.progress.begin_update(binding.writes())
        else:
            placement.fence()

    def _after_update(
        self, binding: OptimizerBinding, optimizer: Any, args: Any, kwargs: Any
    ) -> None:
        if self._handle.closed:
            return
        self.step.updating -= 1
        self.pieces.spend(optimizer)
        if binding.behind:
            binding.collect()

    # ---- the store asks (see `pmstore.objects.guards.Guard`)

    def half(self) -> str:
        if self.rolled_back:
            return ""
        if self.step.state is not IDLE:
            return (
                f"a step of the run {self.name!r} is open, and only the run commits it: "
                "run.commit() ends it here and now, the next batch ends it by itself, "
                "run.rollback() takes it back"
            )
        if self._redone():
            return (
                f"what was written to the model or the optimizer of the run {self.name!r} before "
                "a loop was done in an earlier start of the program, and the run has "
                "trained since then: a commit would overwrite that. The loop takes it back by "
                "itself, run.rollback() does now"
            )
        return ""

    def _redone(self) -> bool:
        """Whether the program has not come to its loops yet, which began in an earlier life, and
        has written to what they train."""
        return not self.caught_up and self.pieces.placement.written()

    def capture(self) -> None:
        """Somebody else commits the store: finished steps are part of it."""
        if self.unsaved and not self.rolled_back:
            self._capture()

    def lost(self) -> str:
        return self.half()

    def leaving(self) -> bool:
        """Commits what the program has finished. Raises: UnfinishedStepError, TransactionError."""
        step = self.step
        if self.rolled_back:
            return False
        if step.state is IDLE:
            if why := self.half():
                if self.job is not None:
                    self.job.leave(half=True)
                raise TransactionError(why)
            if self.unsaved:
                self.end(commit=True)
            self._land()
            self._note_changes()
            if self.caught_up and self.store.written():
                self._capture()  # as a whole: a tensor and what belongs to it
            self.log.capture(wait=True)
            if self.log.untold and self.job is None:  # what was logged behind the last loop
                self._guards.committing = self
                try:
                    self.store.commit()
                finally:
                    self._guards.committing = None
                self.log.tell()
                self.log.capture()
            return False
        if step.state is OPEN:
            if self.job is not None:
                self.job.leave(half=True)
            raise UnfinishedStepError(
                f"`with pmstore.open(...)` was left in a step of the run {self.name!r} (of "
                f"{step.kind.called}), and nobody said that it is complete: it is taken back, to "
                f"step {self.progress.committed}. A loop of the run that is followed to its end "
                "needs nothing: so many batches are run.epochs(n, batches=k), not islice or zip. "
                "Before a break or return write run.stop(), if the run is over (early stopping), "
                "or run.end_step(), if the step is complete and the run goes on at the next start"
            )
        self.went_on()
        self.end(commit=True)
        self._land()
        self.log.capture(wait=True)
        return False

    def dropping(self) -> None:
        """What is not committed is taken back: one line of the log says so."""
        if self.rolled_back:
            return
        progress, lost = self.progress, []
        if steps := progress.finished - progress.committed:
            lost.append(words(steps, "finished step"))
        if self.step.state is not IDLE:
            lost.append("the step that was open")
        if lost:
            _log.warning(
                "%s: the run %r goes back to step %d: %s taken back",
                *(self.store.path, self.name, progress.committed),
                " and ".join(lost) + (" are" if steps > 1 or len(lost) > 1 else " is"),
            )
        elif not self.store.written():
            self.schedule.spare()

    def went_back(self) -> None:
        pass

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

    @property
    def rolled_back(self) -> bool:
        """Whether the store holds nothing of this run that is pending."""
        return self._rollbacks() != self.progress.agreed

    # ---- two sides that agree

    def require(self) -> None:
        """Store and Python agree, or an error says why they cannot.

        Raises: AttachError: detached; TransactionError: rolled back by other means.
        """
        if self._rollbacks() == self.progress.agreed:
            return
        if self.detached:
            raise self._gone()
        if self.progress.agreed < 0:
            self.store.rollback()
            self._restore()
        elif not self.store.closed:
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
        pieces, progress, rollbacks = self.pieces, self.progress, self._rollbacks()
        with records(self.store.path, self.name):
            progress.agreed = -1
            self.pending = self.loss = self.given = None
            self.unsaved = False
            pieces.restore(opened=opened)
            progress.restore()
            if pieces.loader is not None:
                pieces.loader.restore(progress.place)
            self.schedule.rolled_back()
            self.course.rolled_back(progress.committed)
            self.log.rolled_back()
            self.state.restore()
            self.heads.rolled_back()
            pieces.rng.restore()  # last: nothing above may draw a number afterwards
            pieces.placement.note()
            progress.agreed = rollbacks
