"""What modules keep beside parameters and buffers: numbers, texts, lists and small arrays in plain
attributes, generators, and which of them are in training mode."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from pmstore import Store
from pmstore._engine._binding import Watch
from pmstore.objects.structure import (
    COLLECTIONS,
    LossyError,
    at_once,
    encode,
    has_factory,
    is_leaf,
    is_namedtuple,
    join,
    split,
)
from pmstore.torch._random.defaults import bits_of, set_states, states_of
from pmstore.torch._random.search import OF_MODULES, Found, Holder, find_in_modules
from pmstore.torch._state.model import ModelBinding
from pmstore.torch._state.optimizer_state import is_constant
from pmstore.torch.changes import OTHERS, SAME, VALUES, sample_of, still
from pmstore.torch.kept_structure import Structure, become, objects_in, raw_bytes
from pmstore.torch.keys import full_name

_FRAMEWORKS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers")
_ARRAYS = (np.ndarray, torch.Tensor)
_TABLE_BYTES = 1 << 16
"""A collection without arrays that is larger when it is first seen is a table, and not looked
at."""
_MOST_BYTES = 1 << 20
"""Of any other one, and of an array."""
_TOO_LARGE = (
    f"more than {_MOST_BYTES >> 20} MiB, or {_TABLE_BYTES >> 10} KiB without an array, is too large"
)
_GRAPH_BYTES = 1 << 18
"""Of all that has tensors of a graph in it: more is what forwards leave behind, to be looked at."""
_BASES = (int, float, complex, str, bytes)
"""What is of a class of them would come back as a plain one."""
_SAMPLED = 512
"""Elements of a large tensor that are compared."""
_MOST_ASKED = 16
"""Items of a collection that are asked whether they may be data, before all of it is encoded."""

Place = tuple[str, str]
"""A module's name, and that of its attribute."""


class Data(NamedTuple):
    """An attribute that is data, as bytes and arrays."""

    encoded: bytes
    arrays: list[Any]

    @property
    def data_bytes(self) -> int:
        return len(self.encoded) + sum(int(one.nbytes) for one in self.arrays)

    @property
    def large(self) -> bool:
        """Whether it is left alone when it is first seen."""
        most = _MOST_BYTES if self.arrays else _TABLE_BYTES
        return self.data_bytes > most


def own_keys(module: nn.Module) -> list[str]:
    """Attributes that are the program's, and not what a framework keeps in a module."""
    keys = [key for key in vars(module) if key not in OF_MODULES]
    if "_" not in {key[:1] for key in keys}:
        return keys
    kind = type(module)
    of_framework = kind.__module__.partition(".")[0] == "torch" or any(
        base.__module__.partition(".")[0] in _FRAMEWORKS for base in kind.__mro__
    )
    return [key for key in keys if not key.startswith("_")] if of_framework else keys


def is_computed(module: nn.Module, key: str) -> bool:
    """Whether a hook of torch makes it anew before each forward: weight_norm, spectral_norm and
    pruning of torch.nn.utils."""
    return any(
        key == (one._tensor_name if isinstance(one, BasePruningMethod) else one.name)
        for one in module._forward_pre_hooks.values()
        if isinstance(one, (BasePruningMethod, SpectralNorm, WeightNorm))
    )


def _is_plain(array: Any) -> bool:
    """Whether it is a plain array in memory. A leaf that requires a gradient is not, as somebody
    trains it; nor is a view of one."""
    if not isinstance(array, torch.Tensor):
        return type(array) is np.ndarray and not array.dtype.hasobject
    if type(array) is not torch.Tensor or array.device.type != "cpu":
        return False
    if array.layout is not torch.strided or array.is_quantized or array.is_nested:
        return False
    if array.numel() and not array.data_ptr():
        return False  # its memory was freed
    if not array.requires_grad:
        return True
    # in this order: a view of what was written to since has no graph to ask for
    base = array._base
    return not (array if base is None else base).is_leaf


def _of_graph(array: Any) -> bool:
    """Whether it was computed from parameters: a hidden state that the next step detaches."""
    return isinstance(array, torch.Tensor) and array.requires_grad


def _detached(value: Any) -> Any:
    """The value, without the graph that its tensors are of."""
    skeleton, arrays = split(value)
    return join(
        skeleton, [one.detach() if isinstance(one, torch.Tensor) else one for one in arrays]
    )


