"""Views outlive everything: `del`, replacement, the roll back of the transaction that made them,
`close`, a crash beside them, and the interpreter's end. Never a segmentation fault, never another
object's bytes. `make nightly WHAT=asan-python` runs this file, too.
"""

from __future__ import annotations

import gc
import itertools
import random
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore

SIZES = [1, 700, 40_000, 2 << 20]  # a slab's slots, an extent, an aligned one


def churn(store: pmstore.Store, rng: random.Random) -> None:
    """Allocates and frees all sizes, and commits: whatever is free gets used."""
    for i in range(3):
        for size in SIZES:
            store[f"churn/{size}/{i}"] = np.full(size, 0xEE, np.uint8)
        if rng.random() < 0.3:
            store.commit()
    del store["churn"]
    store.commit()
    for size in SIZES:
        store[f"stays/{size}"] = np.full(size, 0xDD, np.uint8)
    store.commit()


def others_are_whole(store: pmstore.Store) -> None:
    for size in SIZES:
        assert (store[f"stays/{size}"] == 0xDD).all()
    assert store.check().problems == ()


def deleted(store: pmstore.Store, make: Callable[[str], Any]) -> Any:
    view = make("w")
    store.commit()
    del store["w"]
    return view


def deleted_and_committed(store: pmstore.Store, make: Callable[[str], Any]) -> Any:
    view = deleted(store, make)
    store.commit()
    return view


def born_and_deleted(store: pmstore.Store, make: Callable[[str], Any]) -> Any:
    view = make("w")
    del store["w"]
    return view


def deleted_with_its_group(store: pmstore.Store, make: Callable[[str], Any]) -> Any:
    view = make("g/h/w")
    store.commit()
    del store["g"]
    store.commit()
    return view


def replaced(store: pmstore.Store, make: Callable[[str], Any]) -> Any:
    view = make("w")
    store.commit()
    store["w"] = np.zeros(3)
    store.commit()
    return view


def replaced_by_a_value(store: pmstore.Store, make: Callable[[str], Any]) -> Any:
    view = make("w")
    store["w"] = None
    store.commit()
    return view


def made_and_rolled_back(store: pmstore.Store, make: Callable[[str], Any]) -> Any:
    view = make("w")
    store.rollback()
    assert "w" not in store
    return view


def made_in_a_block_that_raised(store: pmstore.Store, make: Callable[[str], Any]) -> Any:
    view = None
    with pytest.raises(ZeroDivisionError):
        with store.transaction():
            view = make("w")
            store["other"] = np.ones(100)
            raise ZeroDivisionError
    return view


def popped(store: pmstore.Store, make: Callable[[str], Any]) -> Any:
    items = store.list("items")
    items.append(make("w"))
    del store["w"]
    view = items[0]
    items.pop()
    return view


