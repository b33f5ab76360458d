"""The loop over the data of a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from pmstore.torch._data.position import Held, Position
from pmstore.torch._data.source import Source
from pmstore.torch._random import defaults as rng
from pmstore.torch._step.steps import Steps
from pmstore.torch.lookahead import Lookahead

_END = object()
_LOOKS = 16
"""Batches of a loop after which generators are looked for that were made while one was loaded."""


class DataLoops:
    """The loops of one run: one goes on at a time."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._loop: object | None = None  # the one that goes on
        self._ended: int | None = None  # `epochs` of the last one that came to its end

    def close(self) -> None:
        """No loop goes on after this; worker processes end."""
        self._loop = None
        loader = self._steps.pieces.loader
        if loader is not None:
            loader.source.close()

    def batches(self, source: Source, epochs: int | None, ahead: int | None) -> Iterator[Any]:
        """See `Run.batches`."""
        loop = self._loop = object()
        steps, progress = self._steps, self._steps.progress
        place = progress.place
        steps.data_unused = False
        place.begin(ahead or 0)
        watch = progress.lookahead = Lookahead(place, ahead)
        steps.begun.over = False
        restored = progress.restored
        reader = Reader(source, place.done, lambda: steps.expect(epochs, source))
        empty = True
        while True:
            watch.ask()
            try:
                loaded = reader.load(epochs, place.again, careful=place.ahead > 0)
            except Exception:
                steps.leave()  # who stops a job may have ended the loader's processes as well
                raise
            if loaded is None:
                break
            empty = False
            steps.leave()
            given, before = loaded
            place.forwards = steps.begun.forwards
            place.hand_out(reader.behind, before)
            watch.hand_out(given[0])
            if steps.job is not None:
                steps.job.took_batch()
            yield given.pop()  # the program alone says how long it lives
            if self._loop is not loop:
                raise RuntimeError(
                    "another loop over run.batches() has begun, or the run was detached: one at a "
                    "time"
                )
            steps.require()
            if progress.restored != restored:
                restored = progress.restored
                watch.require()
                # go on after the last committed batch
                place.begin(0)
                watch = progress.lookahead = Lookahead(place, ahead)
                reader.go_to(place.done)
        if empty and epochs == self._ended == 1:  # the default, in a loop over epochs
            raise ValueError(
                f"run.batches(epochs={epochs}) has come to its end already: epochs is how many "
                "data epochs the run has in all. In a loop over them write `for epoch in "
                "range(run.data_epoch, epochs): for batch in run.batches(epochs=epoch + 1)`"
            )
        self._ended = epochs
        place.forwards = steps.begun.forwards
        place.end(reader.behind)
        watch.end()
        steps.begun.over = not steps.begun.forward
        steps.schedule.expect_no_more()


class Reader:
    """Loads one batch after the other, over the ends of epochs.

    Attributes:
        behind: the position behind the last one.
    """

    def __init__(
        self, source: Source, behind: Position, opens: Callable[[], None] | None = None
    ) -> None:
        """opens: called before an epoch is opened. None: the caller opens each by `begin`."""
        self.behind: Position = behind
        self._source = source
        self._opens = opens
        self._batches: Iterator[Any] | None = None
        self._watched = rng.Watched(source)
        self._looks = _LOOKS
        self._begun: dict[str, Any] | None = None  # the generators when `begin` returned

    def go_to(self, behind: Position) -> None:
        self.behind = behind
        self._batches = self._begun = None

    def begin(self) -> None:
        """Opens a new epoch now, and not with its first batch: it draws as `iter(loader)` does.
        REQUIRES: `behind` is where one begins."""
        self._batches, start = self._source.begin(self.behind)
        self.behind = Position(self.behind.data_epoch, 0, start, self.behind.state)
        self._begun = rng.capture(self._source.generators)

    def _first(self) -> None:
        """Before the first batch of an epoch that `begin` opened: what the program drew since then
        belongs to the epoch's start."""
        now, begun = rng.capture(self._source.generators), self._begun
        self._begun = None
        start = self.behind.start
        if begun is not None and start is not None and rng.bits_of(now) != rng.bits_of(begun):
            start["first"] = now

    def load(
        self, epochs: int | None, again: deque[Held], *, careful: bool
    ) -> tuple[list[Any], dict[str, Any] | None] | None:
        """A batch, in a list, and the generators' states before it was loaded, if loading drew from
        them and careful. Those in `again` are loaded with the generators as they were. None: there
        are no more epochs."""
        source = self._source
        while epochs is None or self.behind.data_epoch < epochs:
            now = rng.capture(source.generators) if source.late else None
            here = self.behind
            held = again[0] if again else None
            if held is not None and held.behind.data_epoch != here.data_epoch:
                held = None  # of the next epoch, if this one is at its end
            before = None
            if self._batches is None and self._opens is not None:
                self._opens()
            if self._batches is None and here.start is None:
                batch = self._load_first(held)
                if batch is _END:
                    raise ValueError("the loader gave no batch in a whole data epoch")
            else:
                if self._begun is not None:
                    self._first()
                if self._batches is None:
                    self._batches = self._open_again(here)
                batch, before = self._load_next(held, careful)
                if batch is _END:
                    # worker processes end here
                    self.go_to(Position(here.data_epoch + 1, state=source.state()))
                    continue
                self.behind = here.next(source.state())
            if self._looks and self._made_late(here, now):
                self.go_to(here)
                continue
            if held is not None:
                again.popleft()
            return [batch], before
        return None

    def _open_again(self, here: Position) -> Iterator[Any]:
        if here.batch or self._opens is not None:
            return self._source.resume(here)
        with rng.unchanged(self._source.generators):
            return self._source.reopen(here)  # what the first batch draws was not drawn yet

    def _load_first(self, held: Held | None) -> Any:
        source, epoch = self._source, self.behind.data_epoch
        if held is None:
            self._batches, start = source.begin(self.behind)
            batch = next(self._batches, _END)
        else:
            start = held.behind.start or {}
            with rng.unchanged(source.generators):
                self._batches = source.reopen(Position(epoch, 0, start))
                batch = next(self._batches, _END)
        self.behind = Position(epoch, 1, start, source.state())
        return batch

    def _load_next(self, held: Held | None, careful: bool) -> tuple[Any, dict[str, Any] | None]:
        assert self._batches is not None
        source = self._source
        if held is not None:
            with rng.unchanged(source.generators):
                if held.before is not None:
                    rng.restore(held.before, source.generators)
                return next(self._batches, _END), held.before
        if not careful:
            return next(self._batches, _END), None
        before = self._watched.capture()
        batch = next(self._batches, _END)
        return batch, None if rng.same(before, self._watched.capture()) else before

    def _made_late(self, here: Position, now: dict[str, Any] | None) -> bool:
        """Looks for generators that were made while the batch was loaded. Returns whether it has to
        be loaded again: they have a stored state."""
        self._looks -= 1
        source = self._source
        new = {one.place for one in source.look()}
        known = new & source.late.keys()
        if not known or now is None:
            return False
        rng.restore(now, source.generators)
        started = here.start is not None and known <= here.start["generators"].keys()
        late = {place: source.late.pop(place) for place in known}
        if source.replays and not started:
            return False  # it was made in this epoch, and so it was now
        rng.set_states(late, source.generators)
        return True
