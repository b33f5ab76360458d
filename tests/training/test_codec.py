"""Python-side state taken apart and put together."""

from __future__ import annotations

import copy
import datetime as dt
import enum
import sys
import types
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import pmstore
from pmstore.objects.structure import LossyError, join, split
from pmstore.torch.kept_structure import Structure, become, objects_in, raw_bytes


class Level(enum.IntEnum):
    LOW = 1


class Phase(str, enum.Enum):
    WARM = "warm"


class Mode(enum.Enum):
    BOTH = (1, 2.5)
    SAME = (1, 2.5)  # noqa: PIE796


class Rights(enum.IntFlag):
    READ = 1
    WRITE = 2


class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Named(NamedTuple):
    name: str
    size: int = 3


Point = namedtuple("Point", "x y")


class Text(str):
    def __str__(self) -> str:
        return "another text"


STATES: list[Any] = [
    None,
    {"a": [1, 2.5, "x", b"y", None, True, (1, 2)], 3: {"nested": ()}, (1, "k"): -0.0},
    {"pmstore": "a user's own key", "b": torch.arange(3)},
    Counter({30: 1, 80: 2}),
    OrderedDict([("z", 1), ("a", np.float32(2))]),
    {"set": {1, 2}, "frozen": frozenset({"a"}), "ring": deque([1, 2], maxlen=2)},
    {"dtype": torch.bfloat16, "device": torch.device("cpu")},
    [torch.tensor(1.5), np.arange(4).reshape(2, 2), torch.zeros(0, 3), np.float64(3)],
    float("inf"),
    [bytearray(b"ab"), dt.datetime(2020, 1, 2), dt.date(2020, 1, 1), dt.timedelta(1, 2), 10**40],
    [Path("a/b"), Decimal("1.10"), Fraction(1, 3), range(1, 9, 2), slice(1, None), 1 + 2j],
    [torch.Size([2, 3]), (), ((1, (2,)), [(3,)])],
    pytest.param(
        {"mixed": {1, "a", None, (2, 3)}, "members": frozenset({Level.LOW, Mode.BOTH})}, id="sets"
    ),
    {Mode.BOTH: 1, np.int64(3): [Phase.WARM], (1, Level.LOW): 2, frozenset({1}): 3},
    Counter(np.array([1, 1, 2])),
    defaultdict(int, a=1),
    {"a": [defaultdict(list, {1: [2]}), defaultdict(None, b=defaultdict(dict))]},
    Point(1, 2.5),
    [Point(torch.ones(2), (Point(1, [2]),)), Named("a")],
]


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, (torch.Tensor, np.ndarray)):
        return type(ours) is type(theirs) and bool((raw_bytes(ours) == raw_bytes(theirs)).all())
    if isinstance(ours, defaultdict) and ours.default_factory is not theirs.default_factory:
        return False
    if isinstance(ours, (set, frozenset)):
        return type(ours) is type(theirs) and ours == theirs
    if isinstance(ours, (list, tuple)):
        return (
            type(ours) is type(theirs) and all(map(same, ours, theirs)) and len(ours) == len(theirs)
        )
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in ours)
    return type(ours) is type(theirs) and repr(ours) == repr(theirs)


@pytest.mark.parametrize("state", STATES, ids=repr)
def test_a_state_comes_back(store: pmstore.Store, state: Any) -> None:
    assert same(join(*split(state)), state)
    part = Structure(store, "part")
    assert not part.stored
    part.write(state)
    assert part.stored
    back = Structure(store, "part").read()
    assert same(back, state)
    assert type(back) is type(state)


def test_tensors_that_require_gradients_come_back_so(store: pmstore.Store) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    part = Structure(store, "part")
    for factor in (1.0, 2.0, 3.0):
        state = [weight.clone(), weight * factor, weight, torch.nn.Parameter(torch.ones(2), False)]
        part.write(state)
        back = part.read()
        assert same(back, state)
        assert [one.requires_grad for one in back] == [True, True, True, False]
        assert all(one.is_leaf for one in back)
    part.write([weight.detach()])
    assert not part.read()[0].requires_grad


@pytest.mark.parametrize("given", [defaultdict(lambda: 1, a=2), Text("a")], ids=["dict", "str"])
def test_what_becomes_plain_is_refused_where_all_has_to_be_exact(given: Any) -> None:
    back = join(*split([given]))
    assert back == [given]
    assert type(back[0]) is type(given).__mro__[1]
    with pytest.raises(LossyError, match=r"at \[0\]: .* (keep str\(value\)|defaultdict\(int\))"):
        split([given], exact=True)


def test_a_structure_becomes_another_in_the_objects_that_are_ours() -> None:
    here = {"a": ([1], Point(deque([[2]]), {3})), "b": [4], "c": [5]}
    ours = {id(one): one for _, one in objects_in(here)}
    point: Any = here["a"][1]
    row, inner, members, mine = here["a"][0], point.x[0], point.y, [6]
    here["b"], here["c"] = here["c"], mine
    wanted = {"a": ([7], Point(deque([[8]]), {9})), "b": [10], "c": [11]}
    assert become(here, copy.deepcopy(wanted), ours) is here
    assert here == wanted
    assert (row, inner, members, mine) == ([7], [8], {9}, [6])
    assert here["a"][0] is row
    assert type(here["a"][1]) is Point


def test_a_size_becomes_the_one_that_is_wanted() -> None:
    here = [torch.Size([1, 2])]
    assert become(here, [torch.Size([3, 4])], {id(here): here}) is here
    assert here == [torch.Size([3, 4])]


