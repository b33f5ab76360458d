"""A loader that can be opened anywhere in its data.

The order of a data epoch (in this file: of an epoch) is a function of the generators' states at
its start. So that state is stored once an epoch, with the number of batches taken, and resuming is:
set the generators back, open the loader, skip, set the generators to where the run is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

from pmstore.torch._data.loader_attributes import (
    ATTRIBUTES,
    Attributes,
    SetsHeld,
    StateOf,
    objects_of,
)
from pmstore.torch._data.position import Position
from pmstore.torch._random import defaults as rng
from pmstore.torch._random.search import Found, find
from pmstore.torch._state.stateful import is_stateful

# ---- batches that are gone through again


_FIRST = 2.0
"""Seconds until the first line."""
_EVERY = 5.0
"""And between two lines."""


def batches_again(count: int) -> Iterator[int]:
    """Counts up to that number. If that takes long, lines on standard error say how far it is."""
    begun = said = time.monotonic()
    wait = _FIRST
    for number in range(count):
        yield number
        now = time.monotonic()
        if now - said >= wait:
            _say(f"going through {number + 1:,} of {count:,} batches again ...")
            said, wait = now, _EVERY
    if said != begun:
        _say(f"went through {count:,} batches again in {time.monotonic() - begun:.0f} s")


def _say(what: str) -> None:
    print(f"pmstore: {what}", file=sys.stderr, flush=True)


# ---- loaders


KEEPERS = ("loader", "dataset", "sampler", "batch_sampler")
"""Names of objects whose attributes may change with the data."""


class Source:
    """This one consumes what it skips: it suits all that iterates again.

    Attributes:
        generators: that the loader's objects hold; stored where they are now, and at an epoch's
            start. What data sets and samplers change in themselves counts as such.
        objects: data sets and samplers, by their places.
        attributes: of those without a state of their own; None: they have none.
        late: stored states of generators that are not there yet, by their places.
        looks: batches left after which generators are looked for that were made while one was
            loaded. A look costs as much as a small step.
    """

    replays = True
    """Whether it draws again what was drawn for the batches it skips."""
    says_where = False
    """Whether its loader says where it is: `state`."""
    asks = True
    """Whether data sets and samplers are asked for their states: else the loader does."""

    def __init__(self, loader: Iterable[Any], holders: dict[str, Any]) -> None:
        """holders: objects to look for generators in, by names; of `KEEPERS` attributes and state
        are kept too."""
        keepers = {name: one for name, one in holders.items() if name in KEEPERS}
        self.loader = loader
        self.late: dict[str, Any] = {}
        self.looks: int = 16
        self.data_epoch: int = 0  # that was opened last
        self.opened = False  # in this process
        self._holders = holders
        kept = objects_of(keepers)
        others = {place: one for place, one in kept.items() if not is_stateful(one)}
        self._own = [
            Found(place, StateOf(one), "state_dict")
            for place, one in kept.items()
            if place not in others and self.asks
        ]
        self.objects: dict[str, Any] = kept
        self.attributes: Attributes | None = Attributes(others) if others else None
        if self.attributes is not None:
            self._own.append(Found(ATTRIBUTES, self.attributes, ATTRIBUTES))
        lists: set[str] = set()
        for place in kept:
            if place[-1] == "]":
                lists.add(place.rpartition("[")[0])
        self._sets = SetsHeld(others, lists) if lists else None
        if self._sets is not None:
            self._own.append(Found("data sets", self._sets, ATTRIBUTES))
        self.generators: list[Found] = []
        self.look()

    def look(self) -> list[Found]:
        """Looks for generators. Returns those that were not there before."""
        known = {one.place for one in self.generators}
        self.generators = [*find(self._holders), *self._own]
        return [one for one in self.generators if one.place not in known]

    def all_there(self) -> bool:
        """Whether no object that holds a generator has another one in its place."""
        return all(map(Found.is_there, self.generators))

    def follow(self) -> None:
        """Looks for generators again if some are in the place of those that were found."""
        if not self.all_there():
            self.look()

    def draws(self, leave_out: tuple[str, ...] = ()) -> bool:
        """Whether something of it changes from batch to batch. leave_out: beginnings of places."""
        return any(
            one.get_state() if one.kind == ATTRIBUTES else not one.place.startswith(leave_out)
            for one in self.generators
        )

    def length(self) -> int | None:
        """Batches of an epoch; None: not known, as of a DataLoader over an IterableDataset."""
        try:
            return len(self.loader) if isinstance(self.loader, Sized) else None
        except TypeError:
            return None

    def begin(self, position: Position) -> tuple[Iterator[Any], dict[str, Any]]:
        """The batches of a new epoch, and its start."""
        self.follow()
        if self._sets is not None:
            self._sets.check(begun=False)
        start = rng.capture(self.generators)
        self.data_epoch = position.data_epoch
        return self.open(0, start), start

    def resume(self, position: Position) -> Iterator[Any]:
        """The batches that are left of an epoch that has begun. The generators come out as they
        went in."""
        now = rng.capture(self.generators)
        try:
            batches = self.reopen(position)
            if position.batch == 0:
                self.draw_first()  # now, while the generators are those of the epoch's start
            return batches
        finally:
            self.follow()
            rng.restore(now, self.generators)

    def draw_first(self) -> None:
        """Draws the first index of the epoch that was opened, if it draws any."""

    def replace_batches(self, wrap: Callable[[Any], Any]) -> None:
        """Its batch sampler is wrapped from now on, where it has one that indices come from."""

    def reopen(self, position: Position) -> Iterator[Any]:
        """The same; the generators come out as the epoch's beginning left them."""
        assert position.start is not None
        self.data_epoch = position.data_epoch
        rng.restore(position.start, self.generators)
        if self._sets is not None:
            self._sets.check(begun=True)
        return self.open(position.batch, position.start)

    def open(self, skip: int, start: dict[str, Any]) -> Iterator[Any]:
        """The batches of one epoch after the first `skip`. The generators are in the state `start`
        now."""
        iterator = iter(self.loader)
        end = object()
        if skip == 0:
            return self._stream(iterator, None)
        self.first_draw(start)
        again = batches_again(skip)
        next(again)
        first = next(iterator, end)
        stream = rng.Stream()
        with stream:
            for _ in again:
                if first is end or next(iterator, end) is end:
                    break
        return self._stream(iterator, stream)

    def first_draw(self, start: dict[str, Any]) -> None:
        """Where the program drew between the opening of an epoch and its first batch: the
        generators are as they were then."""
        if "first" in start:
            rng.restore(start["first"], self.generators)

    def state(self) -> Any:
        """Returns the state of a loader that says where it is, which nobody else has. Another
        loader has none: it returns None."""

    def state_of(self, position: Position) -> Any:
        """The same, where the run is at that position: while nothing was read from the loader in
        this process, the position knows."""
        return self.state() if self.opened else position.state

    def close(self) -> None:
        """Ends what lives on between epochs."""

    @staticmethod
    def _stream(iterator: Iterator[Any], stream: rng.Stream | None) -> Iterator[Any]:
        end = object()
        while True:
            if stream is None:
                batch = next(iterator, end)
                stream = rng.Stream()
            else:
                with stream:
                    batch = next(iterator, end)
            if batch is end:
                return
            given = [batch]
            del batch  # the program alone says how long it lives
            yield given.pop()


class SequenceSource(Source):
    """A list of batches, or anything with len and []: what is skipped is not touched."""

    loader: Sequence[Any]
    replays = False

    def open(self, skip: int, start: dict[str, Any]) -> Iterator[Any]:
        return (self.loader[index] for index in range(skip, len(self.loader)))
