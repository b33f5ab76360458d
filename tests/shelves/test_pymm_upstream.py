"""What PyMM's own programs do (`make nightly WHAT=upstream-pymm` runs them): autograd graphs of
members, both orders of a shelf's arguments, names of a transaction, memory, files that are read
into members."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shelf_helpers import committed, needs_torch, stored, torch

import pmstore
from pmstore import pymm

# ---- autograd ----


@needs_torch
def test_an_assigned_result_keeps_its_graph(shelf: Any, shm: Path) -> None:
    a = torch.tensor(3.0, requires_grad=True)
    shelf.x = torch.tensor([1.0, 2.0])
    shelf.y = a * shelf.x
    assert shelf.y.requires_grad
    assert not shelf.y.is_leaf
    shelf.y *= 2  # of the graph, too
    shelf.y[0] *= 5
    shelf.z = shelf.y.clone().reshape(1, 2)
    shelf.z.sum().backward()
    assert a.grad is not None
    assert a.grad.item() == 2 * (5 * 1 + 2)
    assert stored(shm, "z") == [[30, 12]]
    with committed(shm) as store:
        assert not store["z"].requires_grad  # the graph is this process's, no part of the number


@needs_torch
def test_a_graph_through_a_leaf_of_the_shelf(shelf: Any) -> None:
    shelf.x = torch.tensor(1.0, requires_grad=True)
    assert shelf.x.is_leaf
    shelf.z = shelf.x**3
    shelf.z.backward()
    assert shelf.x.grad.item() == 3
    with torch.no_grad():
        shelf.z = shelf.x * 2
    assert not shelf.z.requires_grad
    shelf.z = (shelf.x * 2).detach()
    assert not shelf.z.requires_grad


@needs_torch
def test_training_through_members_is_that_of_plain_tensors(shelf: Any) -> None:
    """A polynomial fitted to a sine, the predictions on the shelf."""

    def fit(keep: bool) -> list[float]:
        shelf.x = torch.linspace(-3, 3, 100)
        weights = [torch.full((), 0.1 * k, requires_grad=True) for k in range(4)]
        for _ in range(20):
            predicted = sum(weight * shelf.x**k for k, weight in enumerate(weights))
            if keep:
                shelf.predicted = predicted
                predicted = shelf.predicted
            loss = (predicted - torch.sin(shelf.x)).pow(2).sum()
            gradients = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight -= 1e-4 * gradient
        return [weight.item() for weight in weights]

    assert fit(keep=True) == fit(keep=False)


@needs_torch
def test_a_rollback_ends_a_graph_with_the_value(shelf: Any, shm: Path) -> None:
    shelf.y = torch.zeros(2)
    a = torch.tensor(3.0, requires_grad=True)
    shelf.tx_begin([shelf.y])
    shelf.y = a * torch.ones(2)
    assert not shelf.y.is_leaf
    shelf._core.block.__exit__(ValueError, ValueError(), None)
    shelf._core.block = None
    assert shelf.y.tolist() == [0, 0]
    assert not shelf.y.requires_grad
    shelf.y = a * torch.ones(2)
    shelf._core.store.rollback()
    assert shelf.y.tolist() == [3, 3]  # committed with its statement
    assert stored(shm, "y") == [3, 3]


@needs_torch
def test_lists_refuse_a_graph(shelf: Any) -> None:
    a = torch.tensor(3.0, requires_grad=True)
    shelf.l = pymm.linked_list([torch.ones(1)])
    for change in (
        lambda: shelf.l.append(2 * a),
        lambda: shelf.l.__setitem__(0, 2 * a),
        lambda: shelf.l.extend([1, 2 * a]),
        lambda: pymm.linked_list([2 * a]).store_in(shelf._core.store, "m"),
    ):
        with pytest.raises(RuntimeError, match=r"detach\(\)"):
            change()
    assert shelf.l == [torch.ones(1)]
    shelf.l.append((2 * a).detach())
    shelf.l.append(a)
    assert shelf.l[2].requires_grad


# ---- shelves ----


def test_both_orders_of_arguments(shm: Path) -> None:
    folder = str(shm)
    for number, given in enumerate(
        (
            ((folder, 8), {}),
            ((8, folder), {}),
            ((shm,), {"size_mb": 8}),
            ((8,), {"pmem_path": folder}),
            ((np.int64(8), shm, "0x900000000"), {}),
            ((folder, 8, "0x900000000", "hstore-cc", None, True), {}),
            ((), {"size_mb": 8, "pmem_path": folder, "force_new": True}),
        )
    ):
        shelf = pymm.shelf(f"s{number}", *given[0], **given[1])  # type: ignore[call-overload]
        shelf.x = 1
        shelf._close()
        assert (shm / f"s{number}.pm").exists()
    for wrong, why in (
        (((folder, folder), {}), "two folders"),
        (((8, 9), {}), "two sizes"),
        (((folder,), {"pmem_path": folder}), "two folders"),
        (((8,), {"size_mb": 8}), "two sizes"),
        (((1.5,), {}), "float"),
        (((True, folder), {}), "bool"),
    ):
        with pytest.raises(TypeError, match=why):
            pymm.shelf("s", *wrong[0], **wrong[1])  # type: ignore[call-overload]


def test_mapstore_is_memory(shm: Path) -> None:
    """As PyMM's: it needs no folder, begins empty, and ends with the shelf."""
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    first = pymm.shelf("m", "/nowhere/at/all", 8, backend="mapstore")
    second = pymm.shelf("m", size_mb=8, backend="mapstore", mm_plugin="libmm-plugin-rcalb.so")
    first.x = pymm.ndarray((10, 10))
    first.x.fill(33)
    first.big = np.ones(3 << 20)
    assert (first.x[9][9], second.items) == (33, [])
    with pytest.raises(ZeroDivisionError), first._core.store.transaction():
        first.x += 1
        1 / 0
    assert first.x[0][0] == 33
    del first
    again = pymm.shelf("m", shm, 8, backend="mapstore")
    assert again.items == []
    if before:
        assert {name for name in os.listdir("/dev/shm") if f"-{os.getpid()}-" in name} <= before
    assert not (shm / "m.pm").exists()


