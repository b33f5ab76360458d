"""A signal handler or finalizer that changes the store in the middle of any of its functions, in
the same thread.

The store's lock lets it in. So it is called before the first bytecode of an operation, before the
second, and so on; what the operation gives is checked against what it may be: the object of that
name as it was before, or as it is after.
"""

from __future__ import annotations

import itertools
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._engine import failures, pins, snapshot
from pmstore._engine.constants import PAGE_BYTES

OTHER = -1  # what no operation may see: it is stored where what was freed had been


class Caller:
    """Calls the handler before the n-th bytecode that runs under `run`, in any Python frame."""

    def __init__(self, at: int, handler: Callable[[], None]) -> None:
        self.at, self.handler, self.seen = at, handler, 0

    def trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.seen += 1
            if self.seen == self.at:
                self.handler()
        return self.trace

    def run(self, work: Callable[[], object]) -> object:
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            return work()
        finally:
            sys.settrace(before)


@pytest.fixture
def store(path: Any) -> Iterator[pmstore.Store]:
    with pmstore.open(path, "w", size="8MB", domain="process") as store:
        yield store


def fill(store: pmstore.Store) -> None:
    """Everything that the operations look up; all of it is 7."""
    for name in list(store):
        del store[name]
    store.commit()
    store["a"] = np.full(64, 7)
    store["g/a"] = np.full(64, 7)
    store["g/h/a"] = np.full(64, 7)
    store["v"] = 7
    store.list("l").extend([np.full(64, 7), np.full(64, 7)])
    store.list("g/l").append(np.full(64, 7))
    pair = store.slots("s", 64, int)
    pair.next[:] = 7
    pair.flip()
    store.commit()


def remove_all(store: pmstore.Store) -> Callable[[], None]:
    def handler() -> None:
        for name in list(store):
            del store[name]
        store.commit()
        for number in range(12):  # of the sizes of what was there: blocks, directories, names
            store[f"other{number}"] = np.full(64, OTHER)
            store[f"line{number}"] = np.full(8, OTHER)
            store[f"name{number}"] = "x" * 50
        store.commit()

    return handler


def replace_all(store: pmstore.Store) -> Callable[[], None]:
    def handler() -> None:
        for name in ("a", "g/a", "g/h/a"):
            if name in store:
                del store[name]
                store.commit()
                store[f"{name}2"] = np.full(64, OTHER)
                store[name] = np.full(64, 8)
        store["v"] = 8
        store.commit()

    return handler


def roll_back(store: pmstore.Store) -> Callable[[], None]:
    return store.rollback


def value_of(thing: object) -> set[int]:
    if isinstance(thing, np.ndarray):
        return {int(x) for x in np.unique(thing)}
    if isinstance(thing, list):
        return {value for one in thing for value in value_of(one)}
    return {thing} if isinstance(thing, int) else set()


def walk(store: pmstore.Store) -> list[Any]:
    return [store[name] for name in ("a", "g/a", "g/h/a", "v")]


OPERATIONS: dict[str, Callable[[pmstore.Store], Any]] = {
    "look-up": walk,
    "of a group": lambda store: store["g"]["h"]["a"],
    "of a kept group": lambda store: pmstore.Group(store._core, (b"g", b"h"))["a"],
    "get": lambda store: store.get("g/a"),
    "in": lambda store: [] if "g/h/a" in store else [7],
    "require": lambda store: store.require("g/h/a", 64, int),
    "setdefault": lambda store: store.setdefault("g/a", np.full(64, 7)),
    "item": lambda store: store["l"][1],
    "items": lambda store: store["l"][:],
    "iteration of a list": lambda store: list(store["g/l"]),
    "append": lambda store: store["g/l"].append(np.full(64, 7)),
    "set an item": lambda store: store["l"].__setitem__(0, np.full(64, 7)),
    "current": lambda store: store["s"].current,
    "description": lambda store: list(store["s"].shape[1:]),
    "set": lambda store: store.update({"g/h/x": np.full(64, 7), "y": 7}),
    "make": lambda store: np.copyto(store.zeros("g/h/z", 64, int), 7),
    "delete": lambda store: store.__delitem__("g/h/a"),
    "make slots": lambda store: str(store.slots("g/pair", 64, int).name),
    "make a list": lambda store: str(store.list("g/h/list").name),
}


@pytest.mark.parametrize("handler", [remove_all, replace_all, roll_back])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_at_every_bytecode(
    store: pmstore.Store, operation: str, handler: Callable[[pmstore.Store], Callable[[], None]]
) -> None:
    at, calls = 1, 0
    while True:
        fill(store)
        caller = Caller(at, handler(store))
        try:
            seen = value_of(caller.run(lambda: OPERATIONS[operation](store)))
        except (KeyError, IndexError):
            seen = set()
        assert seen <= {0, 7, 8}, (at, seen)  # `require` makes zeros where nothing is
        if caller.seen < at:
            break
        for name in ("other3", "line3", "g/a2"):  # nothing was written into what is another's now
            if name in store:
                assert value_of(store[name]) == {OTHER}, (at, name)
        calls += 1
        at += 1 if at < 60 else 11
        if at % 20 == 1:
            assert store.check().problems == ()
    assert calls > 20
    store.commit()
    assert store.check().problems == ()


def test_a_collection_in_the_middle_of_a_call(store: pmstore.Store) -> None:
    """Garbage is collected where C code makes objects too, not between bytecodes alone."""
    import gc

    class Scratch:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            if "a" in store:
                del store["a"]
                store.commit()
            store["b"] = np.full(64, OTHER)
            store.commit()

    before = gc.get_threshold()
    try:
        for threshold in range(1, 25):
            for name in ("a", "b"):
                store.pop(name, None)
            store.commit()
            store["a"] = np.full(64, 7)
            store.commit()
            Scratch()
            gc.set_threshold(threshold)
            try:
                assert value_of(store["a"]) == {7}
            except KeyError:
                pass
            finally:
                gc.set_threshold(*before)
    finally:
        gc.set_threshold(*before)
    gc.collect()  # not after the store is closed
    assert store.check().problems == ()


@pytest.mark.parametrize("what", ["store", "snapshot"])
def test_a_handler_closes_in_the_middle_of_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The copy that it interrupted goes on after it, so it does not wait for that."""
    store = pmstore.open(tmp_path / "s.pm")
    store["x"] = np.ones(5000)
    store.commit()
    pinned, pauses = store._pin_committed(), itertools.count()
    assert pinned is not None
    closed = store if what == "store" else pinned

    def pause(seconds: float) -> None:
        assert next(pauses) < 100, "it waits for itself"

    def interrupted(*arguments: Any) -> None:
        failures.call(*arguments)
        monkeypatch.setattr(snapshot, "call", failures.call)
        signal.raise_signal(signal.SIGUSR1)

    for module in (pins, snapshot):
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=pause)
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(pins, "_IDLE_SECONDS", 0)
    monkeypatch.setattr(snapshot, "call", interrupted)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: closed.close())
    try:
        pinned.take(0, np.empty(PAGE_BYTES, np.uint8))
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises((ValueError, pmstore.PmstoreError)):
        pinned.take(0, np.empty(PAGE_BYTES, np.uint8))
    pinned.close()
    assert pinned.closed
    store.close()
