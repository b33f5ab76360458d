"""Tensors and arrays that leave the store's memory, which numpy and torch allow: taken back in, or
an error; never lost."""

from __future__ import annotations

import copy
import gc
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing

import pmstore
import pmstore.torch

Leave = Callable[[torch.Tensor], object]


def stored(path: Path, name: str = "w") -> Any:
    with pmstore.open(path, "r") as store:
        return store[name].clone() if isinstance(store[name], torch.Tensor) else store[name].copy()


@pytest.fixture
def w(store: pmstore.Store) -> torch.Tensor:
    store["w"] = torch.zeros(1000)
    store.commit()
    w: torch.Tensor = store["w"]
    return w


def assign_data(w: torch.Tensor) -> object:
    w.data = torch.full((1000,), 7.0)
    return None


def assign_data_beside_a_view(w: torch.Tensor) -> object:
    view = w.view(10, 100)  # keeps the old storage alive
    w.data = torch.full((1000,), 7.0)
    return view


def set_storage(w: torch.Tensor) -> object:
    w.set_(torch.full((1000,), 7.0).untyped_storage(), 0, (1000,), (1,))
    return None


@pytest.mark.parametrize("leave", [assign_data, assign_data_beside_a_view, set_storage])
@pytest.mark.parametrize("end", ["commit", "block", "enter", "leave"])
def test_what_moved_to_private_memory_is_taken_in(path: Path, leave: Leave, end: str) -> None:
    with pmstore.open(path, "w", size="8MB") as store:
        store["w"] = torch.zeros(1000)
        store.commit()
        w = store["w"]
        address = w.data_ptr()
        if end == "block":
            with store.transaction():
                kept = leave(w)
        else:
            kept = leave(w)
        if end == "commit":
            store.commit()
        elif end == "enter":
            with store.transaction():
                pass
        if end != "leave":
            assert w.data_ptr() == address
            assert store["w"] is w
            store.rollback()
            assert w[0] == 7
    del kept
    assert stored(path)[0] == 7


@pytest.mark.parametrize("leave", [assign_data, assign_data_beside_a_view, set_storage])
def test_a_look_up_takes_it_in(store: pmstore.Store, w: torch.Tensor, leave: Leave) -> None:
    address = w.data_ptr()
    kept = leave(w)
    assert store["w"] is w
    assert w.data_ptr() == address
    del kept
    w.add_(1)
    store.commit()
    store.rollback()
    assert w[0] == 8


def test_the_block_of_a_moved_tensor_is_nobody_elses(store: pmstore.Store, w: torch.Tensor) -> None:
    address = w.data_ptr()
    w.data = torch.full((1000,), 7.0)
    del store["w"]
    store.commit()  # not an error: nothing of that name is stored
    store["x"] = torch.full((1000,), 3.0)
    store.commit()
    assert store["x"] is not w
    assert store["x"][0] == 3
    assert w[0] == 7
    assert w.data_ptr() != address


