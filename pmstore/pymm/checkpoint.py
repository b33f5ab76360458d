"""`shelf.save` and `shelf.load`: values of any depth, one variable of the shelf for each leaf,
named as PyMM names them."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

import numpy as np

from pmstore.errors import NoSuchNameError
from pmstore.objects.tensor import is_tensor
from pmstore.pymm.arrays import shelved_ndarray
from pmstore.pymm.scalars import plain
from pmstore.pymm.shelf_names import HIDDEN, Core


def save(core: Core, data: Any, name: str, is_inplace: bool) -> None:
    with core.writing():
        saved = core.store.group(HIDDEN)
        before = set(_leaves(saved[name])) if name in saved else set()
        structure = _Saving(core, name, before, is_inplace).put(data, name)
        for leaf in before - set(_leaves(structure)):
            core.store.pop(leaf, None)
            core.current().pop(leaf, None)
        saved[name] = structure


def load(core: Core, name: str, target: Any) -> Any:
    structures = core.store.get(HIDDEN, {})
    if name not in structures:
        raise NoSuchNameError(
            f"nothing was saved as {name!r}; saved were {', '.join(structures) or 'no names'}"
        )
    data = _get(core, structures[name])
    if target is None:
        return data
    target.load_state_dict(data)
    return target


def _is_torch_object(data: Any) -> str | None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.nn.Module):
        return "model"
    return "optimizer" if torch is not None and isinstance(data, torch.optim.Optimizer) else None


# A structure is a list: ["leaf", name], ["value", value], ["dict", [key, structure], ...],
# ["ordereddict", [key, structure], ...], ["list", structure, ...] or ["tuple", structure, ...].


class _Saving:
    """One call of `save`. It knows the names of the leaves that it has stored."""

    def __init__(self, core: Core, name: str, before: set[str], is_inplace: bool) -> None:
        """Begins a call of `save`. before: the leaves of what was saved under the name last."""
        self._core, self._name, self._before, self._is_inplace = core, name, before, is_inplace
        self._leaves: set[str] = set()

    def put(self, data: Any, name: str) -> list[Any]:
        """Stores the data, in leaves whose names begin with that name. Returns the data's
        structure."""
        data = plain(data)
        kind = _is_torch_object(data)
        if kind is not None:
            suffix = "__+model_#named_parameters_" if kind == "model" else "__+optimizer_#"
            state = data.state_dict()
            return ["dict", *([key, self.put(state[key], f"{name}{suffix}{key}")] for key in state)]
        if isinstance(data, dict):
            kind = "ordereddict" if isinstance(data, OrderedDict) else "dict"
            return [
                kind,
                *(
                    [key, self.put(item, f"{name}__+{kind}_#{type(key).__name__}#_#{key}#")]
                    for key, item in data.items()
                ),
            ]
        if isinstance(data, (list, tuple)):
            items = (self.put(item, f"{name}__+list_{index}") for index, item in enumerate(data))
            return ["list" if isinstance(data, list) else "tuple", *items]
        if isinstance(data, np.ndarray):
            return self._leaf(data, f"{name}__#ndarray#")
        if is_tensor(data):
            return self._leaf(data, f"{name}__#Tensor#")
        if type(data) in (str, bytes, int, float):
            return self._leaf(data, f"{name}__#{type(data).__name__}#")
        return ["value", data]

    def _leaf(self, data: Any, name: str) -> list[Any]:
        name = name.replace("/", "%2F")  # not the name of a group
        if name in self._leaves or (name in self._core.store and name not in self._before):
            raise ValueError(
                f"what is saved as {self._name!r} has a part whose name is that of another "
                f"variable of the shelf, {name!r}: use other keys, or save it as another name"
            )
        self._leaves.add(name)
        _put_leaf(self._core, data, name, self._is_inplace)
        return ["leaf", name]


def _put_leaf(core: Core, data: Any, name: str, is_inplace: bool) -> None:
    store = core.store
    old = store.get(name) if is_inplace and name in store else None
    if (
        type(data) in (np.ndarray, shelved_ndarray)
        and type(old) is np.ndarray
        and (old.shape, old.dtype) == (data.shape, data.dtype)
    ):
        store.will_write(old)
        old[...] = data.view(np.ndarray)
    elif is_tensor(data) and is_tensor(old) and (old.shape, old.dtype) == (data.shape, data.dtype):
        store.will_write(old)
        old.detach().copy_(data.detach())
    else:
        if hasattr(data, "name_on_shelf"):
            data = data.as_tensor()
        store[name] = data
        core.current().pop(name, None)


def _get(core: Core, structure: Any) -> Any:
    kind, *parts = structure
    if kind == "leaf":
        return _copy(core.store[parts[0]])
    if kind == "value":
        return parts[0]
    if kind in ("dict", "ordereddict"):
        found = ((key, _get(core, part)) for key, part in parts)
        return dict(found) if kind == "dict" else OrderedDict(found)
    items = [_get(core, part) for part in parts]
    return items if kind == "list" else tuple(items)


def _copy(value: Any) -> Any:
    """Returns a copy of an array or tensor, as PyMM does: an optimizer takes the tensors that it is
    given as its own, and training on from a checkpoint must not write into it."""
    if isinstance(value, np.ndarray):
        return value.copy("K")
    return value.detach().clone().requires_grad_(value.requires_grad) if is_tensor(value) else value


def _leaves(structure: Any) -> list[str]:
    kind, *parts = structure
    if kind == "leaf":
        return list(parts)
    if kind == "value":
        return []
    named = kind in ("dict", "ordereddict")
    return [leaf for part in parts for leaf in _leaves(part[1] if named else part)]
