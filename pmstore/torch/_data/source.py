"""A loader that can be opened anywhere in its data.

The order of a data epoch (in this file: of an epoch) is a function of the generators' states at
its start. So that state is stored once an epoch, with the number of batches taken, and resuming is:
set the generators back, open the loader, skip, set the generators to where the run is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

from pmstore.torch._data.position import Position
from pmstore.torch._data.replay import batches_again
from pmstore.torch._random import defaults as rng
from pmstore.torch._random.search import Found, find

_PLAIN = (bool, int, float, str, type(None))


class Source:
    """This one consumes what it skips: it suits all that iterates again.

    Attributes:
        generators: that the loader's objects hold; stored where they are now, and at an epoch's
            start. Parts of a sampler's state that are no generators, but change like them, count
            as such.
        late: stored states of generators that are not there yet, by their places.
    """

    replays = True
    """Whether it draws again what was drawn for the batches it skips."""
    says_where = False
    """Whether its loader says where it is: `state`."""

    def __init__(self, loader: Iterable[Any], holders: dict[str, Any], samplers: list[Any]) -> None:
        """holders: objects to look for generators in, by names; samplers: that may have a state."""
        self.loader = loader
        self.late: dict[str, Any] = {}
        self.data_epoch: int = 0  # that was opened last
        self.earlier = False  # the run was stored by a pmstore that drew otherwise
        self._samplers = [one for one in samplers if has_state(one)]
        self._holders = holders
        self._attributes = [
            Found(f"{name} attributes", _Attributes(one), "numbers")
            for name, one in holders.items()
            if any(one is sampler for sampler in samplers) and _may_count(one)
        ]
        self.generators: list[Found] = []
        self.look()

    def look(self) -> list[Found]:
        """Looks for generators. Returns those that were not there before."""
        known = {one.place for one in self.generators}
        self.generators = [*find(self._holders, self._samplers), *self._attributes]
        return [one for one in self.generators if one.place not in known]

    def length(self) -> int | None:
        """Batches of an epoch; None: not known, as of a DataLoader over an IterableDataset."""
        try:
            return len(self.loader) if isinstance(self.loader, Sized) else None
        except TypeError:
            return None

    def begin(self, position: Position) -> tuple[Iterator[Any], dict[str, Any]]:
        """The batches of a new epoch, and its start."""
        start = rng.capture(self.generators)
        self.data_epoch = position.data_epoch
        start["samplers"] = [copy.deepcopy(one.state_dict()) for one in self._samplers]
        return self.open(0, start), start

    def resume(self, position: Position) -> Iterator[Any]:
        """The batches that are left of an epoch that has begun. The generators come out as they
        went in."""
        with rng.unchanged(self.generators):
            batches = self.reopen(position)
            if position.batch == 0:
                self.draw_first()  # now, while the generators are those of the epoch's start
            return batches

    def draw_first(self) -> None:
        """Draws the first index of the epoch that was opened, if it draws any."""

    def replace_batches(self, wrap: Callable[[Any], Any]) -> None:
        """Its batch sampler is wrapped from now on, where it has one that indices come from."""

    def reopen(self, position: Position) -> Iterator[Any]:
        """The same; the generators come out as the epoch's beginning left them."""
        assert position.start is not None
        self.data_epoch = position.data_epoch
        rng.restore(position.start, self.generators)
        for one, state in zip(self._samplers, position.start.get("samplers", ()), strict=False):
            one.load_state_dict(copy.deepcopy(state))
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
        stream = rng.capture()
        with rng.isolated(stream):
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
        """Of a loader that says where it is; it is nobody else's. None: of another one."""

    def close(self) -> None:
        """Ends what lives on between epochs."""

    @staticmethod
    def _stream(iterator: Iterator[Any], stream: dict[str, Any] | None) -> Iterator[Any]:
        end = object()
        while True:
            if stream is None:
                batch = next(iterator, end)
                stream = rng.capture()
            else:
                with rng.isolated(stream):
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


def has_state(sampler: Any) -> bool:
    return callable(getattr(sampler, "state_dict", None)) and callable(
        getattr(sampler, "load_state_dict", None)
    )


def _may_count(sampler: Any) -> bool:
    """Whether it may change itself; torch's own do not, but for `set_epoch`."""
    own = type(sampler).__module__.partition(".")[0] != "torch"
    return (own or hasattr(sampler, "set_epoch")) and not has_state(sampler)


class _Attributes:
    """A sampler's plain attributes that are not what they were at attach: how many epochs it has
    begun, for example."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._first = self._plain()

    def _plain(self) -> dict[str, Any]:
        held = getattr(self._sampler, "__dict__", {})
        return {name: value for name, value in held.items() if type(value) in _PLAIN}

    def get_state(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self._plain().items()
            if name not in self._first or value != self._first[name]
        }

    def set_state(self, state: dict[str, Any], /) -> None:
        for name, value in {**self._first, **state}.items():
            if getattr(self._sampler, name, self) != value:
                setattr(self._sampler, name, value)

    def seed(self, seed: int) -> None:
        """A sampler is in no worker."""
