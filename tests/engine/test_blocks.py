"""Whose a block is: threads, tasks of an event loop, generators that end elsewhere, and the end of
the store."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore

DOMAINS = ["process", "emulated", "file"]


def _make(path: Path, domain: Any) -> None:
    with pmstore.open(path, "w", size="8MB", domain=domain) as store:
        store["a"] = np.full(1000, 100)
        store["b"] = np.zeros(1000, int)


def _move(
    store: pmstore.Store, half: threading.Event, go: threading.Event, told: list[BaseException]
) -> None:
    try:
        a, b = store["a"], store["b"]
        with store.transaction():
            a -= 60
            half.set()
            go.wait(60)
            b += 60
    except BaseException as error:
        told.append(error)


@pytest.fixture
def mover() -> Iterator[
    Callable[[pmstore.Store], tuple[threading.Thread, threading.Event, list[BaseException]]]
]:
    """Starts a thread that stays in the middle of a block that moves 60 from one array to the
    other."""
    started: list[tuple[threading.Thread, threading.Event]] = []

    def start(
        store: pmstore.Store,
    ) -> tuple[threading.Thread, threading.Event, list[BaseException]]:
        half, go, told = threading.Event(), threading.Event(), list[BaseException]()
        thread = threading.Thread(target=_move, args=(store, half, go, told), name="mover")
        thread.start()
        started.append((thread, go))
        assert half.wait(60)
        return thread, go, told

    yield start
    for thread, go in started:
        go.set()
        thread.join()


def _sums(path: Path) -> tuple[int, int]:
    with pmstore.open(path, "r") as store:
        assert store.check().problems == ()
        return int(store["a"][0]), int(store["b"][0])


# ---- the end of the store ------------------------------------------------------------------------


@pytest.mark.parametrize("domain", DOMAINS)
def test_leaving_the_store_never_commits_half_a_block(
    shm: Path, domain: str, mover: Any, monkeypatch: Any
) -> None:
    """The other thread waits for this one: it is waited for, not for ever, and what it has done is
    undone whole."""
    monkeypatch.setattr("pmstore.store._LEAVING_SECONDS", 0.2)
    path = shm / "s.pm"
    _make(path, domain)
    with (
        pytest.raises(pmstore.TransactionError, match=r"'mover'.*open when the store was closed"),
        pmstore.open(path) as store,
    ):
        thread, go, told = mover(store)
    assert store.closed
    go.set()
    thread.join()
    assert isinstance(told[0], pmstore.ClosedStoreError)
    assert _sums(path) == (100, 0)


@pytest.mark.parametrize("domain", DOMAINS)
def test_leaving_the_store_waits_for_a_block(shm: Path, domain: str, mover: Any) -> None:
    path = shm / "s.pm"
    _make(path, domain)
    with pmstore.open(path) as store:
        _, go, told = mover(store)
        threading.Timer(0.1, go.set).start()
    assert told == []
    assert _sums(path) == (40, 60)


def test_an_exception_out_of_the_store_waits_for_nobody(shm: Path, mover: Any) -> None:
    path = shm / "s.pm"
    _make(path, "process")
    with pytest.raises(ZeroDivisionError), pmstore.open(path) as store:
        thread, go, told = mover(store)
        raise ZeroDivisionError
    go.set()
    thread.join()
    assert isinstance(told[0], pmstore.ClosedStoreError)
    assert _sums(path) == (100, 0)


def test_an_interrupt_ends_the_waiting_for_a_block(shm: Path, mover: Any) -> None:
    path, main = shm / "s.pm", threading.get_ident()
    for seconds in (0.1, 0.5, 4.0):
        _make(path, "process")
        with pytest.raises(KeyboardInterrupt), pmstore.open(path) as store:
            thread, go, _ = mover(store)
            threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGINT)).start()
        if store.closed:
            break
        go.set()  # it came before the waiting, on a busy machine: the store is open as before
        thread.join()
        store.close()
    else:
        pytest.fail("the store stayed open")
    assert _sums(path) == (100, 0)


def test_leaving_the_store_in_a_block_of_the_same_thread(shm: Path) -> None:
    """As a generator does that is still in one."""
    path = shm / "s.pm"
    _make(path, "process")

    def moving() -> Iterator[None]:
        with store.transaction():
            store["a"][:] -= 60
            yield

    with (
        pytest.raises(pmstore.TransactionError, match="open when the store was closed"),
        pmstore.open(path) as store,
    ):
        held = moving()
        next(held)
    held.close()
    assert _sums(path) == (100, 0)


# ---- threads -------------------------------------------------------------------------------------


def _in_a_thread(call: Callable[[], object]) -> BaseException | None:
    raised: list[BaseException | None] = [None]

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised[0] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0]


def test_calls_of_other_threads(store: pmstore.Store) -> None:
    """Whatever changes the store is refused as a whole while another thread is in a block; reading
    goes on."""
    a = store.zeros("a", 10)
    store["v"] = 1
    store.group("g")["x"] = 1
    numbers = store.list("l")
    numbers.extend([1, 2])
    slots = store.slots("s", 4)
    store.commit()
    changes: list[Callable[[], object]] = [
        lambda: store.update(v=2),
        lambda: store.update(new=2),
        lambda: store.update({"deep/er/name": 2}),
        lambda: store.update(array=np.ones(3)),
        lambda: store.__delitem__("v"),
        lambda: store.zeros("z", 3),
        lambda: store.group("new group"),
        lambda: store.list("new list"),
        lambda: store.slots("new slots", 3),
        lambda: numbers.append(3),
        lambda: numbers.__setitem__(0, 3),
        lambda: numbers.__delitem__(0),
        lambda: slots.next,
        lambda: slots.flip(),
        lambda: store.will_write(a),
        lambda: store.commit(),
        lambda: store.commit(wait=False),
        lambda: store.rollback(),
    ]
    reads: list[Callable[[], object]] = [
        lambda: store["a"].sum(),
        lambda: store["v"],
        lambda: list(store),
        lambda: "v" in store,
        lambda: list(numbers),
        lambda: slots.current,
        lambda: store.group("g")["x"],
        lambda: store.check(),
    ]
    before = sorted(store)
    with store.transaction():
        for change in changes:
            error = _in_a_thread(change)
            assert isinstance(error, pmstore.TransactionError), change
            assert error.owner is not None
            assert "MainThread" in error.owner
        for read in reads:
            assert _in_a_thread(read) is None
        assert sorted(store) == before
        a[0] = 1
    assert a[0] == 1
    assert store["v"] == 1
    assert _in_a_thread(lambda: store.update(v=2)) is None
    assert store["v"] == 2


@pytest.mark.parametrize("domain", DOMAINS)
def test_stores_of_other_threads_belong_to_the_open_block(shm: Path, domain: Any) -> None:
    with pmstore.open(shm / "s.pm", size="4MB", domain=domain) as store:
        a, b = store.zeros("a", 10), store.zeros("b", 100_000)
        store.commit()
        with suppress(ZeroDivisionError), store.transaction():
            a[:] = 1
            assert _in_a_thread(lambda: b.fill(5)) is None
            raise ZeroDivisionError
        assert not a.any()
        assert not b.any()
        with store.transaction():
            assert _in_a_thread(lambda: b.fill(5)) is None
        store.rollback()
        assert (b == 5).all()


# ---- blocks that nobody leaves -------------------------------------------------------------------


def _opened_by_a_thread_that_ends(store: pmstore.Store) -> Iterator[None]:
    def opening() -> Iterator[None]:
        with store.transaction():
            store["a"][0] = 7
            yield

    held = opening()
    assert _in_a_thread(lambda: next(held)) is None
    return held


@pytest.fixture
def one(store: pmstore.Store) -> pmstore.Store:
    store.zeros("a", 10)
    store.commit()
    return store


def test_a_generator_closed_in_another_thread(one: pmstore.Store) -> None:
    held = _opened_by_a_thread_that_ends(one)
    held.close()  # type: ignore[attr-defined]
    assert one["a"][0] == 0
    one["a"][1] = 1
    one.commit()
    with one.transaction(timeout=0):
        one["v"] = 1
    one.rollback()
    assert one["a"].tolist()[:2] == [0, 1]


def test_a_generator_dropped_in_another_thread(one: pmstore.Store) -> None:
    held = _opened_by_a_thread_that_ends(one)
    del held
    gc.collect()
    one.commit()
    assert one["a"][0] == 0


def test_a_generator_that_goes_on_in_another_thread(one: pmstore.Store) -> None:
    """It leaves its block normally, but its thread has ended: rolled back, and it says so."""
    held = _opened_by_a_thread_that_ends(one)
    with pytest.raises(pmstore.TransactionError, match="had ended: it was rolled back"):
        next(held)
    assert one["a"][0] == 0
    one.commit()


def test_a_generator_of_a_thread_that_lives(one: pmstore.Store) -> None:
    def opening() -> Iterator[None]:
        with one.transaction():
            one["a"][0] = 7
            yield

    held = [opening()]
    next(held[0])
    error = _in_a_thread(lambda: next(held[0]))
    assert isinstance(error, pmstore.TransactionError)
    assert "thread that entered it" in str(error)
    del error, held[:]
    gc.collect()
    assert one["a"][0] == 0
    assert not one.in_transaction
    one.commit()


@pytest.mark.parametrize("what", ["commit", "rollback", "enter", "change", "leave"])
def test_the_block_of_a_thread_that_has_ended(shm: Path, what: str) -> None:
    """Whoever meets it rolls it back. A commit says so: what it was to commit went with it."""
    store = pmstore.open(shm / "s.pm", size="4MB")
    store.zeros("a", 10)
    store.commit()
    held = _opened_by_a_thread_that_ends(store)
    if what in ("commit", "rollback"):
        with pytest.raises(pmstore.TransactionError, match="had ended: it was rolled back"):
            getattr(store, what)()
        getattr(store, what)()
    elif what == "enter":
        with store.transaction(timeout=0):
            store["v"] = 1
    elif what == "change":
        store["v"] = 1
        store.commit()
    else:
        with pytest.raises(pmstore.TransactionError, match="had ended: it was rolled back"), store:
            store["a"][1] = 1
    if what != "leave":
        assert store["a"][0] == 0
        with pytest.raises(pmstore.TransactionError, match="over before it was left"):
            next(held)
    store.close()
    with pmstore.open(shm / "s.pm") as store:
        assert store["a"][0] == 0
        assert ("v" in store) == (what in ("enter", "change"))


def test_a_thread_that_gets_the_id_of_one_that_has_ended(one: pmstore.Store) -> None:
    """It is another thread, and joins nothing."""
    for _ in range(20):
        held = _opened_by_a_thread_that_ends(one)
        entered: list[bool] = []
        assert _in_a_thread(lambda entered=entered: entered.append(one.in_transaction)) is None  # type: ignore[misc]
        assert entered == [False]
        held.close()  # type: ignore[attr-defined]


def test_the_outermost_block_decides_whoever_is_inside(one: pmstore.Store) -> None:
    def inside() -> Iterator[None]:
        with one.transaction():
            one["a"][1] = 1
            yield

    with one.transaction():
        held = inside()
        next(held)
        one["a"][0] = 1
    assert not one.in_transaction
    one.rollback()
    assert one["a"].tolist()[:2] == [1, 1]
    with pytest.raises(pmstore.TransactionError, match="over before it was left"):
        next(held)


def test_what_an_exception_caught_around_an_inner_block_leaves(one: pmstore.Store) -> None:
    with one.transaction():
        one["a"][0] = 1
        with suppress(ZeroDivisionError), one.transaction():
            one["a"][1] = 1
            raise ZeroDivisionError
        assert one["a"].tolist()[:2] == [1, 1]
    one.rollback()
    assert one["a"].tolist()[:2] == [1, 1]


# ---- tasks ---------------------------------------------------------------------------------------


def test_a_block_of_another_task(one: pmstore.Store) -> None:
    """An exception undoes exactly the block: nothing of another task's that was left normally."""

    async def first(inside: asyncio.Event, tried: asyncio.Event) -> None:
        with one.transaction():
            one["one"] = 1
            inside.set()
            await tried.wait()
            raise ZeroDivisionError

    async def second(inside: asyncio.Event, tried: asyncio.Event) -> None:
        await inside.wait()
        for refused in (
            one.transaction().__enter__,
            one.commit,
            one.rollback,
            lambda: one.update(two=2),
        ):
            with pytest.raises(pmstore.TransactionError, match="async with") as caught:
                refused()
            assert caught.value.owner == "task 'the-first'"
        assert not one.in_transaction
        assert one["one"] == 1  # reading goes on
        asyncio.get_running_loop().call_soon(tried.set)
        async with one.transaction() as block:
            assert one.in_transaction
            assert block is not None
            one["two"] = 2
        one.rollback()

    async def main() -> list[BaseException | None]:
        inside, tried = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(
            asyncio.create_task(first(inside, tried), name="the-first"),
            second(inside, tried),
            return_exceptions=True,
        )

    failed, other = asyncio.run(main())
    assert isinstance(failed, ZeroDivisionError)
    assert other is None, other
    assert sorted(one) == ["a", "two"]


