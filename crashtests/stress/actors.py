"""What threads do to a store outside of blocks."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import pmstore
from crashtests.stress import board as b
from crashtests.stress.content import WrongError, decode, describe, encode, expect_filled
from crashtests.stress.life import PATIENCE_SECONDS, REFUSED, Session
from pmstore import tiers

if TYPE_CHECKING:
    from crashtests.stress.life import Life
    from crashtests.stress.unit import Unit

CREATED = b.OWN
FIRST = b.OWN + 1
"""The first word that is a kind's own."""


class Actor:
    """What one thread does, step by step. index: of its words on the board, and part of what its
    objects hold."""

    disturbs = False
    """Has work for signal handlers and finalizers, too."""
    units: tuple[Unit, ...] = ()

    def __init__(self, life: Life, index: int) -> None:
        self.life = life
        self.index = index
        self.name = f"{type(self).__name__} {index}"
        self.words = life.board.actor(index)
        self.random = random.Random(life.plan.seed * 64 + index)

    @property
    def created(self) -> bool:
        """Its objects are in the store: a commit that made them returned."""
        return bool(self.words[CREATED])

    @created.setter
    def created(self, value: bool) -> None:
        self.words[CREATED] = value

    def create(self, store: Any) -> None:
        """Makes its objects, those that are not there. In a block."""
        for unit in self.units:
            unit.create(store)

    def check(self, store: Any, first: bool) -> None:
        """Looks at its objects in a store that was opened, at any commit; first: nobody uses it
        yet.

        Raises: WrongError.
        """
        for unit in self.units:
            if first:
                unit.settle(store)
            else:
                unit.within(store, 0 if store.mode == "r" else unit.acknowledged)
        self.has_read(len(self.units))

    def ready(self) -> None:
        """Before the store is opened, in each life."""

    def start(self, store: Any) -> None:
        """Before its thread, in each life."""

    def step(self, session: Session) -> None:
        raise NotImplementedError

    def disturb(self, store: Any, rng: random.Random) -> None:
        """Of actors that disturb."""

    def run(self, steps: int = 1 << 60) -> None:
        while steps > 0:
            steps -= 1
            session = self.life.session
            if session is None:
                time.sleep(0.0005)
                continue
            try:
                self.step(session)
            except REFUSED:
                self.words[b.REFUSED] += 1
                time.sleep(0)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self.life.fail_with(error, self.name)
            self.words[b.STEPS] += 1

    def commit(self, store: Any, pending: bool = False) -> None:
        """One that returned. pending: without waiting in the call. Raises: REFUSED."""
        if pending:
            store.commit(wait=False).wait()
        else:
            store.commit()
        self.words[b.COMMITS] += 1
        self.life.note_commit(store)

    def has_read(self, count: int = 1) -> None:
        self.words[b.READS] += count


