"""KeyboardInterrupt anywhere: the store is usable and holds the old or the new state, whole."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from interrupter import Interrupter

import pmstore


def at_every_bytecode(work: Callable[[], None], verify: Callable[[], None]) -> int:
    """Runs work with an interrupt at its first bytecode, its second, and so on until it runs
    through."""
    work()  # what is imported or made on first use is not what is tested
    verify()
    at = 1
    while Interrupter(at).run(work):
        verify()
        at += 1
    verify()
    return at


def test_at_every_bytecode_of_a_block(store: pmstore.Store) -> None:
    a, b = store.zeros("a", 100), store.zeros("b", 100)
    store["n"] = 0
    store.commit()

    def work() -> None:
        with store.transaction(writes=[a]):
            a.__iadd__(1)
            b.__iadd__(1)
            store["n"] = store["n"] + 1

    def verify() -> None:
        assert not store.in_transaction
        assert a[0] == b[0] == store["n"]
        assert store["a"] is a
        epoch = store.epoch
        store.rollback()  # nothing is pending
        assert a[0] == b[0] == store["n"]
        assert store.epoch == epoch

    assert at_every_bytecode(work, verify) > 20


def test_at_every_bytecode_of_a_kept_transaction_object(store: pmstore.Store) -> None:
    a = store.zeros("a", 100)
    store.commit()
    blocks = []

    def work() -> None:
        blocks.append(store.transaction(writes=[a]))
        with blocks[-1]:
            a.__iadd__(1)

    def verify() -> None:
        # An interrupt between the body and __exit__, which only a tracing tool can cause, is seen
        # when the object goes.
        blocks.clear()
        assert not store.in_transaction
        value = a[0]
        store.rollback()
        assert a[0] == value

    at_every_bytecode(work, verify)


def test_at_every_bytecode_of_commit_and_rollback(store: pmstore.Store) -> None:
    a = store.zeros("a", 100)
    store["n"] = 0
    store.commit()

    def commit() -> None:
        a.__iadd__(1)
        store["n"] = int(a[0])
        store.commit()

    def verify() -> None:
        store.rollback()
        assert a[0] == store["n"]
        assert not store.in_transaction

    def rollback() -> None:
        a.__iadd__(1)
        store["n"] = int(a[0])
        store.rollback()

    at_every_bytecode(commit, verify)
    at_every_bytecode(rollback, verify)


def test_at_every_bytecode_of_object_operations(store: pmstore.Store) -> None:
    counter = iter(range(10**9))

    def work() -> None:
        name = f"g/{next(counter)}"
        made = store.zeros(name, 50)
        made[:] = 1
        store["x"] = np.arange(10)
        assert store[name] is made
        del store[name]
        store.setdefault("y", [1])

    def verify() -> None:
        store.commit()
        assert store.stats().pinned_bytes == 0

    at_every_bytecode(work, verify)
    assert store.check().problems == ()


def test_at_every_bytecode_of_open_and_close(path: Path) -> None:
    with pmstore.open(path) as store:
        store["n"] = 0

    def work() -> None:
        with pmstore.open(path) as store:
            store["n"] += 1

    def verify() -> None:
        with pmstore.open(path, lock_timeout=5) as store:  # the lock is free again
            assert store.check().problems == ()

    import warnings

    with warnings.catch_warnings():
        # interrupted before anybody could close it
        warnings.simplefilter("ignore", ResourceWarning)
        at_every_bytecode(work, verify)


def _look(store: pmstore.Store) -> None:
    assert store["v"] == 5
    assert "v" in store
    assert list(store) == ["v", "a", "l"]
    assert len(store) == 3
    assert [entry.name for entry in store.entries()] == ["v", "a", "l"]
    assert list(store.list("l")) == [1, 2]
    assert store["a"][0] == 1
    store["v"] = 5


def _filled(path: Path) -> pmstore.Store:
    store = pmstore.open(path, "w", size="2MB")
    store["v"] = 5
    store["a"] = np.ones(3)
    store.list("l").extend([1, 2])
    store.commit()
    return store


def test_a_handler_that_closes_the_store_at_every_bytecode_of_looking(path: Path) -> None:
    """An error that says so, never bytes that are gone."""
    at, more = 1, True
    while more:
        store = _filled(path)
        interrupter = Interrupter(at, store.close)
        with suppress(pmstore.ClosedStoreError):
            more = interrupter.run(lambda store=store: _look(store))  # type: ignore[misc]
        assert store.closed or not more
        store.close()
        at += 1
    assert at > 50


def test_a_handler_that_uses_the_store_at_every_bytecode_of_leaving_it(path: Path) -> None:
    """It finds an open store or a closed one."""
    at, more = 1, True
    found: list[None] = []
    refused: list[None] = []

    def leave(store: pmstore.Store) -> None:
        with store:
            store["v"] = 5

    while more:
        store = _filled(path)

        def use(store: pmstore.Store = store) -> None:
            try:
                _look(store)
                with store.transaction():
                    store["v"] = 5
                found.append(None)
            except pmstore.ClosedStoreError:
                assert store.closed
                refused.append(None)

        more = Interrupter(at, use).run(lambda store=store: leave(store))  # type: ignore[misc]
        assert store.closed
        at += 1
    assert found
    assert refused


def test_an_interrupt_at_every_bytecode_of_leaving_the_store(path: Path) -> None:
    """Closed, or open as before and to be closed again: nothing between."""
    at, more, closed = 1, True, set()

    def leave(store: pmstore.Store) -> None:
        with store:
            store["v"] = 6

    while more:
        store = _filled(path)
        more = Interrupter(at).run(lambda store=store: leave(store))  # type: ignore[misc]
        closed.add(store.closed)
        if not store.closed:
            assert store["v"] in (5, 6)
            store.commit()
            store.close()
        with pmstore.open(path) as store:
            assert store["v"] in (5, 6)
        at += 1
    assert closed == {True, False}


def test_real_signals(store: pmstore.Store) -> None:
    a, b = store.zeros("a", 20_000), store.zeros("b", 20_000)
    store["n"] = 0
    store.commit()
    stop = threading.Event()
    main = threading.get_ident()

    def interrupt() -> None:
        rng = np.random.default_rng(1)
        while not stop.is_set():
            time.sleep(rng.uniform(0.0002, 0.003))
            if armed.is_set():
                armed.clear()
                signal.pthread_kill(main, signal.SIGINT)

    armed = threading.Event()
    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupted = done = 0
    thread.start()
    try:
        while interrupted < 200:
            try:
                armed.set()
                while True:
                    with store.transaction(writes=[a] if done % 2 else ()):
                        a += 1
                        b += 1
                        store["n"] += 1
                    done += 1
            except KeyboardInterrupt:
                interrupted += 1
            assert not store.in_transaction
            assert a[0] == b[0] == a[-1] == b[-1] == store["n"]
    finally:
        stop.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert done > 0
    assert store.check().problems == ()


def test_a_signal_ends_the_wait_for_another_threads_block(store: pmstore.Store) -> None:
    inside, leave = threading.Event(), threading.Event()

    def owner() -> None:
        with store.transaction():
            store["owner"] = 1
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=owner)
    thread.start()
    inside.wait(60)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            timer.start()  # in here: the signal may come before the wait begins
            with store.transaction(timeout=None):
                pytest.fail("entered")
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
        leave.set()
        thread.join()
    assert store["owner"] == 1
    with store.transaction():
        store["after"] = 1


def test_a_signal_ends_the_wait_for_the_lock(store: pmstore.Store) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            timer.start()  # in here: the signal may come before the wait begins
            pmstore.open(store.path, lock_timeout=None)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    store["x"] = 1


def test_interrupted_while_a_roll_back_waits_for_a_look_up(store: pmstore.Store) -> None:
    """It is rolled back all the same, then the interrupt is raised."""
    store["x"] = 0
    store.commit()
    held, main = threading.Event(), threading.main_thread().ident
    assert main is not None

    def look_up() -> None:
        with store._core.lock:
            held.set()
            time.sleep(0.2)
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.2)

    thread = threading.Thread(target=look_up)
    with pytest.raises(KeyboardInterrupt):
        with store.transaction():
            store["x"] = 1
            thread.start()
            held.wait()
            raise ZeroDivisionError
    assert not store.in_transaction
    thread.join()
    assert store["x"] == 0
    with store.transaction():
        store["x"] = 2
    assert store["x"] == 2
