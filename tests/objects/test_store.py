"""The store as its users see it."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import warnings
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pmstore
from pmstore.objects.names import split_name


def test_the_readme_example(path: Path, domain: Any) -> None:
    with pmstore.open(path, domain=domain) as store:
        w = store.zeros("w", (64, 64), "float32")
        store["config"] = {"lr": 1e-3, "layers": [64, 64]}
        with store.transaction():
            w += 1
            store["step"] = 1
        assert store.domain == domain
    with pmstore.open(path, "r", domain=domain) as store:
        assert store["config"] == {"lr": 1e-3, "layers": [64, 64]}
        assert (store["w"] == 1).all()
        assert store["step"] == 1
        assert not store["w"].flags.writeable
        with pytest.raises(pmstore.ReadOnlyStoreError):
            store["step"] = 2
        assert store.check().problems == ()


def test_rollback_and_commit(path: Path, domain: Any) -> None:
    store = pmstore.open(path, domain=domain)
    a = store.zeros("a", 5)
    store["x"] = 1
    store.commit()
    epoch = store.epoch
    a[:] = 7
    store["x"] = 2
    store["y"] = 3
    store.rollback()
    assert a.tolist() == [0] * 5
    assert (store["x"], "y" in store, store.epoch) == (1, False, epoch)
    assert store["a"] is a
    a[:] = 8
    store.commit()
    store.rollback()
    assert a.tolist() == [8] * 5
    assert store.epoch == epoch + 1
    store.close()


def test_a_block_that_raises_undoes_exactly_the_block(path: Path, domain: Any) -> None:
    with pmstore.open(path, domain=domain) as store:
        a = store.zeros("a", 5)
        a[0] = 1  # pending: committed by entering
        with pytest.raises(ZeroDivisionError):
            with store.transaction(writes=[a]):
                a[1] = 2
                store["x"] = 1
                1 / 0
        assert a.tolist() == [1, 0, 0, 0, 0]
        assert "x" not in store


def test_nested_blocks_join(store: pmstore.Store) -> None:
    a = store.zeros("a", 3)
    store.commit()
    epoch = store.epoch
    with store.transaction():
        assert store.in_transaction
        with store.transaction(writes=[a]):
            a[0] = 1
        a[1] = 1
        assert store.epoch == epoch
    assert not store.in_transaction
    assert store.epoch == epoch + 1
    with pytest.raises(KeyError):
        with store.transaction():
            with store.transaction():
                a[2] = 1
            raise KeyError
    assert a.tolist() == [1, 1, 0]


def test_one_transaction_object_serves_again(store: pmstore.Store) -> None:
    a = store.zeros("a", 3)
    block = store.transaction(writes=[a])
    for i in range(3):
        with block:
            a[i] = 1
            with block:
                pass
    assert a.sum() == 3
    with pytest.raises(pmstore.TransactionError, match="not entered"):
        block.__exit__(None, None, None)


def test_a_block_that_is_dropped_rolls_back(store: pmstore.Store) -> None:
    a = store.zeros("a", 3)
    store.commit()
    block = store.transaction()
    block.__enter__()
    a[0] = 1
    del block
    assert not store.in_transaction
    assert a[0] == 0


def test_closing_inside_a_block(path: Path) -> None:
    store = pmstore.open(path)
    a = store.zeros("a", 3)
    store.commit()
    with pytest.raises(pmstore.ClosedStoreError, match="rolled back"):
        with store.transaction():
            a[0] = 1
            store.close()
    store = pmstore.open(path)
    with pytest.raises(ZeroDivisionError):
        with store.transaction():
            store.close()
            1 / 0
    with pmstore.open(path) as store:
        assert store["a"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("code", [0, None, 1, "failed"])
def test_sys_exit_in_with_takes_back(path: Path, code: Any) -> None:
    with pytest.raises(SystemExit):
        with pmstore.open(path) as store:
            store["x"] = 1
            sys.exit(code)
    with pmstore.open(path) as store:
        assert "x" not in store


def test_mapping(store: pmstore.Store) -> None:
    assert len(store) == 0
    store["b"] = 1
    store["a"] = [1]
    store["g/h/x"] = (2,)
    assert list(store) == ["b", "a", "g"]
    assert store["g"]["h"]["x"] == store["g/h/x"] == (2,)
    assert "g/h/x" in store
    assert "g/z/x" not in store
    assert "b/x" not in store
    assert store.get("nothing", 5) == 5
    with pytest.raises(KeyError):
        store["g/nothing"]
    with pytest.raises(KeyError):
        del store["nothing"]
    assert store.pop("b") == 1
    assert store.setdefault("a", 7) == [1]
    store.update({"k": 1, "l": 2})
    assert dict(store["g"].items()).keys() == {"h"}
    assert store.group("g") != store
    with pytest.raises(pmstore.NameExistsError, match="group"):
        store["g"] = 1
    with pytest.raises(pmstore.NameExistsError, match="group"):
        store["g"] = np.zeros(2)
    with pytest.raises(pmstore.NameExistsError, match="under it"):
        store["a/b"] = 1
    del store["g"]
    assert "g/h/x" not in store
    store["a"] = np.arange(3)
    store["a"] = "text"
    store.clear()
    assert list(store) == []
    assert store.check().problems == ()


def test_names_of_any_sort(store: pmstore.Store) -> None:
    """Plain ones become paths in C, others in Python."""
    part = st.text(st.characters(codec=None), max_size=20) | st.text("aé/\0", max_size=4)
    names = part | part.map(lambda text: text * 40) | st.integers(990, 1100).map(lambda n: "n" * n)

    @given(names)
    def compare(name: str) -> None:
        group.clear()
        try:
            parts = split_name(name)
        except ValueError as error:
            for use in (lambda: group[name], lambda: group.__setitem__(name, 1)):
                with pytest.raises(ValueError, match=re.escape(str(error))):
                    use()
            assert len(group) == 0
            return
        with pytest.raises(KeyError):
            group[name]
        group[name] = 1
        assert group[name] == 1
        assert list(group) == [parts[0].decode()]

    group = store.group("group")
    compare()
    for none in (5, b"x", None):
        for use in (lambda: group[none], lambda: group.__setitem__(none, 1)):  # noqa: B023
            with pytest.raises(TypeError, match="names of a store are str"):
                use()


def test_groups_are_paths(store: pmstore.Store) -> None:
    group = store.group("g")
    group["x"] = 1
    sub = group.group("sub")
    sub["y"] = 2
    assert store["g/sub/y"] == 2
    store.commit()
    del store["g"]
    with pytest.raises(KeyError, match="not in the store"):
        list(group)
    store["g/x"] = 5
    assert group["x"] == 5
    store.rollback()
    assert group["x"] == 1
    assert sub["y"] == 2
    assert "pmstore.Group 'g'" in repr(group)


def test_creating_arrays(store: pmstore.Store) -> None:
    torch = pytest.importorskip("torch")
    assert store.zeros("z", (2, 3), "i4").tolist() == [[0] * 3] * 2
    assert store.empty("e", 4).shape == (4,)
    assert store.full("f", (2,), 7).dtype == np.asarray(7).dtype
    assert store.full("row", (2, 2), [1, 2], "f4").tolist() == [[1, 2]] * 2
    assert store.full("s", 2, "ab").tolist() == ["ab", "ab"]
    assert store.tensor("t", (2, 2)).dtype == torch.float32
    with pytest.raises(pmstore.NameExistsError, match="require"):
        store.zeros("z", 3)
    assert store.require("z", (2, 3), "i4") is store["z"]
    assert store.require("new/z", 3, "f4").tolist() == [0, 0, 0]
    assert store.require("t", (2, 2), torch.float32) is store["t"]
    for shape, dtype in (((3, 2), "i4"), ((2, 3), "f4"), ((2, 3), torch.int32)):
        with pytest.raises(pmstore.NameExistsError, match="required was"):
            store.require("z", shape, dtype)
    with pytest.raises(TypeError, match=r"store\.tensor"):
        store.zeros("q", 3, torch.float32)


def test_assigning_an_object_to_its_own_name_keeps_its_place(store: pmstore.Store) -> None:
    pytest.importorskip("torch")
    w = store.zeros("w", 1000)
    t = store.tensor("t", 1000)
    address, blocks = w.ctypes.data, store.stats().blocks
    store["w"] += 1
    store["t"] += 1
    store["w"] = w[:]
    assert store["w"] is w
    assert store["t"] is t
    assert w.ctypes.data == address
    assert store.stats().blocks == blocks
    assert w.sum() == t.sum() == 1000


def test_replacing_keeps_old_views(store: pmstore.Store) -> None:
    old = store.zeros("w", 1000)
    store.commit()
    store["w"] = old[::2] + 1
    store["v"] = store["w"][:5]
    store.commit()
    store["big"] = np.ones(1000)
    assert old.sum() == 0
    assert old.shape == (1000,)
    assert store["w"].shape == (500,)
    assert store["v"].tolist() == [1] * 5


def test_views_keep_their_block_and_die_with_it(store: pmstore.Store) -> None:
    w = store.zeros("w", 100_000)
    view = w[10:20]
    ref = weakref.ref(w)
    del w
    assert ref() is not None
    assert store["w"] is ref()
    del store["w"]
    store.commit()
    assert store.stats().pinned_bytes >= 800_000
    del view
    gc.collect()
    assert store.stats().pinned_bytes == 0


def test_views_outlive_the_store(path: Path, domain: Any) -> None:
    pytest.importorskip("torch")
    with pmstore.open(path, domain=domain) as store:
        a = store.zeros("a", 1000)
        t = store.tensor("t", 1000)
        a += 1
        t += 1
    address = a.ctypes.data
    a += 1
    t += 1
    assert a.ctypes.data == address
    assert (a.sum(), t.sum().item()) == (2000, 2000)
    with pmstore.open(path, domain=domain) as store:
        assert store["a"].sum() == 1000
        assert store["t"].sum() == 1000


def test_growth_moves_nothing(path: Path, domain: Any) -> None:
    with pmstore.open(path, size="1MiB", domain=domain) as store:
        first = store.full("first", 1000, 3.0)
        address = first.ctypes.data
        for i in range(8):
            store[f"more/{i}"] = np.full(100_000, i, "f8")
        assert store["first"] is first
        assert first.ctypes.data == address
    with pmstore.open(path, domain=domain) as store:
        assert [store[f"more/{i}"][-1] for i in range(8)] == list(range(8))
        assert store.check().problems == ()


def test_an_open_store_that_is_forgotten_warns_and_closes(path: Path) -> None:
    store = pmstore.open(path)
    a = store.zeros("a", 3)
    store.commit()
    a[0] = 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del store
        gc.collect()
        assert a[0] == 1  # an array keeps its store open
        assert not caught
        del a
        gc.collect()
    assert [str(w.message)[:34] for w in caught] == ["a pmstore.Store was never closed; "]
    with pmstore.open(path) as store:
        assert store["a"][0] == 0


def test_a_store_that_is_open_at_exit_is_closed(path: Path) -> None:
    code = f"import pmstore; s = pmstore.open({str(path)!r}); s['x'] = 1; s.commit(); s['y'] = 1"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
    with pmstore.open(path) as store:
        assert list(store) == ["x"]
        assert store.recovery.clean


def test_what_it_says_of_itself(store: pmstore.Store) -> None:
    store["w<b>"] = np.zeros((2, 3), "f4")
    store["g/x"] = 1
    assert "domain process" in repr(store)
    assert "w&lt;b&gt;" in store._repr_html_()
    assert "survives death of the process" in str(store.info())
    assert str(store.recovery) == "new store"
    assert store.stats().blocks > 0
    assert str(store.check()).endswith("sound")
    assert [(e.name, e.kind, e.dtype, e.shape) for e in store.entries()] == [
        ("w<b>", "array", "float32", (2, 3)),
        ("g", "group", None, None),
    ]
    store.close()
    assert "closed" in repr(store)
    assert "closed" in store._repr_html_()


def test_a_repr_never_raises(path: Path) -> None:
    """A debugger and a notebook ask for it whatever became of the thing."""
    with pmstore.open(path) as store:
        things: list[Any] = [store.group("g"), store.list("l"), store.slots("s", (2, 3), "f4")]
        store.commit()

        def said() -> list[str]:
            return [
                str(call())
                for thing in [store, *things]
                for call in (thing.__repr__, thing._repr_html_)
            ]

        assert "0 names" in repr(things[0])
        assert "0 items" in repr(things[1])
        assert "shape (2, 3), dtype float32" in repr(things[2])
        assert things[2]._repr_html_().count("<td>(2, 3)</td>") == 2
        for name in "gls":
            del store[name]
        assert sum("not in the store any more" in one for one in said()) == 6
    assert sum("closed" in one for one in said()) == 8


def test_declared_writes_of_all_sorts(store: pmstore.Store) -> None:
    torch = pytest.importorskip("torch")
    a = store.zeros("a", (100, 100))
    f = store.group("g")
    f["f"] = np.asfortranarray(np.zeros((10, 10)))
    d = store.zeros("d", 3, "M8[s]")
    t = store.tensor("t", (10, 10), torch.bfloat16)
    z = store.zeros("z", 0)
    pieces = [a[::-2, 3:7], f["f"], d, t, t.t()[1:], z, t[:0], a[0, 0:1], np.zeros(0)]
    with store.transaction(writes=pieces):
        a[1, 3] = 5
    with store.transaction(writes=(x for x in pieces)):
        pass
    with store.transaction(writes=a):
        pass
    store.will_write(*pieces, *[a] * 50)
    store.rollback()
    assert a[1, 3] == 5


@pytest.mark.parametrize(
    ("writes", "error"),
    [([np.zeros(3)], ValueError), ([b"abc"], ValueError), ([3], TypeError), (3, TypeError)],
)
def test_declared_writes_that_are_none(
    store: pmstore.Store, writes: Any, error: type[Exception]
) -> None:
    a = store.zeros("a", 3)
    with pytest.raises(error):
        with store.transaction(writes=writes):
            pytest.fail("entered")
    assert not store.in_transaction
    a[0] = 1
    with store.transaction(writes=[a]):
        a[1] = 1
    assert a.tolist() == [1, 1, 0]


def test_importing_pmstore_imports_no_torch() -> None:
    code = "import pmstore, sys; print([m for m in ('torch', 'typer', 'rich') if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_readinto(store: pmstore.Store, shm: Path) -> None:
    (shm / "data").write_bytes(b"\1" * 8192)
    a = store.zeros("a", 8192, "u1")
    store.commit()
    store.will_write(a)
    with open(shm / "data", "rb", buffering=0) as file:
        assert file.readinto(a.data) == 8192
    assert a.sum() == 8192
    store.rollback()
    assert a.sum() == 0


def test_faulthandler_after_open(path: Path) -> None:
    code = f"""
