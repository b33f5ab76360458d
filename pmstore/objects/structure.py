"""Structures (state_dicts, states of generators) as a plain value and a list of arrays.

A store holds values and, under names of their own, arrays. A state_dict mixes the two, and has
types a store refuses to guess at. `split` takes it apart: the *skeleton* holds everything a store
can hold as a value, with marks where an array or something of another type was; the arrays come
beside it. `join` puts it together again. `encode` gives the skeleton as the bytes that are stored.

Nothing of the program runs, and nothing is imported: the store may be anybody's. A mark names a
type of a short list, or a class of the program (an enumeration, a namedtuple), which is looked for
in the modules that are imported.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from enum import Enum, EnumMeta, Flag, IntFlag
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from types import ModuleType
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
_PARTS: dict[str, Callable[[list[Any]], Any]] = {
    "set": set,
    "frozenset": frozenset,
    "Decimal": lambda parts: Decimal(*parts),
    "Fraction": lambda parts: _fraction(*parts),
    "Path": lambda parts: Path(*parts),
    "range": lambda parts: range(*parts),
    "slice": lambda parts: slice(*parts),
}
"""What is made of its parts alone."""
_PARTS_OF: dict[type, tuple[str, Callable[[Any], Sequence[Any]]]] = {
    set: ("set", lambda item: _in_order(item)),
    frozenset: ("frozenset", lambda item: _in_order(item)),
    Decimal: ("Decimal", lambda item: [str(item)]),
    Fraction: ("Fraction", lambda item: [item.numerator, item.denominator]),
    type(Path()): ("Path", lambda item: [str(item)]),
    range: ("range", lambda item: [item.start, item.stop, item.step]),
    slice: ("slice", lambda item: [item.start, item.stop, item.step]),
}
_OF_TORCH = ("dtype", "device", "Size")
_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind
    for kind in (
        *(bool, int, float, complex, str, bytes, bytearray),
        *(list, tuple, dict, set, frozenset, deque, OrderedDict, Counter),
    )
}
"""Of a defaultdict, which come back. Any other one is code."""
_KEYS = (bool, int, float, str, bytes, type(None))
_PLAIN_OF: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,  # of these classes: another one may say `str(item)` of itself
    float: float.__float__,
    str: str.__str__,
    bytes: lambda item: memoryview(item).tobytes(),
}
_FLAT = frozenset(_KEYS)
COLLECTIONS = (
    *(list, dict, tuple, set, frozenset, deque, OrderedDict, Counter, defaultdict, bytearray),
)
"""Whose parts are data, and a bytearray. There are namedtuples besides."""


def at_once(value: Any, known: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """Returns the value in collections of its own. Each is copied in one go, which no other thread
    of the program comes between: one that fills a cache meanwhile ends no walk. What is no
    collection is the value's."""
    kind: Any = type(value)
    if kind in _FLAT:
        return value
    known = {} if known is None else known
    if kind is frozenset or not (kind in COLLECTIONS or is_namedtuple(kind)):
        return value
    if id(value) in known:
        return known[id(value)][1]
    if issubclass(kind, tuple):
        made: Any = tuple.__new__(kind, [at_once(part, known) for part in value])
    else:
        made = value.copy()
        known[id(value)] = value, made
        if isinstance(made, dict):
            for key, part in made.items():
                made[key] = at_once(part, known)
        elif kind is list or kind is deque:
            for index, part in enumerate([*made]):
                made[index] = at_once(part, known)
    known[id(value)] = value, made
    return made


class LossyError(TypeError):
    """Something is data, and would come back as data of another type.

    Attributes:
        why: without the place.
    """

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"cannot store the state at {where or 'the top'}: {why}")
        self.why = why


def _fraction(numerator: int, denominator: int) -> Fraction:
    """Raises: ArithmeticError: it is none. (A text may say 1e999999999, which takes hours.)"""
    if type(numerator) is not int or type(denominator) is not int:
        raise ArithmeticError
    return Fraction(numerator, denominator)


