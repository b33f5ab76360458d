"""Objects that change together, in a block: after a kill all of them are of one generation."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from crashtests.stress.content import WrongError, encode, expect_filled

TORCH = importlib.util.find_spec("torch") is not None
if TORCH:  # else there are no tensors
    import torch

WINDOW = 5
INTENT, ACKNOWLEDGED = 0, 1
WORDS = 2


class Part:
    """One object of a unit. path: its name. tag: what its content names it by."""

    in_place = False
    """The same array for ever, which is written in place."""

    def __init__(self, path: str, tag: int) -> None:
        self.path = path
        self.tag = tag

    def create(self, store: Any) -> None:
        self.write(store, 0)

    def write(self, store: Any, generation: int) -> None:
        raise NotImplementedError

    def check(self, store: Any, generation: int) -> None:
        raise NotImplementedError


class Filled(Part):
    """An array that is written in place."""

    in_place = True
    length = 500

    def create(self, store: Any) -> None:
        store[self.path] = np.full(self.length, encode(self.tag, 0))

    def write(self, store: Any, generation: int) -> None:
        store[self.path][:] = encode(self.tag, generation)

    def check(self, store: Any, generation: int) -> None:
        expect_filled(self.path, store[self.path], encode(self.tag, generation))


class Large(Filled):
    """Of many pages; written in two halves, by declared and by captured pages alike."""

    length = 20_000


class Replaced(Part):
    """An array that is stored anew, in another size, each time."""

    def write(self, store: Any, generation: int) -> None:
        store[self.path] = np.full(1 + abs(generation) % 700, encode(self.tag, generation))

    def check(self, store: Any, generation: int) -> None:
        found = store[self.path]
        if len(found) != 1 + generation % 700:
            raise WrongError(
                f"{self.path}: expected {1 + generation % 700} items (generation {generation}), "
                f"found {len(found)}"
            )
        expect_filled(self.path, found, encode(self.tag, generation))


class Names(Part):
    """A group of which each generation makes one name and removes one."""

    def create(self, store: Any) -> None:
        store[f"{self.path}/0"] = encode(self.tag, 0)

    def write(self, store: Any, generation: int) -> None:
        if generation < 0:
            del store[self.path]
            store[f"{self.path}/undone"] = 1
            return
        group = store[self.path]
        for name in list(group):
            if int(name) <= generation - WINDOW:
                del group[name]
        group[str(generation)] = encode(self.tag, generation)

    def check(self, store: Any, generation: int) -> None:
        names = list(store[self.path])
        if not names or names[-1] != str(generation):
            raise WrongError(
                f"{self.path}: expected generation {generation} as the newest of its names, found "
                f"{names}"
            )
        for name in names:
            if store[f"{self.path}/{name}"] != encode(self.tag, int(name)):
                raise WrongError(f"{self.path}/{name}: found {store[f'{self.path}/{name}']}")


class Flipped(Part):
    """A pair of slots."""

    length = 6000

    def create(self, store: Any) -> None:
        slots = store.slots(self.path, self.length, "int64")
        slots.next[:] = encode(self.tag, 0)
        slots.flip()

    def write(self, store: Any, generation: int) -> None:
        slots = store[self.path]
        slots.next[:] = encode(self.tag, generation)
        slots.flip()

    def check(self, store: Any, generation: int) -> None:
        expect_filled(self.path, store[self.path].current, encode(self.tag, generation))


class Tensor(Part):
    """A tensor that is written in place."""

    in_place = True
    length = 300

    def fresh(self, generation: int) -> Any:
        return torch.full((self.length,), float(encode(self.tag, generation)), dtype=torch.float64)

    def create(self, store: Any) -> None:
        store[self.path] = self.fresh(0)

    def write(self, store: Any, generation: int) -> None:
        store[self.path].fill_(float(encode(self.tag, generation)))

    def check(self, store: Any, generation: int) -> None:
        found = store[self.path]
        if tuple(found.shape) != (self.length,):
            raise WrongError(
                f"{self.path}: expected {self.length} items, found shape {tuple(found.shape)}"
            )
        expect_filled(self.path, found.detach().numpy(), float(encode(self.tag, generation)))  # type: ignore[arg-type]


class Unit:
    """Parts, and a value that says of which generation they are. words: two of the board.

    One thread writes it. A generation is written to the board before its block is entered, and
    acknowledged after that was left: so the state is of the acknowledged one, or of the one that
    was under way.
    """

    def __init__(
        self,
        path: str,
        number: int,
        words: memoryview,
        kinds: tuple[type[Part], ...],
        stays: bool = True,
    ) -> None:
        """stays: nobody moves its arrays and tensors out of the heap."""
        self.path = path
        self.stays = stays
        self._words = words
        self._at = f"{path}/generation"
        self.parts = [kind(f"{path}/{i}", number * 16 + i) for i, kind in enumerate(kinds)]

    @property
    def acknowledged(self) -> int:
        return self._words[ACKNOWLEDGED]

    @property
    def intent(self) -> int:
        return self._words[INTENT]

    def begin(self) -> int:
        """The next generation."""
        self._words[INTENT] += 1
        return self._words[INTENT]

    def done(self, generation: int) -> None:
        """The block of that generation was left normally."""
        self._words[ACKNOWLEDGED] = generation

    def create(self, store: Any) -> None:
        """REQUIRES: a block. Objects that are there are left."""
        if self._at not in store:
            for part in self.parts:
                part.create(store)
            store[self._at] = self._words[INTENT] = self._words[ACKNOWLEDGED] = 0

    def write(self, store: Any, generation: int, parts: list[Part] | None = None) -> None:
        """REQUIRES: a block. parts: those; None: all, and the value."""
        for part in self.parts if parts is None else parts:
            part.write(store, generation)
        if parts is None:
            self.finish(store, generation)

    def finish(self, store: Any, generation: int) -> None:
        store[self._at] = generation

    def read(self, store: Any) -> int:
        """The generation of all its parts. Raises: WrongError: they are not of one."""
        try:
            generation = int(store[self._at])
            if generation < 0:
                raise WrongError(f"{self._at}: generation {-generation} was undone, and is there")
            for part in self.parts:
                part.check(store, generation)
        except KeyError as error:
            raise WrongError(f"{self.path}: {error} is missing") from error
        return generation

    def settle(self, store: Any) -> int:
        """After a kill, or an error that leaves open whether a block was committed: looks, and
        takes note.

        Raises: WrongError: it is neither the acknowledged generation, nor the one that was under
            way.
        """
        acknowledged, intent = self.acknowledged, self.intent
        found = self.read(store)
        if found not in (acknowledged, intent):
            raise WrongError(
                f"{self.path}: expected generation {acknowledged} (acknowledged) or {intent}, "
                f"found {found}"
            )
        self.done(found)
        return found

    def within(self, store: Any, at_least: int) -> int:
        """Of a copy, or of a store that goes on: whole, and not older. Raises: WrongError."""
        found = self.read(store)
        if not at_least <= found <= self.intent:
            raise WrongError(
                f"{self.path}: expected generation {at_least} to {self.intent}, found {found}"
            )
        return found