import faulthandler, pmstore
with pmstore.open({str(path)!r}) as store:
    a = store.zeros("a", 10000)
    store.commit()
    faulthandler.enable()
    a += 1
    store.commit()
    faulthandler.disable()
    a += 1
    store.commit()
    faulthandler.enable()
    print(a.sum(), flush=True)
    import ctypes
    ctypes.string_at(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "20000.0"
    assert "Segmentation fault" in done.stderr
    assert done.returncode == -11


def test_iteration_streams(store: pmstore.Store) -> None:
    group = store.group("g")
    for i in range(3500):
        group[f"{i}"] = i
    assert list(group) == [f"{i}" for i in range(3500)]
    for seen, name in enumerate(group):  # what was passed may go; what comes is not endless
        del group[name]
        group[f"new {name}"] = seen
    assert len(group) == 3500
    assert next(iter(group)) == "new 0"
    iterator = iter(group)
    next(iterator)
    del group["new 1000"]
    with pytest.raises(RuntimeError, match="changed while it was iterated"):
        list(iterator)
    iterator = iter(group)
    next(iterator)
    del store["g"]
    with pytest.raises(RuntimeError, match="changed while it was iterated"):
        list(iterator)
    for i in range(10):
        store[f"few/{i}"] = i
    assert [name for name in store["few"] if store["few"].pop(name) is None] == []


def _read_calls() -> int:
    io = Path("/proc/self/io")
    if not io.exists():
        pytest.skip("the kernel does not count reads (CONFIG_TASK_IO_ACCOUNTING)")
    return int(re.search(r"syscr: (\d+)", io.read_text())[1])  # type: ignore[index]


def test_an_open_after_a_close_does_not_search_the_journal(disk: Path) -> None:
    """All commits are home then. After a kill the open looks through 8 MiB for what a damaged
    record hides: 2,000 reads."""
    path = disk / "run.pm"
    with pmstore.open(path, size="32MiB", domain="file") as store:
        for number in range(3):
            store["a"] = number
            store.commit()
    for mode in ("r+", "r"):
        before = _read_calls()
        with pmstore.open(path, mode) as store:
            assert store["a"] == 2
            assert store.recovery.clean
            assert _read_calls() - before < 200


def test_a_check_says_how_far_it_is(path: Path) -> None:
    told: list[tuple[int, int]] = []
    with pmstore.open(path, size="32MiB") as store:
        for number in range(5000):
            store[f"group{number % 7}/{number}"] = number
        store.list("numbers").extend(range(3000))
        store["array"] = np.zeros(100)
        report = store.check(progress=lambda *at: told.append(at))
    assert report.problems == ()
    assert all(before <= after for before, after in pairwise(told))
    done, total = told[-1]
    assert done == total == report.blocks + report.names + 3000
