"""Property tests: what array or tensor is stored, by name or in a list, comes back equal, of the
same type, over the heap."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

import pmstore
from pmstore.objects import dtypes

long_doubles = st.sampled_from([np.dtype(np.longdouble), np.dtype(np.clongdouble)])
scalars = (
    nps.scalar_dtypes()
    | nps.unicode_string_dtypes(max_len=5)
    | nps.byte_string_dtypes(max_len=5)
    | long_doubles
)  # others: test_dtypes.py
any_dtype = scalars | nps.array_dtypes(scalars, max_size=4)
shapes = nps.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda a: a,
    "fortran": np.asfortranarray,
    "transposed": lambda a: a.T,
    "axes rolled": lambda a: np.moveaxis(a, 0, -1) if a.ndim else a,
    "reversed": lambda a: a[::-1] if a.ndim else a,
    "strided": lambda a: a[..., ::2] if a.ndim else a,
    "broadcast": lambda a: np.broadcast_to(a, (2, *a.shape)),
}


@pytest.fixture(scope="module")
def store() -> Iterator[pmstore.Store]:
    with tempfile.TemporaryDirectory(
        prefix=f"pmstore-test-{os.getpid()}-", dir="/dev/shm"
    ) as folder:
        with pmstore.open(f"{folder}/s.pm", size="8MiB") as opened:
            yield opened


def stored(store: pmstore.Store, value: Any) -> Iterator[Any]:
    """It, by name and as an item; committed, and gone afterwards."""
    store["g/a"] = value
    store.list("l")[:] = [None, value]
    store.commit()
    yield store["g/a"]
    yield store["l"][1]
    del store["g"], store["l"]


@given(st.data(), st.sampled_from(sorted(LAYOUTS)))
def test_any_array(store: pmstore.Store, data: st.DataObject, layout: str) -> None:
    shape = data.draw(shapes)
    dtype = data.draw(any_dtype)
    value = LAYOUTS[layout](data.draw(nps.arrays(dtype, shape)))
    for back in stored(store, value):
        assert type(back) is np.ndarray
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        assert back.tobytes() == value.tobytes()
        assert back.flags.writeable
        assert not back.nbytes or back.ctypes.data % 64 == 0


@given(st.data())
def test_any_tensor(store: pmstore.Store, data: st.DataObject) -> None:
    torch = pytest.importorskip("torch")
    name = data.draw(
        st.sampled_from([name for name in dtypes.TORCH_DTYPES if hasattr(torch, name)])
    )
    dtype = getattr(torch, name)
    shape = data.draw(shapes)
    count = int(np.prod(shape)) * dtype.itemsize
    raw = data.draw(st.binary(min_size=count, max_size=count))
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    value = (
        torch.frombuffer(bytearray(raw) or bytearray(1), dtype=torch.uint8)[:count]
        .view(dtype)
        .view(shape)
    )
    value = value.permute(data.draw(st.permutations(range(len(shape)))))
    parameter = dtype.is_floating_point and data.draw(st.booleans())
    if parameter:
        value = torch.nn.Parameter(value, requires_grad=data.draw(st.booleans()))
    for back in stored(store, value):
        assert type(back) is type(value)
        assert (back.dtype, back.shape, back.requires_grad) == (
            value.dtype,
            value.shape,
            value.requires_grad,
        )
        # both are dense: strides and the bytes in their order in memory say it all
        if value.numel():
            assert [
                step for side, step in zip(back.shape, back.stride(), strict=True) if side > 1
            ] == [step for side, step in zip(value.shape, value.stride(), strict=True) if side > 1]
            assert bytes(back.untyped_storage().tolist()) == raw
