"""Random number generators other than the default ones: what they are as data, and where a program
holds them.

The default generators of Python, numpy and torch are every program's. Others lie in objects:
`self.rng` of a data set, the generator of a sampler. They are looked for there.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from pmstore.torch.changes import Question

_MOST_PARTS = 64
"""Parts of one list, tuple or dict that are looked at, from its beginning."""
_MOST_OBJECTS = 2000
"""Objects that are looked at in all."""
_DEPTH = 6
"""Steps from the first object: an attribute, an item, an argument of a partial."""


class Generator(Protocol):
    """What has the state of a random number generator; torch's own are of this kind."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any, /) -> Any: ...


class Seedable(Generator, Protocol):
    """One that can be started anew."""

    def seed(self, seed: int) -> None: ...


class _Torch:
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def get_state(self) -> Any:
        return self._generator.get_state()

    def asked(self, state: torch.Tensor) -> list[Question]:
        return [(self._generator.get_state, (), state.numpy().tobytes())]

    def set_state(self, state: Any, /) -> None:
        self._generator.set_state(state)

    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)


class _Python:
    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def get_state(self) -> Any:
        return lower_python(self._generator.getstate())

    def set_state(self, state: Any, /) -> None:
        put_python(state, self._generator)

    def seed(self, seed: int) -> None:
        self._generator.seed(seed)


class _RandomState:
    def __init__(self, generator: np.random.RandomState) -> None:
        self._generator = generator

    def get_state(self) -> Any:
        return self._generator.get_state(legacy=False)

    def set_state(self, state: Any, /) -> None:
        self._generator.set_state(state)

    def seed(self, seed: int) -> None:
        self._generator.seed(seed % 2**32)


class _Bits:
    """A numpy Generator: all its state is its bit generator's, and how many it has spawned."""

    def __init__(self, bits: Any) -> None:
        self._bits = bits
        # numpy before 1.25 has it under another name, and spawns by it alone
        sequence: Any = getattr(bits, "seed_seq", None) or getattr(bits, "_seed_seq", None)
        known = isinstance(sequence, np.random.SeedSequence)
        self._sequence = _Sequence(sequence) if known else None

    def get_state(self) -> Any:
        state = self._bits.state
        spawned = self._sequence.spawned if self._sequence is not None else 0
        return {**state, "spawned": spawned} if spawned else state

    def set_state(self, state: Any, /) -> None:
        self._bits.state = {key: value for key, value in state.items() if key != "spawned"}
        if self._sequence is not None:
            self._sequence.spawned = state.get("spawned", 0)

    def seed(self, seed: int) -> None:
        self._bits.state = type(self._bits)(seed).state
        if self._sequence is not None:
            self._sequence.seed(seed)


class _Sequence:
    """A numpy SeedSequence, whose `spawn` gives other children each time."""

    def __init__(self, sequence: np.random.SeedSequence) -> None:
        self._sequence = sequence

    @property
    def spawned(self) -> int:
        """How many children it has given."""
        return self._sequence.n_children_spawned

    @spawned.setter
    def spawned(self, count: int) -> None:
        if count != self.spawned:
            self._become({**self._sequence.state, "n_children_spawned": count})

    def _become(self, given: Any) -> None:
        """Fills the object itself, which others may hold, as pickle fills one."""
        other: Any = np.random.SeedSequence(**given)
        filled: Any = self._sequence
        filled.__setstate__(other.__reduce__()[2])

    def get_state(self) -> Any:
        state = self._sequence.state
        entropy: Any = state["entropy"]
        if not isinstance(entropy, (int, type(None))):
            entropy = np.asarray(entropy).tolist()
        return {**state, "entropy": entropy}

    def set_state(self, state: Any, /) -> None:
        self._become(state)

    def seed(self, seed: int) -> None:
        """Its next children are others. It stays the seed that it is."""
        self.spawned = seed % 2**31


_KINDS = (
    *(torch.Generator, random.Random),
    *(np.random.Generator, np.random.BitGenerator, np.random.RandomState, np.random.SeedSequence),
)


def as_generator(given: Any) -> Seedable | None:
    """The state of a generator of a kind that is known; None: it is not one."""
    if not isinstance(given, _KINDS):  # thousands are asked in one search
        return None
    if isinstance(given, torch.Generator):
        return _Torch(given)
    if isinstance(given, random.Random) and not isinstance(given, random.SystemRandom):
        return _Python(given)
    if isinstance(given, np.random.Generator):
        return _Bits(given.bit_generator)
    if isinstance(given, np.random.BitGenerator):
        return _Bits(given)
    if isinstance(given, np.random.SeedSequence):
        return _Sequence(given)
    return _RandomState(given) if isinstance(given, np.random.RandomState) else None