@lru_cache(4096)
def is_namedtuple(kind: type) -> bool:
    """Whether it is a class of named tuples."""
    return issubclass(kind, tuple) and type(getattr(kind, "_fields", None)) is tuple


@lru_cache(4096)
def is_leaf(kind: type) -> bool:
    """Whether it is a type of data that holds no other data, and cannot change."""
    kind = PLAIN.get(kind, kind)
    return (
        (kind in values.LEAVES and kind is not bytearray)
        or (kind in _PARTS_OF and kind not in COLLECTIONS)
        or issubclass(kind, (np.generic, Enum))
        or (kind.__module__ == "torch" and kind.__name__ in _OF_TORCH)
    )


def has_factory(item: Any) -> bool:
    """Whether a defaultdict has a factory that is code: it comes back as a dict."""
    return item.default_factory is not None and _factory(item) is None


def _factory(item: Any) -> str | None:
    factory = item.default_factory
    name = getattr(factory, "__name__", "")
    return name if type(name) is str and _FACTORIES.get(name) is factory else None


def encode(
    state: Any, arrays: tuple[type, ...] = (np.ndarray,), *, exact: bool | None = False
) -> tuple[bytes, list[Array]]:
    """Returns the bytes of the skeleton, and the arrays: what `split` and `values.encode` make, in
    one pass. arrays: types that are arrays in it; other ones are found too, more slowly.

    Raises: TypeError, ValueError, as `split`.
    """
    known = _binding.encode(state, arrays)
    if known is not None:
        return known
    skeleton, found = split(state, exact=exact)
    return values.encode(skeleton), found


def split(state: Any, *, exact: bool | None = False) -> tuple[Any, list[Array]]:
    """Splits a structure into its skeleton and its arrays. The arrays are the structure's own, not
    copies. exact: all of it has to come back as what it is. Else a defaultdict whose factory is
    code comes back as a dict, because whoever loads the state has its own, and a number or a text
    of another class as a plain one. None: nothing comes back, and classes need not be found again.

    Raises:
        TypeError: something in it is neither data nor a collection of data, or, as LossyError, it
            would come back as another type; the message says where.
        ValueError: it contains itself.

    >>> split({"lr": [0.1], "weights": np.zeros(2)})
    ({'lr': [0.1], 'weights': {'pmstore': 'array', 'index': 0}}, [array([0., 0.])])
    """
    made = _Splitter(exact)
    try:
        return made.split(state, ""), made.arrays
    except RecursionError:
        raise ValueError("cannot store a state that contains itself") from None


