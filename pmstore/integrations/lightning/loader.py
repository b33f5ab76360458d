"""Gives each of the Trainer's data loaders a place that a run keeps.

Lightning goes through its loaders itself. So steps are made by hand: the next one begins where the
Trainer asks for a batch, as all that belongs to the batch before is done by then (validation,
schedulers, callbacks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pmstore.torch._data.cursor import Cursor
from pmstore.torch._data.position import Held, Place, Position
from pmstore.torch._data.source_choice import open_source
from pmstore.torch._random import defaults as rng
from pmstore.torch.run_errors import AttachError, ChangedError
from pmstore.torch.settings import Settings, same, settings_of_loader


class PlacedLoader:
    """Stands for a loader: gives the batches that it would give, and knows where it is.

    One loop over it counts, the newest. Other attributes are the loader's own.
    """

    def __init__(
        self, loader: Iterable[Any], asked: Callable[[bool], AbstractContextManager[None]]
    ) -> None:
        """Takes the loader. asked: wraps each request for a batch that was not held when the run
        was stored, and (True) each beginning of a data epoch; the batch is loaded, or the order
        drawn, inside.

        Raises: AttachError: it can be gone through once only.
        """
        try:
            self._source = open_source(loader)
        except TypeError as error:
            raise AttachError(str(error)) from None
        self.settings: Settings = settings_of_loader(loader)
        self._loader = loader
        self._asked = asked
        self._cursor = Cursor(self._source, Position())
        self._place = Place()
        self._loop: _Loop | None = None
        self._goes_on = False  # the next loop goes on where the stored one was

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # while the loader is copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        length: int = len(self._loader)  # type: ignore[arg-type]  # TypeError if it has none
        return length

    @property
    def sized(self) -> bool:
        try:
            len(self)
        except (TypeError, NotImplementedError):
            return False
        return True

    @property
    def looped(self) -> bool:
        return self._loop is not None

    def __iter__(self) -> Iterator[Any]:
        if not self._goes_on:
            here = self._cursor.behind
            if here.start is not None:  # whatever is left of the data epoch is not gone through
                self._cursor.go_to(Position(here.data_epoch + 1, state=self._source.state()))
            with self._asked(True):
                self._cursor.begin()
            self._place = Place(self._cursor.behind)
        self._goes_on = False
        self._place.begin(ahead=int(not self.sized))  # otherwise the Trainer takes no batch ahead
        self._loop = _Loop(self)
        return self._loop

    def next_of(self, loop: _Loop) -> Any:
        if self._loop is not loop:
            raise RuntimeError(
                "another loop over the Trainer's data loader has begun, and the place of one loop "
                "is kept: in hooks go through a loader of your own"
            )
        place = self._place
        with nullcontext() if place.again else self._asked(False):
            epochs = place.given.data_epoch + 1
            loaded = self._cursor.load(epochs, place.again, careful=place.ahead > 0)
        if loaded is None:
            raise StopIteration
        if place.held > place.ahead:
            place.use()
        given, before = loaded
        place.hand_out(self._cursor.behind, before)
        return given.pop()

    def close(self) -> None:
        """Ends the worker processes of the loader."""
        self._source.close()

    # ---- the place

    def place(self, trained: int) -> dict[str, Any]:
        """Returns the loader's place as plain data. trained: batches of this data epoch that were
        trained on."""
        place = self._place
        while place.held and place.done.batch < trained:
            place.use()
        done = place.done
        return {
            "settings": self.settings,
            "at": [done.data_epoch, done.batch],
            "start": done.start,
            "state": done.state,
            "generators": rng.states_of(self._source.generators),
            "held": [one.before for one in place.waiting],
        }

    def go_to(self, place: dict[str, Any], *, within: bool) -> None:
        """Goes to a stored place. within: the Trainer goes on within its epoch; else it begins one.

        Raises: ChangedError: it is one of another loader.
        """
        self._compare(place["settings"])
        data_epoch, batch = place["at"]
        start, source = place["start"], self._source
        if start is not None:
            rng.check(start, source.generators)
        states = place["generators"]
        rng.set_states(states, source.generators)
        there = {one.place for one in source.generators}
        source.late = {name: state for name, state in states.items() if name not in there}
        done = Position(data_epoch, batch, start, place["state"])
        if start is not None and not within:
            done = Position(data_epoch + 1, state=place["state"])
        self._cursor.go_to(done)
        self._place = Place(done)
        if start is not None and within:
            for before in place["held"]:
                done = done.next()
                self._place.again.append(Held(done, before))
            self._goes_on = self._loop is None

    def _compare(self, stored: dict[str, Any]) -> None:
        different = [
            f"{key} of the data loader: stored {stored[key]!r}, given {self.settings[key]!r}"
            for key in stored
            if key in self.settings and not same(stored[key], self.settings[key])
        ]
        if different:
            raise ChangedError(
                "the Trainer's data loader is not the one whose place is stored: go on with the "
                "stored settings, or begin a new run with the stored model, "
                "pmstore.torch.load(path, model)",
                mismatched=different,
            )


class _Loop:
    """Goes one time through a PlacedLoader."""

    def __init__(self, loader: PlacedLoader) -> None:
        self._loader = loader

    def __iter__(self) -> _Loop:
        return self

    def __next__(self) -> Any:
        return self._loader.next_of(self)