Link = tuple[Any, Any]
"""An object, and one that it holds as an attribute or an item."""


def _holds(link: Link) -> bool:
    holder, held = link
    items = holder if isinstance(holder, (list, tuple, dict)) else getattr(holder, "__dict__", ())
    return any(one is held for one in [*(items.values() if isinstance(items, dict) else items)])


@dataclass(frozen=True, slots=True)
class Found:
    """A generator that some object holds.

    Attributes:
        place: where, as an expression: "dataset.rng".
        generator: that was there when it was looked for.
        way: to it: objects, each with the one that it held.
    """

    place: str
    generator: Seedable
    kind: str
    way: tuple[Link, ...] = field(default=(), compare=False, repr=False)

    def is_there(self) -> bool:
        """Whether each object on the way to it still holds the next one."""
        return all(map(_holds, self.way))

    def get_state(self) -> Any:
        return self.generator.get_state()

    def asked(self, state: Any) -> list[Question] | None:
        """What tells whether its state is the same; None: the state alone does."""
        ask: Callable[[Any], list[Question] | None] | None
        ask = getattr(self.generator, "asked", None)
        return ask(state) if ask is not None else None

    def set_state(self, state: Any, /) -> None:
        self.generator.set_state(state)

    def seed(self, seed: int) -> None:
        """Starts it anew; another place with the same seed gets other numbers."""
        digest = hashlib.blake2b(
            self.place.encode(), key=seed.to_bytes(8, "little"), digest_size=8
        ).digest()
        self.generator.seed(int.from_bytes(digest, "little") >> 1)


def find(roots: dict[str, Any]) -> list[Found]:
    """The generators that these objects hold, each once; roots: by the names that places begin
    with.

    Looked at are attributes, items of lists, tuples and dicts, what bound methods and
    `functools.partial` carry, the variables that functions close over and the globals that they
    name, each again in the same way, within bounds. The default generators are left out.
    """
    search = _Search()
    for name, root in roots.items():
        search.look(name, root)
    return search.found


Holder = tuple[dict[str, Any], str, Any]
"""The attributes of a module, the name of one in which a generator was found, and its value."""


def find_in_modules(modules: dict[str, torch.nn.Module]) -> tuple[list[Found], list[Holder]]:
    """The generators that these modules hold, by their names, in the same way, and where; what
    torch keeps in a module is left out."""
    search = _Search([*modules.values()])
    holders: list[Holder] = []
    looked: set[type] = set()  # classes whose objects have nothing of their own there
    classes: set[int] = set()
    for name, module in modules.items():
        for key, item in list(vars(module).items()):
            if key not in OF_MODULES and type(item) not in _LEAVES:
                before, shared = [*search.found], id(item) in search.seen
                search.look(f"{name}.{key}" if name else key, item)
                if shared or search.found != before:
                    holders.append((vars(module), key, item))
        kind = type(module)
        if kind not in looked:
            for place, item in _of_class(name, module, classes):
                search.look(place, item)
            if not any(map(_slots, kind.__mro__)):
                looked.add(kind)
    return search.found, holders


OF_MODULES = frozenset(vars(torch.nn.Module())) - {"training"}
"""Attributes in which torch keeps what a module has: parameters, modules, hooks."""