def test_a_transaction_returns_its_names(shelf: Any) -> None:
    shelf.n = pymm.ndarray((4, 4), dtype=np.uint8)
    shelf.m = pymm.ndarray((4, 4), dtype=np.uint8)
    shelf.i = 5
    assert shelf.tx_begin([shelf.m, "n", shelf.i, shelf.n[1:]]) == ["m", "n", "i", "n"]
    shelf.n += 1
    shelf.tx_end()
    assert shelf.tx_begin_all() == ["n", "m", "i"]
    shelf.tx_end()
    assert shelf.tx_begin() == ["n", "m", "i"]
    shelf.tx_end()
    for wrong in ("nothing", np.ones(3), 5):
        with pytest.raises(RuntimeError, match="not a variable of the shelf"):
            shelf.tx_begin([shelf.n, wrong])
        with pytest.raises(pmstore.TransactionError):
            shelf.tx_end()


def test_strings_of_bytes(shelf: Any, shm: Path) -> None:
    shelf.s = pymm.string(b"\xff\xfe=\xd8\t\xde", encoding="utf-16")
    assert shelf.s == "\U0001f609"
    assert stored(shm, "s") == "\U0001f609"
    shelf.t = pymm.string(b"caf\xe9", "latin-1")
    assert shelf.t == "café"
    with pytest.raises(UnicodeDecodeError):
        pymm.string(b"caf\xe9")


def test_transient_memory_warns(shelf: Any) -> None:
    for module in (pymm, pymm.pymmcore):
        with pytest.warns(UserWarning, match="transient memory is not enabled"):
            module.enable_transient_memory(
                backing_directory="/tmp", pmem_file="/mnt/pmem0/swap", pmem_file_size_gb=1
            )
        module.disable_transient_memory()


# ---- memory ----