def test_tasks_take_turns(one: pmstore.Store) -> None:
    """Whatever they await inside."""
    a = one["a"]

    async def add(which: int) -> None:
        for _ in range(5):
            async with one.transaction():
                seen = a[0]
                with one.transaction():  # joins
                    await asyncio.sleep(0)
                async with one.transaction():
                    await asyncio.sleep(0.0001 * which)
                a[0] = seen + 1
                assert one.in_transaction

    async def main() -> None:
        await asyncio.gather(*map(add, range(8)))

    asyncio.run(main())
    one.rollback()
    assert a[0] == 40


def test_a_task_waits_for_a_thread_and_the_loop_goes_on(one: pmstore.Store) -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with one.transaction():
            inside.set()
            leave.wait(60)
            one["thread"] = 1

    async def main() -> None:
        async def wait() -> None:
            async with one.transaction(timeout=None):
                one["task"] = one["thread"] + 1

        with pytest.raises(pmstore.TransactionError, match="'holder'"):
            async with one.transaction(timeout=0.01):
                pytest.fail("entered")
        cancelled = asyncio.create_task(wait())
        waiting = asyncio.create_task(wait())
        for _ in range(100):
            await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        leave.set()
        await waiting

    thread = threading.Thread(target=hold, name="holder")
    thread.start()
    assert inside.wait(60)
    asyncio.run(main())
    thread.join()
    assert one["task"] == 2


