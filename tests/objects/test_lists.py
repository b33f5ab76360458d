"""Persistent lists: what `list` does, in a store."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.objects.readonly import plain_type


def churn(items: Any, model: list[Any], rng: random.Random) -> None:
    """One random operation on both."""
    length = len(model)
    value: Any = rng.choice(
        [rng.randrange(1 << 70), "é" * rng.randrange(60), None, [1, (2, b"x")], rng.random()]
    )
    at = rng.randrange(-length - 2, length + 3)
    low = rng.randrange(length + 1)
    run = slice(low, low + rng.choice([0, 1, 3, 200]))
    wide = slice(
        *rng.choice([(low, None, 3), (None, low, -2), (low, low + 60, 2), (-40, None, -1)])
    )
    values = [value] * rng.choice([0, 1, 2, 150])
    how = rng.randrange(9)
    popped: list[Any] = []
    for target in (items, model):
        if how == 0:
            target.insert(at, value)
        elif how == 1:
            target.append(value)
        elif how == 2:
            target.extend(values)
        elif how == 3:
            target[run] = values
        elif how == 4:
            target[wide] = [value] * len(range(*wide.indices(length)))
        elif how == 5:
            del target[run]
        elif how == 6:
            del target[wide]
        elif how == 7 and length:
            target[at % length - length] = value
        elif how == 8 and length:
            popped.append(target.pop(at % length))
    assert popped == popped[::-1]


@pytest.mark.parametrize("seed", range(4))
def test_is_a_list(store: pmstore.Store, seed: int) -> None:
    """Against `list`, with commits, roll backs and reopens in between."""
    rng = random.Random(seed)
    items = store.list("deep/items")
    model: list[Any] = []
    committed = list(model)
    store.commit()
    for step in range(1500):
        churn(items, model, rng)
        if step % 50 == 0:
            assert items[:] == model
            assert len(items) == len(model)
            assert items[::-3] == model[::-3]
            assert store.check().problems == ()
            if rng.random() < 0.3:
                store.rollback()
                model = list(committed)
                assert list(items) == model
            else:
                store.commit()
                committed = list(model)
    store.rollback()
    path = store.path
    store.close()
    with pmstore.open(path, "r") as again:
        assert list(again["deep/items"]) == committed
        assert [plain_type(item) for item in again["deep/items"]] == [
            type(item) for item in committed
        ]


def test_arrays_are_over_the_heap(store: pmstore.Store) -> None:
    items = store.list("items")
    items.append(np.arange(5))
    items.append(np.zeros((2, 0)))
    first = items[0]
    assert items[0] is first
    first += 10
    store.commit()
    first[:] = 0
    store.rollback()
    assert items[0].tolist() == [10, 11, 12, 13, 14]
    before = store.stats().blocks
    items[0] += 1  # its own place: nothing moves
    assert items[0] is first
    assert store.stats().blocks == before
    items.insert(0, "before")
    assert items[1] is first
    assert items[2].shape == (2, 0)
    del items[1]
    store.commit()
    items.extend(np.full(5, i) for i in range(300))
    store.commit()
    assert first.tolist() == [11, 12, 13, 14, 15]
    assert items[-1].tolist() == [299] * 5
    assert store.check().problems == ()


def test_tensors(store: pmstore.Store) -> None:
    torch = pytest.importorskip("torch")
    items = store.list("items")
    items.append(torch.nn.Parameter(torch.ones(3)))
    assert type(items[0]) is torch.nn.Parameter
    assert items[0].data_ptr() % 64 == 0


def test_opens_or_creates(store: pmstore.Store) -> None:
    items = store.list("a/b")
    items.append(1)
    assert store.list("a/b") == items == store["a/b"]
    assert hash(items) == hash(store["a/b"])
    assert store.list("a/c") != items
    assert store.entries()[0].kind == "group"
    assert store["a"].entries()[0].kind == "list"
    assert "1 item>" in repr(items)
    with pytest.raises(ValueError, match="7 is not in the list 'a/b'"):
        items.remove(7)
    store["a/b"] += [2, 3]
    assert items[:] == [1, 2, 3]


def test_names_in_use(store: pmstore.Store) -> None:
    store["v"] = 1
    items = store.list("items")
    with pytest.raises(pmstore.NameExistsError, match="'v' is no list"):
        store.list("v")
    with pytest.raises(pmstore.NameExistsError, match="'items' is a list"):
        store["items"] = [1]
    with pytest.raises(pmstore.NameExistsError, match="a list"):
        store.require("items", 3)
    with pytest.raises(pmstore.NameExistsError):
        store["items/x"] = 1
    with pytest.raises(TypeError, match="a list of a store is not a value"):
        store["other"] = items
    with pytest.raises(TypeError, match="cannot store"):
        items.append(items)


def test_removed_and_made_again(store: pmstore.Store) -> None:
    items = store.list("g/items")
    items.extend(range(1000))
    del store["g"]
    for use in (lambda: items[0], lambda: len(items), lambda: items.append(1), lambda: list(items)):
        with pytest.raises(KeyError, match="not in the store any more"):
            use()
    store.commit()
    assert store.check().blocks == 2
    store.list("g/items").append("new")
    assert items[:] == ["new"]
    store.rollback()
    with pytest.raises(KeyError):
        items[0]


def test_errors_of_lists(store: pmstore.Store) -> None:
    items = store.list("items")
    items.extend(range(10))
    for bad in (10, -11, 1 << 80):
        with pytest.raises(IndexError):
            items[bad]
        with pytest.raises(IndexError):
            items[bad] = 1
        with pytest.raises(IndexError):
            del items[bad]
    with pytest.raises(TypeError, match="integers or slices"):
        items["1"]  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="extended slice"):
        items[::2] = [1]
    with pytest.raises(TypeError):
        items[2:4] = 7  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="cannot store"):
        items.extend([1, object()])
    with pytest.raises(IndexError):
        store.list("empty").pop()
    assert items[:] == list(range(10))


def test_an_extension_by_itself(store: pmstore.Store) -> None:
    items = store.list("items")
    items.extend([1, 2])
    items.extend(items)
    items[1:1] = items
    assert items[:] == [1, 1, 2, 1, 2, 2, 1, 2]
    items.reverse()
    assert items[:] == [2, 1, 2, 2, 1, 2, 1, 1]


def test_full_changes_nothing(path: Path) -> None:
    """And deleting works then, whatever the number of items."""
    with pmstore.open(path, size="1MiB", max_size="1MiB") as store:
        items = store.list("items")
        items.append("first")
        filler = []
        with pytest.raises(pmstore.StoreFullError):
            for i in range(10**6):
                filler.append(b"%06d" % i * 20)
                items.append(filler[-1])
        del filler[-1]
        blocks = store.stats().blocks
        for change in (
            lambda: items.extend([b"x" * 100] * 3000),
            lambda: items.__setitem__(slice(1, 3), [b"x" * 10] * 9000),
            lambda: items.__setitem__(slice(None, None, 2), [b"x" * 100] * ((len(items) + 1) // 2)),
            lambda: items.insert(1, np.zeros(1 << 20)),
        ):
            with pytest.raises(pmstore.StoreFullError):
                change()
            assert items[1:] == filler
            assert store.stats().blocks == blocks
        assert store.check().problems == ()
        store.commit()
        del items[1::2]
        assert items[1:] == filler[1::2]
        store.commit()
        items.append(b"room again" * 30)
        items.clear()
        assert store.check().problems == ()
        store.commit()
        assert store.check().blocks == 4  # header and table of the root, its node, the list


def test_reading(path: Path) -> None:
    with pmstore.open(path) as store:
        store.list("items").extend([1, np.ones(2)])
    with pmstore.open(path, "r") as store:
        items = store.list("items")
        assert items[0] == 1
        assert not items[1].flags.writeable
        with pytest.raises(pmstore.ReadOnlyStoreError):
            items.append(1)
        with pytest.raises(KeyError):
            store.list("no")
    with pytest.raises(pmstore.ClosedStoreError):
        len(items)
    assert "closed" in repr(items)


def test_the_binding_refuses_what_it_does_not_take(store: pmstore.Store) -> None:
    """The calls of `_objects.c`: a mistake of their caller is an exception, not a crash."""
    pool = store._core.pool
    store.list("l").extend([1, 2])
    at = pool.open_list(0, b"l", create=False)
    assert at is not None
    wrong: list[tuple[Any, tuple[Any, ...], type[Exception]]] = [
        (pool.find, (0,), TypeError),
        (pool.find, (0, "l"), TypeError),
        (pool.find, ("0", b"l"), TypeError),
        (pool.find, (1, b"l"), pmstore.CorruptStoreError),
        (pool.item, (at, b"", None, False), TypeError),
        (pool.item, (at, b""), TypeError),
        (pool.get, (0, b"l"), TypeError),
        (pool.slot, (0, "l", 0), TypeError),
        (pool.item, (at + 1, b"", 0, False), pmstore.CorruptStoreError),
        (pool.put_value, (0, b"", b"\xc0"), ValueError),
        (pool.put_value, (0, b"x", 7), TypeError),
        (pool.splice, (at, b"", -1, 1, 1, ()), ValueError),
        (pool.splice, (at, b"", 0, 1, 0, ()), ValueError),
        (pool.splice, (at, b"", 0, 0, 1, 5), TypeError),
        (pool.splice, (at, b"", 0, 0, 1, [()]), TypeError),
        (pool.splice, (at, b"", 0, 0, 1, [(1, "meta", 0, 0)]), TypeError),
        (
            pool.splice,
            (at, b"", 0, 0, 1, [(1, b"\xc0", 0, 0)] * 100 + [(1, b"", None, 0)]),
            TypeError,
        ),
    ]
    for call, arguments, error in wrong:
        with pytest.raises(error):
            call(*arguments)
    assert pool.find(0, b"nothing") is None
    assert pool.item(at, b"", 2, False) is None
    assert store.list("l")[:] == [1, 2]
    assert store.check().problems == ()


def test_an_index_that_is_none(store: pmstore.Store) -> None:
    items = store.list("items")
    for wrong in (1.5, "1", None):
        with pytest.raises(TypeError):
            items.insert(wrong, 0)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            items[wrong]  # type: ignore[call-overload]
    items.insert(np.int64(0), 1)
    assert items[:] == [1]
