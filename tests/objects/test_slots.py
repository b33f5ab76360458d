"""Slots: two blocks that take turns, in every domain, beside everything else a transaction does."""

from __future__ import annotations

import gc
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._engine.constants import FILL_ZERO
from pmstore.objects.slots import pack

SIZES = [3, 1000, 5000, 300_000]  # float64: in a slab, up to several huge pages


@pytest.fixture
def made(path: Path, domain: str) -> Any:
    with pmstore.open(path, size="16MiB", domain=domain) as store:  # type: ignore[arg-type]
        yield store


@pytest.mark.parametrize("length", SIZES)
def test_versions_take_turns(path: Path, domain: str, length: int) -> None:
    with pmstore.open(path, size="16MiB", domain=domain) as store:  # type: ignore[arg-type]
        w = store.slots("w", length)
        assert w.previous is None
        store.commit()
        for step in range(1, 6):
            with store.transaction():
                np.add(w.current, 1, out=w.next)
                assert not w.flipped
                w.flip()
                assert w.flipped
                assert (w.current == step).all()
            assert (w.previous == step - 1).all()
            with pytest.raises(ValueError, match="read-only"):
                w.previous[0] = 1
        assert store.check().problems == ()
    with pmstore.open(path) as store:
        w = store["w"]
        assert isinstance(w, pmstore.Slots)
        assert (w.current == 5).all()
        assert w.previous is None


@pytest.mark.parametrize("length", SIZES)
def test_against_a_model(path: Path, domain: str, length: int) -> None:
    """Random steps; whatever happens, what is committed is what the model says, also after a
    reopen."""
    rng = random.Random(f"{length}{domain}")
    store = pmstore.open(path, size="16MiB", domain=domain)  # type: ignore[arg-type]
    w = store.slots("w", length)
    beside = store.zeros("beside", 700)
    store.commit()
    committed = now = 0.0
    for step in range(1, 150):
        action = rng.choice(
            ["next", "swap", "in place", "commit", "roll back", "reopen", "scribble"]
        )
        if action == "next" and not w.flipped:
            w.next[:] = now = step
            w.flip()
        elif action == "in place":
            w.current[:] += 1
            now += 1
        elif action == "swap" and w.previous is not None and not w.flipped:
            now = float(w.previous[0])
            w.flip()
        elif action == "scribble" and not w.flipped:
            w.next[:] = np.nan
        elif action == "commit":
            beside[:] = now
            store.commit()
            committed = now
        elif action == "roll back":
            store.rollback()
            now = committed
        elif action == "reopen":
            store.close()
            store = pmstore.open(path, domain=domain)  # type: ignore[arg-type]
            w, beside = store["w"], store["beside"]
            now = committed
        assert (w.current == now).all()
    assert store.check().problems == ()
    store.close()


def test_nothing_is_captured(made: pmstore.Store) -> None:
    w = made.slots("w", 300_000)
    made.commit()
    before = made.stats().captured_bytes
    for step in range(4):
        with made.transaction():
            w.next[:] = step
            w.flip()
    assert made.stats().captured_bytes - before < 4096


def test_what_comes_after_a_flip(made: pmstore.Store) -> None:
    """Further steps of the same transaction go into the new version, in place; the committed one is
    out of reach."""
    w = made.slots("w", 10_000)
    made.commit()
    with made.transaction():
        w.target[:] = 1
        w.flip()
        with pytest.raises(pmstore.TransactionError, match="holds the committed version"):
            w.next
        with pytest.raises(pmstore.TransactionError, match="flipped in this transaction already"):
            w.flip()
        w.target[:] += 1
        assert w.target is w.current
    assert (w.current == 2).all()
    assert (w.previous == 0).all()