class _Search:
    """Breadth first: what lies near is found before the bounds are reached."""

    def __init__(self, leave_out: Sequence[Any] = ()) -> None:
        """leave_out: objects that are not looked into, and do not count."""
        self.found: list[Found] = []
        self._most = _MOST_OBJECTS + len(leave_out)
        self._classes: set[int] = set()
        # the objects too: an id is another's once one is gone
        self.seen: dict[int, Any] = {id(one): one for one in leave_out}
        for default in (torch.default_generator, getattr(random, "_inst", None)):
            self.seen[id(default)] = default
        state = getattr(np.random.mtrand, "_rand", None)
        for default in (state, getattr(state, "_bit_generator", None)):
            self.seen[id(default)] = default

    def look(self, name: str, root: Any) -> None:
        level: list[tuple[str, Any, tuple[Link, ...]]] = [(name, root, ())]
        for depth in range(_DEPTH + 1):
            below: list[tuple[str, Any, tuple[Link, ...]]] = []
            for place, item, way in level:
                if type(item) in _LEAVES or id(item) in self.seen:
                    continue
                if len(self.seen) > self._most:
                    return
                self.seen[id(item)] = item
                if not self._take(place, item, way) and depth < _DEPTH:
                    with suppress(Exception):  # of a property, or what says that it is a dict
                        for at, part in parts_of(place, item, self._classes):
                            below.append((at, part, (*way, (item, part))))
            level = below

    def _take(self, place: str, item: Any, way: tuple[Link, ...]) -> bool:
        generator = as_generator(item)
        if generator is None:
            return False
        bits = getattr(item, "bit_generator", None)  # two generators may draw from one
        if bits is not None:
            if id(bits) in self.seen:
                return True
            self.seen[id(bits)] = bits
        kind = f"{type(item).__module__.partition('.')[0]} {type(item).__name__}"
        if bits is not None:
            kind += f" ({type(bits).__name__})"
        # what a function closes over, or a class has, is not followed
        followed = tuple(link for link in way if _holds(link))
        self.found.append(Found(place, generator, kind, followed))
        return True


_LEAVES = (
    *(bool, int, float, complex, str, bytes, bytearray, type(None), range, slice),
    *(np.ndarray, torch.Tensor, torch.nn.Parameter, torch.device, torch.dtype, torch.Size),
    *(type, types.ModuleType, types.BuiltinFunctionType),
)
_FOREIGN = ("builtins", "torch", "numpy", "abc", "typing", "collections", "random", "functools")
"""Packages whose methods name no generator of a program's."""


def parts_of(place: str, item: Any, classes: set[int]) -> Iterator[tuple[str, Any]]:
    """What an object holds, with the places. classes: by id, those whose methods were looked at:
    what these hold is the same for each object. Others are added."""
    if isinstance(item, dict):
        for key, part in list(itertools.islice(item.items(), _MOST_PARTS)):
            yield f"{place}[{key!r}]", part
    elif isinstance(item, (list, tuple)):
        for index, part in enumerate(item[:_MOST_PARTS]):
            yield f"{place}[{index}]", part
    elif isinstance(item, functools.partial):
        yield f"{place}.func", item.func
        yield f"{place}.args", item.args
        yield f"{place}.keywords", item.keywords
    elif isinstance(item, types.MethodType):
        yield f"{place}.__self__", item.__self__
        yield from _of_function(place, item.__func__)
    elif isinstance(item, types.FunctionType):
        yield from _of_function(place, item)
    if isinstance(item, (type, types.ModuleType)):
        return
    held = getattr(item, "__dict__", None)
    if type(held) is dict:
        for name, part in list(held.items()):
            yield f"{place}.{name}", part
    yield from _of_class(place, item, classes)


def _of_class(place: str, item: Any, classes: set[int]) -> Iterator[tuple[str, Any]]:
    """What an object has by its class: slots, what its methods close over, and generators."""
    for kind in type(item).__mro__:
        if kind.__module__.partition(".")[0] in _FOREIGN:
            continue
        for name in _slots(kind):
            try:
                yield f"{place}.{name}", object.__getattribute__(item, name)
            except AttributeError:
                continue
        if id(kind) in classes:
            continue
        classes.add(id(kind))
        for name, given in list(vars(kind).items()):
            if isinstance(given, types.FunctionType):
                yield from _of_function(place, given)
            elif as_generator(given) is not None:
                yield f"{kind.__qualname__}.{name}", given


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _of_function(place: str, function: Any) -> Iterator[tuple[str, Any]]:
    """What a function closes over, its defaults, and generators that are globals it names."""
    if not isinstance(function, types.FunctionType):
        yield f"{place}.__func__", function
        return
    if function.__module__.partition(".")[0] in _FOREIGN:
        return
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"{place} closure {name}", cell.cell_contents
        except ValueError:  # not set yet
            continue
    yield f"{place}.__defaults__", function.__defaults__ or ()
    for name in code.co_names:
        given = function.__globals__.get(name)
        if as_generator(given) is not None:
            yield f"{function.__module__}.{name}", given


def lower_python(state: tuple[Any, ...]) -> dict[str, Any]:
    """What `random.getstate` gives, as data."""
    version, words, gauss = state
    return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}


def put_python(state: dict[str, Any], generator: Any = random) -> None:
    """The other way: that is its state. The module `random` stands for the default generator."""
    generator.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))