def test_a_callback_of_the_loop_is_not_the_task(one: pmstore.Store) -> None:
    told: list[BaseException] = []

    def called() -> None:
        try:
            one["late"] = 1
        except pmstore.TransactionError as error:
            told.append(error)

    async def main() -> None:
        with one.transaction():
            asyncio.get_running_loop().call_soon(called)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        one["late"] = 2

    asyncio.run(main())
    assert len(told) == 1
    assert one["late"] == 2


def test_a_block_around_a_whole_loop_is_its_tasks_too(one: pmstore.Store) -> None:
    async def add(which: int) -> None:
        with one.transaction():
            await asyncio.sleep(0)
            one["a"][which] = 1

    async def main() -> None:
        await asyncio.gather(*map(add, range(4)))

    with suppress(ZeroDivisionError), one.transaction():
        asyncio.run(main())
        assert one["a"][:4].all()
        raise ZeroDivisionError
    assert not one["a"].any()


def test_the_block_of_a_task_that_has_ended(one: pmstore.Store) -> None:
    kept: list[Any] = []

    async def forget() -> None:
        kept.append(one.transaction().__enter__())
        one["a"][0] = 1

    async def main() -> None:
        await asyncio.create_task(forget())
        with one.transaction():
            assert one["a"][0] == 0
            one["a"][1] = 1

    asyncio.run(main())
    with pytest.raises(pmstore.TransactionError, match="over before it was left"):
        kept[0].__exit__(None, None, None)
    one.rollback()
    assert one["a"].tolist()[:2] == [0, 1]