class _Splitter:
    """Takes one structure apart."""

    def __init__(self, exact: bool | None) -> None:
        self.arrays: list[Array] = []
        self._exact = exact
        self._names: dict[type, str] = {}  # of classes that were found
        self._members: dict[int, Any] = {}  # marks of members of enumerations, by their ids
        self._way = (
            "Keep plain values of it; what has a state of its own, a generator too, can be given "
            "to attach, as stateful={'name': it}"
            if exact
            else "Leave it out of state_dict(), or give the object a state_dict() of plain values"
        )

    def split(self, item: Any, where: str) -> Any:
        kind: Any = PLAIN.get(type(item), type(item))
        if kind in values.LEAVES or isinstance(item, np.generic):
            return item
        if isinstance(item, np.ndarray) or is_tensor(item):
            self.arrays.append(item)
            return {_MARK: "array", "index": len(self.arrays) - 1}
        if kind is list or kind is tuple:
            return kind(self._parts(item, where))
        if kind in (dict, OrderedDict, Counter, defaultdict):
            return self._mapping(item, kind, where)
        if kind is deque:
            return {_MARK: "deque", "parts": self._parts(item, where), "maxlen": item.maxlen}
        if kind in _PARTS_OF:
            name, parts_of = _PARTS_OF[kind]
            return {_MARK: name, "parts": self._parts(parts_of(item), where)}
        if kind.__module__ == "torch" and kind.__name__ in _OF_TORCH:
            if kind.__name__ == "Size":
                return {_MARK: "Size", "parts": list(item)}
            return {_MARK: kind.__name__, "name": str(item)}
        if is_namedtuple(kind):
            mark = {_MARK: "namedtuple", "class": self._name_of(kind, "namedtuple", where)}
            return {**mark, "fields": list(kind._fields), "parts": self._parts(item, where)}
        return self._of_a_class(item, kind, where)

    def _parts(self, item: Iterable[Any], where: str) -> list[Any]:
        return [self.split(part, f"{where}[{index}]") for index, part in enumerate([*item])]

    def _mapping(self, item: Any, kind: type, where: str) -> Any:
        items = [*item.items()]  # at once: see `at_once`
        pairs = [
            [self._key(key, where), self.split(part, f"{where}[{key!r}]")] for key, part in items
        ]
        if kind is defaultdict:
            name = _factory(item)
            if name is not None or item.default_factory is None:
                return {_MARK: "defaultdict", "factory": name, "pairs": pairs}
            if self._exact:
                raise LossyError(
                    where,
                    "a defaultdict comes back without a factory that is code. Give it a type, as "
                    "defaultdict(int) or defaultdict(list), or use a dict and d.setdefault(key, "
                    "value)",
                )
            kind = dict
        if kind is dict and _MARK not in item and all(_is_plain_key(key) for key, _ in items):
            return dict(pairs)
        return {_MARK: kind.__name__, "pairs": pairs}

    def _key(self, key: Any, where: str) -> Any:
        if _is_plain_key(key):
            return key
        where, held = f"{where or 'the top'}, the key {key!r}", len(self.arrays)
        made = self.split(key, where)
        if len(self.arrays) > held:
            raise TypeError(f"cannot store the state at {where}: an array is no plain value")
        return made

    def _of_a_class(self, item: Any, kind: Any, where: str) -> Any:
        known = self._members.get(id(item))
        if known is not None:
            return known
        plain = _plain(item)
        name = item.name if isinstance(item, Enum) and item.name in kind.__members__ else None
        member = name is not None or isinstance(item, Flag)  # programs compare members by `is`
        if member and (plain is None or self._exact or _is_found(kind)):
            found = self._name_of(kind, "enumeration", where)
            value = item.value if name is None else plain
            mark = {_MARK: "enum", "class": found, "name": name, "value": value}
            return self._members.setdefault(id(item), mark)
        called = f"{kind.__module__}.{kind.__qualname__}"
        if plain is None:
            raise TypeError(
                f"cannot store the state at {where or 'the top'}: {called} is neither data nor a "
                f"collection of data. {self._way}"
            )
        if self._exact:
            to = type(plain).__name__
            raise LossyError(where, f"{called} comes back as {to}: keep {to}(value)")
        return plain

    def _name_of(self, kind: type, what: str, where: str) -> str:
        """Raises: LossyError: a restart would not find it."""
        if kind in self._names:
            return self._names[kind]
        if not _is_found(kind) and self._exact is not None:
            raise LossyError(
                where,
                f"the {what} {kind.__qualname__} is found under no name of its module, as after a "
                "restart it has to be: define it at the top of a module",
            )
        found = self._names[kind] = f"{kind.__module__}:{kind.__qualname__}"
        return found


def _in_order(items: Any) -> list[Any]:
    """What is in a set, in an order that does not depend on how it was filled."""
    try:
        return sorted(items)
    except (TypeError, ValueError, RuntimeError):  # of several types, or without an order
        return sorted(items, key=lambda item: values.encode(split(item)[0]))


def _plain(item: Any) -> Any:
    """Returns the plain value of a number, text or bytes of another class. None: it is none."""
    for base, plain in _PLAIN_OF.items():
        if isinstance(item, base):
            return plain(item)
    return None


def _is_plain_key(key: Any) -> bool:
    return type(key) in _KEYS or (type(key) is tuple and all(map(_is_plain_key, key)))


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
    if kind is bytearray:
        return bytearray(skeleton)
    if kind is not dict:
        return skeleton
    if _MARK not in skeleton:
        return {key: join(part, arrays) for key, part in skeleton.items()}
    return _unmark(skeleton, arrays)


