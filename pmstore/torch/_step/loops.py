"""The loops of a run: they hand out steps, and begin and end them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

from pmstore.errors import TransactionError
from pmstore.torch._data.batch_source import Source
from pmstore.torch._data.cursor import Cursor, Transfer
from pmstore.torch._data.position import Position
from pmstore.torch._step.epoch import Epoch
from pmstore.torch._step.progress import BY_HAND, LoopRecord
from pmstore.torch._step.state import ENDED, IDLE, MARKED, OPEN, Kind
from pmstore.torch._step.steps import Steps
from pmstore.torch.run_errors import LookaheadError

_log = logging.getLogger("pmstore")
_DATA = {"epochs", "batches"}


class _Bounds(NamedTuple):
    """What a loop hands out: batches up to a data epoch. end: that with which the loop ends; token:
    stands for the loop; within: for the epoch, of `run.epochs`; over: is called behind them."""

    token: object
    epochs: int | None
    end: int | None
    over: Callable[[], None]
    within: object | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """How batches are handed out. See `Run.batches`."""

    every: int = 1
    ahead: int | None = None
    device: Any = None
    limit: int | None = None
    """Batches of an epoch at most."""


class Loops:
    """The loops of one run, one at a time. The store keeps which were begun, in their order: what
    stands before a loop that has begun in an earlier life is taken back.

    Attributes:
        last_in_step: whether the batch that was handed out last is the last of its step.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._step = steps.step
        self._progress = steps.progress
        self._token: object | None = None  # of the loop that goes on
        self._within: object | None = None  # of the epoch that is iterated
        self._number: int | None = None  # of the loop that was begun last
        self._next = 0  # number of the loop that follows it
        self._new = False  # it was begun in this process for the first time
        self._over = True  # it is over
        self._again = False  # taken back, and no loop has gone on since then
        self._epoch: int | None = None  # that run.epochs handed out last
        self._looked = False  # a first epoch was iterated
        self._holds = False  # the program holds batches of the loop, as it says
        self.last_in_step: bool = False
        steps.went_back_to = self._went_back
        steps.went_on = self._went_on

    def close(self) -> None:
        """No loop goes on after this; worker processes end."""
        self._token = self._within = None
        loader = self._steps.pieces.loader
        if loader is not None:
            loader.source.close()

    # ---- a loop begins

    def _begin(self, kind: str, name: str, n: int | None) -> tuple[object, bool]:
        """Returns what stands for the loop, and whether it is over, as a later one has begun."""
        steps, progress = self._steps, self._progress
        steps.require()
        self._check_left()
        if self._step.stopping:
            self._stop(None)
        if self._number is None:
            steps.pieces.held.begin()
        number = self._find(kind, name, n)
        new = number == len(progress.loops)
        passed = False
        if new:
            self._begin_new(number, kind, name, n)
        else:
            passed = self._begin_known(number, n)
        self._number, self._next, self._over, self._again = number, number + 1, False, False
        self._new = new
        self._holds, self._epoch = False, None
        steps.caught_up = self._next == len(progress.loops)
        if kind in _DATA:
            steps.data_unused = False
        elif steps.data_unused:
            steps.tell_unused()
        self._token, self._within = object(), None
        return self._token, passed

    def _begin_new(self, number: int, kind: str, name: str, n: int | None) -> None:
        """Its beginning is committed, together with what stands before it, and with the end of a
        step by hand, which reaches up to here."""
        progress, before = self._progress, self._progress.loops
        data_epoch = progress.place.done.data_epoch
        if kind == "epochs":  # others than run.epochs have trained on those before, without tails
            progress.over = max(progress.over, data_epoch)
        try:
            base = progress.bases.pop(f"{kind} {name}", data_epoch) if name else 0
            progress.begin_loop(number, LoopRecord(kind, name, n, base))
            self._steps.boundary()
        except BaseException:
            progress.loops = before
            raise

    def _begin_known(self, number: int, n: int | None) -> bool:
        """Takes back what stands before it. Returns whether it is over."""
        steps, progress = self._steps, self._progress
        if self._step.state is not IDLE:
            steps.boundary()
        elif self._number is None:
            self._tell_set_up()
        steps.go_back()
        record = progress.loops[number]
        more = record.n is not None and (n is None or n > record.n)
        later = progress.loops[number + 1 :]
        if (
            more
            and record.name
            and record.kind in _DATA
            and any(one.kind in _DATA for one in later)
        ):
            raise RuntimeError(
                f"{record.called} asks for more epochs than before, and a later loop has begun: "
                "the data that would be its own were that one's. Begin another loop, with a name "
                "of its own, behind it"
            )
        over = record.over and not more
        changed = n != record.n or not all(one.over for one in progress.loops[:number])
        if changed or record.kind == "steps":
            progress.begin_loop(number, record._replace(n=n, over=over))
        if changed:  # durable, so that it is the same loop after a roll back, or a kill
            if more:
                progress.stopped = False
                steps.heads.forget(number + 1)  # its end will be another one
            steps.boundary()
        return over

    def _tell_set_up(self) -> None:
        if self._steps.changed():
            _log.info(
                "%s: what the program changed between attach and the first loop of the run %r is "
                "taken back, as it goes on: that was done at its first start",
                *(self._steps.store.path, self._steps.name),
            )

    def _find(self, kind: str, name: str, n: int | None) -> int:
        """The number of the loop. It is told by kind and name, and by its place in the order.

        Raises: RuntimeError: the order is another one than before.
        """
        loops = self._progress.loops
        first = self._next
        if self._again:
            first, here = self._skip(0, kind), self._number
            fits = [
                one
                for one in dict.fromkeys((first, here))
                if one is not None and one < len(loops) and loops[one][:2] == (kind, name)
            ]
            exact = [one for one in fits if loops[one].n == n]
            chosen = exact if exact else fits
            if kind == BY_HAND:
                chosen = chosen[-1:]  # a first series of which steps are left would have been seen
            if len(chosen) > 1:
                raise RuntimeError(
                    f"after a roll back {loops[chosen[0]].called} begins again, and it is not "
                    "known whether it is the first or the last of two such loops of the run: give "
                    "them names, name=..."
                )
            first = chosen[0] if chosen else first
        number = self._skip(first, kind)
        if number < len(loops) and loops[number][:2] != (kind, name):
            now = LoopRecord(kind, name, n, 0)
            raise RuntimeError(
                f"the run has begun {loops[number].called} at this place of the program, and "
                f"{now.called} begins now. Loops of a run stand in one order at each start of the "
                "program, also those that are over: they hand out nothing. For passes over the "
                "data write `for epoch in run.epochs(n): for batch in epoch:`. If the program was "
                'edited: attach(..., resume=pmstore.torch.Resume(loops="program"))'
            )
        return number

    def _skip(self, number: int, kind: str) -> int:
        """Steps by hand of which none is left to do are not seen."""
        loops = self._progress.loops
        while kind != BY_HAND and number < len(loops) and loops[number].kind == BY_HAND:
            number += 1
        return number

    def _check_left(self) -> None:
        """Raises: TransactionError: a step is open that nobody said is complete."""
        step = self._step
        if step.state is IDLE:
            return
        if step.within:
            raise TransactionError(
                "a step has no steps in it, and `with run.next_step()` is open: leave it before a "
                "loop of the run"
            )
        if step.kind is Kind.HEAD:
            raise TransactionError(
                "a step has no steps in it, and the head of an epoch is open: iterate the epoch, "
                "`for epoch in run.epochs(n): for batch in epoch:`"
            )
        if step.state is OPEN or (
            step.state is ENDED
            and step.kind is not Kind.HAND
            and not (step.stopping or self._progress.stopped)
        ):
            left = self._progress.loops[self._number].called if self._number is not None else ""
            how = "and nobody said that the step is complete"
            if step.state is ENDED:
                how = (
                    "after run.commit(), so that a kill just after it would go on with that loop. "
                    "Leave out run.commit() before and behind a break: what stands behind it is of "
                    "the step that was left, and is committed with it"
                )
            within = ""
            if step.kind is Kind.TAIL:
                within = (
                    "If it was not left, this loop stands in it: the tail of an epoch has no steps "
                    "in it, and a loop of the run stands behind `for epoch in run.epochs(n):`. "
                )
            raise TransactionError(
                f"{left} was left in a step (of {step.kind.called}) by break, islice or an error, "
                f"{how}. {within}Before a break write run.end_step(), which says that the step is "
                "complete, or run.stop(), if the run is over; after an error run.rollback(), "
                "which takes the step back"
            )

    # ---- the next step is asked for

    def _ask(self, token: object, epoch: Position | None = None) -> None:
        """The open step ends. epoch: the position behind the epoch that is iterated, which is over,
        but for its tail, if the program stops.

        Raises: RuntimeError: another loop has begun; as `Steps.ask`.
        """
        if self._token is not token:
            self._refuse_token()
        self._again = False
        stopping = self._step.stopping
        if stopping:
            self._stop(epoch)
        self._steps.ask(commit=stopping)

    def _stop(self, epoch: Position | None) -> None:
        """`run.stop` was called in the step that ends. epoch: see `_ask`."""
        self._step.stopping = False
        self._progress.stopped = True
        if epoch is not None:
            self._progress.place.skip(epoch)

    def commit(self, *, agree: bool) -> None:
        """See `Run.commit`. What `run.stop` said before is part of it."""
        step, loader = self._step, self._steps.pieces.loader
        if step.stopping and step.state in (OPEN, MARKED):
            epoch = None
            if self._within is not None and step.kind is Kind.BATCH and loader is not None:
                epoch = self._behind(loader.source, self._progress.over + 1)
            self._stop(epoch)
        self._steps.commit(agree=agree)

    def _went_on(self) -> None:
        """The program has left the step that is open, and said that it is complete."""
        step, loader = self._step, self._steps.pieces.loader
        if step.kind is Kind.HEAD and loader is not None:
            self._leave_epoch(loader.source)
        if step.stopping:
            self._stop(None)

    def _refuse_token(self) -> NoReturn:
        if self._token is None and self._again:
            raise RuntimeError(
                "the run was taken back to before this loop or epoch: begin the loop again"
            )
        raise RuntimeError(
            "another loop of the run has begun, or the run was detached: one loop at a time"
        )

    def _end(self, gave: bool = False) -> None:
        """The loop is over, durably: what follows is the head of the next one, or the program's
        end."""
        steps, progress = self._steps, self._progress
        assert self._number is not None
        record = progress.loops[self._number]
        earlier = self._used_up_by(record) if self._new and not gave else None
        if earlier is not None and not progress.stopped:
            progress.drop_loop()  # it did not begin: else the next start would pass over it
            steps.boundary()
            self._next = self._number
            self._number, self._over = (self._next - 1 if self._next else None), True
            raise RuntimeError(
                f"{record.called} has nothing to hand out, as {earlier.called} of this program has "
                "used it up: it counts over the whole run. Ask for more, or give the loop a name=, "
                "under which it counts for itself. For passes over the data write `for epoch in "
                "run.epochs(n): for batch in epoch:`"
            )
        self._over = True
        if not progress.stopped:
            steps.schedule.expect_no_more()
        later = progress.loops[self._next :]
        again = not gave and not self._new and steps.heads.knows(self._next)
        again = again and not (later and later[0].kind == BY_HAND)
        if not again:
            steps.heads.begin(self._next)
        steps.settle()
        if again:
            steps.heads.begin_again(self._next)

    def _used_up_by(self, record: LoopRecord) -> LoopRecord | None:
        """The loop before it that has counted for it, as far as it goes, or further."""
        for one in self._progress.loops[: self._number]:
            both_steps = (one.kind, one.name) == (record.kind, record.name) == ("steps", one.name)
            both_data = not (one.name or record.name) and {one.kind, record.kind} <= _DATA
            if (both_steps or both_data) and (one.n is None or one.n >= (record.n or 0)):
                return one
        return None

    # ---- loops

    def steps(self, n: int, name: str) -> Iterator[int]:
        """See `Run.steps`."""
        progress = self._progress
        token, passed = self._begin("steps", name, n)
        total = progress.finished + max(n - progress.count, 0)
        self._steps.course.last_step = self._steps.schedule.expect_steps(total)
        gave = False
        while True:
            self._ask(token)
            if passed or progress.stopped or progress.count >= n:
                break
            self._steps.begin(Kind.NUMBER)
            number = progress.count
            progress.count += 1
            gave = True
            yield number
        self._end(gave)

    def batches(
        self, source: Source, epochs: int | None, options: Options, name: str
    ) -> Iterator[Any]:
        """See `Run.batches`."""
        progress = self._progress

        def begin() -> _Bounds | None:
            token, passed = self._begin("batches", name, epochs)
            assert self._number is not None
            if passed:
                self._ask(token)
                self._end(False)
                return None
            before = progress.place.done
            end = None if epochs is None else progress.loops[self._number].base + epochs
            return _Bounds(token, end, end, lambda: self._end(progress.place.done != before))

        return self._hand_out(source, options, begin)

    def epochs(self, source: Source, n: int | None, options: Options, name: str) -> Iterator[Epoch]:
        """See `Run.epochs`."""
        steps, progress, place = self._steps, self._progress, self._progress.place
        token, passed = self._begin("epochs", name, n)
        assert self._number is not None
        base = progress.loops[self._number].base
        gave = False
        while True:
            self._ask_for_epoch(source, token)
            epoch = progress.over
            tail = place.done.data_epoch > epoch  # its batches are trained on
            if passed or (n is not None and epoch >= base + n) or (progress.stopped and not tail):
                break
            again = progress.head == epoch + 1
            if again:
                steps.settle()  # the head is done again, and taken back alone
            steps.begin(Kind.HEAD)
            steps.heads.begin_epoch(again=again)
            self._epoch = epoch
            gave = True
            end = None if n is None else base + n
            begin = partial(self._begin_epoch, source, epoch, end, token)
            iterate = partial(self._hand_out, source, options, begin)
            yield Epoch.of(epoch - base, iterate, partial(_length, source, options))
        self._end(gave)

    def _ask_for_epoch(self, source: Source, token: object) -> None:
        """What is open of the epoch before ends, and with it that epoch."""
        if self._token is not token:
            self._refuse_token()
        step = self._step
        if step.state is not IDLE:
            if step.kind is Kind.HEAD and not step.stopping:
                raise TransactionError(
                    f"epoch {self._epoch} was not iterated: write `for batch in epoch:`"
                )
            if step.kind is not Kind.TAIL:
                if step.kind is not Kind.HAND and not step.stopping:
                    self._check_left()
                self._leave_epoch(source)
        self._within = None
        self._ask(token)

    def _leave_epoch(self, source: Source) -> None:
        """It is over, with the step that is open: by `break`, or as the run is stopped."""
        progress = self._progress
        if progress.place.done.data_epoch == progress.over:
            progress.place.skip(self._behind(source, progress.over + 1))
        progress.over += 1

    def _behind(self, source: Source, data_epoch: int) -> Position:
        """Where that epoch begins, from where the run is in its data."""
        return Position(data_epoch, state=source.state_of(self._progress.place.done))

    def _begin_epoch(self, source: Source, epoch: int, end: int | None, token: object) -> _Bounds:
        """An epoch that `epochs` has handed out is iterated."""
        steps, step, progress = self._steps, self._step, self._progress
        if self._token is not token:
            self._refuse_token()
        if step.state is IDLE or step.kind is not Kind.HEAD or progress.over != epoch:
            raise RuntimeError("an epoch is iterated once, before the next one is asked for")
        if progress.head == epoch + 1:
            steps.go_back()
        else:
            progress.head = epoch + 1
            stopping = step.stopping
            if stopping:
                self._stop(self._behind(source, epoch + 1))
            # the first one, so that the check for look-ahead sees all
            steps.end(commit=stopping or not self._looked)
        self._looked = True
        self._within = within = object()
        return _Bounds(token, epoch + 1, end, partial(steps.begin, Kind.TAIL), within)

    # ---- batches

    def _hand_out(
        self, source: Source, options: Options, begin: Callable[[], _Bounds | None]
    ) -> Iterator[Any]:
        """Batches. begin: called when the first one is asked for. None: there are none."""
        if (bounds := begin()) is None:
            return
        token, epochs, end, over, within = bounds
        steps, step, progress = self._steps, self._step, self._progress
        place, ahead, every = progress.place, options.ahead or 0, options.every
        transfer = Transfer(options.device) if options.device is not None else None
        prefetch = int(transfer is not None)
        place.begin(ahead or prefetch, prefetched=bool(prefetch))
        self._holds = bool(ahead)
        length = _length(source, options)
        if every > 1 and length is None:
            raise ValueError(
                f"every={every} has to know which batch is the last of an epoch, and the loader "
                "does not say how many there are: give it a length"
            )
        cursor = Cursor(source, place.done, lambda: steps.expect(end, source))
        asked, kind, restored = 0, Kind.BATCH, progress.restored
        self.last_in_step = True
        fetched: list[Any] | None = None
        while True:
            if self._token is not token:
                self._refuse_token()
            if asked == 1 and options.ahead is None and progress.restored == restored:
                self._check_used()
            asked += 1
            if self._within is not within:
                raise RuntimeError("the next epoch was asked for: this one is over")
            if step.stopping:
                behind = self._behind(source, epochs or 0)
                self._ask(token, behind if within is not None else None)
            elif ahead:
                self._check_held(token, ahead)
            elif self.last_in_step or step.state is not OPEN:
                self._again = False
                steps.ask()
            else:
                steps.require()
                step.check_caller()
            if progress.restored != restored:
                restored = progress.restored
                place.begin(ahead or prefetch, prefetched=bool(prefetch))
                cursor.go_to(place.done)
                fetched = None
            if progress.stopped:
                break
            given, fetched = fetched or self._load(cursor, epochs, options, transfer), None
            if given is None:
                break
            if transfer is not None:
                place.use()
                if not _is_last(place.done, length):
                    fetched = self._load(cursor, place.done.data_epoch + 1, options, transfer)
                given = [transfer.finish(given.pop())]
            if every > 1:
                self.last_in_step = place.done.batch % every == 0 or _is_last(place.done, length)
            if not ahead and step.state is IDLE:
                steps.begin(kind)
            yield given.pop()  # the program alone says how long it lives
        if not self.last_in_step and step.state is OPEN:
            raise RuntimeError(
                f"the loader has given fewer batches than its length says, {length}, so that "
                "run.last_in_step was not told: correct its length"
            )
        if not progress.stopped:
            place.end(cursor.behind)
        if step.state is IDLE and not (ahead and place.held):
            over()

    def _load(
        self, cursor: Cursor, epochs: int | None, options: Options, transfer: Transfer | None
    ) -> list[Any] | None:
        """The next batch, in a list. None: there are no more epochs than so many."""
        steps, place = self._steps, self._progress.place
        if options.limit is not None and cursor.behind.batch >= options.limit:
            cursor.next_epoch()
            place.drop(cursor.behind.data_epoch)
        try:
            loaded = cursor.load(epochs, place.again, careful=place.ahead > 0)
        except Exception:
            if steps.schedule.told:  # who stops a job may have ended the loader's processes
                steps.ask()
            raise
        if loaded is None:
            return None
        given, before = loaded
        place.hand_out(cursor.behind, before)
        if steps.job is not None:
            steps.job.took_batch()
        if transfer is not None:
            given = [transfer.start(given.pop())]
        return given

    def _check_used(self) -> None:
        """Raises: LookaheadError: nothing was done with the first batch of the loop. Nobody can
        tell while finished steps are pending, which what is written since then is mixed with."""
        steps, step, progress = self._steps, self._step, self._progress
        if (
            step.state is not OPEN
            or step.used
            or step.stopping
            or step.values
            or progress.finished != progress.committed
            or steps.store.written()
            or any(one.grad is not None for _, one in steps.pieces.parameters())
        ):
            return
        raise LookaheadError(
            "a second batch was asked for before anything was done with the first. If the program "
            "passes over it, write run.batches(ahead=0). If it holds batches (islice, list, a "
            "pool, a prefetcher), write run.batches(ahead=k) for k batches held, and `with "
            "run.next_step():` around what is done with each, in the order handed out; or leave "
            "that to DataLoader(num_workers=...), or to run.batches(device=...), which copies the "
            "next batch while this one is trained on. A shuffle buffer belongs into the data set"
        )

    def _check_held(self, token: object, ahead: int) -> None:
        """Checks a loop whose program holds batches."""
        steps, place = self._steps, self._progress.place
        if self._token is not token:
            self._refuse_token()
        steps.require()
        if place.held > ahead:
            raise LookaheadError(
                f"run.batches(ahead={ahead}) says that the program holds at most {ahead} batches "
                f"beside the one that it trains on, and it asks for another while it holds "
                f"{place.held}: each is trained on in `with run.next_step():`"
            )

    # ---- by hand

    def begin_by_hand(self) -> None:
        """See `Run.next_step`."""
        steps, step, progress = self._steps, self._step, self._progress
        steps.require()
        if step.state is not IDLE and (step.within or step.kind is not Kind.HAND):
            self._check_left()
        held = self._holds and progress.place.held > 0
        goes_on = self._token is not None and not self._again and self._number is not None
        if held or (goes_on and progress.loops[self._number or 0].kind == BY_HAND):
            stopping = step.stopping
            if stopping:
                self._stop(None)
            steps.ask(commit=stopping)
            if held:
                progress.place.use()
        else:
            self._begin(BY_HAND, "", None)
            steps.ask()
        if progress.stopped:
            raise RuntimeError(
                "run.stop() has ended the run: leave the loop when run.stopping is true"
            )
        steps.begin(Kind.HAND)
        step.within = True

    def check_commit(self) -> None:
        """Raises: TransactionError: it is not known whether the epoch's tail has begun."""
        step, progress = self._step, self._progress
        behind = step.state is not IDLE and step.kind is Kind.HAND and not step.within
        of_epoch = self._holds and self._within is not None
        if behind and of_epoch and progress.place.done.data_epoch > progress.over:
            raise TransactionError(
                "run.commit() behind the last batch of run.epochs(ahead=...): whether it stands in "
                "the epoch's tail, which goes with the step of that batch, is not known. Call it "
                "in `with run.next_step():`"
            )

    # ---- going back

    def _went_back(self, kind: Kind | None, pending: bool) -> str:
        """The run was taken back to its last commit, from a step of that kind. Returns "" if the
        program goes on from there; else what is lost of its way.

        pending: anything was taken back.
        """
        progress, number = self._progress, self._number
        if number is None:
            return ""
        told = ""
        if number >= len(progress.loops):
            told = "before this loop began. Begin the loops of the program from the first"
        elif self._over and kind is None:
            if pending:
                told = (
                    "to the end of a loop that is over. Begin the loops of the program from the "
                    "first: those that are over hand out nothing"
                )
        elif self._holds:
            told = "and the program holds batches of later steps. Begin the loop again"
        elif progress.loops[number].kind == "epochs":
            epoch = self._epoch
            here = epoch is not None and (
                progress.over == epoch + 1
                or (progress.over == epoch and progress.head == epoch + 1)
            )
            if kind is Kind.HEAD or not here:
                told = "before the first batch of this epoch. Begin the loop again"
        self._again = True  # unless the loop goes on
        if told:
            self._token = self._within = None
        return told


def _length(source: Source, options: Options) -> int | None:
    length = source.length()
    return length if options.limit is None or length is None else min(length, options.limit)


def _is_last(position: Position, length: int | None) -> bool:
    return length is not None and position.batch >= length


def check_count(value: Any, what: str, least: int, none: Iterable[None] = ()) -> None:
    """Raises: TypeError, ValueError: it is no whole number of at least so many."""
    if value is None and None in none:
        return
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise TypeError(f"{what}={value!r}: a whole number, at least {least}")
    if value < least:
        raise ValueError(f"{what}={value!r}: a whole number, at least {least}")
