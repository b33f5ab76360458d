"""The attributes of a scikit-learn estimator as data: a plain value, the *skeleton*, and arrays.

Arrays, numbers, texts, lists, tuples and dicts are data. So are generators of numpy, by their
state, estimators of scikit-learn within each other, the optimizers of its networks and its loss
functions. Anything else is refused by name. What is one object in two places (an array that two
attributes look at, a generator) is one again.
"""

from __future__ import annotations

import hashlib
import importlib
import pickle
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.neural_network._stochastic_optimizers import BaseOptimizer

from pmstore.objects.readonly import plain_type

Array = np.ndarray[Any, np.dtype[Any]]

_MARK = "pmstore"
"""A dict of the skeleton with this key stands for something else than a dict."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LOSSES = ("sklearn.linear_model._sgd_fast", "sklearn._loss._loss")
_MODULE = re.compile(r"sklearn(\.\w+)+")
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_MARKS = (
    *("dict", "array", "floats", "objects", "same", "global", "generator"),
    *("loss", "object", "dtype", "given"),
)
_MANY = 64
"""A list of more floats than this is stored as an array: it is a history that grows."""
_DEEP = 50
_GAPS = 64
"""Times an array's own size, that it may lie apart."""
GLOBAL: np.random.RandomState = np.random.mtrand._rand
"""What `np.random.rand` draws from, and scikit-learn with random_state=None."""