def test_arrays_for_other_libraries(shelf: Any, shm: Path) -> None:
    shelf.a = pymm.dlpack_array((2, 3), dtype=np.float32)
    assert shelf.a.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert "dltensor" in repr(shelf.a.as_capsule())
    np.from_dlpack(shelf.a)[0] = 2
    if torch:
        tensor = torch.utils.dlpack.from_dlpack(shelf.a.as_capsule())
        assert tensor.data_ptr() == shelf.a.addr
        tensor[1] = 3
        shelf.a.persist()
        assert stored(shm, "a") == [[2, 2, 2], [3, 3, 3]]


@needs_torch
def test_memory_of_members(shelf: Any, shm: Path) -> None:
    shelf.x = np.arange(4.0)
    shelf.t = torch.arange(3.0)
    for member, at, size in ((shelf.x, shelf.x.addr, 32), (shelf.t, shelf.t.data_ptr(), 12)):
        assert member.memory == (hex(at), size)
        assert member.namedmemory.addr() == member._value_named_memory.addr() == member.memory
    shelf.x.asndarray()[0] = 7
    shelf.x.namedmemory.persist()
    assert stored(shm, "x") == [7, 1, 2, 3]
    assert isinstance(shelf.mr, pymm.MemoryResource)
    assert shelf.mr.list_items() == ["x", "t"]
    assert shelf.mr.get_percent_used() == shelf.used
    with pytest.raises(RuntimeError, match="shelf itself"):
        shelf.mr = 5
    with pytest.raises(TypeError, match=r"shelf\.x = "):
        pymm.MemoryResource("zzz", 1024)
    with pytest.raises(AttributeError, match=r"shelf\.x = "):
        shelf.mr.create_named_memory("zimbar", 8)


@pytest.mark.parametrize("how", ["readinto", "memoryview", "data", "view", "cast"])
def test_files_are_read_into_members(shelf: Any, shm: Path, how: str) -> None:
    """The kernel stores into the array, of which no page fault tells the engine."""
    content = np.arange(1000.0)
    (shm / "array.dat").write_bytes(content.tobytes())
    shelf.z = np.zeros(1000)
    with open(shm / "array.dat", "rb", buffering=0) as source:
        target: Any = {
            "readinto": lambda: shelf.z,
            "memoryview": lambda: memoryview(shelf.z),
            "data": lambda: shelf.z.data,
            "view": lambda: memoryview(shelf.z[500:]),
            "cast": lambda: memoryview(shelf.z).cast("B")[:4000],
        }[how]()
        source.readinto(target)
    expected = np.zeros(1000)
    if how == "view":
        expected[500:] = content[:500]
    else:
        expected[: 500 if how == "cast" else None] = content[: 500 if how == "cast" else None]
    assert np.array_equal(shelf.z, expected)
    assert not np.array_equal(stored(shm, "z"), expected)
    shelf.z.persist()
    assert np.array_equal(stored(shm, "z"), expected)
    assert shelf._core.store.check().problems == ()


def test_a_file_that_is_read_in_a_transaction_is_rolled_back_with_it(shelf: Any, shm: Path) -> None:
    (shm / "array.dat").write_bytes(np.arange(1000.0).tobytes())
    shelf.z = np.full(1000, 5.0)
    shelf.tx_begin()
    with open(shm / "array.dat", "rb", buffering=0) as source:
        source.readinto(memoryview(shelf.z))
    assert shelf.z[9] == 9
    assert stored(shm, "z") == [5] * 1000
    shelf._close()
    again = pymm.shelf("s", shm)
    assert again.z.tolist() == [5] * 1000
    again._close()


