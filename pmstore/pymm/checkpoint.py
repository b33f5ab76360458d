"""`shelf.save` and `shelf.load`: values of any depth, one variable of the shelf for each leaf,
named as PyMM names them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from pmstore.objects.tensor import is_tensor
from pmstore.pymm.common import HIDDEN, Core
from pmstore.pymm.scalars import plain


def save(core: Core, data: Any, name: str, is_inplace: bool) -> None:
    with core.writing():
        saved = core.store.group(HIDDEN)
        before = set(_leaves(saved[name])) if name in saved else set()
        structure = _put(core, data, name, is_inplace)
        for leaf in before - set(_leaves(structure)):
            core.store.pop(leaf, None)
            core.current().pop(leaf, None)
        saved[name] = structure


def load(core: Core, name: str, target: Any) -> Any:
    structures = core.store.get(HIDDEN, {})
    if name not in structures:
        raise KeyError(
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


# A structure is a list: ["leaf", name], ["value", value], ["dict", [key, structure], ...], ["list",
# structure, ...] or ["tuple", structure, ...].


def _put(core: Core, data: Any, name: str, is_inplace: bool) -> list[Any]:
    data = plain(data)
    kind = _is_torch_object(data)
    if kind is not None:
        suffix = "__+model_#named_parameters_" if kind == "model" else "__+optimizer_#"
        state = data.state_dict()
        return [
            "dict",
            *(
                [key, _put(core, item, f"{name}{suffix}{key}", is_inplace)]
                for key, item in state.items()
            ),
        ]
    if isinstance(data, dict):
        return [
            "dict",
            *(
                [key, _put(core, item, f"{name}__+dict_{key}", is_inplace)]
                for key, item in data.items()
            ),
        ]
    if isinstance(data, (list, tuple)):
        items = (
            _put(core, item, f"{name}__+list_{index}", is_inplace)
            for index, item in enumerate(data)
        )
        return ["list" if isinstance(data, list) else "tuple", *items]
    if isinstance(data, np.ndarray) or is_tensor(data) or type(data) in (str, bytes, int, float):
        _put_leaf(core, data, name, is_inplace)
        return ["leaf", name]
    return ["value", data]


def _put_leaf(core: Core, data: Any, name: str, is_inplace: bool) -> None:
    store = core.store
    if isinstance(data, np.ndarray):
        data = data.view(np.ndarray)
    old = store.get(name) if is_inplace and name in store else None
    if (
        isinstance(data, np.ndarray)
        and type(old) is np.ndarray
        and (old.shape, old.dtype) == (data.shape, data.dtype)
    ):
        store.will_write(old)
        old[...] = data
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
    if kind == "dict":
        return {key: _get(core, part) for key, part in parts}
    items = [_get(core, part) for part in parts]
    return items if kind == "list" else tuple(items)


def _copy(value: Any) -> Any:
    """As PyMM: an optimizer takes the tensors that it is given as its own, and training on from a
    checkpoint must not write into it."""
    if isinstance(value, np.ndarray):
        return value.copy("K")
    return value.detach().clone().requires_grad_(value.requires_grad) if is_tensor(value) else value


def _leaves(structure: Any) -> list[str]:
    kind, *parts = structure
    if kind == "leaf":
        return list(parts)
    if kind == "value":
        return []
    return [leaf for part in parts for leaf in _leaves(part[1] if kind == "dict" else part)]