def test_torch_refuses_to_swap_it(w: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(w, torch.zeros(1000))


def test_no_pin_is_left(store: pmstore.Store, w: torch.Tensor) -> None:
    w.data = torch.ones(1000)
    store.commit()
    w.data = torch.ones(1000)
    del w
    store.commit()
    assert store.stats().pinned_bytes == 0
    x = store["w"]
    x.data = torch.ones(1000)
    del store["w"]
    store.commit()
    assert store.stats().pinned_bytes == 0


@pytest.mark.parametrize(
    ("leave", "why"),
    [
        (lambda w: setattr(w, "data", torch.zeros(10)), r"shape \(10,\)"),
        (lambda w: setattr(w, "data", torch.zeros(1000, dtype=torch.float64)), "float64"),
        (lambda w: w.set_(torch.zeros(1000).share_memory_()), "shared memory"),
    ],
)
def test_what_cannot_be_taken_in_raises(
    store: pmstore.Store, w: torch.Tensor, leave: Leave, why: str
) -> None:
    leave(w)
    epoch = store.epoch
    for commit in (store.commit, store.transaction().__enter__, lambda: store["w"]):
        with pytest.raises(pmstore.MovedError, match=f"'w' left the store.*{why}"):
            commit()
    assert store.epoch == epoch
    store["w"] = w  # the way out that the message names: stored anew, and w is the program's
    store.commit()
    assert store["w"] is not w
    assert torch.equal(store["w"], w)


def test_a_block_that_moved_something_for_good_is_rolled_back(store: pmstore.Store) -> None:
    store["w"] = torch.zeros(1000)
    store.commit()
    w = store["w"]
    with pytest.raises(pmstore.MovedError), store.transaction():
        store["n"] = 1
        w.data = torch.zeros(5)
    assert "n" not in store
    del w  # the other way out
    assert store["w"].shape == (1000,)
    store.commit()


@pytest.mark.parametrize("share", ["tensor", "module", "storage", "parameter"])
@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_sharing_is_refused(
    store: pmstore.Store, w: torch.Tensor, share: str, strategy: str
) -> None:
    module = torch.nn.Linear(1, 1)
    module.weight = torch.nn.Parameter(w, requires_grad=False)
    address = w.data_ptr()
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        with pytest.raises(pmstore.MovedError, match=store.path):
            {
                "tensor": w.share_memory_,
                "module": module.share_memory,
                "storage": w.untyped_storage().share_memory_,
                "parameter": module.weight.share_memory_,
            }[share]()
        copied = copy.deepcopy(module).share_memory()
        assert copied.weight.is_shared()
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    assert w.data_ptr() == address
    assert store["w"] is w
    torch.zeros(5).share_memory_()  # others are


def add_one(into: Any, out: Any, given: torch.Tensor) -> None:
    for tensor in (given, into.get()):
        out.put(float(tensor.sum()))
        tensor.add_(1)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_is_sent_copies(store: pmstore.Store, method: str) -> None:
    store["w"] = torch.ones(1000)
    store["v"] = torch.nn.Parameter(torch.full((10, 10), 2.0))
    store.commit()
    w, v = store["w"], store["v"]
    places = w.data_ptr(), v.data_ptr()
    context = torch.multiprocessing.get_context(method)
    into, out = context.SimpleQueue(), context.Queue()
    given = w if method == "spawn" else w.clone()  # a fork child has w itself, to read
    child = context.Process(target=add_one, args=(into, out, given), daemon=True)
    child.start()
    into.put(v.detach())
    try:
        assert [out.get(timeout=300), out.get(timeout=300)] == [1000, 200]
    except queue.Empty:
        raise AssertionError(f"the child ended with {child.exitcode}") from None
    child.join(300)
    assert child.exitcode == 0
    assert places == (w.data_ptr(), v.data_ptr())
    assert store["w"] is w
    assert w.sum() == 1000


def read(out: Any, done: Any, w: torch.Tensor) -> None:
    out.put(float(w.sum()))
    out.put(w)  # a tensor of the store goes through a queue of a child too
    done.get()


def test_a_fork_child_reads(store: pmstore.Store, w: torch.Tensor) -> None:
    w.fill_(2)
    store.commit()
    context = torch.multiprocessing.get_context("fork")
    out, done = context.SimpleQueue(), context.SimpleQueue()
    child = context.Process(target=read, args=(out, done, w), daemon=True)
    child.start()
    assert out.get() == 2000
    assert out.get().sum() == 2000
    done.put(None)
    child.join(300)
    assert child.exitcode == 0


# ---- numpy, and objects that were changed in place -----------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "alter",
    [
        lambda a: setattr(a, "shape", (10, 10)),
        lambda a: setattr(a, "dtype", np.int64),
        lambda a: setattr(a, "strides", (0,)),
        lambda a: a.setflags(write=False),
    ],
)
def test_an_array_that_was_altered_is_not_given_out(
    store: pmstore.Store, alter: Callable[[Any], object]
) -> None:
    store["a"] = np.ones(100)
    a = store["a"]
    alter(a)
    store.commit()
    b = store["a"]
    assert b is not a
    assert (b.shape, b.dtype, b.strides, b.flags.writeable) == ((100,), np.float64, (8,), True)
    assert store["a"] is b
    b[:] = 5
    store.commit()
    assert a.ravel().view(np.float64)[0] == 5  # it is over the same memory still


