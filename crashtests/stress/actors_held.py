"""A store that holds the version before the last commit and goes back to it, grows and is
compacted, beside readers in other processes."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import pmstore
from crashtests.stress import board as b
from crashtests.stress.actors import FIRST, Actor
from crashtests.stress.content import WrongError, encode, expect_filled
from crashtests.stress.life import PATIENCE_SECONDS, Session, end_with_parent
from crashtests.stress.unit import WORDS, Filled, Flipped, Large, Names, Part, Replaced, Unit

if TYPE_CHECKING:
    from crashtests.stress.life import Life


class Grown(Replaced):
    """An array whose size goes up and down by megabytes: the file grows."""

    def _length(self, generation: int) -> int:
        return 1 + abs(generation) * 7919 % 150_000

    def write(self, store: Any, generation: int) -> None:
        store[self.path] = np.full(self._length(generation), encode(self.tag, generation))

    def check(self, store: Any, generation: int) -> None:
        found = store[self.path]
        if len(found) != self._length(generation):
            raise WrongError(
                f"{self.path}: expected {self._length(generation)} items (generation "
                f"{generation}), found {len(found)}"
            )
        expect_filled(self.path, found, encode(self.tag, generation))


class InPlace(Flipped):
    """A pair of slots whose current version is written in place, two times in three."""

    length = 30_000

    def write(self, store: Any, generation: int) -> None:
        if generation % 3 == 0:
            super().write(store, generation)
        else:
            store[self.path].current[:] = encode(self.tag, generation)


class Made(Part):
    """A pair of slots that is made anew each time, under another name."""

    KEPT = 2

    def _name(self, generation: int) -> str:
        return f"{self.path}/{abs(generation)}"

    def write(self, store: Any, generation: int) -> None:
        slots = store.slots(self._name(generation), 1000 + abs(generation) % 9 * 1000, "int64")
        slots.next[:] = encode(self.tag, generation)
        slots.flip()
        for name in list(store[self.path])[: -self.KEPT]:
            del store[f"{self.path}/{name}"]

    def check(self, store: Any, generation: int) -> None:
        expect_filled(
            self._name(generation),
            store[self._name(generation)].current,
            encode(self.tag, generation),
        )


_SHIFT = 31


class Rewinder(Actor):
    """The only one that commits: one generation after the other, and now and then back to the one
    before, which no later one has the number of.

    On the board: the generation of the last commit with the one that it may hold, in one word; the
    one under way, if any; the last number that was given.
    """

    KINDS: tuple[type[Part], ...] = (Filled, Large, Replaced, Names, Flipped, Grown, InPlace, Made)
    HERE, NEXT, LAST = FIRST + WORDS, FIRST + WORDS + 1, FIRST + WORDS + 2

    def __init__(self, life: Life, index: int) -> None:
        super().__init__(life, index)
        self.unit = Unit(f"held{index}", index, self.words[FIRST : FIRST + WORDS], self.KINDS)

    @property
    def here(self) -> tuple[int, int | None]:
        """The generation of the last commit, and of the one before, if that may be held."""
        generation, before = divmod(self.words[self.HERE], 1 << _SHIFT)
        return generation - 1, before - 1 if before else None

    @property
    def under_way(self) -> int | None:
        number = self.words[self.NEXT]
        return number - 1 if number else None

    @under_way.setter
    def under_way(self, generation: int | None) -> None:
        self.words[self.NEXT] = 0 if generation is None else generation + 1

    def _arrive(self, generation: int, before: int | None) -> None:
        held = 0 if before is None else before + 1
        self.words[self.HERE] = (generation + 1) << _SHIFT | held
        self.under_way = None

    @property
    def oldest(self) -> int:
        """No reader may be shown an older one from now on."""
        generation, before = self.here
        under_way = self.under_way
        return min(n for n in (generation, before, under_way) if n is not None)

    @property
    def newest(self) -> int:
        return int(self.words[self.LAST])

    def create(self, store: Any) -> None:
        self.unit.create(store)
        self._arrive(0, None)

    def check(self, store: Any, first: bool) -> None:
        found = self.unit.read(store)
        self.has_read()
        if not first:
            if not self.oldest <= found <= self.newest:
                raise WrongError(
                    f"{self.unit.path}: expected generation {self.oldest} to {self.newest}, found "
                    f"{found}"
                )
            return
        (here, before), under_way = self.here, self.under_way
        if found not in (here, under_way):
            raise WrongError(
                f"{self.unit.path}: expected generation {here}, or {under_way} under way, found "
                f"{found}"
            )
        if found != here:  # a commit, or it went back
            self._arrive(found, here if found > here else None)
        else:
            self._arrive(here, before)

    def step(self, session: Session) -> None:
        store, rng = session.store, self.random
        before = self.here[1]  # None: the one without its objects, too
        if before is not None and store.holds and rng.random() < 0.3:
            self._go_back(store, before)
        else:
            self._go_on(store, rng.random() < 0.2)
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.002)

    def _go_back(self, store: Any, before: int) -> None:
        self.under_way = before
        if self.random.random() < 0.3:  # what is pending is rolled back
            self.unit.write(store, -before, self.unit.parts[:2])
        store.rewind()
        self._has_committed(store, before)
        self._arrive(before, None)
        if store.holds:
            raise WrongError(f"{self.unit.path}: it went back to {before}, and holds a version")

    def _go_on(self, store: Any, fails: bool) -> None:
        here = self.here[0]
        self.words[self.LAST] += 1
        generation = self.newest
        if not fails:
            self.under_way = generation
        try:
            with store.transaction(timeout=PATIENCE_SECONDS):
                self.unit.write(store, -generation if fails else generation)
                if fails:
                    raise InterruptedError
        except InterruptedError:
            self._expect(store, here)
            return
        self._has_committed(store, generation)
        held = self.life.plan.hold
        if store.holds != held:
            raise WrongError(f"{self.unit.path}: committed {generation}: holds is {store.holds}")
        self._arrive(generation, here if held else None)

    def _has_committed(self, store: Any, generation: int) -> None:
        self.words[b.COMMITS] += 1
        self.life.note_commit(store)
        self._expect(store, generation)

    def _expect(self, store: Any, generation: int) -> None:
        found = self.unit.read(store)
        self.has_read()
        if found != generation:
            raise WrongError(f"{self.unit.path}: expected generation {generation}, found {found}")


class Beside(Actor):
    """A process that opens the store for reading, again and again, while another writes it: what it
    is shown is whole, and neither older nor newer than what may be there."""

    SHOWN = 4
    """Commits of one open, at most."""

    def ready(self) -> None:
        parent = os.getpid()
        if os.fork() == 0:
            try:
                end_with_parent(parent)
                while True:
                    self._read()
            except BaseException as error:
                self.life.board.fail(f"{self.name}, a reader: {type(error).__name__}: {error}")
            finally:
                os._exit(1)

    def _read(self) -> None:
        try:
            oldest = self._oldest()
            with pmstore.open(self.life.plan.path, "r") as store:
                for _ in range(self.random.randrange(1, self.SHOWN)):
                    self._look(store, oldest)
                    time.sleep(self.random.random() * 0.005)
                    oldest = self._oldest()
                    store.refresh(keep=self.random.random() < 0.5)
        except (pmstore.StoreLockedError, pmstore.SnapshotLostError, FileNotFoundError):
            # nobody answers: it is being opened, closed or killed; or too slow
            self.words[b.REFUSED] += 1
        time.sleep(self.random.random() * 0.005)

    def _writers(self) -> list[Rewinder]:
        return [a for a in self.life.actors if isinstance(a, Rewinder) and a.created]

    def _oldest(self) -> dict[Rewinder, int]:
        return {writer: writer.oldest for writer in self._writers()}

    def _look(self, store: Any, oldest: dict[Rewinder, int]) -> None:
        for writer, least in oldest.items():
            found = writer.unit.read(store)
            if not least <= found <= writer.newest:
                raise WrongError(
                    f"{writer.unit.path}: expected generation {least} to {writer.newest}, found "
                    f"{found}"
                )
            self.words[FIRST] += 1
            self.has_read()

    def step(self, session: Session) -> None:
        looks = self.words[FIRST]
        while self.words[FIRST] == looks:
            time.sleep(0.002)
