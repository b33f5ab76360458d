"""The place in the data that a run keeps in the store."""

from __future__ import annotations

from pmstore import Store
from pmstore.torch import rng
from pmstore.torch.errors import MismatchError
from pmstore.torch.loader import Position, Source
from pmstore.torch.part import Part
from pmstore.torch.samples import cut_source, read_cut


class LoaderPart:
    """Keeps where a loader is. `Progress` has the numbers; here are states of generators:

    `<path>/start`        of all that the order depends on, at the data epoch's start
    `<path>/generators`   of the loader's own, now
    """

    def __init__(self, store: Store, path: str, source: Source) -> None:
        self.source = source
        self._store = store
        self._path = path
        self._start = Part(store, f"{path}/start")
        self._generators = Part(store, f"{path}/generators")
        self._start_written: object = self  # what is stored; nothing known yet
        self._drawn: list[bytes] | None = None  # the generators' states that are stored, if known

    def fits(self) -> bool:
        """Whether the stored place is of a loader with as many generators."""
        return len(self._generators.read()) == len(self.source.generators)

    def check(self) -> None:
        """Raises: MismatchError: the stored place is of a loader with other generators."""
        if not self.fits():
            stored, given = len(self._generators.read()), len(self.source.generators)
            raise MismatchError(
                "the loader is not the one whose place is stored",
                mismatched=[f"it has {given} generators of its own, the stored one {stored}"],
                ways=('Resume(data="next epoch") begins a data epoch with the loader given',),
            )

    def write(self, position: Position) -> None:
        """Pending until the next commit. Both parts change once a data epoch."""
        if self._start_written is not position.start:
            self._start.write(position.start)
            self._start_written = position.start
        states = [generator.get_state() for generator in self.source.generators]
        drawn = [state.numpy().tobytes() for state in states]
        if drawn != self._drawn:
            self._generators.write(states)
            self._drawn = drawn

    def restore(self, position: Position) -> None:
        """Sets the position's start and the loader's generators to what the last commit holds.

        Raises: ValueError: the start is not there, or is no state of these generators.
        """
        self._start.forget()
        self._generators.forget()
        self._drawn = None
        cut_source(self.source, read_cut(self._store, self._path))
        position.start = self._start_written = start = self._start.read()
        if start is not None:
            # now, and not when the next batch is asked for
            rng.check(start, self.source.generators)
        elif position.batch:
            raise ValueError("the data have been read from, and where from is not there")
        states = self._generators.read()
        for generator, state in zip(self.source.generators, states, strict=True):
            generator.set_state(state)
