"""Shelves in ordinary programs: what a statement says is stored, or the statement raises."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shelf_helpers import needs_torch, stored, torch

from pmstore import pymm

# ---- save ----


def test_parts_of_what_is_saved_are_told_apart(shelf: Any) -> None:
    shelf.x = 5
    for data in (
        {2: 5, "2": 6, True: 7.0, None: b"8", (1, 2): 9},
        {"a__+dict_b": 1, "a": {"b": 2}, "a/b": 3},
        {1: np.zeros(1), "1": np.ones(1)},
        {"list": [1], "tuple": (1,), "0": {0: [[], {}]}},
        7,
        np.arange(3),
    ):
        for _ in range(2):
            shelf.save(data, "x")
            np.testing.assert_equal(shelf.load("x"), data)
    assert shelf.x == 5
    assert shelf.items == ["x", "x__#ndarray#"]


def test_a_name_that_is_taken_is_not_written_over(shelf: Any) -> None:
    setattr(shelf, "run__+list_0__#int#", 1)
    with pytest.raises(ValueError, match="another variable"):
        shelf.save([2], "run")
    assert shelf.items == ["run__+list_0__#int#"]
    same = {"a#__+dict_#str#_#b": 1, "a": {"b": 2}}
    with pytest.raises(ValueError, match="another variable"):
        shelf.save(same, "other")


def test_ordered_dicts_stay(shelf: Any) -> None:
    shelf.save({"o": OrderedDict(b=1, a=OrderedDict())}, "run")
    found = shelf.load("run")
    assert (type(found["o"]), list(found["o"])) == (OrderedDict, ["b", "a"])
    assert type(found["o"]["a"]) is OrderedDict


# ---- arrays and numbers ----


def test_masks_are_not_dropped(shelf: Any) -> None:
    masked = np.ma.masked_array([1, 2, 3], [0, 1, 0])
    shelf.l = pymm.linked_list()
    shelf.save({"a": np.zeros(3, int)}, "run")
    for store in (
        lambda: setattr(shelf, "x", masked),
        lambda: shelf.l.append(masked),
        lambda: shelf.save({"a": masked}, "run"),
    ):
        with pytest.raises(TypeError, match="masked array"):
            store()
    assert (shelf.x, len(shelf.l)) == (None, 0)


def test_numbers_of_numpy(shelf: Any, shm: Path) -> None:
    shelf.x = np.arange(5)
    shelf.n = shelf.x.sum()
    shelf.n += 1
    shelf.f, shelf.b = np.float32(1.5), np.bool_(True)
    assert (stored(shm, "n"), stored(shm, "f"), stored(shm, "b")) == (11, 1.5, True)
    for wrong in (np.complex64(1), np.longdouble(1), np.datetime64("2020-01-01")):
        with pytest.raises(RuntimeError, match="cannot be put"):
            shelf.y = wrong


@pytest.mark.parametrize("name", ["shape", "dtype", "strides"])
@pytest.mark.filterwarnings("ignore:Setting the:DeprecationWarning")
def test_what_describes_a_variable_is_not_changed_in_memory_alone(shelf: Any, name: str) -> None:
    shelf.x = np.arange(6.0)
    new = {"shape": (2, 3), "dtype": "i8", "strides": (8,)}[name]
    with pytest.raises(RuntimeError, match=r"shelf\.x = "):
        setattr(shelf.x, name, new)
    view = shelf.x[:]
    setattr(view, name, new)
    view[...] = 0
    assert not shelf.x.any()
    old = shelf.x
    shelf.x = 1
    setattr(old, name, new)


def test_copyto_by_its_keywords_is_a_transaction(shelf: Any, shm: Path) -> None:
    shelf.x = np.zeros(3)
    np.copyto(src=1, dst=shelf.x)
    assert stored(shm, "x") == [1, 1, 1]
    np.place(vals=[2], mask=[True, False, False], arr=shelf.x)
    assert stored(shm, "x") == [2, 1, 1]


def test_a_name_with_a_slash_is_refused(shelf: Any) -> None:
    with pytest.raises(RuntimeError, match="leave out the /"):
        setattr(shelf, "a/b", 1)
    assert shelf.items == []


def test_lists_do_what_lists_do(shelf: Any, shm: Path) -> None:
    shelf.l = pymm.linked_list([3, 1, 2])
    shelf.l.sort(key=lambda item: -item)
    assert stored(shm, "l") == [3, 2, 1]
    more = [0]
    assert shelf.l + more == [3, 2, 1, 0]
    assert more + shelf.l == [0, 3, 2, 1]
    assert shelf.l + shelf.l == 2 * shelf.l == shelf.l * 2 == [3, 2, 1, 3, 2, 1]
    assert type(shelf.l.copy()) is list
    with pytest.raises(TypeError):
        shelf.l + tuple(more)
    missing = set(dir(list)) - set(dir(shelf.l)) - {"__class_getitem__", "__getstate__"}
    assert missing <= {"__ge__", "__gt__", "__le__", "__lt__", "__imul__"}


# ---- tensors ----


@needs_torch
def test_new_data_of_a_tensor_goes_into_the_shelf(shelf: Any, shm: Path) -> None:
    shelf.t = torch.zeros(3, requires_grad=True)
    (shelf.t * 2).sum().backward()
    t, address = shelf.t, shelf.t.data_ptr()
    t.data = t.data - t.grad
    assert (t.data_ptr(), stored(shm, "t")) == (address, [-2, -2, -2])
    t.data += 1  # a getter, a sum in place, and the setter
    t.data.mul_(2)
    assert (t.data_ptr(), stored(shm, "t")) == (address, [-2, -2, -2])
    shelf.l = pymm.linked_list([torch.zeros(2)])
    shelf.l[0].data = torch.ones(2)
    assert stored(shm, "l")[0].tolist() == [1, 1]
    for other in (torch.zeros(4), torch.zeros(3, dtype=torch.float64)):
        with pytest.raises(RuntimeError, match=r"shelf\.t = "):
            t.data = other


@needs_torch
def test_a_tensor_is_not_reshaped_in_memory_alone(shelf: Any, shm: Path) -> None:
    shelf.t = torch.arange(6.0).reshape(2, 3)
    for change in (
        lambda t: t.t_(),
        lambda t: t.unsqueeze_(0),
        lambda t: t.resize_(1),
        lambda t: t.set_(torch.ones(2)),
        lambda t: torch.Tensor.transpose_(t, 0, 1),
    ):
        with pytest.raises(RuntimeError, match=r"shelf\.t = "):
            change(shelf.t)
    row = shelf.t[0]
    row.unsqueeze_(0).add_(1)
    assert stored(shm, "t") == [[1, 2, 3], [3, 4, 5]]


@needs_torch
def test_a_tensor_as_parameter_of_a_model(shelf: Any, shm: Path) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    shelf.w = model.weight.detach()
    model.weight = torch.nn.Parameter(shelf.w)
    optimizer = torch.optim.AdamW(model.parameters())
    before = model.weight.tolist()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert stored(shm, "w") == model.weight.tolist() != before
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    for other in (copy.deepcopy(model), torch.load(written, weights_only=False)):
        assert type(other.weight) is torch.nn.Parameter
        assert torch.equal(other.weight, model.weight)
        with torch.no_grad():
            other.weight += 1
    assert stored(shm, "w") == model.weight.tolist()
