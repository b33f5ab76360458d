"""What threads, tasks and generators do to a store in blocks."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pmstore
from crashtests.stress import board as b
from crashtests.stress.actors import FIRST, Actor
from crashtests.stress.content import WrongError
from crashtests.stress.life import PATIENCE_SECONDS, REFUSED, Session
from crashtests.stress.unit import (
    TORCH,
    WORDS,
    Filled,
    Flipped,
    Large,
    Names,
    Part,
    Replaced,
    Tensor,
    Unit,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from crashtests.stress.life import Life


class WantedError(Exception):
    """Raised in a block that is to be undone."""


class Writer(Actor):
    """Whole changes of its objects, and changes that fail half way; transfers between accounts that
    all writers share."""

    ALL: tuple[type[Part], ...] = (Filled, Large, Replaced, Names, Flipped)
    ACCOUNTS, EACH = 64, 1000

    def __init__(self, life: Life, index: int, kinds: tuple[type[Part], ...] | None = None) -> None:
        super().__init__(life, index)
        kinds = (*self.ALL, Tensor) if TORCH and kinds is None else kinds or self.ALL
        self.unit = Unit(f"unit{index}", index, self.words[FIRST : FIRST + WORDS], kinds)
        self.units = (self.unit,)
        self.doubtful = False

    def create(self, store: Any) -> None:
        super().create(store)
        if "accounts" not in store:
            store.full("accounts", self.ACCOUNTS, self.EACH, dtype="int64")

    def check(self, store: Any, first: bool) -> None:
        super().check(store, first)
        total = int(store["accounts"].sum())
        if total != self.ACCOUNTS * self.EACH:
            raise WrongError(
                f"accounts: expected a sum of {self.ACCOUNTS * self.EACH}, found {total}"
            )
        self.has_read()

    def start(self, store: Any) -> None:
        self.doubtful = False

    def step(self, session: Session) -> None:
        """An interrupt may come anywhere: then what became of the block is looked up by the next
        step."""
        store, rng = session.store, self.random
        if self.doubtful:
            self.unit.settle(store)
            self.doubtful = False
        self.doubtful = True
        fails = rng.random() < 0.3
        generation = self.unit.begin()
        try:
            with store.transaction(self._declared(store), timeout=PATIENCE_SECONDS):
                self.block(store, generation, fails)
        except WantedError:
            found = self.unit.read(store)
            if found != self.unit.acknowledged:
                raise WrongError(
                    f"{self.unit.path}: a block was undone: expected generation "
                    f"{self.unit.acknowledged}, found {found}"
                ) from None
        else:
            self.unit.done(generation)
            self.words[b.COMMITS] += 1
            self.life.note_commit(store)
        self.doubtful = False
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.002)

    def _declared(self, store: Any) -> list[Any]:
        if self.random.random() < 0.7:
            return []
        return [store[part.path] for part in self.unit.parts if isinstance(part, Large)]

    def block(self, store: Any, generation: int, fails: bool) -> None:
        """The block's body."""
        rng = self.random
        found = self.unit.read(store)
        if found != self.unit.acknowledged:
            raise WrongError(
                f"{self.unit.path}: expected generation {self.unit.acknowledged} (acknowledged), "
                f"found {found}"
            )
        self.has_read()
        parts = rng.sample(self.unit.parts, len(self.unit.parts))
        half = rng.randrange(len(parts) + 1)
        accounts = store["accounts"]
        one, other, amount = (
            rng.randrange(self.ACCOUNTS),
            rng.randrange(self.ACCOUNTS),
            rng.randrange(9),
        )
        written = -generation if fails else generation
        accounts[one] -= amount
        self.unit.write(store, written, parts[:half])
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.003)  # half done, and others run
        if fails and rng.random() < 0.7:
            raise WantedError
        if rng.random() < 0.2:
            with store.transaction():
                self.unit.write(store, written, parts[half:])
        else:
            self.unit.write(store, written, parts[half:])
        accounts[other] += amount
        self.unit.finish(store, written)
        if fails:
            raise WantedError