def test_reading_through_a_buffer_is_never_refused(shelf: Any) -> None:
    """In a thread beside a transaction, and in a fork child, where nothing can be declared."""
    shelf.z = np.arange(1000.0)
    z, found = shelf.z, []
    shelf.tx_begin([])

    def look() -> None:
        found.append(bytes(memoryview(z)))
        with open("/dev/zero", "rb", buffering=0) as zero:
            try:
                zero.readinto(z)
            except OSError as error:
                found.append(error.errno)

    beside = threading.Thread(target=look)
    beside.start()
    beside.join()
    shelf.tx_end()
    assert found == [z.tobytes(), errno.EFAULT]
    child = os.fork()
    if child == 0:
        os._exit(bytes(memoryview(z)) != z.tobytes())
    assert os.waitpid(child, 0)[1] == 0


def test_only_what_a_system_call_may_write_is_captured(shelf: Any) -> None:
    """Not what a compiled function reads through a buffer that it could write (Cython's do)."""
    shelf.z = np.arange(1000.0)
    z = shelf.z.asndarray()
    exported = ctypes.pythonapi.PyObject_GetBuffer
    exported.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]
    release = ctypes.pythonapi.PyBuffer_Release
    release.argtypes = [ctypes.c_void_p]

    def captures(flags: int) -> bool:
        shelf.persist()
        view = ctypes.create_string_buffer(1024)
        exported(shelf.z, view, flags)
        release(view)
        with open("/dev/zero", "rb", buffering=0) as zero:
            try:
                zero.readinto(memoryview(z))
            except OSError:
                return False
        return True

    simple, writable, records, full_ro = 0, 1, 0x1D, 0x11C
    assert [captures(one) for one in (simple, writable, records, full_ro)] == [0, 1, 0, 1]


def test_reading_through_a_buffer_writes_nothing(shelf: Any) -> None:
    shelf.z = np.arange(1000.0)
    epoch = shelf._core.store.epoch
    view = memoryview(shelf.z)
    assert bytes(view) == shelf.z.tobytes()
    assert b"".join([shelf.z]) == shelf.z.tobytes()
    shelf.persist()
    assert shelf._core.store.epoch <= epoch + 1
    with pytest.raises(OSError, match="Bad address"), open("/dev/zero", "rb", buffering=0) as zero:
        zero.readinto(view)  # was declared until that commit: refused, not lost
    plain = shelf.z.asndarray()
    shelf._close()
    with open("/dev/zero", "rb", buffering=0) as zero:
        zero.readinto(memoryview(plain))  # its own memory now
    assert not plain.any()


@needs_torch
def test_what_is_loaded_is_a_copy(shelf: Any, shm: Path) -> None:
    """An optimizer takes the tensors that it is given as its own: training on from a checkpoint
    must not write into it."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1, momentum=0.5)
    weight.sum().backward()
    optimizer.step()
    shelf.save({"optimizer": optimizer, "array": np.ones(3), "tensor": torch.ones(2)}, "run")
    found = shelf.load("run")
    found["array"] += 1
    found["tensor"].add_(1)
    fresh = torch.optim.SGD([weight], lr=1, momentum=0.5)
    fresh.load_state_dict(found["optimizer"])
    fresh.step()
    other = torch.optim.SGD([weight], lr=1, momentum=0.5)
    shelf.save(optimizer, "alone")
    shelf.load("alone", other).step()
    again = shelf.load("run")
    assert (again["array"].tolist(), again["tensor"].tolist()) == ([1, 1, 1], [1, 1])
    for state in (again["optimizer"], shelf.load("alone")):
        assert state["state"][0]["momentum_buffer"].tolist() == [1, 1, 1]
    assert {type(again["array"]), type(again["tensor"])} == {np.ndarray, torch.Tensor}


@needs_torch
def test_files_are_read_into_tensors(shelf: Any, shm: Path) -> None:
    (shm / "array.dat").write_bytes(np.arange(1000.0).tobytes())
    shelf.t = torch.zeros(1000, dtype=torch.float64)
    with open(shm / "array.dat", "rb", buffering=0) as source:
        with pytest.raises(OSError, match="Bad address"):
            source.readinto(shelf.t.numpy())
        shelf.tx_begin([shelf.t])
        source.readinto(shelf.t.numpy())
        shelf.tx_end()
    assert stored(shm, "t") == list(range(1000))