def _unmark(mark: Mapping[str, Any], arrays: Sequence[Array]) -> Any:
    name = mark[_MARK]
    if name == "array":
        return arrays[mark["index"]]
    if name in _MAPPINGS or name == "defaultdict":
        pairs = {join(key, arrays): join(part, arrays) for key, part in mark["pairs"]}
        if name == "defaultdict":
            return defaultdict(_FACTORIES.get(mark["factory"]), pairs)
        return _MAPPINGS[name](pairs)
    if name == "enum":
        return _member(mark)
    if name in _PARTS or name in ("deque", "Size", "namedtuple"):
        parts = [join(part, arrays) for part in mark["parts"]]
        if name in _PARTS:
            try:
                return _PARTS[name](parts)
            except ArithmeticError:
                raise ValueError(f"a stored state has a {name} that is none") from None
        if name == "deque":
            return deque(parts, mark["maxlen"])
        if name == "namedtuple":
            return _named(mark, parts)
    if name in _OF_TORCH:
        import torch

        if name == "Size":
            return torch.Size(parts)
        if name == "device":
            return torch.device(mark["name"])
        dtype = vars(torch).get(mark["name"].removeprefix("torch."))  # `getattr` imports
        if isinstance(dtype, torch.dtype):
            return dtype
    raise ValueError(f"a stored state has a mark that this version does not know: {name!r}")


# ---- classes of the program


def _find_class(name: str) -> Any:
    """Returns what has that name in a module that is imported. Runs no code of the program: the
    store may be anybody's."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        # `isinstance` and attributes of other objects, as of lazy ones, may be code
        base = next((base for base in (type, ModuleType) if issubclass(type(found), base)), None)
        found = None if base is None else _DICT_OF[base].__get__(found).get(part)
    return found if issubclass(type(found), type) else None


_DICT_OF: dict[type, Any] = {base: vars(base)["__dict__"] for base in (type, ModuleType)}


def _is_found(kind: type) -> bool:
    return _find_class(f"{kind.__module__}:{kind.__qualname__}") is kind


def _tell_not_found(mark: Mapping[str, Any], instead: str) -> None:
    warnings.warn(
        f"a stored state has a value of {mark.get('class')!r}, a class that no imported module "
        f"has as it was: it comes back as {instead}. Import its module before",
        RuntimeWarning,
        stacklevel=2,
    )


def _member(mark: Mapping[str, Any]) -> Any:
    """Returns the member. Where the program has not imported the class, or the member is gone: its
    plain value, or its name.

    Raises: ValueError: it is no mark of a member.
    """
    name, value, kind = mark.get("name"), mark.get("value"), _find_class(str(mark.get("class")))
    if not isinstance(name, str) and (name is not None or type(value) is not int):
        raise ValueError("the stored state has a member of an enumeration without a name")
    if isinstance(kind, EnumMeta):
        members: Mapping[Any, Any] = dict(kind.__members__.items())
        if name in members:
            return members[name]
        if name is None and issubclass(kind, Flag):
            several = _flags(kind, value)
            if several is not None:
                return several
    plain = name if value is None else value
    _tell_not_found(mark, repr(plain))
    return plain


def _flags(kind: type[Flag], value: Any) -> Flag | None:
    """Several flags, or none of them. None: some are gone."""
    known: Any = kind._value2member_map_.get(value)
    if known is None:
        base: Any = IntFlag if issubclass(kind, IntFlag) else Flag
        try:  # as Python's own class makes it: that of the program may have other code there
            known = base._missing_.__func__(kind, value)
        except ValueError:
            return None
    return known if isinstance(known, kind) else None


def _named(mark: Mapping[str, Any], parts: list[Any]) -> Any:
    """Returns the namedtuple. Where the program has not imported the class, or it has other fields:
    a tuple."""
    kind = _find_class(str(mark.get("class")))
    if isinstance(kind, type) and is_namedtuple(kind):
        fields: Any = kind
        if list(fields._fields) == list(mark["fields"]) and len(parts) == len(fields._fields):
            return tuple.__new__(kind, parts)
    _tell_not_found(mark, "a tuple")
    return tuple(parts)