class _Trace:
    """What tells whether a value that is not kept is another one. An array is not held.

    Attributes:
        why: it is not kept.
    """

    def __init__(self, value: Any, why: str, *, whole: bool) -> None:
        """whole: all of it is compared, if it is not large."""
        self.why = why
        data = _data(value, exact=None) if whole else None
        self._data = None if data is None or data.large else _bits(data)
        self._held: Any = weakref.ref(value) if isinstance(value, _ARRAYS) else value
        self._seen = sample_of(value)
        self._content = _some_bytes(value)

    def fits(self, value: Any) -> bool:
        if self._data is not None:
            data = _data(value, exact=None)
            return data is not None and _bits(data) == self._data
        held = self._held() if isinstance(self._held, weakref.ref) else self._held
        if held is not value:
            return False
        seen, before = sample_of(value), self._seen
        self._seen = seen
        # torch counts writes to all that shared memory once: a detached weight, too
        return seen == before or (self._content is not None and self._content == _some_bytes(value))


def _some_bytes(value: Any) -> bytes | None:
    """Returns the bytes of some elements of a tensor. None: it is none."""
    if not isinstance(value, torch.Tensor):
        return None
    flat = value.detach().reshape(-1)
    return raw_bytes(flat[:: max(flat.numel() // _SAMPLED, 1)]).tobytes()


def _bits(data: Data) -> bytes:
    return data.encoded + b"".join(raw_bytes(one).tobytes() for one in data.arrays)


def _may_be_data(value: Any) -> bool:
    kind: Any = type(value)
    return kind in COLLECTIONS or kind in _ARRAYS or is_leaf(kind) or is_namedtuple(kind)


def _is_like_data(value: Any) -> bool:
    return _may_be_data(value) or is_constant(value) or issubclass(type(value), _BASES)


def _data(value: Any, given: Any = None, *, exact: bool | None = True) -> Data | None:
    """None: it is no data that is kept. given: what the program gave in its place; a dict with a
    factory that is code takes it from there. exact: see `structure.split`.

    Raises: LossyError: it would come back as another type.
    """
    if not (is_constant(value) or _may_be_data(value)):
        return None
    if type(value) in _ARRAYS and not _is_plain(value):
        return None
    some = value.values() if isinstance(value, dict) else value
    if type(value) in COLLECTIONS and not all(map(_is_like_data, [*islice(some, _MOST_ASKED)])):
        return None  # before all that is in the others is looked at
    if type(value) is type(given) is defaultdict and has_factory(value):
        value = dict(value)
    try:
        encoded, arrays = encode(value, _ARRAYS, exact=exact)
    except LossyError:
        raise
    except (TypeError, ValueError):
        return None
    return Data(encoded, arrays) if all(map(_is_plain, arrays)) else None


class AttributesPart:
    """Keeps them in `<path>`: {"changed": {module: {attribute: [value, given]}}, "arrays": {module:
    {attribute: value}}, "generators": {place: state}}.

    What has arrays in it, and generators, are kept always. Anything else is kept once the run has
    changed it, with what the program gave: an attribute that the run does not change is the
    program's, as its code is.
    """

    def __init__(
        self, store: Store, path: str, models: Mapping[str, nn.Module], model: ModelBinding
    ) -> None:
        """Touches nothing. model: which knows when modules are others."""
        self._part = Structure(store, path)
        self._models = models
        self._model = model
        # what the program gave: a value without arrays, with its bytes if it can change; else None
        self._given: dict[Place, tuple[Any, bytes] | None] | None = None
        self._left_alone: dict[Place, _Trace | None] = {}  # too large; None: it was told of
        self._room = 0  # bytes for what is of a graph
        self._changed: dict[Place, Any] = {}
        self._ours: dict[int, Any] = {}  # what could be changed at the last commit, by its id
        self._arrays: set[Place] = set()  # of what has arrays in it, what is kept
        self._watch: Watch | None = None  # None: nothing is known
        self._tables: dict[str, dict[str, Any]] = {}  # attributes, by the names of modules
        self._constants: list[Place] = []
        self._mutable: list[Place] = []
        self._generators: list[Found] = []
        self._holders: list[Holder] = []

    def _look(self) -> Watch:
        """Finds modules, attributes and generators anew."""
        same = still(self._model, "linked", self._model.linked)
        modules = modules_of(self._models)
        self._tables = {name: vars(module) for name, module in modules.items()}
        self._constants, self._mutable = [], []
        watched = []
        for name, module in modules.items():
            table, keys = vars(module), own_keys(module)
            watched.append((table, keys))
            for key in keys:
                value = table[key]
                if is_constant(value):
                    self._constants.append((name, key))
                    continue
                if isinstance(value, torch.Tensor) and is_computed(module, key):
                    continue
                if _may_be_data(value) and (name, key) not in self._left_alone:
                    self._mutable.append((name, key))
        self._generators, self._holders = find_in_modules(modules)
        return Watch(watched, [], [], 0, [same])

    def _begin(self, watch: Watch) -> Watch:
        """Notes what the program gives. watch: what `_look` has just given."""
        self._given = {(name, key): None for name, table in self._tables.items() for key in table}
        for name, key in self._constants:
            self._given[name, key] = self._tables[name][key], b""
        kept: list[Place] = []
        for place in list(self._mutable):
            value = self._tables[place[0]][place[1]]
            try:
                data = _data(value, value)
            except LossyError as error:
                self._leave_alone(place, value, error.why, whole=True)
                continue
            if data is None or any(map(_of_graph, data.arrays)):
                continue
            if data.large:
                self._leave_alone(place, value)
                continue
            kept.append(place)
            if not data.arrays:
                self._given[place] = copy.deepcopy(at_once(value)), data.encoded
        self._ours = self._find_ours(kept) if kept else {}
        return watch

    def _leave_alone(
        self, place: Place, value: Any, why: str = _TOO_LARGE, *, whole: bool = False
    ) -> None:
        """It is not kept. A warning says so once it changes. whole: see `_Trace`."""
        self._left_alone[place] = _Trace(value, why, whole=whole)
        self._mutable.remove(place)

    def _give_up(self, place: Place, why: str) -> None:
        """It has changed, and is kept no more."""
        self._left_alone[place] = None
        if place in self._mutable:
            self._mutable.remove(place)
        self._changed.pop(place, None)
        warnings.warn(
            f"{describe(place)} changed, and is not kept as an attribute: {why}. After a restart "
            "it is as the program makes it. If the training depends on it, make it a buffer, "
            "register_buffer(...), or keep it in the store",
            RuntimeWarning,
            stacklevel=2,
        )

    def _tell_left_alone(self) -> None:
        """Warns, once, of what is not kept and has changed."""
        for (name, key), trace in self._left_alone.items():
            now = self._tables.get(name, {}).get(key)
            if trace is not None and not trace.fits(now):
                self._left_alone[name, key] = None
                if not _of_graph(now):  # else a forward has left it behind
                    self._give_up((name, key), trace.why)

    @property
    def watch(self) -> Watch | None:
        """See `Part`."""
        looked = self._mutable or self._generators or self._left_alone
        return None if looked else self._watch

    def capture(self) -> None:
        """Pending until the next commit."""
        if self._given is None:  # a new run
            self._watch = self._begin(self._look())
        known, self._watch = self._watch, None  # nothing is known until all is written
        seen = OTHERS if known is None else known.look()
        if self._left_alone:
            self._tell_left_alone()
        if seen == SAME and not (self._mutable or self._generators):
            self._watch = known
            return
        if (
            known is None
            or seen == OTHERS
            or any(table.get(key) is not one for table, key, one in self._holders)
            or not all(map(Found.is_there, self._generators))
        ):
            known = self._look()
        elif seen == VALUES:
            known.take()
        if seen != SAME:
            self._note_constants()
        arrays: dict[str, dict[str, Any]] = {}
        self._room = _GRAPH_BYTES
        data = [*filter(partial(self._note_mutable, arrays=arrays), [*self._mutable])]
        self._arrays = {(name, key) for name, values in arrays.items() for key in values}
        changed: dict[str, dict[str, Any]] = {}
        for (name, key), value in self._changed.items():
            given = self._given_value((name, key))
            changed.setdefault(name, {})[key] = [value, *(() if given is None else given[:1])]
        self._ours = self._find_ours(data) if data else {}
        generators = states_of(self._generators)
        if changed or arrays or generators or self._part.stored:
            self._part.write({"changed": changed, "arrays": arrays, "generators": generators})
        self._watch = known

    def _find_ours(self, places: list[Place]) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for name, key in places:
            value = self._tables.get(name, {}).get(key)
            if type(value) in COLLECTIONS or type(value) in _ARRAYS or isinstance(value, tuple):
                for _, one in objects_in(value):
                    found[id(one)] = one
        return found

    def _given_value(self, place: Place) -> tuple[Any, bytes] | None:
        return self._given.get(place) if self._given is not None else None

    def _note_constants(self) -> None:
        mutable = set(self._mutable)
        kept = {place: one for place, one in self._changed.items() if place in mutable}
        for place in self._constants:
            value, given = self._tables[place[0]][place[1]], self._given_value(place)
            if (
                place in self._changed
                or given is None
                or (given[0] is not value and encode(given[0])[0] != encode(value)[0])
            ):
                kept[place] = value
        self._changed = kept

    def _note_mutable(self, place: Place, arrays: dict[str, dict[str, Any]]) -> bool:
        """Returns whether it is data that is kept once it changes."""
        name, key = place
        value, given = self._tables[name][key], self._given_value(place)
        try:
            data = _data(value, None if given is None else given[0])
        except LossyError as error:
            self._give_up(place, error.why)
            return False
        # one that the program gave as None is not known to be small
        known = place in self._changed or place in self._arrays or bool(given and given[1])
        if data is None or data.arrays:
            self._changed.pop(place, None)
        if data is None:
            return False
        if any(map(_of_graph, data.arrays)):
            self._room -= data.data_bytes
            if self._room >= 0:
                arrays.setdefault(name, {})[key] = _detached(value)
            return True
        if known and data.data_bytes > _MOST_BYTES:
            self._give_up(place, f"it has grown to {data.data_bytes:,} bytes. {_TOO_LARGE}")
        elif data.large and not known:
            self._leave_alone(place, value)
        elif data.arrays:
            arrays.setdefault(name, {})[key] = value
        elif place in self._changed or given is None or given[1] != data.encoded:
            self._changed[place] = value
        return place not in self._left_alone

    def restore(self) -> None:
        """Sets attributes and generators to what the last commit holds, and takes back those that
        are new since then. What the run had not changed is as the program gave it."""
        self._part.forget()
        self._watch = None
        watch = self._look()
        if self._given is None:
            self._begin(watch)
        held: Mapping[str, Any] = self._part.read() if self._part.stored else _NOTHING
        self._changed = {
            (name, key): value
            for name, values in held["changed"].items()
            for key, (value, *_) in values.items()
        }
        self._arrays = {(name, key) for name, values in held["arrays"].items() for key in values}
        wanted = dict(self._changed)
        for name, values in held["arrays"].items():
            wanted.update(((name, key), value) for key, value in values.items())
        ours = {**self._ours}
        for place in [*self._constants, *self._mutable]:
            if place not in wanted:
                self._take_back(*place, ours)
        for (name, key), value in wanted.items():
            if name in self._tables:
                self._put(name, key, value, ours)
        given = self._given or {}
        places = [*filter(given.get, self._mutable), *wanted]
        self._ours = self._find_ours(places) if places else {}
        set_states(held["generators"], self._generators)

    def _put(self, name: str, key: str, value: Any, ours: dict[int, Any]) -> None:
        table = self._tables[name]
        here, value = table.get(key), copy.deepcopy(value)
        if _of_graph(here):
            table[key] = value
        elif not (  # else another attribute has it too, and was put there
            id(here) in self._ours and id(here) not in ours and bits_of(here) == bits_of(value)
        ):
            table[key] = become(here, value, ours)

    def _take_back(self, name: str, key: str, ours: dict[int, Any]) -> None:
        table, given = self._tables[name], self._given_value((name, key))
        if given is not None:
            if given[0] is not table[key]:
                self._put(name, key, given[0], ours)
        elif self._given is not None and (name, key) not in self._given:
            del table[key]


# ---- a program that has changed


def conflicts(
    store: Store, path: str, models: Mapping[str, nn.Module]
) -> dict[Place, tuple[Any, Any]]:
    """Returns, of what the run has changed, what the program gave and what it gives now, where that
    is another value than it gave, and than the run has."""
    part, found = Structure(store, path), {}
    if not part.stored:
        return {}
    modules = modules_of(models)
    for name, values in part.read()["changed"].items():
        for key, known in values.items():
            given = vars(modules[name]).get(key, _ABSENT) if name in modules else _ABSENT
            try:
                data = _data(given, given)
            except LossyError:
                continue
            if data is None or len(known) < 2:
                continue
            if data.encoded not in [encode(one)[0] for one in known]:
                found[name, key] = known[1], given
    return found


def take_given(store: Store, path: str, models: Mapping[str, nn.Module]) -> None:
    """What the program gives counts, of all in conflict, or of all if none is; pending until the
    next commit."""
    part = Structure(store, path)
    if not part.stored:
        return
    held, wrong = part.read(), conflicts(store, path, models)
    for name, values in held["changed"].items():
        for key in list(values):
            if not wrong or (name, key) in wrong:
                del values[key]
    part.write(held)


_ABSENT = object()
_NOTHING: dict[str, dict[str, Any]] = {"changed": {}, "arrays": {}, "generators": {}}


def modules_of(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Each once, by its first name."""
    seen: set[nn.Module] = set()
    return {
        full_name(key, name): module
        for key, model in models.items()
        for name, module in model.named_modules(memo=seen)
    }


def _called(name: str) -> str:
    return f"the module {name!r}" if name else "the model"


def describe(place: Place) -> str:
    """An attribute in a message."""
    name, key = place
    return f"{key} of {_called(name)}"
