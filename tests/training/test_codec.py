"""Python-side state taken apart and put together."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch

import pmstore
from pmstore.objects.structure import join, split
from pmstore.torch.kept_structure import Structure, raw_bytes


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
]


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, (torch.Tensor, np.ndarray)):
        return type(ours) is type(theirs) and bool((raw_bytes(ours) == raw_bytes(theirs)).all())
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


def test_factories_and_subclasses_become_plain() -> None:
    assert join(*split(defaultdict(list, {"a": [1]}))) == {"a": [1]}
    back = join(*split([Text("a"), Rights.READ | Rights.WRITE]))
    assert back == ["a", 3]
    assert [type(one) for one in back] == [str, int]


def test_a_member_of_an_enumeration_comes_back_as_itself(store: pmstore.Store) -> None:
    members = [Level.LOW, Phase.WARM, Mode.BOTH, Mode.SAME, Rights.WRITE]
    part = Structure(store, "part")
    part.write({"all": members, "one": Phase.WARM})
    back = part.read()
    assert all(one is other for one, other in zip(back["all"], members, strict=True))
    assert back["one"] is Phase.WARM


def test_a_member_of_a_class_that_is_not_imported_comes_back_as_its_value() -> None:
    skeleton, arrays = split([Phase.WARM, Mode.BOTH, Level.LOW])
    for mark, other in zip(skeleton, ("gone:Phase", "enum:Enum.Mode", "os:path"), strict=True):
        mark["class"] = other
    back = join(skeleton, arrays)
    assert back == ["warm", "BOTH", 1]
    assert [type(one) for one in back] == [str, str, int]
    with pytest.raises(ValueError, match="without a name"):
        join({"pmstore": "enum", "class": "enum:Enum", "name": [1]}, [])


def test_an_enumeration_that_a_restart_would_not_find_is_refused() -> None:
    local = enum.Enum("local", "A")
    with pytest.raises(
        TypeError, match=r"at \['a'\]: the enumeration local is found under no name"
    ):
        split({"a": local.A})  # type: ignore[attr-defined]


def test_what_is_not_data_is_named_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"the state at \['a'\]\[1\]: builtins\.function"):
        split({"a": [0, lambda: None]})
    with pytest.raises(TypeError, match="the key <object"):
        split({"a": {object(): 1}})
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