class Counter(Actor):
    """Stores numbers into arrays that it shares with other threads, each at places of its own,
    while those commit.

    Once a commit of its own returned and its numbers are still there (nobody rolled back), they are
    acknowledged.
    """

    MOST = 1024
    ARRAYS = {"shared/hot": (100, 1), "shared/tile": (4096, 64), "shared/wide": (65_536, MOST)}
    """Length, and how many places each actor has."""

    def __init__(self, life: Life, index: int, waits: bool = True) -> None:
        super().__init__(life, index)
        self.waits = waits

    def create(self, store: Any) -> None:
        for name, (length, _) in self.ARRAYS.items():
            if name not in store:
                store.zeros(name, length, dtype="int64")

    def _place(self, name: str, number: int) -> int:
        length, places = self.ARRAYS[name]
        return self.index + number % places * (length // places if places > 1 else 0)

    def check(self, store: Any, first: bool) -> None:
        intent, acknowledged = self.words[FIRST], self.words[FIRST + 1]
        for name, (_, places) in self.ARRAYS.items():
            found = np.array(store[name])
            for number in range(max(1, acknowledged - places + 1), acknowledged + 1):
                value = int(found[self._place(name, number)])
                if not (number <= value <= intent and value % places == number % places):
                    raise WrongError(
                        f"{name}[{self._place(name, number)}]: stored and committed {number} (of "
                        f"{acknowledged} acknowledged, {intent} under way), found {value}"
                    )
        self.has_read()

    def start(self, store: Any) -> None:
        self.since = list(range(self.words[FIRST + 1] + 1, self.words[FIRST] + 1))

    def step(self, session: Session) -> None:
        store, rng = session.store, self.random
        arrays = {name: session.keep(name) for name in self.ARRAYS}
        if rng.random() < 0.3:
            self._store_same(arrays)
        for _ in range(rng.choice((1, 1, 2, 5))):
            number = self.words[FIRST] + 1
            self.words[FIRST] = number
            self.since.append(number)
            for name, array in arrays.items():
                if name == "shared/hot" or rng.random() < 0.7:
                    array[self._place(name, number)] = number
        if rng.random() < 0.4:
            time.sleep(rng.random() * 0.001)
            return
        self._acknowledge(store, arrays)

    def _store_same(self, arrays: dict[str, Any]) -> None:
        """Pages are captured, and are as they were but for what others store there meanwhile."""
        for name, (length, places) in self.ARRAYS.items():
            mine = arrays[name][self.index :: length // places]
            mine[:] = mine.copy()

    def _acknowledge(self, store: Any, arrays: dict[str, Any]) -> None:
        """Everything since the last time; what somebody rolled back is stored again first."""
        last = self.since[-1]
        del self.since[: -self.MOST]  # earlier numbers have been stored over
        wanted = {
            (name, self._place(name, number)): number for name in arrays for number in self.since
        }
        for (name, place), number in wanted.items():
            if arrays[name][place] != number:
                arrays[name][place] = number
        self.commit(store, not self.waits and self.random.random() < 0.3)
        if all(arrays[name][place] == number for (name, place), number in wanted.items()):
            self.words[FIRST + 1] = last
            self.since.clear()
        self.has_read(len(wanted))


class Racer(Actor):
    """Another thread stores into an array just while this one commits; then nobody writes, and this
    one commits again."""

    WARM = 4
    """Commits in a row that make the array a hot range."""

    def __init__(self, life: Life, index: int) -> None:
        super().__init__(life, index)
        self.array = f"race{index}"

    def create(self, store: Any) -> None:
        if self.array not in store:
            store.zeros(self.array, 100, dtype="int64")

    def check(self, store: Any, first: bool) -> None:
        """Places 0 and 1: this thread's, the other's."""
        found = store[self.array]
        for place, who in enumerate(("it", "another thread")):
            intent, acknowledged = self.words[FIRST + 2 * place], self.words[FIRST + 2 * place + 1]
            if not acknowledged <= found[place] <= intent:
                raise WrongError(
                    f"{self.array}[{place}]: {who} stored {acknowledged}, and a later commit "
                    f"returned: found {found[place]} ({intent} under way)"
                )
        self.has_read(2)

    def step(self, session: Session) -> None:
        store, array, rng = session.store, session.keep(self.array), self.random
        for _ in range(rng.choice((1, self.WARM))):
            began = time.perf_counter()
            self._own(array)
            self.commit(store)
            took = time.perf_counter() - began
        go, pause = threading.Event(), rng.random() * took

        def race() -> None:
            go.wait()
            time.sleep(pause)
            self.words[FIRST + 2] += 1
            array[1] = self.words[FIRST + 2]

        other = threading.Thread(target=race)
        other.start()
        self._own(array)
        go.set()
        try:
            self.commit(store)
        finally:
            other.join()
        self.commit(store)
        for place in (0, 1):
            if array[place] == self.words[FIRST + 2 * place]:  # nobody rolled back
                self.words[FIRST + 2 * place + 1] = self.words[FIRST + 2 * place]
        time.sleep(rng.random() * 0.04)

    def _own(self, array: Any) -> None:
        self.words[FIRST] += 1
        array[0] = self.words[FIRST]


class UndoRacer(Actor):
    """Another thread stores into an array while a block that wrote the same pages is undone. What
    is there when a later commit returned, nobody writing any more, is acknowledged, place by
    place."""

    LENGTH, PLACES = 100_000, 32

    def __init__(self, life: Life, index: int) -> None:
        super().__init__(life, index)
        self.array = f"undone{index}"
        self.acknowledged = self.words[FIRST + 1 : FIRST + 1 + self.PLACES]

    def create(self, store: Any) -> None:
        if self.array not in store:
            store.zeros(self.array, self.LENGTH, dtype="int64")

    def _places(self, array: Any) -> Any:
        return array[:: self.LENGTH // self.PLACES]

    def check(self, store: Any, first: bool) -> None:
        found = self._places(store[self.array])
        for place, acknowledged in enumerate(self.acknowledged):
            if not acknowledged <= found[place] <= self.words[FIRST]:
                raise WrongError(
                    f"{self.array}, place {place}: {acknowledged} was there when a commit "
                    f"returned, found {found[place]} ({self.words[FIRST]} under way)"
                )
        self.has_read(self.PLACES)

    def step(self, session: Session) -> None:
        store, array = session.store, session.keep(self.array)
        stop = threading.Event()
        self.words[FIRST] += 1
        number, places = self.words[FIRST], self._places(array)

        def race() -> None:
            while not stop.is_set():
                places[:] = number

        other = threading.Thread(target=race)
        try:
            with store.transaction(timeout=PATIENCE_SECONDS):
                array[1::8] = -number
                other.start()
                raise InterruptedError
        except InterruptedError:
            pass
        finally:
            stop.set()
            if other.ident is not None:
                other.join()
        if self.random.random() < 0.5:
            places[self.random.randrange(self.PLACES)] = number
        self.commit(store)
        for place, value in enumerate(places.tolist()):
            self.acknowledged[place] = value
        time.sleep(self.random.random() * 0.02)


class Churner(Actor):
    """Names that come and go, made and removed by all threads, handlers and finalizers: what is
    read is of that name."""

    disturbs = True
    NAMES = 16
    LENGTH = 1000
    TAG = 1 << 12

    def __init__(self, life: Life, index: int, scratches: bool = False) -> None:
        super().__init__(life, index)
        self.scratches = scratches

    def create(self, store: Any) -> None:
        store.setdefault("churn/stays", 0)

    def check(self, store: Any, first: bool) -> None:
        for name in list(store["churn"]):
            if name != "stays":
                self._look(store, name)

    def _look(self, store: Any, name: str) -> None:
        """Raises: WrongError, KeyError."""
        rollbacks = store.rollbacks
        try:
            self._look_at(name, store[f"churn/{name}"])
        except WrongError:
            time.sleep(0.1)
            # else another thread had made it, and it was undone while we looked at it
            if store.rollbacks == rollbacks:
                raise
        self.has_read()

    def _look_at(self, name: str, value: Any) -> None:
        number = int(name[1:])
        if name[0] == "v":
            if value["name"] != name:
                raise WrongError(f"churn/{name}: found the value of {value['name']}")
        else:
            first, last = int(value[0]), int(value[-1])
            for found in (first, last):
                if found >> 32 != self.TAG + number:
                    raise WrongError(
                        f"churn/{name}: expected object {self.TAG + number}, found {decode(found)}"
                    )
            if first != last or not (value == first).all():
                raise WrongError(f"churn/{name}: expected one generation, found {describe(value)}")

    def _make(self, store: Any, name: str, serial: int) -> None:
        if name[0] == "v":
            store[f"churn/{name}"] = {"name": name, "serial": serial}
        else:
            store[f"churn/{name}"] = np.full(self.LENGTH, encode(self.TAG + int(name[1:]), serial))

    def _name(self, rng: random.Random) -> str:
        return f"{rng.choice('nnnv')}{rng.randrange(self.NAMES)}"

    def disturb(self, store: Any, rng: random.Random) -> None:
        gone, new = self._name(rng), self._name(rng)
        with contextlib.suppress(KeyError):
            del store[f"churn/{gone}"]
        if rng.random() < 0.8:
            with contextlib.suppress(*REFUSED):
                store.commit()
        self._make(store, new, rng.randrange(1 << 20))
        if rng.random() < 0.8:
            with contextlib.suppress(*REFUSED):
                store.commit()

    def step(self, session: Session) -> None:
        store, rng = session.store, self.random
        if self.scratches and self.life.plan.finalizers:
            Scratch(self.life)
        for _ in range(30):
            with contextlib.suppress(KeyError):
                self._look(store, self._name(rng))
        if rng.random() < 0.3:
            began = time.monotonic()
            self.disturb(store, rng)
            time.sleep(time.monotonic() - began)  # others have a turn


_finalizing = threading.local()


class Scratch:
    """Cyclic garbage whose finalizer uses the store: the collector runs it in the middle of
    anything."""

    def __init__(self, life: Life) -> None:
        self.me = self
        self.life = life

    def __del__(self) -> None:
        began = time.monotonic()
        if began < getattr(_finalizing, "until", 0.0) or self.life.session is None:
            return
        _finalizing.until = began + 1e9
        try:
            rng = random.Random()
            self.life.disturb(rng)
            if rng.random() < 0.1:
                raise InterruptedError
        finally:  # the thread has most of the time, however long its store takes
            now = time.monotonic()
            _finalizing.until = now + (now - began)


class Assigner(Actor):
    """Assigns to names of its own, one call at a time, outside of blocks. What returned is there,
    whatever blocks of other threads do; only a roll back that somebody asked for takes it away."""

    def __init__(self, life: Life, index: int) -> None:
        super().__init__(life, index)
        self.value, self.array = f"own{index}/value", f"own{index}/array"
        self.tag = index * 16

    def create(self, store: Any) -> None:
        if self.value not in store:
            store[self.value] = store[self.array] = 0
            self.words[FIRST] = self.words[FIRST + 1] = 0

    def _found(self, store: Any) -> tuple[int, int]:
        """The value, and the array's length (0: nothing was assigned yet)."""
        array = store[self.array]
        if isinstance(array, int):
            return int(store[self.value]), 0
        expect_filled(self.array, array, encode(self.tag, len(array)))
        return int(store[self.value]), len(array)

    def check(self, store: Any, first: bool) -> None:
        intent, acknowledged = self.words[FIRST], self.words[FIRST + 1]
        value, length = self._found(store)
        if not acknowledged <= value <= intent:
            raise WrongError(
                f"{self.value}: expected {acknowledged} (acknowledged) to {intent}, found {value}"
            )
        if length and length not in {n % 997 + 1 for n in range(max(1, acknowledged), intent + 1)}:
            raise WrongError(
                f"{self.array}: expected one of {acknowledged} to {intent}, found length {length}"
            )
        if not length and acknowledged:
            raise WrongError(
                f"{self.array}: expected what {acknowledged} assigned, found the first value"
            )
        self.has_read()

    def step(self, session: Session) -> None:
        store, rng = session.store, self.random
        number = self.words[FIRST] + 1
        self.words[FIRST] = number
        length = number % 997 + 1
        store[self.value] = number
        store[self.array] = np.full(length, encode(self.tag, length))
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.002)
        if rng.random() < 0.7:
            self.commit(store)
        there = int(store[self.value]) == number and self._found(store)[1] == length
        self.has_read(2)
        if there and rng.random() < 0.7:
            self.commit(store)
            if int(store[self.value]) == number and self._found(store)[1] == length:
                self.words[FIRST + 1] = number
                return
            there = False
        if not there and not self.life.plan.rollbacks and self.life.session is session:
            raise WrongError(
                f"{self.value}: {number} was assigned, and nobody rolled back: found "
                f"{store[self.value]} and length {self._found(store)[1]} instead of {length}"
            )


class Undoer(Actor):
    """Rolls back what is uncommitted, whoever wrote it."""

    def step(self, session: Session) -> None:
        time.sleep(self.random.random() * 0.02)
        session.store.rollback()


class Forker(Actor):
    """Forks children that look at arrays again and again: they see the state of the fork, whole."""

    DOMAINS = ("file",)
    """Elsewhere a child's mapping is its parent's, and shows what that writes."""

    def start(self, store: Any) -> None:
        self.children: list[int] = []

    def step(self, session: Session) -> None:
        self._reap()
        if len(self.children) >= 2:
            time.sleep(0.002)
            return
        units = [
            unit
            for actor in self.life.actors
            for unit in actor.units
            if actor.created and unit.stays
        ]
        rng = self.random
        pauses = [rng.random() * 0.02 for _ in range(3)]
        # so that no block of another thread is half done
        with session.store.transaction(timeout=PATIENCE_SECONDS):
            shown = []
            for unit in units:
                generation = unit.read(session.store)
                shown += [
                    (part, session.store[part.path], generation)
                    for part in unit.parts
                    if part.in_place
                ]
            parent = os.getpid()
            child = os.fork()
            if child == 0:
                self._look(shown, pauses, parent)
        self.children.append(child)

    def _look(self, shown: list[tuple[Any, Any, int]], pauses: list[float], parent: int) -> None:
        """The child. Once its parent is killed, nobody keeps for it what the next owner writes."""
        gc.disable()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        code = 0
        try:
            for pause in pauses:
                for part, array, generation in shown:
                    if self.life.plan.domain in self.DOMAINS:
                        expect_filled(
                            f"a fork child's {part.path}", array, encode(part.tag, generation)
                        )
                    else:
                        float(np.asarray(array).sum())
                time.sleep(pause)
        except WrongError as error:
            code = 1
            if os.getppid() == parent:
                self.life.board.fail(f"{self.name}, {pauses}: {error}")
        except BaseException as error:
            self.life.board.fail(f"{self.name}: a fork child: {error!r}")
            code = 1
        finally:
            os._exit(code)

    def _reap(self) -> None:
        for child in list(self.children):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                self.children.remove(child)
                self.has_read()
                if status:
                    self.life.fail(f"{self.name}: a fork child ended with status {status:#x}")


class Copier(Actor):
    """Copies the file while it is written, as `cp` does, and opens the copy: it is refused, or some
    commit, whole."""

    def step(self, session: Session) -> None:
        time.sleep(self.random.random() * 0.02)
        copy = self.life.plan.folder / f"copy{self.index}.pm"
        shutil.copyfile(self.life.plan.path, copy)
        try:
            with pmstore.open(
                copy, self.random.choice(("r", "r+")), domain=self.life.plan.domain
            ) as store:  # type: ignore[arg-type]
                for actor in self.life.actors:
                    for unit in actor.units if actor.created else ():
                        try:
                            unit.within(store, 0)
                        except WrongError as error:
                            raise WrongError(
                                f"a copy that was opened without error: {error}"
                            ) from error
                        self.has_read()
        except pmstore.PmstoreError:
            self.words[b.REFUSED] += 1
        finally:
            copy.unlink(missing_ok=True)


class Flusher(Actor):
    """Flushes to a tier, restores from it, and checks what came back."""

    def create(self, store: Any) -> None:
        store.add_tier("stress", pmstore.TierConfig(self.life.plan.folder / "tier", keep=2))

    def check(self, store: Any, first: bool) -> None:
        if first and self.random.random() < 0.3 and self.words[FIRST]:
            self._restore(None, {})

    def _restore(self, epoch: int | None, at_least: dict[str, int]) -> None:
        target = self.life.plan.folder / f"restored{self.index}.pm"
        target.unlink(missing_ok=True)
        try:
            report = tiers.restore(
                target, self.life.plan.folder / "tier", epoch, domain=self.life.plan.domain
            )
            if report.epoch < self.words[FIRST]:
                raise WrongError(
                    f"epoch {self.words[FIRST]} was flushed, {report.epoch} restored: {report}"
                )
            with pmstore.open(target, "r") as store:
                for actor in self.life.actors:
                    for unit in actor.units if actor.created else ():
                        unit.within(store, at_least.get(unit.path, 0))
                        self.has_read()
        except WrongError as error:
            raise WrongError(f"a restored store: {error}") from error
        finally:
            target.unlink(missing_ok=True)

    def step(self, session: Session) -> None:
        at_least = {
            unit.path: unit.acknowledged for actor in self.life.actors for unit in actor.units
        }
        try:
            flush = session.store.flush("stress")
            flush.wait(PATIENCE_SECONDS * 3)
        except pmstore.TierError:  # the store is being closed: its flushes are ended
            if session.store.closed or self.life.session is not session:
                return
            raise
        self.words[FIRST] = flush.epoch
        if self.random.random() < 0.5:
            self._restore(None, at_least)
