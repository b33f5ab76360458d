"""torch tensors on a shelf: a `torch.Tensor` whose in-place operations are transactions. Imported
with the first tensor."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from pmstore.pymm.shelf_memory import ShelvedMemory
from pmstore.pymm.shelf_names import Core, Shadow
from pmstore.store import Store

_TORCH_TYPES: dict[Any, torch.dtype] = {
    float: torch.float64,
    int: torch.int64,
    bool: torch.bool,
    complex: torch.complex128,
}
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_RESHAPING = frozenset(
    (
        *("as_strided_", "resize_", "resize_as_", "squeeze_", "swapaxes_", "swapdims_", "t_"),
        *("transpose_", "unsqueeze_"),
    )
)
"""The in-place methods that change no number, but the tensor's shape."""


def _dtype(dtype: Any) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    return (
        _TORCH_TYPES[dtype] if dtype in _TORCH_TYPES else torch.from_numpy(np.empty(0, dtype)).dtype
    )


class torch_tensor(Shadow):
    """A tensor to be made on the shelf: of a shape (a tuple or torch.Size), filled with zeros, or
    of data (anything else).

    dtype: of torch, numpy or Python; float is float64, as in PyMM. order: for PyMM; tensors made
        here are contiguous.
    """

    def __init__(
        self,
        shape: Any,
        dtype: Any = float,
        strides: Any = None,
        order: str = "C",
        requires_grad: bool = False,
    ) -> None:
        del strides, order
        kind = _dtype(dtype)
        if isinstance(shape, tuple):
            self._data = torch.zeros(shape, dtype=kind, device="cpu")
        else:
            given = (
                shape if isinstance(shape, torch.Tensor) else torch.as_tensor(shape, device="cpu")
            )
            self._data = given.detach().to(kind)
        self._data.requires_grad_(requires_grad)

    def store_in(self, store: Store, name: str) -> None:
        store[name] = self._data


class shelved_torch_tensor(torch.Tensor, ShelvedMemory):
    """A tensor whose bytes are in the store. Its views are of this type too; what is computed from
    it is a plain tensor.

    Writing through it (`t += 1`, `t[i] = v`, `t.fill_(0)`, `out=t`) is a transaction.
    """

    _core: Core
    name_on_shelf: str

    @staticmethod
    def __new__(cls, core: Core, name: str, plain: torch.Tensor) -> shelved_torch_tensor:
        # Not as_subclass: a view of a tensor that requires a gradient would be no leaf.
        self: shelved_torch_tensor = torch.Tensor._make_subclass(
            cls, plain.detach(), plain.requires_grad
        )
        self._core = core
        self.name_on_shelf = name
        return self

    def __init__(self, core: Core, name: str, plain: torch.Tensor) -> None:
        """Does nothing: `__new__` has made the tensor, and torch.Tensor has no use for the
        arguments."""

    def as_tensor(self) -> torch.Tensor:
        """Returns the same memory as a plain tensor. Writes through it are not transactions of
        their own."""
        return self.as_subclass(torch.Tensor)

    def fill(self, value: Any) -> shelved_torch_tensor:
        """Fills the tensor with the value: PyMM's name for `fill_`."""
        self.fill_(value)
        return self

    def persist(self) -> None:
        """Commits what was written past the member. Between tx_begin and tx_end it does nothing:
        the end commits."""
        with self._core.writing():
            pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        with _writing(written), torch._C.DisableTorchFunctionSubclass():
            if isinstance(written, shelved_torch_tensor):
                if func == _SET_DATA:
                    return _set_data(written, args[1])
                if func.__name__ in _RESHAPING and not written._is_view():
                    raise RuntimeError(_reshaping(written, func.__name__))
            result = func(*args, **kwargs)
            return _views(result, args) if written is None else result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return repr(self._as_leaf() if self.is_leaf else self.as_tensor())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_leaf().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns a copy that is a plain tensor."""
        memo[id(self)] = copied = copy.deepcopy(self._as_leaf())
        return copied

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses: the tensor's memory is the shelf's. Raises: RuntimeError."""
        del args, kwargs  # torch functions do not get this one
        raise RuntimeError(_reshaping(self, "set_"))

    def _as_leaf(self) -> Any:
        """Returns the same memory as a plain tensor or parameter, without the graph."""
        plain = self.as_tensor().detach()
        if getattr(self, "_is_param", False):
            return torch.nn.Parameter(plain, self.requires_grad)
        return plain.requires_grad_(self.requires_grad)


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns what the call writes into; None if it writes into nothing."""
    name = getattr(func, "__name__", "")
    if kwargs.get("out") is not None:
        return kwargs["out"]
    in_place = name.startswith("__i") and name not in (
        "__index__",
        "__int__",
        "__invert__",
        "__init__",
    )
    if (
        in_place
        or name in ("__setitem__", "__set__")
        or (name.endswith("_") and not name.endswith("__"))
        or kwargs.get("inplace")
    ):
        # torch.nn.init passes its tensor by name
        return args[0] if args else next(iter(kwargs.values()), None)
    return None


def _writing(written: Any) -> AbstractContextManager[Any]:
    for tensor in written if isinstance(written, (tuple, list)) else (written,):
        if isinstance(tensor, shelved_torch_tensor) and hasattr(tensor, "_core"):
            return tensor._core.writing()
    return nullcontext()


def _set_data(written: shelved_torch_tensor, value: Any) -> None:
    """Does `t.data = value`: copies the numbers in, as the memory stays the shelf's. REQUIRES: no
    torch functions."""
    if (value.shape, value.dtype) != (written.shape, written.dtype):
        raise RuntimeError(
            f"{tuple(value.shape)} of {value.dtype} cannot be the data of {tuple(written.shape)} "
            f"of {written.dtype}: assign it to the shelf, shelf.{written.name_on_shelf} = ..."
        )
    written.detach().copy_(value.detach())


def _reshaping(written: shelved_torch_tensor, method: str) -> str:
    """Says why a method is refused that would change the tensor and not what is stored."""
    name = written.name_on_shelf
    return (
        f"{method} would leave what is stored as it is: assign the result to the shelf, "
        f"shelf.{name} = shelf.{name}.clone().{method}(...)"
    )


def _views(result: Any, args: Any) -> Any:
    """Gives a result that shares a member's memory the member's type, so that writing through it is
    a transaction too. REQUIRES: no torch functions."""
    if (
        type(result) is not torch.Tensor
        or not args
        or not isinstance(args[0], shelved_torch_tensor)
    ):
        return result
    source = args[0]
    if (
        not hasattr(source, "_core")
        or result.layout != torch.strided
        or result.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
    ):
        return result
    view = result.as_subclass(shelved_torch_tensor)
    view._core, view.name_on_shelf = source._core, source.name_on_shelf
    return view


# PyMM programs compare str(type(x)) with this.
shelved_torch_tensor.__module__ = "pymm.torch_tensor"