def test_old_arrays_of_a_slot_are_safe(made: pmstore.Store) -> None:
    """An array got as `next` is the current version after the flip: writes are captured then,
    whoever still holds it."""
    w = made.slots("w", 10_000)
    made.commit()
    first, second = w.current, w.next
    second[:] = 1
    w.flip()
    made.commit()
    second[:] = 7  # the committed version
    made.rollback()
    assert (w.current == 1).all()
    first[:] = 8  # the idle slot, which was not asked for: captured needlessly, no harm
    made.commit()
    assert (w.current == 1).all()
    made.will_write(w.next)
    w.next[:] = 3
    w.flip()
    made.commit()
    assert (w.current == 3).all()


@pytest.mark.parametrize("length", [100, 300_000])
def test_a_removed_pair_leaves_ordinary_room(made: pmstore.Store, length: int) -> None:
    """What was written without capture is captured again once something else lies there."""
    w = made.slots("w", length)
    made.commit()
    scratch = w.next
    scratch[:] = 5
    del made["w"]
    made.rollback()
    assert (w.current == 0).all()
    w.next[:] = 6
    del made["w"]
    made.commit()
    scratch[:] = 9  # a view of a dead block
    del scratch
    gc.collect()
    others = [made.zeros(f"a{i}", length) for i in range(3)]
    made.commit()
    for other in others:
        other[:] = 1
    made.rollback()
    assert all((other == 0).all() for other in others)
    with pytest.raises(KeyError, match="not in the store any more"):
        w.current


def test_rolled_back_creation(made: pmstore.Store) -> None:
    w = made.slots("w", 50_000)
    w.next[:] = 1
    w.flip()
    made.rollback()
    assert "w" not in made
    a = made.zeros("a", 50_000)
    made.commit()
    a[:] = 3
    made.rollback()
    assert (a == 0).all()