ENDS = [
    deleted,
    deleted_and_committed,
    born_and_deleted,
    deleted_with_its_group,
    replaced,
    replaced_by_a_value,
    made_and_rolled_back,
    made_in_a_block_that_raised,
    popped,
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("end", ENDS, ids=lambda f: f.__name__)
def test_a_view_keeps_its_bytes(
    path: Path, domain: Any, end: Callable[..., Any], size: int
) -> None:
    rng = random.Random(size)
    pattern = np.frombuffer(rng.randbytes(size), np.uint8)
    with pmstore.open(path, domain=domain, size="8MiB") as store:
        store["first"] = np.zeros(10)

        def make(name: str) -> Any:
            store[name] = pattern
            return store[name]

        view = end(store, make)
        held = view.tobytes()
        if end is not made_and_rolled_back and end is not made_in_a_block_that_raised:
            assert held == pattern.tobytes()
        churn(store, rng)
        assert view.tobytes() == held
        view[:] = 0xAA  # and it may be written: nobody else sees that
        churn(store, rng)
        store.rollback()
        assert (view == 0xAA).all()
        others_are_whole(store)
        used = store.stats().used_bytes
        del view
        gc.collect()
        store.commit()
        assert store.stats().pinned_bytes == 0
        assert store.stats().used_bytes <= used
        churn(store, rng)
        others_are_whole(store)
    with pmstore.open(path, domain=domain) as store:
        others_are_whole(store)


def test_tensors_too(path: Path, domain: Any) -> None:
    torch = pytest.importorskip("torch")
    with pmstore.open(path, domain=domain, size="8MiB") as store:
        store["w"] = torch.arange(1000)
        view = store["w"][10:20]
        other = torch.from_numpy(store.zeros("n", 50))
        store.commit()
        del store["w"], store["n"]
        store.commit()
        churn(store, random.Random(1))
        assert view.tolist() == list(range(10, 20))
        assert other.sum() == 0
        others_are_whole(store)
    assert view.tolist() == list(range(10, 20))
    view += 1
    assert view[0] == 11


VIEWS: list[Callable[[Any], Any]] = [
    lambda a: a[2:5],
    lambda a: a.reshape(10, 10).T,
    lambda a: memoryview(a),
    lambda a: np.frombuffer(memoryview(a)),
    lambda a: np.asarray(memoryview(a))[::-1],
    lambda a: a.view("u1"),
    lambda a: iter(a),
    lambda a: np.lib.stride_tricks.as_strided(a, (5,), (16,)),
    lambda a: a.ravel(),
    lambda a: np.nditer(a),
]


@pytest.mark.parametrize("derive", VIEWS)
def test_what_is_derived_keeps_the_block(
    store: pmstore.Store, derive: Callable[[Any], Any]
) -> None:
    """And nothing but that: once it is gone, so is the pin."""

    def content(view: Any) -> bytes:
        return (
            view.tobytes()
            if hasattr(view, "tobytes")
            else np.asarray([float(x) for x in view]).tobytes()
        )

    store["w"] = np.arange(100.0)
    view, expected = derive(store["w"]), content(derive(np.arange(100.0)))
    del store["w"]
    store.commit()
    assert store.stats().pinned_bytes > 0
    churn(store, random.Random(2))
    if not hasattr(view, "tobytes"):
        assert content(view) == expected  # an iterator can be asked once
    else:
        for _ in range(2):
            assert content(view) == expected
    del view
    gc.collect()
    assert store.stats().pinned_bytes == 0


def test_two_handles_of_one_block(store: pmstore.Store) -> None:
    """An array and views of it die in any order; the block is free after the last."""
    for order in itertools.permutations(range(3)):
        store["w"] = np.ones(1000)
        held = [store["w"], store["w"][:5], memoryview(store["w"])]
        del store["w"]
        store.commit()
        for i in order:
            assert store.stats().pinned_bytes > 0
            held[i] = None  # type: ignore[call-overload]
        assert store.stats().pinned_bytes == 0


@pytest.mark.parametrize("size", SIZES)
def test_closing(path: Path, domain: Any, size: int) -> None:
    store = pmstore.open(path, domain=domain, size="8MiB")
    store["w"] = np.full(size, 1, np.uint8)
    store["gone"] = np.full(size, 2, np.uint8)
    w, gone = store["w"], store["gone"]
    store.commit()
    del store["gone"]
    store.commit()
    w[:] = 9  # not committed
    address = w.ctypes.data
    store.close()
    store.close()
    assert w.ctypes.data == address
    assert (w == 1).all()
    assert (gone == 2).all()
    w[:] = 3
    gone[:] = 4
    with pmstore.open(path, domain=domain) as again:  # another process could, too
        assert (again["w"] == 1).all()
        again["w"][:] = 5
        churn(again, random.Random(size))
        assert (w == 3).all()
        assert (gone == 4).all()
        third = again["w"]
    assert (third == 5).all()
    del w, gone, third
    gc.collect()


def test_closing_from_many_threads(path: Path) -> None:
    for _ in range(20):
        store = pmstore.open(path)
        w = store.require("w", 1000)
        threads = [threading.Thread(target=store.close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.closed
        w += 1
        del w


def test_closing_beside_a_writer(path: Path, domain: Any) -> None:
    """Its writes go on; what was committed is what is in the file."""
    for _ in range(10):
        store = pmstore.open(path, domain=domain)
        w = store.require("w", 30_000, "i8")
        w[:] = 7
        store.commit()
        stop = threading.Event()

        def write(w: Any = w, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                w += 1

        thread = threading.Thread(target=write)
        thread.start()
        store.close()
        stop.set()
        thread.join()
        w += 1
        with pmstore.open(path, "r", domain=domain) as again:
            assert (again["w"] == 7).all()
        del w, write


def test_a_crash_frees_what_views_kept(path: Path, domain: Any) -> None:
    code = f"""
import os, signal, numpy as np, pmstore
store = pmstore.open({str(path)!r}, domain={domain!r}, size="8MiB")
store["stays"] = np.ones(10)
views = []
for i in range(20):
    store["w"] = np.full([10, 3000, 100_000][i % 3], i)
    views.append(store["w"])
    store.commit()
del store["w"]
store.commit()
assert store.stats().pinned_bytes > 4_000_000
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert (
        subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode
        == -signal.SIGKILL
    )
    with pmstore.open(path, domain=domain) as store:
        assert store.check().problems == ()
        assert store.stats().blocks == 4  # the root's header and table, a name, its array
        assert store.stats().pinned_bytes == 0


def test_any_order_of_collection(path: Path) -> None:
    """Store, group, list, transaction and a view, dropped in every order; in a cycle, by the
    collector in its own order."""
    pmstore.open(path, size="1MiB").close()
    for trial, order in enumerate(itertools.permutations(range(5))):
        store = pmstore.open(path)
        things: list[Any] = [
            store,
            store.group("g"),
            store.list("l"),
            store.transaction(),
            store.require("w", 10_000)[5:],
        ]
        del store
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            if trial % 20 == 0:
                things.append(things)
                del things
                gc.collect()
            else:
                for i in order:
                    things[i] = None
    with pmstore.open(path) as store:
        assert store.check().problems == ()


EXITS = {
    "views in globals": "w = store['w']; v = w[3:]",
    "views in a cycle": "w = [store['w']]; w.append(w)",
    "views of a removed array": "w = store['w']; del store['w']; store.commit()",
    "inside a block": "t = store.transaction(); t.__enter__(); store['w'][:] = 5",
    "a generator inside a block": """
def work():
    with store.transaction():
        yield store['w']
g = work()
next(g)
""",
    "a finalizer that writes": """
class Writer:
    def __init__(self, w): self.w = w
    def __del__(self): self.w += 1
writer = Writer(store['w'])
""",
    "a finalizer that uses the store": """
class User:
    def __init__(self, store): self.store = store
    def __del__(self):
        try: self.store['late'] = 1
        except pmstore.ClosedStoreError: pass
user = User(store)
""",
    "an exit handler that writes": (
        "import atexit; w = store['w']; atexit.register(lambda: w.__iadd__(1))"
    ),
    "sys.exit inside with": "w = store['w']\nwith store: sys.exit(0)",
    "a daemon thread that writes": """
import threading, time
w = store['w']
def write():
    while True: w.__iadd__(1)
threading.Thread(target=write, daemon=True).start()
time.sleep(0.02)
""",
    "a daemon thread inside a block": """
import threading, time
w = store['w']
def write():
    with store.transaction():
        time.sleep(60)
threading.Thread(target=write, daemon=True).start()
time.sleep(0.02)
""",
    "a daemon thread that commits": """
import threading, time
def write():
    try:
        while True:
            with store.transaction(): store['n'] = store.get('n', 0) + 1
    except pmstore.ClosedStoreError: pass
threading.Thread(target=write, daemon=True).start()
time.sleep(0.02)
""",
    "os._exit": "w = store['w']; w += 1; import os; os._exit(0)",
    "modules gone first": (
        "import sys; w = store['w']; sys.modules.pop('pmstore'); sys.modules.pop('numpy')"
    ),
}


@pytest.mark.parametrize("exit_", EXITS.values(), ids=EXITS.keys())
def test_the_interpreter_may_exit_at_any_time(path: Path, exit_: str) -> None:
    with pmstore.open(path, size="8MiB") as store:
        store["w"] = np.zeros(20_000)
    code = f"import sys, pmstore\nstore = pmstore.open({str(path)!r})\n{exit_}\n"
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    with pmstore.open(path) as store:
        assert store.check().problems == ()
        assert "w" not in store or not store["w"].any()
