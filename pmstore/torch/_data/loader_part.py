"""The place in the data that a run keeps in the store."""

from __future__ import annotations

from typing import Any

from pmstore import Store
from pmstore._engine._binding import Watch
from pmstore.torch._data.batch_source import Source
from pmstore.torch._data.position import Held, Place, Position
from pmstore.torch._data.samples import cut_source, read_cut
from pmstore.torch._random import defaults as rng
from pmstore.torch.changes import SAME, asking, still
from pmstore.torch.kept_structure import Structure
from pmstore.torch.run_errors import MismatchError

_VERSION = 2
_OF_ITSELF = ("generator", "sampler", "batch_sampler")
"""Generators of these have to be there from the beginning."""


class LoaderPart:
    """Keeps where a loader is. `Progress` has the numbers; here are states of generators:

    `<path>/found`        which generators there are, by their places, and the version of this
    `<path>/start`        of all that the order depends on, at the data epoch's start
    `<path>/generators`   of those that the loader's objects hold, now
    `<path>/state`        of a loader that says where it is, behind the last batch trained on
    `<path>/held`         of the batches held: their epochs' starts, and before each was loaded
    """

    def __init__(self, store: Store, path: str, source: Source) -> None:
        self.source = source
        self._store = store
        self._path = path
        self._found = Structure(store, f"{path}/found")
        self._start = Structure(store, f"{path}/start")
        self._generators = Structure(store, f"{path}/generators")
        self._held = Structure(store, f"{path}/held")
        self._state = Structure(store, f"{path}/state")
        self._state_written: object = None
        self._start_written: object = self  # what is stored; nothing known yet
        self._drawn: bytes | None = None  # the generators' states that are stored, if known
        self._watch: Watch | None = None  # whether they may be others
        self._kept = False  # whether batches held are stored

    def fits(self) -> bool:
        """Whether the stored place is of a loader with the same generators."""
        return not any(self._differences())

    def check(self) -> None:
        """Raises: MismatchError: the stored place is of a loader with other generators."""
        missing, unexpected, mismatched = self._differences()
        if missing or unexpected or mismatched:
            raise MismatchError(
                "the loader is not the one whose place is stored: its generators or state differ",
                missing=missing,
                unexpected=unexpected,
                mismatched=mismatched,
                ways=('Resume(data="next epoch") begins a data epoch with the loader given',),
            )

    def _differences(self) -> tuple[list[str], list[str], list[str]]:
        """Generators that are missing, unexpected, and of another kind."""
        found = self.source.generators
        says = self._read_state() is not None
        if self._start.stored and self._start.read() is not None and says != self.source.says_where:
            has = "a state_dict" if self.source.says_where else "no state_dict"
            return [], [], [f"it has {has}, unlike the stored one"]
        stored = self._found.read()["kinds"]
        given = {one.place: one.kind for one in found}
        missing = [place for place in stored if place not in given]
        unexpected = [place for place in given if place not in stored]
        at_once = any(one.startswith(_OF_ITSELF) for one in [*missing, *unexpected])
        if not at_once and not (missing and unexpected):
            missing, unexpected = [], []  # a dataset may make its generator when it is read from
        return (
            [f"{place}: {stored[place]}" for place in missing],
            [f"{place}: {given[place]}" for place in unexpected],
            [
                f"{place}: a {given[place]}, was a {kind}"
                for place, kind in stored.items()
                if given.get(place, kind) != kind
            ],
        )

    def capture(self, place: Place) -> None:
        """Pending until the next commit. What is written changes once a data epoch, and where
        loading draws."""
        if self._start_written is not place.done.start:
            self._start.write(place.done.start)
            self._start_written = place.done.start
        if place.done.state is not self._state_written:
            self._state.write(place.done.state)
            self._state_written = place.done.state
        if self._watch is None or self._watch.look() != SAME:
            self._capture_generators()
        if place.ahead or place.again or self._kept:
            self._write_held(place)

    def _capture_generators(self) -> None:
        source, self._watch = self.source, None
        source.follow()
        found = source.generators
        states = {one.place: one.generator.get_state() for one in found}
        attributes = source.attributes
        if attributes is not None and attributes.lost:
            attributes.refuse_lost()
        drawn = rng.bits_of(states) if states else b""
        if drawn != self._drawn:
            self._drawn = None
            kinds = {one.place: one.kind for one in found}
            self._found.write({"version": _VERSION, "kinds": kinds})
            self._generators.write(states)
        self._drawn = drawn
        questions = [still(source, "generators", found)]
        if any(one.way for one in found):
            questions.append((source.all_there, (), True))
        for one in found:
            asked = one.asked(states[one.place])
            if asked is None:
                return
            questions += asked
        self._watch = asking(questions)

    def _write_held(self, place: Place) -> None:
        waiting = place.waiting
        if not waiting and not self._kept:
            return
        last: Any = place.done.start
        batches = []
        for one in waiting:
            # an epoch's start once, with its first batch
            new = one.behind.start is not last
            batches.append([one.behind.start if new else None, one.before])
            last = one.behind.start
        self._held.write({"batches": batches})
        self._kept = True

    def restore(self, place: Place) -> None:
        """Sets the loader's generators and all that the numbers do not tell of the place to what
        the last commit holds.

        Raises: ValueError: the start is not there, or is no state of these generators.
        """
        for part in (self._found, self._start, self._state, self._generators, self._held):
            part.forget()
        self._drawn = self._watch = None
        source = self.source
        source.follow()
        source.opened = False
        cut_source(source, read_cut(self._store, self._path))
        start: Any = self._start.read()
        place.done = Position(place.done.data_epoch, place.done.batch, start, self._read_state())
        self._state_written = place.done.state
        self._start_written = start
        if start is not None:
            # now, and not when the next batch is asked for
            rng.check(start, source.generators)
        elif place.done.batch:
            raise ValueError("the data have been read from, and where from is not there")
        states: Any = self._generators.read()
        rng.set_states(states, source.generators)
        there = {one.place for one in source.generators}
        source.late = {place: state for place, state in states.items() if place not in there}
        self._kept = self._held.stored
        if self._kept:
            self._restore_held(place)

    def _restore_held(self, place: Place) -> None:
        held = self._held.read()
        behind = place.done
        for start, before in held["batches"]:
            if start is not None:
                behind = Position(behind.data_epoch + (behind.start is not None), 0, start)
            behind = behind.next()
            place.again.append(Held(behind, before))

    def _read_state(self) -> Any:
        return self._state.read() if self._state.stored else None