class Split:
    """Takes an estimator's attributes apart. It holds the arrays that it has found."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        """The arrays by path; they are the estimator's own, not copies."""
        self.histories: set[str] = set()
        """Paths of arrays of which only the first part is filled, and more may follow."""
        self.generators: list[Any] = []
        """Those that the estimator holds, and numpy's default one if it draws from that."""
        self._seen: dict[Any, str] = {}
        self._alive: list[Any] = []  # so that no two objects have one address

    def attributes(self, state: Mapping[str, Any], given: frozenset[str]) -> dict[str, Any]:
        """Returns the skeleton of the attributes. given: names of attributes that may be no data:
        such a one is left to the object that gets the state on the way back."""
        skeleton = {}
        for name, value in state.items():
            try:
                skeleton[name] = self._one(value, name, 0)
            except TypeError:
                if name not in given:
                    raise
                skeleton[name] = {_MARK: "given"}
        return skeleton

    def _one(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind in _PLAIN or (isinstance(value, np.generic) and not value.dtype.hasobject):
            return value
        if depth == _DEEP:
            raise TypeError(f"{path} lies more than {_DEEP} deep, or contains itself")
        if kind is np.ndarray:
            return self._array(value, path, depth)
        if kind is list and len(value) > _MANY and (one := _float_type(value)) is not None:
            self.arrays[path] = np.array(value)
            self.histories.add(path)
            numpy = one is np.float64
            return {_MARK: "floats", "path": path, "length": len(value), "numpy": numpy}
        if kind is list or kind is tuple:
            return kind(self._one(v, f"{path}.{i}", depth + 1) for i, v in enumerate(value))
        if kind is dict:
            pairs = [
                (self._key(key, path), self._one(item, f"{path}.{i}", depth + 1))
                for i, (key, item) in enumerate(value.items())
            ]
            if _MARK in value:
                return {_MARK: "dict", "pairs": [list(pair) for pair in pairs]}
            return dict(pairs)
        return self._object(value, path, depth)

    def _array(self, value: Array, path: str, depth: int) -> Any:
        if value.dtype.hasobject:
            parts = [self._one(v, f"{path}.{i}", depth + 1) for i, v in enumerate(value.flat)]
            return {_MARK: "objects", "shape": list(value.shape), "parts": parts}
        mark: dict[str, Any] = {_MARK: "array", "path": path}
        if value.flags.c_contiguous and value.size:
            # two attributes that look at the same bytes
            address = value.__array_interface__["data"][0]
            key = (address, value.nbytes, value.dtype.str)
            mark["path"] = self._seen.setdefault(key, path)
            if mark["path"] != path:
                mark["shape"] = list(value.shape)
                return mark
        self.arrays[path] = value
        if (steps := _steps(value)) is not None:
            mark["steps"] = steps
        return mark

    def _object(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if (first := self._seen.get(id(value))) is not None:
            return {_MARK: "same", "path": first}
        self._seen[id(value)] = path
        self._alive.append(value)
        if isinstance(value, (np.random.RandomState, np.random.Generator)):
            self.generators.append(value)
            return self._generator(value, path, depth)
        if kind.__module__ in _LOSSES:
            made, arguments, *_ = value.__reduce__()
            if made is kind:
                told = self._one(list(arguments), path, depth + 1)
                mark = {_MARK: "loss", "module": kind.__module__, "name": kind.__name__}
                return {**mark, "arguments": told}
        if _MODULE.fullmatch(kind.__module__) and isinstance(value, (BaseEstimator, BaseOptimizer)):
            name = kind.__qualname__
            if getattr(importlib.import_module(kind.__module__), name, None) is kind:
                parts = {
                    key: self._one(item, f"{path}.{key}", depth + 1)
                    for key, item in vars(value).items()
                }
                mark = {_MARK: "object", "module": kind.__module__, "name": name}
                return {**mark, "attributes": parts}
        if isinstance(value, type) and issubclass(value, np.generic):
            return {_MARK: "dtype", "name": np.dtype(value).str}
        raise TypeError(f"{path} is a {kind.__module__}.{kind.__qualname__}")

    def _generator(self, value: Any, path: str, depth: int) -> Any:
        if value is GLOBAL:
            return {_MARK: "global"}
        legacy = isinstance(value, np.random.RandomState)
        if type(value) is not (np.random.RandomState if legacy else np.random.Generator):
            raise TypeError(f"{path} is a {type(value).__qualname__}, a generator of its own kind")
        mark = {_MARK: "generator", "kind": "RandomState" if legacy else "Generator"}
        return {**mark, "state": self._one(generator_state(value), path, depth + 1)}

    def _key(self, key: Any, path: str) -> Any:
        if type(key) in _PLAIN or (isinstance(key, np.generic) and not key.dtype.hasobject):
            return key
        if type(key) is tuple:
            return tuple(self._key(part, path) for part in key)
        raise TypeError(f"{path} has the key {key!r}, which is not plain")


def _steps(array: Array) -> list[int] | None:
    """Returns the steps between elements along each axis, for an array that leaves gaps, as a slice
    does; None for other arrays. Sums and products of matrices are worked out in another order with
    gaps, so that the last bits differ."""
    if array.flags.forc or array.size == 0:
        return None
    steps = [step // array.itemsize for step in array.strides]
    apart = all(step > 0 and step % array.itemsize == 0 for step in array.strides)
    return steps if apart and _extent(array.shape, steps) <= _GAPS * array.size else None


def _extent(shape: tuple[int, ...], steps: list[int]) -> int:
    return 1 + sum((length - 1) * step for length, step in zip(shape, steps, strict=True))


def _apart(array: Array, steps: list[int]) -> Array:
    extent = _extent(array.shape, steps)
    if not (all(step > 0 for step in steps) and 0 < extent <= _GAPS * array.size):
        raise ValueError(f"elements {steps} apart")
    room = np.zeros(extent, array.dtype)
    strides = [step * array.itemsize for step in steps]
    made = np.lib.stride_tricks.as_strided(room, array.shape, strides)
    made[...] = array
    return made


def _float_type(items: list[Any]) -> type | None:
    """Returns the type of all items if they have one type, and it is float or numpy's; otherwise
    None."""
    kinds = set(map(type, items))
    return kinds.pop() if kinds in ({float}, {np.float64}) else None


def generator_state(generator: Any) -> dict[str, Any]:
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return cast("dict[str, Any]", generator.bit_generator.state)


def drawn(generators: Iterable[Any]) -> bytes:
    """Returns what is another if one of the generators has drawn since."""
    return pickle.dumps([generator_state(one) for one in generators])


def set_generator(generator: Any, state: dict[str, Any]) -> None:
    """Sets the generator to the state. Raises: ValueError, TypeError: the state is of another kind
    of generator."""
    if isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


class Join:
    """Puts attributes together again that `Split` took apart. Arrays are those given, not copies.

    It makes nothing but what `Split` takes apart: no class outside scikit-learn's own estimators,
    optimizers and losses is looked up, whatever the skeleton says.
    """

    def __init__(self, arrays: Mapping[str, Array], own: Mapping[str, Any]) -> None:
        """Takes the arrays. own: attributes of the object that gets the state. What was left to it
        is taken from there, and its generators are set, not made anew."""
        self._arrays = arrays
        self._own = own
        self._made: dict[str, Any] = {}

    def attributes(self, skeleton: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the attributes of a skeleton. Raises: ValueError, LookupError, TypeError: it is
        no skeleton."""
        return {name: self._one(part, name) for name, part in skeleton.items()}

    def _one(self, part: Any, path: str) -> Any:
        kind = plain_type(part)
        if kind is list or kind is tuple:
            return kind(self._one(item, f"{path}.{i}") for i, item in enumerate(part))
        if kind is not dict:
            return part
        if _MARK not in part:
            return {k: self._one(v, f"{path}.{i}") for i, (k, v) in enumerate(part.items())}
        if part[_MARK] not in _MARKS:
            raise ValueError(f"a mark that this version does not know: {part[_MARK]!r}")
        return getattr(self, f"_{part[_MARK]}")(part, path)

    def _dict(self, mark: dict[str, Any], path: str) -> Any:
        return {k: self._one(v, f"{path}.{i}") for i, (k, v) in enumerate(mark["pairs"])}

    def _array(self, mark: dict[str, Any], path: str) -> Any:
        array = self._arrays[mark["path"]]
        if "steps" in mark:
            return _apart(array, mark["steps"])
        return array.reshape(mark["shape"]) if "shape" in mark else array

    def _floats(self, mark: dict[str, Any], path: str) -> Any:
        floats = self._arrays[mark["path"]][: mark["length"]]
        return list(floats) if mark["numpy"] else floats.tolist()

    def _objects(self, mark: dict[str, Any], path: str) -> Any:
        array = np.empty(mark["shape"], dtype=object)
        parts = mark["parts"]
        if len(parts) != array.size:
            raise ValueError(f"{path} has {len(parts)} elements for {array.size}")
        for i, part in enumerate(parts):
            array.flat[i] = self._one(part, f"{path}.{i}")
        return array

    def _same(self, mark: dict[str, Any], path: str) -> Any:
        return self._made[mark["path"]]

    def _global(self, mark: dict[str, Any], path: str) -> Any:
        self._made[path] = GLOBAL
        return GLOBAL

    def _generator(self, mark: dict[str, Any], path: str) -> Any:
        legacy = mark["kind"] == "RandomState"
        kind = np.random.RandomState if legacy else np.random.Generator
        state = self._one(mark["state"], path)
        name = state["bit_generator"]
        if name not in _BIT_GENERATORS:
            raise ValueError(f"{path} is of an unknown kind of generator: {name!r}")
        made = self._own.get(path)
        if (
            type(made) is not kind
            or made is GLOBAL
            or generator_state(made)["bit_generator"] != name
        ):
            made = kind(getattr(np.random, name)())
        set_generator(made, state)
        self._made[path] = made
        return made

    def _loss(self, mark: dict[str, Any], path: str) -> Any:
        if mark["module"] not in _LOSSES:
            raise ValueError(f"{path}: no module of losses: {mark['module']!r}")
        kind = getattr(importlib.import_module(mark["module"]), mark["name"])
        if not isinstance(kind, type) or kind.__module__ != mark["module"]:
            raise ValueError(f"{path}: no loss: {mark['name']!r}")
        made = kind(*self._one(mark["arguments"], path))
        self._made[path] = made
        return made

    def _object(self, mark: dict[str, Any], path: str) -> Any:
        if not _MODULE.fullmatch(mark["module"]):
            raise ValueError(f"{path}: not of scikit-learn: {mark['module']!r}")
        kind = getattr(importlib.import_module(mark["module"]), mark["name"])
        if not (isinstance(kind, type) and issubclass(kind, (BaseEstimator, BaseOptimizer))):
            raise ValueError(f"{path}: neither an estimator nor an optimizer: {mark['name']!r}")
        made: Any = object.__new__(kind)
        self._made[path] = made
        for key, part in mark["attributes"].items():
            made.__dict__[key] = self._one(part, f"{path}.{key}")
        return made

    def _dtype(self, mark: dict[str, Any], path: str) -> Any:
        return np.dtype(mark["name"]).type

    def _given(self, mark: dict[str, Any], path: str) -> Any:
        return self._own[path]


# ---- settings ----


def settings_of(estimator: BaseEstimator) -> dict[str, str]:
    """Returns the parameters that the estimator was made with, in words."""
    return {name: _told(value) for name, value in estimator.get_params().items()}


def _told(value: Any) -> str:
    if isinstance(value, np.ndarray):
        content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
        return f"an array {value.dtype} {value.shape} of sha256 {content}"
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {[_told(item) for item in value]}"
    if isinstance(value, dict):
        return f"{ {key: _told(item) for key, item in value.items()} }"
    if isinstance(value, (str, int, float, complex, bytes, type(None))):
        return repr(value)
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def draws_from_global(estimator: BaseEstimator) -> bool:
    return any(
        name.rpartition("__")[2] == "random_state" and (value is None or value is GLOBAL)
        for name, value in estimator.get_params().items()
    )