def test_a_state_that_contains_itself_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(ValueError, match="contains itself"):
        split(state)


def test_a_member_of_an_enumeration_comes_back_as_itself(store: pmstore.Store) -> None:
    members = [Level.LOW, Phase.WARM, Mode.BOTH, Mode.SAME, Rights.WRITE, Access.READ]
    members += [Rights.READ | Rights.WRITE, Access.READ | Access.WRITE, Access(0), Rights(8)]
    part = Structure(store, "part")
    part.write({"all": members, "one": Phase.WARM})
    back = part.read()
    assert all(one is other for one, other in zip(back["all"], members, strict=True))
    assert back["one"] is Phase.WARM


def test_a_member_of_a_class_that_is_not_imported_comes_back_as_its_value() -> None:
    skeleton, arrays = split([Phase.WARM, Mode.BOTH, Level.LOW])
    for mark, other in zip(skeleton, ("gone:Phase", "enum:Enum.Mode", "os:path"), strict=True):
        mark["class"] = other
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        back = join(skeleton, arrays)
    assert "of 'enum:Enum.Mode', a class that no imported module has" in str(told[1].message)
    assert back == ["warm", "BOTH", 1]
    assert [type(one) for one in back] == [str, str, int]
    with pytest.raises(ValueError, match="without a name"):
        join({"pmstore": "enum", "class": "enum:Enum", "name": [1]}, [])


@pytest.mark.parametrize("fields", [["x"], ["x", "z"]])
def test_a_namedtuple_of_a_class_that_is_another_one_comes_back_as_a_tuple(fields: Any) -> None:
    skeleton, arrays = split(Point(1, 2))
    skeleton["fields"] = fields
    with pytest.warns(RuntimeWarning, match=r"Point', a class that .* comes back as a tuple"):
        back = join(skeleton, arrays)
    assert back == (1, 2)
    assert type(back) is tuple


def test_flags_that_are_gone_come_back_as_a_number() -> None:
    skeleton, arrays = split(Access.READ | Access.WRITE)
    skeleton["value"] = 9
    with pytest.warns(RuntimeWarning, match="comes back as 9"):
        assert join(skeleton, arrays) == 9


def test_a_class_that_a_restart_would_not_find_is_refused() -> None:
    local: Any = enum.Enum("local", "A")
    several: Any = enum.Flag("several", "A B")
    named: Any = namedtuple("named", "x")
    for one, told in (
        (local.A, "enumeration local"),
        (several.A | several.B, "enumeration several"),
        (named(1), "namedtuple named"),
    ):
        with pytest.raises(TypeError, match=rf"at \['a'\]: the {told} is found under no name"):
            split({"a": one})


class Proxy:
    """As lazy objects of frameworks: code runs whatever is asked of them."""

    @property
    def __class__(self) -> Any:
        raise AssertionError("code of the program runs")

    @__class__.setter
    def __class__(self, kind: Any) -> None: ...

    @property
    def __dict__(self) -> Any:
        raise AssertionError("code of the program runs")


@pytest.mark.parametrize("kind", ["enum", "namedtuple"])
def test_nothing_runs_of_what_a_mark_names(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    place = types.ModuleType("place")
    vars(place)["proxy"] = object.__new__(Proxy)

    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError("code of the program runs")

    monkeypatch.setitem(sys.modules, "place", place)
    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    for name in ("place:proxy", "place:proxy.A", "lazy:A"):
        mark = {"pmstore": kind, "class": name, "name": "A", "value": None, "parts": []}
        with pytest.warns(RuntimeWarning, match="no imported module"):
            assert join({**mark, "fields": []}, []) in ("A", ())


def test_a_mark_imports_nothing_and_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "__getattr__", asked.append)
    with pytest.raises(ValueError, match="does not know"):
        join({"pmstore": "dtype", "name": "torch._lazy"}, [])
    assert not asked
    for parts in (["1e5", None], ["1e5", 1], [1.5, None]):
        with pytest.raises(ValueError, match="has a Fraction that is none"):
            join({"pmstore": "Fraction", "parts": parts}, [])


def test_what_is_not_data_is_named_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"the state at \['a'\]\[1\]: builtins\.function"):
        split({"a": [0, lambda: None]})
    with pytest.raises(TypeError, match=r"at \['a'\], the key <object .* is neither data"):
        split({"a": {object(): 1}})
    with pytest.raises(TypeError, match=r"the key tensor\(1\): an array is no plain value"):
        split({torch.tensor(1): 1})
    with pytest.raises(ValueError, match="has a Decimal that is none"):
        join({"pmstore": "Decimal", "parts": ["x"]}, [])
    with pytest.raises(ValueError, match="a mark that this version does not know"):
        join({"pmstore": "from the future"}, [])


def test_writing_again_writes_only_what_changed(store: pmstore.Store) -> None:
    part = Structure(store, "part")
    array = np.zeros(100)
    part.write({"a": array, "n": 1})
    stored = store["part/0"]
    store.commit()
    before = store.stats()
    part.write({"a": array, "n": 1})
    after = store.stats()
    assert (after.faults, after.captures) == (before.faults, before.captures)
    array[5] = -0.0  # equal, but other bits
    part.write({"a": array, "n": 1})
    assert store["part/0"] is stored or store["part/0"].ctypes.data == stored.ctypes.data
    assert np.signbit(stored[5])
    part.write({"a": np.zeros(3), "b": array})
    part.write({"n": 1})
    assert list(store["part"]) == ["value"]
    store.rollback()
    part.forget()
    assert part.read()["n"] == 1
    assert not np.signbit(part.read()["a"]).any()
