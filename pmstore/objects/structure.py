"""Structures (state_dicts, states of generators) as a plain value and a list of arrays.

A store holds values and, under names of their own, arrays. A state_dict mixes the two, and has
types a store refuses to guess at. `split` takes it apart: the *skeleton* holds everything a store
can hold as a value, with marks where an array or a collection of another type was; the arrays come
beside it. `join` puts it together again. `encode` gives the skeleton as the bytes that are stored.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, EnumMeta
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pmstore._engine import _binding
from pmstore.objects import values
from pmstore.objects.readonly import PLAIN
from pmstore.objects.tensor import is_tensor

if TYPE_CHECKING:
    import torch

Array: TypeAlias = "np.ndarray[Any, Any] | torch.Tensor"

# A dict with this key is a mark. A user's dict that has it too is wrapped as the pairs of a mark.
_MARK = "pmstore"
_MAPPINGS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_PLAIN_OF: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,  # of these classes: another one may say `str(item)` of itself
    float: float.__float__,
    str: str.__str__,
    bytes: lambda item: memoryview(item).tobytes(),
}


def encode(state: Any, arrays: tuple[type, ...] = (np.ndarray,)) -> tuple[bytes, list[Array]]:
    """Returns the bytes of the skeleton, and the arrays: what `split` and `values.encode` make, in
    one pass. arrays: types that are arrays in it; other ones are found too, more slowly.

    Raises: TypeError, as `split`.
    """
    known = _binding.encode(state, arrays)
    if known is not None:
        return known
    skeleton, found = split(state)
    return values.encode(skeleton), found


def split(state: Any) -> tuple[Any, list[Array]]:
    """Splits a structure into its skeleton and its arrays. The arrays are the structure's own, not
    copies.

    Raises:
        TypeError: something in it is neither data nor a collection of data; the message says where.

    >>> split({"lr": [0.1], "weights": np.zeros(2)})
    ({'lr': [0.1], 'weights': {'pmstore': 'array', 'index': 0}}, [array([0., 0.])])
    """
    arrays: list[Array] = []
    return _split(state, arrays, ""), arrays


def _split(item: Any, arrays: list[Array], where: str) -> Any:
    kind = PLAIN.get(type(item), type(item))
    if kind in _PLAIN or isinstance(item, np.generic):
        return item
    if isinstance(item, np.ndarray) or is_tensor(item):
        arrays.append(item)
        return {_MARK: "array", "index": len(arrays) - 1}
    if kind is list or kind is tuple:
        return kind(_split(part, arrays, f"{where}[{index}]") for index, part in enumerate(item))
    # A defaultdict comes back as a dict: its factory is code, and whoever loads the state has its
    # own.
    if kind in (dict, defaultdict) and _MARK not in item:
        return {
            _key(key, where): _split(part, arrays, f"{where}[{key!r}]")
            for key, part in item.items()
        }
    if kind in (dict, OrderedDict, Counter, defaultdict):
        name = {OrderedDict: "OrderedDict", Counter: "Counter"}.get(kind, "dict")
        pairs = [
            [_key(key, where), _split(part, arrays, f"{where}[{key!r}]")]
            for key, part in item.items()
        ]
        return {_MARK: name, "pairs": pairs}
    if kind in (set, frozenset, deque):
        parts = list(item) if kind is deque else sorted(item)
        marked: dict[str, Any] = {
            _MARK: kind.__name__,
            "parts": [_split(part, arrays, where) for part in parts],
        }
        if kind is deque:
            marked["maxlen"] = item.maxlen
        return marked
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
        return {_MARK: kind.__name__, "name": str(item)}
    plain = _plain(item)
    if isinstance(item, Enum) and item.name in type(item).__members__:
        # programs compare members by `is`
        name = f"{kind.__module__}:{kind.__qualname__}"
        if _find_class(name) is kind:
            return {_MARK: "enum", "class": name, "name": item.name, "value": plain}
        if plain is None:
            raise TypeError(
                f"cannot store the state at {where or 'the top'}: the enumeration "
                f"{kind.__qualname__} is found under no name of its module, as after a restart it "
                "has to be: define it at the top of a module"
            )
    if plain is not None:
        return plain
    raise TypeError(
        f"cannot store the state at {where or 'the top'}: {kind.__module__}.{kind.__qualname__} is "
        "neither data nor a collection of data. Leave it out of state_dict(), or give the object a "
        "state_dict() of plain values"
    )


def _plain(item: Any) -> Any:
    """Returns the plain value of a number, text or bytes of another class. None: it is none."""
    for base, plain in _PLAIN_OF.items():
        if isinstance(item, base):
            return plain(item)
    return None


def _key(key: Any, where: str) -> Any:
    if type(key) in (bool, int, float, str, bytes, type(None)):
        return key
    if type(key) is tuple:
        return tuple(_key(part, where) for part in key)
    raise TypeError(
        f"cannot store the state at {where or 'the top'}: the key {key!r} is not a plain value"
    )


def join(skeleton: Any, arrays: Sequence[Array]) -> Any:
    """Puts a structure together again that `split` took apart. The arrays are put in as given, not
    copied.

    Raises:
        ValueError: a mark this version does not know.

    >>> join(*split({"milestones": Counter([30, 80]), "seen": {1, 2}}))
    {'milestones': Counter({30: 1, 80: 1}), 'seen': {1, 2}}
    """
    kind = PLAIN.get(type(skeleton), type(skeleton))
    if kind is list or kind is tuple:
        return kind(join(part, arrays) for part in skeleton)
    if kind is not dict:
        return skeleton
    if _MARK not in skeleton:
        return {key: join(part, arrays) for key, part in skeleton.items()}
    return _unmark(skeleton, arrays)


def _unmark(mark: Mapping[str, Any], arrays: Sequence[Array]) -> Any:
    name = mark[_MARK]
    if name == "array":
        return arrays[mark["index"]]
    if name in _MAPPINGS:
        return _MAPPINGS[name]({key: join(part, arrays) for key, part in mark["pairs"]})
    if name in ("set", "frozenset", "deque"):
        parts = [join(part, arrays) for part in mark["parts"]]
        if name == "deque":
            return deque(parts, mark["maxlen"])
        return set(parts) if name == "set" else frozenset(parts)
    if name == "enum":
        return _member(mark)
    if name in ("dtype", "device"):
        import torch

        if name == "device":
            return torch.device(mark["name"])
        dtype = getattr(torch, mark["name"].removeprefix("torch."), None)
        if isinstance(dtype, torch.dtype):
            return dtype
    raise ValueError(f"a stored state has a mark that this version does not know: {name!r}")


# ---- members of enumerations


def _find_class(name: str) -> Any:
    """Returns what has that name in a module that is imported. Runs no code of the program: the
    store may be anybody's."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _member(mark: Mapping[str, Any]) -> Any:
    """Returns the member. Where the program has not imported the class, or the member is gone: its
    plain value, or its name.

    Raises: ValueError: it is no mark of a member.
    """
    name, kind = mark.get("name"), _find_class(str(mark.get("class")))
    if not isinstance(name, str):
        raise ValueError("the stored state has a member of an enumeration without a name")
    members: Mapping[str, Any] = kind.__members__ if isinstance(kind, EnumMeta) else {}
    if name in members:
        return members[name]
    return name if mark.get("value") is None else mark["value"]