class Tasks(Actor):
    """Tasks of one event loop, each with blocks that wait in the middle: a block that was left
    normally stays."""

    COUNT = 3

    def __init__(self, life: Life, index: int) -> None:
        super().__init__(life, index)
        self.units = tuple(
            Unit(
                f"task{index}.{i}",
                1024 + index * 8 + i,
                self.words[FIRST + WORDS * i : FIRST + WORDS * (i + 1)],
                (Filled, Replaced),
            )
            for i in range(self.COUNT)
        )

    def step(self, session: Session) -> None:
        asyncio.run(self._all(session))

    async def _all(self, session: Session) -> None:
        await asyncio.gather(*(self._task(session, unit) for unit in self.units))

    async def _task(self, session: Session, unit: Unit) -> None:
        for _ in range(5):
            await self._pause()
            try:
                await self._once(session.store, unit)
            except REFUSED:
                self.words[b.REFUSED] += 1
                unit.settle(session.store)

    async def _pause(self) -> None:
        await asyncio.sleep(self.random.choice((0, 0, 0.0005, 0.002)))

    async def _once(self, store: Any, unit: Unit) -> None:
        fails = self.random.random() < 0.4
        found = unit.read(store)
        if found != unit.acknowledged:
            raise WrongError(
                f"{unit.path}: expected generation {unit.acknowledged} (acknowledged), found "
                f"{found}"
            )
        generation = unit.begin()
        block = store.transaction(timeout=PATIENCE_SECONDS)
        try:
            if hasattr(block, "__aenter__") and self.random.random() < 0.7:
                async with block:
                    await self._body(store, unit, -generation if fails else generation)
            else:
                with block:
                    await self._body(store, unit, -generation if fails else generation)
        except WantedError:
            return
        unit.done(generation)
        self.words[b.COMMITS] += 1
        self.life.note_commit(store)
        self.has_read()

    async def _body(self, store: Any, unit: Unit, generation: int) -> None:
        unit.write(store, generation, unit.parts[:1])
        await self._pause()
        unit.write(store, generation, unit.parts[1:])
        unit.finish(store, generation)
        if generation < 0:
            raise WantedError


class Holder(Actor):
    """Generators that hold a block, and are ended by another thread, or by nobody: the block does
    not stay open."""

    def __init__(self, life: Life, index: int) -> None:
        super().__init__(life, index)
        self.unit = Unit(
            f"held{index}", index, self.words[FIRST : FIRST + WORDS], (Filled, Replaced)
        )
        self.units = (self.unit,)

    def _hold(self, store: Any, generation: int) -> Generator[None, None, None]:
        with store.transaction(timeout=PATIENCE_SECONDS):
            self.unit.write(store, generation, self.unit.parts[:1])
            yield
            self.unit.write(store, generation, self.unit.parts[1:])
            self.unit.finish(store, generation)

    def step(self, session: Session) -> None:
        store = session.store
        self.unit.settle(store)
        generation = self.unit.begin()
        held = self._hold(store, generation)
        how = self.random.randrange(5)
        if how == 0:
            next(held)
            next(held, None)
            self.unit.done(generation)
        elif how == 1:
            next(held)
            held.close()
        elif how == 2:
            next(held)
            self._elsewhere(held.close)
        elif how == 3:
            self._elsewhere(lambda: next(held))
            held.close()
        else:
            self._elsewhere(lambda: next(held))
            del held
        try:
            with store.transaction(timeout=PATIENCE_SECONDS):
                pass
        except pmstore.TransactionError as error:
            if any(f"'{actor.name}'" in str(error) for actor in self._others()):
                raise  # which has it for as long, where the machine is busy
            raise WrongError(
                f"a block whose generator has ended ({how}) is open: {error}"
            ) from error
        self.words[b.COMMITS] += 1

    def _others(self) -> list[Actor]:
        return [actor for actor in self.life.actors if actor is not self]

    def _elsewhere(self, work: Any) -> None:
        def quietly() -> None:
            try:
                work()
            except REFUSED:
                self.words[b.REFUSED] += 1

        thread = threading.Thread(target=quietly, name=f"{self.name}'s other thread")
        thread.start()
        thread.join()