def test_fields_that_were_renamed(store: pmstore.Store) -> None:
    store["a"] = np.zeros(4, [("x", "f4"), ("y", "f4")])
    a = store["a"]
    assert store["a"] is a
    a.dtype.names = ("p", "q")
    assert store["a"].dtype.names == ("x", "y")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_array_over_other_memory_raises(store: pmstore.Store) -> None:
    store["a"] = np.ones(100)
    a = store["a"]
    try:
        a.data = np.zeros(100).data
    except AttributeError:  # a numpy that does not allow it
        return
    with pytest.raises(pmstore.MovedError, match="'a' left the store"):
        store.commit()
    with pytest.raises(pmstore.MovedError, match="'a' left the store"):
        store["a"]
    del a
    assert store["a"].sum() == 100
    store.commit()
    assert store.stats().pinned_bytes == 0


@pytest.mark.parametrize(
    "alter", [lambda w: w.t_(), lambda w: w.resize_(5), lambda w: w.unsqueeze_(0)]
)
def test_a_tensor_that_was_altered_is_not_given_out(store: pmstore.Store, alter: Leave) -> None:
    store["w"] = torch.ones(10, 20)
    w = store["w"]
    alter(w)
    store.commit()
    v = store["w"]
    assert v is not w
    assert v.shape == (10, 20)
    assert v.stride() == (20, 1)
    assert store["w"] is v
    assert w.data_ptr() == v.data_ptr()


@pytest.mark.parametrize("dtype", [torch.complex32, torch.float8_e4m3fn, torch.uint16, torch.bool])
def test_dtypes_are_compared(store: pmstore.Store, dtype: torch.dtype) -> None:
    w = store.tensor("w", (8, 8), dtype)
    assert store["w"] is w
    w.data = torch.empty(8, 8, dtype=torch.uint8).zero_().view(8, 8)
    with pytest.raises(pmstore.MovedError, match="uint8"):
        store.commit()
    del w
    gc.collect()
    store.commit()


def test_items_and_slots(store: pmstore.Store) -> None:
    items, pair = store.list("items"), store.slots("pair", 10, torch.float32)
    items.append(torch.zeros(10))
    x, current = items[0], pair.current
    for tensor in (x, current):
        tensor.data = torch.full((10,), 3.0)
    store.commit()
    assert items[0] is x
    assert pair.current is current
    store.rollback()
    assert x[0] == current[0] == 3


# ---- attached runs -------------------------------------------------------------------------------


def attached(store: pmstore.Store) -> tuple[torch.nn.Linear, torch.optim.SGD, pmstore.torch.Run]:
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, pmstore.torch.attach(store, model=model, optimizer=optimizer)


def step(model: torch.nn.Linear, optimizer: torch.optim.SGD) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 20, dtype=model.weight.dtype)).square().mean().backward()
    optimizer.step()


def test_an_attached_model_is_not_shared(path: Path) -> None:
    with pmstore.open(path, "w", size="8MB") as store:
        model, optimizer, run = attached(store)
        for at in run.steps(4):
            if at == 2:
                with pytest.raises(pmstore.MovedError):
                    model.share_memory()
            step(model, optimizer)
        trained = model.weight.detach().clone()
    with pmstore.open(path) as store:
        assert torch.equal(attached(store)[0].weight, trained)


def test_an_attached_parameter_over_shared_memory(store: pmstore.Store) -> None:
    model, optimizer, run = attached(store)
    with run.next_step():
        model.weight.data = model.weight.detach().clone().share_memory_()
        step(model, optimizer)
    with pytest.raises(pmstore.torch.MismatchError, match=r"weight.*shared memory"):
        run.commit()
    run.rollback()
    with run.next_step():
        step(model, optimizer)
    run.commit()
