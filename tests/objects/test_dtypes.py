"""Every non-object dtype of numpy, and every dense CPU dtype of torch, keeps bytes, shape and
order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.errors import FormatVersionError
from pmstore.objects import dtypes

SIMPLE = [
    f"{order}{kind}"
    for order in "<>"
    for kind in ["f2", "f4", "f8", "c8", "c16", "i2", "i4", "i8", "u2", "u4", "u8", "U5"]
]
SIMPLE += [
    "?",
    "i1",
    "u1",
    "S7",
    "V9",
    "g",
    "G",
    "M8",
    "m8",
    "M8[ns]",
    "<M8[25s]",
    ">m8[us]",
    "U0",
    "S0",
    "V0",
    "M8[generic]",
]
STRUCTURED = [
    np.dtype([("a", "<f4"), ("b", ">i8", (2, 3)), ("c", "S3")]),
    np.dtype([("a", "u1"), ("b", "f8")], align=True),
    np.dtype({"names": ["x", "y"], "formats": ["f4", "i2"], "offsets": [8, 1], "itemsize": 20}),
    np.dtype([(("title", "name"), "f8"), ("inner", [("q", "g"), ("ü", "?")])]),
    np.dtype([]),
]
NUMPY = [np.dtype(name) for name in SIMPLE] + STRUCTURED
SHAPES = [(), (0,), (3,), (2, 0, 3), (2, 3), (2, 1, 3)]


@pytest.mark.parametrize("dtype", NUMPY, ids=str)
def test_numpy_descriptor(dtype: np.dtype[Any]) -> None:
    assert dtypes.decode_numpy(dtypes.encode_numpy(dtype)) == dtype


@pytest.mark.parametrize("dtype", NUMPY, ids=str)
def test_numpy_arrays_survive_a_close(path: Path, dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(1)
    arrays = {}
    with pmstore.open(path) as store:
        for i, shape in enumerate(SHAPES):
            for order in "CF":
                raw = rng.integers(0, 2, int(np.prod(shape)) * dtype.itemsize, np.uint8)
                value = (
                    np.ndarray(shape, dtype, raw.tobytes(), order=order)
                    if raw.size
                    else np.empty(shape, dtype, order)
                )
                arrays[f"{i}{order}"] = value
                store[f"{i}{order}"] = value
    with pmstore.open(path) as store:
        for name, value in arrays.items():
            back = store[name]
            assert (back.dtype, back.shape) == (value.dtype, value.shape)
            # In memory order: else numpy copies by field, and what lies between fields is anything.
            assert (back.T if name.endswith("F") else back).tobytes() == (
                value.T if name.endswith("F") else value
            ).tobytes()
            if value.size > 1 and value.ndim > 1 and dtype.itemsize:
                assert back.strides == value.strides
            assert back.flags.writeable
            if value.nbytes:
                assert back.ctypes.data % 64 == 0
            assert store[name] is back
        assert store.check().problems == ()


@pytest.mark.parametrize("name", dtypes.TORCH_DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_tensors_survive_a_close(path: Path, name: str, shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, name):
        pytest.skip("this torch does not have it")
    dtype = getattr(torch, name)
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 2, (count,), dtype=torch.uint8)
    value = raw.view(dtype).view(shape)
    with pmstore.open(path) as store:
        store["t"] = value
        assert store.tensor("zeros", shape, dtype).shape == shape
    with pmstore.open(path) as store:
        back = store["t"]
        assert (back.dtype, back.shape, back.stride()) == (dtype, value.shape, value.stride())
        assert back.untyped_storage().tolist() == value.untyped_storage().tolist()
        assert store["t"] is back


def test_torch_strides_grad_and_parameters(path: Path) -> None:
    torch = pytest.importorskip("torch")
    nhwc = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    with pmstore.open(path) as store:
        store["nhwc"] = nhwc
        store["sliced"] = nhwc[:, ::2]
        store["leaf"] = torch.ones(3, requires_grad=True)
        store["result"] = torch.ones(3, requires_grad=True) * 2
        store["parameter"] = torch.nn.Parameter(torch.ones(3))
        store["frozen"] = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        store["conj"] = torch.tensor([1 + 2j]).conj()
    with pmstore.open(path) as store:
        assert store["nhwc"].is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(store["nhwc"], nhwc)
        assert torch.equal(store["sliced"], nhwc[:, ::2])
        assert store["leaf"].requires_grad
        assert store["leaf"].is_leaf
        assert store["result"].is_leaf
        assert isinstance(store["parameter"], torch.nn.Parameter)
        assert store["parameter"].requires_grad
        assert not store["frozen"].requires_grad
        assert store["conj"].tolist() == [1 - 2j]
        parameter = store["parameter"]
        (parameter * 2).sum().backward()
        assert parameter.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "dtype", ["O", [("a", "f4"), ("b", "O")], np.dtypes.StringDType()], ids=str
)
def test_objects_are_refused(store: pmstore.Store, dtype: Any) -> None:
    with pytest.raises(TypeError, match="Python objects"):
        store.zeros("a", 3, dtype)
    with pytest.raises(TypeError, match="Python objects"):
        store["a"] = np.zeros(3, dtype)
    assert "a" not in store


@pytest.mark.parametrize(
    "data",
    [
        "O",
        "f4,O",
        "|O",
        "<f4\n",
        "x",
        [],
        {},
        {"names": []},
        3,
        None,
        ["<f4", [-1]],
        ["<f4", 2],
        "<M8[zz]",
    ],
)
def test_hostile_descriptors(data: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        dtypes.decode_numpy(data)


def test_long_double_of_another_machine() -> None:
    with pytest.raises(FormatVersionError, match="long double"):
        dtypes.decode_numpy({"longdouble": "<f16", "format": "112:16384x"})


def test_shapes_of_subarray_dtypes(store: pmstore.Store) -> None:
    assert store.zeros("a", 3, np.dtype(("f4", (2,)))).shape == (3, 2)


def test_renamed_fields_are_one_array_s_alone(path: Path) -> None:
    """numpy lets the fields of an array's dtype be renamed in place: dtypes of stored arrays are
    not shared."""
    kind = np.dtype([("mean", "f8"), ("var", "f8"), ("inner", [("a", "f4"), ("b", "f4")])])
    value = np.array([(1.0, 2.0, (3.0, 4.0))] * 3, kind)
    with pmstore.open(path) as store:
        for name in ("x", "y", "z"):
            store[name], store[f"empty/{name}"] = value, value[:0]
        store.slots("pair", 3, kind)
    with pmstore.open(path) as store:
        for before, after in (("x", "y"), ("empty/x", "empty/y")):
            renamed = store[before]
            renamed.dtype.names = ("var", "mean", "inner")
            renamed.dtype["inner"].names = ("b", "a")
            assert store[after].dtype == kind
        assert store["y"]["mean"].tolist() == [1.0] * 3
        pair = store["pair"]
        pair.next.dtype.names = ("var", "mean", "inner")
        assert pair.current.dtype == kind
        del renamed
    with pmstore.open(path) as store:
        assert [store[name].dtype == kind for name in ("x", "y", "z", "empty/x", "empty/z")] == [
            True
        ] * 5
