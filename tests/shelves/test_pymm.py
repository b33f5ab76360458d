"""Shelves: Python's rules where PyMM breaks them, every operation a transaction, crashes,
lifetimes."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shelf_helpers import committed, needs_torch, torch

import pmstore
from pmstore import pymm
from pmstore.testing import ForkServer


def pymm_number(shelf: Any) -> Any:
    shelf.digits = "12"
    return shelf.digits


# ---- values ----


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        2**63,
        -(2**63) - 1,
        10**400,
        -(10**400),
        -0.0,
        float("inf"),
        "",
        "naïve 日本 \U0001f600",
        b"",
        b"\0\xff",
        True,
    ],
)
def test_values_come_back(shelf: Any, shm: Path, value: Any) -> None:
    shelf.v = value
    assert shelf.v == value
    assert repr(shelf.v) == str(value)
    with committed(shm) as store:
        assert store["v"] == value
        assert type(store["v"]) is type(value)
    assert pickle.loads(pickle.dumps(shelf.v)) == value
    assert type(copy.deepcopy(shelf.v)) is type(value)


def test_numbers_follow_python(shelf: Any) -> None:
    shelf.i = -7
    assert (shelf.i // 2, shelf.i % 3, -shelf.i, abs(shelf.i), shelf.i**2, 2**-shelf.i) == (
        -4,
        2,
        7,
        7,
        49,
        128,
    )
    assert (divmod(shelf.i, 2), divmod(20, shelf.i), ~shelf.i, shelf.i << 3, float(shelf.i)) == (
        (-4, 1),
        (-3, -1),
        6,
        -56,
        -7.0,
    )
    assert list(range(10))[shelf.i] == 3
    shelf.i -= 2**100
    assert shelf.i == -7 - 2**100
    shelf.i = 7
    shelf.i /= 2
    assert shelf.i == 3.5
    assert isinstance(shelf.i, pymm.ShelvedCommon)
    shelf.i *= np.ones(2)
    assert type(shelf.i) is pymm.shelved_ndarray
    with pytest.raises(TypeError):
        shelf.i = shelf.nothing + 1
    shelf.f = 1.5
    with pytest.raises(TypeError):
        range(3)[shelf.f]
    assert (shelf.f < 2, shelf.f >= shelf.f, shelf.f == 1.5, f"{shelf.f:.3f}", bool(shelf.f)) == (
        True,
        True,
        True,
        "1.500",
        True,
    )
    assert shelf.f.is_integer() is False
    assert (np.ones(2, np.float32) * shelf.f).dtype == np.float32
    assert np.add(1, shelf.f) == 2.5
    if torch:
        assert (torch.ones(2) * shelf.f).tolist() == [1.5, 1.5]


def test_strings_follow_python(shelf: Any, shm: Path) -> None:
    shelf.s = "aß"
    assert shelf.s + "c" == "aßc"
    assert int(pymm_number(shelf)) == 12
    assert "c" + shelf.s == "caß"
    assert shelf.s == "aß"  # + made a new one
    assert (len(shelf.s), shelf.s[1], shelf.s * 2, shelf.s.upper(), sorted([shelf.s, "A"])[0]) == (
        2,
        "ß",
        "aßaß",
        "ASS",
        "A",
    )
    shelf.s += shelf.s
    with committed(shm) as store:
        assert store["s"] == "aßaß"
    with pytest.raises(UnicodeEncodeError):
        pymm.string("ß", "ascii")
    shelf.b = pymm.bytes("ß", "latin-1")
    assert b"x" + shelf.b + b"y" == b"x\xdfy"


def test_a_value_that_was_replaced_stores_nothing_more(shelf: Any) -> None:
    shelf.i = 1
    old = shelf.i
    shelf.i = 5
    old += 10
    assert (old, shelf.i) == (11, 5)
    kept = shelf.i
    kept += 1  # in place: still the shelf's
    assert (kept, shelf.i) == (6, 6)
    shelf.j = shelf.i
    shelf.i += 1
    assert shelf.j == 6
    shelf.i = None
    assert shelf.items == ["j"]
    shelf.j = np.float64(2.5)
    assert type(shelf._core.store["j"]) is float


# ---- arrays: every way of writing is a transaction of its own ----

WRITES: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x.__setitem__((0, 0), 5),
    "slice": lambda x: x.__setitem__((slice(None), slice(None, None, 2)), 5),
    "view": lambda x: x[::2, ::-2].__setitem__(..., 5),
    "mask": lambda x: x.__setitem__(x > 3, 5),
    "iadd": lambda x: x.__iadd__(1),
    "idiv": lambda x: x.__itruediv__(2),
    "imatmul": lambda x: x.__imatmul__(np.full((4, 4), 2.0)),
    "ufunc out": lambda x: np.multiply(x, 3, out=x),
    "ufunc out, plain in": lambda x: np.sqrt(np.full((4, 4), 4.0), out=x),
    "ufunc at": lambda x: np.add.at(x, (0, [0, 0]), 1),
    "method out": lambda x: x.clip(2, 3, out=x),
    "dot out": lambda x: np.dot(np.ones((4, 4)), np.ones((4, 4)), out=x),
    "cumsum, out by position": lambda x: np.cumsum(np.ones((4, 4)), 1, None, x),
    "fill": lambda x: x.fill(7),
    "sort": lambda x: x[:, ::-1].sort(),
    "put": lambda x: x.put([0, 1], [8, 9]),
    "byteswap": lambda x: x.byteswap(inplace=True),
    "copyto": lambda x: np.copyto(x, 6),
    "putmask": lambda x: np.putmask(x, x > 2, 0),
    "fill_diagonal": lambda x: np.fill_diagonal(x, 9),
    "transposed": lambda x: x.T.__setitem__(0, 5),
    "reshaped": lambda x: x.reshape(-1).__setitem__(3, 50),
    "raw view, then persist": lambda x: (x.asndarray().fill(4), x.persist()),
}


@pytest.mark.parametrize("how", WRITES)
def test_array_writes(shelf: Any, shm: Path, how: str) -> None:
    start = np.arange(16.0).reshape(4, 4)
    shelf.x = start
    expected = np.array(start)
    if how not in ("raw view, then persist",):
        WRITES[how](expected)
    else:
        expected.fill(4)
    epoch = shelf._core.store.epoch
    WRITES[how](shelf.x)
    assert shelf._core.store.epoch > epoch
    np.testing.assert_array_equal(shelf.x, expected)
    assert not np.array_equal(shelf.x, start)
    with committed(shm) as store:
        np.testing.assert_array_equal(store["x"], expected)
    assert type(shelf.x) is pymm.shelved_ndarray


@pytest.mark.parametrize("how", WRITES)
def test_array_writes_in_a_transaction_are_one(shelf: Any, shm: Path, how: str) -> None:
    shelf.x = np.arange(16.0).reshape(4, 4)
    shelf.tx_begin([shelf.x])
    epoch = shelf._core.store.epoch
    WRITES[how](shelf.x)
    shelf.n = 5
    assert shelf._core.store.epoch == epoch
    with committed(shm) as store:
        assert "n" not in store
        assert store["x"].tolist() == np.arange(16.0).reshape(4, 4).tolist()
    shelf.tx_end()
    with committed(shm) as store:
        assert store["n"] == 5
        np.testing.assert_array_equal(store["x"], shelf.x)


def test_an_operation_that_raises_has_changed_nothing(shelf: Any) -> None:
    shelf.x = np.arange(4.0)

    plain = np.arange(4.0)
    for x in (plain, shelf.x):
        with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
            x /= np.array([2.0, 2.0, 2.0, 0.0])  # numpy raises when it has written
    assert plain[3] == np.inf
    assert shelf.x.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="broadcast"):
        shelf.x[...] = np.ones(3)
    with pytest.raises(IndexError):
        shelf.x[9] = 1
    assert shelf.x.tolist() == [0, 1, 2, 3]


def test_what_is_computed_is_plain(shelf: Any) -> None:
    shelf.x = np.arange(12.0).reshape(3, 4)
    x, n = shelf.x, np.ones((3, 4))
    plain = [
        x + n,
        n - x,
        x @ x.T,
        x > 3,
        -x,
        np.sqrt(x),
        x.copy(),
        x.astype("f4"),
        x[[0, 2]],
        x[x > 3],
        x.flatten(),
        x.sum(axis=0),
        x.mean(axis=1),
        x.cumsum(),
        x.clip(0, 1),
        x.round(),
        x.dot(x.T),
        x.repeat(2),
        x.take([0, 1]),
        np.concatenate([x, x]),
        np.stack((x, n)),
        np.where(x > 2, x, 0),
        np.linalg.inv(x[:, :3] + np.eye(3)),
        np.array(x),
        x.asndarray(),
        copy.deepcopy(x),
        pickle.loads(pickle.dumps(x)),
        *np.split(n, 3),
        *x.nonzero(),
    ]
    assert {type(result) for result in plain} == {np.ndarray}
    assert isinstance(x.sum(), np.float64)
    views = [
        x[0],
        x[::2, 1:3],
        x.T,
        x.reshape(4, 3),
        x.ravel(),
        x[..., None],
        x.view(),
        x.swapaxes(0, 1),
        x[None],
    ]
    assert {type(view) for view in views} == {pymm.shelved_ndarray}
    assert all(np.shares_memory(view, x) and view.name == "x" for view in views)
    out = np.zeros((3, 4))
    assert np.add(x, 1, out=out) is out
    assert np.add(x, 1, out=x) is x
    assert x.clip(0, 5, out=x) is x
    y = x
    y += n
    assert y is x
    assert str(x) == str(x.asndarray())
    assert repr(x) == repr(x.asndarray())
    assert f"{x.sum():.0f}" == f"{np.asarray(x).sum():.0f}"


@pytest.mark.parametrize("order", ["C", "F"])
def test_shadow_arrays(shelf: Any, order: str) -> None:
    kind = np.dtype([("a", "i4"), ("b", "f8", 2), ("c", "U3")])
    shelf.x = pymm.ndarray((2, 3), dtype=kind, order=order)
    shelf.x["a"] = -5
    shelf.x["b"][0, 1] = [1, 2]
    shelf.x[1, 2] = (7, (8, 9), "ÄÖÜ")
    assert shelf.x.flags[f"{order}_CONTIGUOUS"]
    assert shelf.x.dtype == kind
    assert shelf.x[1, 2].item()[2] == "ÄÖÜ"
    assert shelf.x["b"][0, 1].tolist() == [1, 2]
    shelf.y = pymm.ndarray(5)
    assert shelf.y.tolist() == [0] * 5
    shelf.z = pymm.ndarray((2, 3), dtype="i2", strides=(2, 4))
    assert shelf.z.strides == (2, 4)
    with pytest.raises(ValueError, match="gaps"):
        pymm.ndarray((2, 3), dtype="i2", strides=(20, 4))
    assert (shelf.z.dim(), shelf.z.addr, shelf.z.name) == (2, shelf.z.ctypes.data, "z")


def test_strided_and_big_endian_copies(shelf: Any) -> None:
    start = np.arange(24, dtype=">i2").reshape(4, 6)
    shelf.x = start[::2, ::-3]
    assert shelf.x.dtype == ">i2"
    assert shelf.x.tolist() == start[::2, ::-3].tolist()
    shelf.x = shelf.x[:, 1]  # of itself
    assert shelf.x.tolist() == start[::2, ::-3][:, 1].tolist()
    shelf.d = np.array(["2026-11-21"], "M8[D]")
    shelf.d += np.timedelta64(1, "D")
    assert shelf.d[0] == np.datetime64("2026-11-22")


@pytest.mark.parametrize(("offset", "length"), [(-1, 2), (0, 11), (5, 6), (10, 1), (3, -1)])
def test_persist_offset_out_of_range(shelf: Any, offset: int, length: int) -> None:
    shelf.x = np.zeros(10)
    shelf.x.persist_offset(0, 10)
    shelf.x.persist_offset(10, 0)
    with pytest.raises(ValueError, match="array of 10"):
        shelf.x.persist_offset(offset, length)


# ---- tensors ----

TENSOR_WRITES: dict[str, Callable[[Any], Any]] = {
    "item": lambda t: t.__setitem__((0, 0), 5),
    "iadd": lambda t: t.__iadd__(1),
    "idiv": lambda t: t.__itruediv__(2),
    "fill": lambda t: t.fill_(7),
    "view": lambda t: t[1:].fill_(3),
    "view of a view": lambda t: t.view(-1)[2:4].mul_(9),
    "out": lambda t: torch.add(torch.ones(4, 4), 1, out=t),
    "copy": lambda t: t.copy_(torch.ones(4, 4)),
    "relu, inplace": lambda t: torch.nn.functional.relu(t.sub_(8), inplace=True),
    "init": lambda t: torch.nn.init.constant_(t, 5),
    "foreach": lambda t: torch._foreach_add_([t], 1),
}


@needs_torch
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", TENSOR_WRITES)
def test_tensor_writes(shelf: Any, shm: Path, how: str, name: str) -> None:
    dtype = torch.float64 if how == "out" and name == "bfloat16" else getattr(torch, name)
    start = torch.arange(16.0).reshape(4, 4).to(dtype)
    expected = start.clone()
    TENSOR_WRITES[how](expected)
    shelf.t = start
    TENSOR_WRITES[how](shelf.t)
    assert shelf.t.dtype == dtype
    assert torch.equal(shelf.t, expected)
    with committed(shm) as store:
        assert torch.equal(store["t"], expected)
        assert not torch.equal(store["t"], start)


@needs_torch
def test_tensors_compute_plain_ones(shelf: Any) -> None:
    shelf.t = torch.arange(6.0).reshape(2, 3)
    t = shelf.t
    plain = [
        t + 1,
        1 - t,
        t @ t.T,
        t.sum(),
        t.clone(),
        t[[0]],
        torch.cat([t, t]),
        t.as_tensor(),
        t.to(torch.float64),
        t.relu(),
    ]
    assert {type(result) for result in plain} == {torch.Tensor}
    assert type(t[0]) is type(t.T) is type(t)
    assert (t.numpy() == np.arange(6.0).reshape(2, 3)).all()
    assert repr(t) == repr(t.clone())
    assert torch.equal(pickle.loads(pickle.dumps(t)), t)
    assert pymm.torch_tensor((2, 3))._data.dtype == torch.float64
    shelf.u = pymm.torch_tensor(torch.Size([2, 2]), dtype=np.float32)
    assert (shelf.u.dtype, shelf.u.shape) == (torch.float32, (2, 2))


@needs_torch
def test_a_parameter_on_the_shelf_trains(shelf: Any, shm: Path) -> None:
    shelf.w = torch.nn.Parameter(torch.tensor([4.0]))
    optimizer = torch.optim.SGD([shelf.w], lr=0.25)
    for _ in range(3):
        optimizer.zero_grad()
        (shelf.w**2).sum().backward()
        optimizer.step()
    assert shelf.w.item() == 0.5
    with committed(shm) as store:
        assert store["w"].item() == 0.5


# ---- lists ----


@needs_torch
def test_lists(shelf: Any, shm: Path) -> None:
    shelf.x = pymm.linked_list([1, "zwei"])
    shelf.x.extend([np.arange(3.0), torch.ones(2), b"b", -(2**70), None])
    shelf.x[2] += 1
    shelf.x[3].add_(1)
    shelf.x[2][0] = 9
    shelf.i = 4
    shelf.x.append(shelf.i)
    shelf.x.append(shelf.x[2])
    del shelf.x[0]
    with committed(shm) as store:
        items = store["x"][:]
    assert items[0] == "zwei"
    assert items[1].tolist() == items[-1].tolist() == [9, 2, 3]
    assert items[2].tolist() == [2, 2]
    assert items[3:-1] == [b"b", -(2**70), None, 4]
    assert type(shelf.x[1]) is pymm.shelved_ndarray
    assert [type(item) for item in shelf.x[1:3]] == [type(shelf.x[1]), type(shelf.x[2])]
    for wrong in (IndexError, RuntimeError):
        for at in (9, -9):
            with pytest.raises(wrong):
                shelf.x[at]
            with pytest.raises(wrong):
                shelf.x[at] = 0
            with pytest.raises(wrong):
                del shelf.x[at]
    with pytest.raises(TypeError):
        shelf.x.append(object())
    with pytest.raises(TypeError):
        shelf.x.append(pymm.ndarray(3))
    assert len(shelf.x) == 8
    shelf.x[1:] = [1, 2]
    assert shelf.x == ["zwei", 1, 2]
    shelf.x += [3]
    shelf.x.reverse()
    assert shelf.x.pop() == "zwei"
    assert repr(shelf.x) == "[3, 2, 1]"
    kept = shelf.x
    shelf.x = kept
    assert shelf.x == [3, 2, 1]
    with pytest.raises(RuntimeError, match="cannot be put"):
        shelf.y = kept
    shelf.x = pymm.linked_list()
    assert len(shelf.x) == 0
    shelf.x = 5
    assert shelf.x == 5


# ---- the shelf ----


def test_names(shelf: Any) -> None:
    assert shelf.missing is None
    assert shelf.items == []
    for name in ("items", "used", "erase", "_core", "name"):
        with pytest.raises(RuntimeError, match="shelf itself"):
            setattr(shelf, name, 1)
    with pytest.raises(RuntimeError, match="cannot be put on the shelf"):
        shelf.x = {"a": 1}
    with pytest.raises(RuntimeError, match="no 'x' on the shelf"):
        shelf.erase("x")
    shelf.x = 1
    shelf.y = np.ones(2)
    assert shelf.items == shelf.get_item_names() == ["x", "y"]
    assert "x" in dir(shelf)
    shelf.erase(shelf.y)
    del shelf.x
    assert shelf.items == []
    with pytest.raises(RuntimeError, match="to erase"):
        shelf.erase(np.ones(2))
    assert not hasattr(shelf, "__deepcopy__")
    with pytest.raises(FileNotFoundError, match="pmem_path"):
        pymm.shelf("x", pmem_path="/nowhere/at/all")


def test_used_grows(shelf: Any) -> None:
    before = shelf.used
    shelf.x = np.zeros(1 << 20, np.uint8)
    assert before < 1 < shelf.used < 100
    shelf.more = np.zeros(64 << 20, np.uint8)  # more than size_mb: the file grows
    assert 50 < shelf.used <= 100


@needs_torch
def test_inspect(shelf: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shelf.x = np.zeros(3)
    shelf.t = torch.zeros(2)
    shelf.s = "text"
    shelf.inspect(verbose=True)
    told = capsys.readouterr().out
    assert f"var x: array dtype=float64 shape=(3,) addr={shelf.x.addr:#x}" in told
    assert "var s: value type=shelved_string" in told
    assert "a commit survives" in told
    assert "pymm.shelf 's'" in repr(shelf)
    assert "<td>x</td>" in shelf._repr_html_()


@needs_torch
def test_deleting_the_shelf_closes_it(shm: Path) -> None:
    shelf = pymm.shelf("s", pmem_path=shm)
    shelf.x = np.arange(3.0)
    shelf.t = torch.arange(3.0)
    shelf.i = 5
    x, t, i = shelf.x, shelf.t, shelf.i
    x.asndarray()[0] = 9  # past the member: committed by the close
    with pytest.raises(pmstore.StoreLockedError):
        pymm.shelf("s", pmem_path=shm)
    del shelf
    again = pymm.shelf("s", pmem_path=shm, backend="process")
    x += 1
    x[0] = -1
    t.add_(1)
    i += 1
    assert (x.tolist(), t.tolist(), i) == ([-1, 2, 3], [1, 2, 3], 6)
    assert (again.x.tolist(), again.t.tolist(), again.i) == ([9, 1, 2], [0, 1, 2], 5)
    again._close()
    new = pymm.shelf(
        "s", pmem_path=shm, force_new=True, mm_plugin="libmm.so", load_addr="0x1000000000"
    )
    assert new.items == []
    new._close()


def test_a_transaction_that_was_not_ended_is_rolled_back(shm: Path) -> None:
    shelf = pymm.shelf("s", pmem_path=shm)
    shelf.x = np.zeros(3)
    shelf.i = 1
    with pytest.raises(pmstore.TransactionError, match="no transaction"):
        shelf.tx_end()
    shelf.tx_begin()
    with pytest.raises(pmstore.TransactionError, match="is open"):
        shelf.tx_begin_all()
    shelf.x += 1
    shelf.i += 1
    shelf.y = "new"
    shelf.persist()
    del shelf
    gc.collect()
    again = pymm.shelf("s", pmem_path=shm)
    assert (again.x.tolist(), again.i, again.y) == ([0, 0, 0], 1, None)
    again._close()


@needs_torch
def test_save_and_load(shelf: Any, shm: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()

    step()
    state = {
        "epoch": np.array([3]),
        "model": model,
        "optimizer": optimizer,
        "notes": ("a", [1, None, 2.5, -(2**70)]),
        "loss": torch.ones(1),
    }
    epoch = shelf._core.store.epoch
    shelf.save(state, "ck")
    assert shelf._core.store.epoch == epoch + 1
    (weight,) = [name for name in shelf.items if name.startswith("ck") and "0.weight" in name]
    address = getattr(shelf, weight).data_ptr()
    step()
    shelf.save(state, "ck")
    loaded = shelf.load("ck")
    assert getattr(shelf, weight).data_ptr() == address  # in place
    assert torch.equal(loaded["model"]["0.weight"], model[0].weight)
    assert torch.equal(loaded["model"]["1.running_mean"], model[1].running_mean)
    assert loaded["notes"] == ("a", [1, None, 2.5, -(2**70)])
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    fresh = torch.optim.Adam(other.parameters())
    shelf.save(model, "m")
    shelf.save(optimizer, "o")
    assert shelf.load("m", other) is other
    shelf.load("o", fresh)
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    )
    assert torch.equal(
        fresh.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"]
    )
    shelf.save({"epoch": 4}, "ck", is_inplace=False)
    assert [name for name in shelf.items if name.startswith("ck")] == [
        "ck__+dict_#str#_#epoch#__#int#"
    ]
    with pytest.raises(KeyError, match="saved were"):
        shelf.load("nothing")
    before = shelf.items
    with pytest.raises(TypeError):
        shelf.save({"good": 1, "bad": object()}, "bad")
    assert shelf.items == before


# ---- crashes ----


def work(ack: Callable[[int], None], folder: str, in_transaction: bool) -> None:
    shelf = pymm.shelf("s", pmem_path=folder, size_mb=1)
    if shelf.x is None:
        shelf.tx_begin()
        shelf.x = np.zeros(100)
        shelf.i = 0
        shelf.s = "0"
        shelf.tx_end()
    for step in range(int(shelf.i) + 1, int(shelf.i) + 4):
        if in_transaction:
            shelf.tx_begin([shelf.x])
        shelf.x += step - shelf.x[0]
        shelf.s = "é" * step if in_transaction else str(step)
        shelf.i += 1
        if in_transaction:
            shelf.tx_end()
        ack(step)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer([str(Path(__file__).parent), str(Path(__file__).parents[1])]) as made:
        yield made


@pytest.mark.parametrize("in_transaction", [True, False])
def test_killed_at_every_primitive(server: ForkServer, shm: Path, in_transaction: bool) -> None:
    """In a transaction: all of a step or nothing. Outside: each statement is there or not, in their
    order."""
    point, killed, seen = 0, 0, set()
    while True:
        point += 3 if killed > 60 else 1
        run = server.run("test_pymm:work", [str(shm), in_transaction], kill_at=point)
        if not (shm / "s.pm").exists():
            continue
        shelf = pymm.shelf("s", pmem_path=shm)
        if shelf.x is not None:
            i, total, text = int(shelf.i), set(shelf.x.tolist()), shelf.s
            assert len(total) == 1
            assert i >= run.acknowledged
            written = len(text) if in_transaction and i else int(text)
            if in_transaction:
                assert total == {float(i)}
                assert written == i
            else:
                assert total <= {float(i), float(i + 1)}
                assert written in (i, i + 1)
            seen.add((total == {float(i)}, written == i))
        assert shelf._core.store.check().problems == ()
        shelf._close()
        killed += run.killed
        if not run.killed:
            assert run.exit_code == 0
            break
    assert killed > 25
    assert seen == {(True, True)} if in_transaction else len(seen) >= 2