def test_many_pairs_flip_together(path: Path, domain: str) -> None:
    with pmstore.open(path, size="16MiB", domain=domain) as store:  # type: ignore[arg-type]
        pairs = [store.slots(f"g/{i}", (7, 1000), "float32") for i in range(12)]
        store.commit()
        with pytest.raises(ZeroDivisionError), store.transaction():
            for i, pair in enumerate(pairs):
                pair.next[:] = i
                pair.flip()
            raise ZeroDivisionError
        assert all((pair.current == 0).all() for pair in pairs)
        with store.transaction():
            for i, pair in enumerate(pairs):
                pair.next[:] = i
                pair.flip()
    with pmstore.open(path) as store:
        assert [float(store[f"g/{i}"].current.max()) for i in range(12)] == list(range(12))
        assert list(store["g"]) == [str(i) for i in range(12)]
        assert [entry.kind for entry in store["g"].entries()] == ["slots"] * 12


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_tensors(path: Path, name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    with pmstore.open(path, size="8MiB") as store:
        w = store.slots("w", (30, 1000), dtype)
        assert w.current.dtype == dtype
        with store.transaction():
            torch.add(w.current, 1, out=w.next)
            w.flip()
        assert w.previous.sum() == 0
    with pmstore.open(path) as store:
        assert (store["w"].current == 1).all()
        assert repr(store["w"]).endswith("shape (30, 1000), dtype " + name + ">")


def test_the_same_block_stays_writable_over_commits(made: pmstore.Store) -> None:
    """Opening the idle slot costs a change of protection, not one for each page and not a fault for
    each commit."""
    w = made.slots("w", 50_000)
    made.commit()
    scratch = w.next
    scratch[:] = 1
    faults = made.stats().faults
    for i in range(5):
        made["i"] = i
        made.commit()
        scratch[:] = i
    assert made.stats().faults == faults


def test_bad_input(store: pmstore.Store, path: Path) -> None:
    store["value"] = 1
    store.slots("w", (3, 4), "float32")
    for name in ("value", "w/0"):
        with pytest.raises(pmstore.NameExistsError, match="is no pair of slots"):
            store.slots(name, 3)
    with pytest.raises(
        pmstore.NameExistsError,
        match=r"have shape \(3, 4\), dtype float32; asked for was shape \(4, 3\)",
    ):
        store.slots("w", (4, 3), "float32")
    with pytest.raises(pmstore.NameExistsError, match="dtype float64"):
        store.slots("w", (3, 4))
    with pytest.raises(pmstore.NameExistsError, match=r"pair of slots: write \.next and flip"):
        store["w"] = 3
    with pytest.raises(TypeError, match="slots of a store are not a value"):
        store["v"] = store["w"]
    with pytest.raises(KeyError):
        store.slots("absent")
    with pytest.raises(TypeError, match="dtype"):
        store.slots("o", 3, object)
    used = store.stats().used_bytes
    with pytest.raises(pmstore.StoreFullError):
        with pmstore.open(path.with_name("small.pm"), size="4MiB", max_size="4MiB") as small:
            try:
                small.slots("big", 200_000)
            finally:
                assert "big" not in small
                assert small.check().problems == ()
    assert store.stats().used_bytes == used
    assert store.slots("w") == store["w"]
    empty = store.slots("empty", (0, 3))
    empty.next
    empty.flip()
    store.commit()
    assert empty.current.shape == (0, 3)
    w = store["w"]
    store.close()
    with pytest.raises(pmstore.ClosedStoreError):
        w.flip()
    for version in ("current", "next", "previous", "target", "shape"):
        with pytest.raises(pmstore.ClosedStoreError):
            getattr(w, version)
    assert "closed" in repr(w)


def test_a_flip_outside_a_block_is_pending(path: Path, domain: str) -> None:
    """As any other write there: the next commit takes it, a roll back or a close without one drops
    it."""
    with pmstore.open(path, domain=domain) as store:
        w = store.slots("w", 20_000)
        w.next[:] = 1
        w.flip()
        store.commit()
        w.next[:] = 2
        w.flip()
        assert (w.current == 2).all()
        store.rollback()
        assert (w.current == 1).all()
        # nothing written since: the slots change places, and the idle one is undefined after a roll
        # back
        w.flip()
        store.rollback()
        w.next[:] = 3
        w.flip()
        with store.transaction():  # commits what is pending first
            w.next[:] = 4
            w.flip()
        assert w.previous is not None
        assert (w.previous == 3).all()
        w.flip()  # back to the version before
        store.commit()
        assert (w.current == 3).all()
        w.flip()
        store.close()
    with pmstore.open(path, domain=domain) as store:
        assert (store["w"].current == 3).all()


@pytest.mark.parametrize(
    "what",
    ["number", "form", "rest", "no array", "another name", "no array's kind", "shape", "sound"],
)
def test_check_knows_slots(path: Path, what: str) -> None:
    """A damaged pair is a problem of the store's, not only of whoever opens it."""
    with pmstore.open(path, size="8MiB") as store:
        store.slots("g/w", (3, 4))
        store["g/beside"] = np.ones(5)
        pool, meta = store._core.pool, pack(0)
        own = store._core.pool.find(pool.find(0, b"g").data, b"w").data  # type: ignore[union-attr]
        damaged = {
            "number": meta[:-1] + b"\x02",
            "form": b"\x81\xa5slots\xcc\x00",
            "rest": b"\xc1",
        }.get(what)
        if damaged is not None:
            pool.describe_group(pool.find(0, b"g").data, b"w", damaged)  # type: ignore[union-attr]
        elif what == "no array":
            pool.remove(own, b"1")
        elif what == "another name":
            pool.put_value(own, b"2", b"\xc0")
        elif what == "no array's kind":
            pool.remove(own, b"0")
            pool.put_value(own, b"0", b"\xc0")
        elif what == "shape":
            other = pool.find(pool.find(0, b"g").data, b"beside")  # type: ignore[union-attr]
            pool.remove(own, b"1")
            pool.put_array(own, b"1", other.meta, other.data_bytes, fill=FILL_ZERO)  # type: ignore[union-attr]
        store.commit()
        problems = store.check().problems
        assert len(problems) == (what != "sound")
        assert all("'g/w'" in problem and "slots" in problem for problem in problems)
    with pmstore.open(path, "r") as store:
        assert store.check().problems == problems


def test_a_store_open_for_reading(path: Path) -> None:
    with pmstore.open(path, size="8MiB") as store:
        store.slots("w", 5)
    with pmstore.open(path, "r") as store:
        w = store["w"]
        assert w.current.tolist() == [0] * 5
        for call in (lambda: w.next, w.flip):
            with pytest.raises(pmstore.ReadOnlyStoreError):
                call()


def test_a_removed_pair_with_a_page_captured_alone(path: Path, domain: str) -> None:
    """A page that is captured ahead at each commit leaves its block's mark; the rest of it must not
    stay idle."""
    size = 2 << 20
    with pmstore.open(path, size="64MiB", domain=domain) as store:  # type: ignore[arg-type]
        w = store.slots("w", size, "uint8")
        store.commit()
        for i in range(6):
            w.current[0] = i
            store.commit()
        at = w.current.ctypes.data
        for value in (1, 7):
            scratch = w.next
            scratch[:] = value
            if value == 1:
                w.flip()
            store.commit()
        assert scratch.ctypes.data == at
        del scratch, w
        del store["w"]
        store.commit()
        others = [store.require(f"x{i}", 100_000, "uint8") for i in range(60)]
        assert any(at <= other.ctypes.data < at + size for other in others)
        for other in others:
            other[:] = 1
        store.commit()
        for other in others:
            other[:] = 2
        store.rollback()
        assert all((other == 1).all() for other in others)
        for other in others:
            other[:] = 3
        store.commit()
        for other in others:
            other[:] = 4
        store.rollback()
        assert all((other == 3).all() for other in others)


def test_a_pair_removed_after_its_flip(path: Path, domain: str) -> None:
    """All of the block is protected again, also the room behind the array."""
    page = 4096
    array = (1 << 20) + (1 << 19) + 4 * page  # the last huge page is filled up
    with pmstore.open(path, size="64MiB", domain=domain, hot=False) as store:  # type: ignore[arg-type]
        w = store.slots("w", array, "uint8")
        store.commit()
        scratch = w.next
        scratch[:] = 1
        at = scratch.ctypes.data
        w.flip()
        del scratch
        del store["w"]
        store.rollback()
        now = next(a for a in (store["w/0"], store["w/1"]) if a.ctypes.data == at)
        before = now.copy()
        store.will_write(now[386 * page : 388 * page])
        now[386 * page] = 5
        now[384 * page] = 5  # captured with what follows, up to the end of the block
        store.rollback()
        assert (now == before).all()
        assert store.check().problems == ()


def test_a_commit_of_another_thread_before_a_flip(path: Path, domain: str) -> None:
    """The flip is then of the transaction after it: `next` would be the version that the last
    commit names."""
    with pmstore.open(path, size="16MiB", domain=domain) as store:  # type: ignore[arg-type]
        w = store.slots("w", 96 << 10, "uint8")
        for value in 1, 2:
            w.next[:] = value
            w.flip()
            other = threading.Thread(target=store.commit)
            other.start()
            other.join()
            assert not w.flipped
        w.next[:] = 3
        w.flip()
        assert w.flipped
        with pytest.raises(pmstore.TransactionError, match="flipped in this transaction"):
            _ = w.next
        assert w.target is w.current
        store.rollback()
        assert not w.flipped
        assert (w.current == 2).all()


def test_slots_are_mappings_of_their_own(path: Path, domain: str) -> None:
    """A commit changes a slot's protection in one piece: the kernel joins it with no neighbour, and
    parts it from none."""
    if domain == "file":
        pytest.skip("its commits wait for a sync")

    def mappings() -> int:
        return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())

    with pmstore.open(path, size="16MiB", domain=domain) as store:  # type: ignore[arg-type]
        pairs = [store.slots(name, 300_000) for name in ("a", "b")]
        for one in pairs * 2:
            one.next[:] = 1
            one.flip()
            store.commit()
        counts = set()
        for one in pairs * 2:
            one.next[:] = 2
            counts.add(mappings())
            one.flip()
            store.commit()
            counts.add(mappings())
        assert len(counts) == 1