def test_a_task_that_is_dropped_in_its_block(one: pmstore.Store) -> None:
    """Nobody will ever go on with it: the collector ends it, and its block."""

    async def stuck() -> None:
        async with one.transaction():
            one["a"][0] = 1
            await asyncio.get_running_loop().create_future()

    loop = asyncio.new_event_loop()
    # "Task was destroyed but it is pending!"
    loop.set_exception_handler(lambda loop, context: None)
    task: Any = loop.create_task(stuck())
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert one["a"][0] == 1
    with pytest.raises(pmstore.TransactionError, match="does not run now"):
        one.commit()
    del task
    gc.collect()
    loop.close()
    one.commit()
    assert one["a"][0] == 0


def test_a_generator_that_another_task_ends(one: pmstore.Store) -> None:
    async def main() -> None:
        async def held() -> Any:
            async with one.transaction():
                one["a"][0] = 1
                yield

        async def begin(generator: Any) -> None:
            await anext(generator)

        closed, dropped = held(), held()
        await asyncio.create_task(begin(closed))
        await closed.aclose()
        await asyncio.create_task(begin(dropped))
        del dropped
        gc.collect()
        await asyncio.sleep(0)
        async with one.transaction(timeout=10):
            one["a"][1] = 1

    asyncio.run(main())
    one.rollback()
    assert one["a"].tolist()[:2] == [0, 1]


# ---- beside commits that nobody waits for --------------------------------------------------------


def test_blocks_beside_commits_that_nobody_waits_for(shm: Path) -> None:
    told: list[BaseException] = []
    for trial in range(40):
        with pmstore.open(shm / "s.pm", "w", size="4MiB") as store:
            a = store.zeros("a", (4, 50_000))
            store.commit()
            a += 1
            store.commit(wait=False)
            gate = threading.Barrier(4)

            def work(
                row: int,
                store: pmstore.Store = store,
                a: Any = a,
                gate: Any = gate,
                trial: int = trial,
            ) -> None:
                gate.wait()
                try:
                    with store.transaction():
                        a[row] = trial
                except Exception as error:
                    told.append(error)

            threads = [threading.Thread(target=work, args=(row,)) for row in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert (a == trial).all()
    assert told == []


def test_a_hook_that_comes_while_a_block_is_waited_for(one: pmstore.Store) -> None:
    asked: list[tuple[int, int]] = []
    entering = 0

    def wait() -> None:
        with one.transaction():
            pass

    waiting = threading.Thread(target=wait)
    with one.transaction():
        waiting.start()
        time.sleep(0.1)  # it waits
        one._core.pool.handle.hook = lambda when: asked.append((threading.get_ident(), when))
        time.sleep(0.3)  # and looks again, after a slice of its time
    ident = waiting.ident
    waiting.join()
    assert (ident, entering) in asked
