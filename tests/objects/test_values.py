"""Values come back equal and of the same type, and what cannot is refused."""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import gc
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pmstore
from pmstore import ClosedStoreError, CorruptStoreError, FormatVersionError
from pmstore.objects import values

any_text = st.text(st.characters(codec=None))
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**300), max_value=2**300)
    | st.floats()
    | st.complex_numbers()
    | any_text
    | st.binary()
    | st.builds(bytearray, st.binary())
    | st.datetimes()
    | st.datetimes(timezones=st.just(dt.timezone.utc))
    | st.dates()
    | st.datetimes(
        timezones=st.integers(-86399, 86399).map(
            lambda seconds: dt.timezone(dt.timedelta(seconds=seconds))
        )
    )
    | st.datetimes().map(lambda moment: moment.replace(fold=1))
    | st.times()
    | st.timedeltas()
    | st.floats(width=32).map(np.float32)
    | st.integers(-(2**15), 2**15 - 1).map(np.int16)
    | st.sampled_from(
        [np.longdouble("1.1"), np.bool_(True), np.datetime64("2020-02-29"), np.timedelta64(5, "ms")]
    )
    | st.sampled_from(
        [
            np.complex64(1 - 2j),
            np.str_("é"),
            np.bytes_(b"a\0b"),
            np.float16("inf"),
            np.uint64(2**64 - 1),
        ]
    )
)
keys = (
    st.none()
    | st.booleans()
    | st.integers()
    | any_text
    | st.binary()
    | st.tuples(st.integers(), any_text)
)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    """Equal, of one type all the way down, nan and the sign of zero included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))  # order too
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (float, np.floating)):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    return bool(a == b)


@given(trees)
def test_round_trip(value: Any) -> None:
    assert same(values.decode(values.encode(value)), value)


@given(trees)
def test_what_a_look_up_gives_is_the_value(value: Any) -> None:
    data = values.encode(value)
    found = values.look_up(data)
    assert same(copy.deepcopy(found), value)
    assert same(pickle.loads(pickle.dumps(found)), value)
    assert values.encode(found) == data


CHANGES: dict[str, Any] = {
    "append": lambda store: store["list"].append(1),
    "extend": lambda store: store["list"].extend([1]),
    "insert": lambda store: store["list"].insert(0, 1),
    "list pop": lambda store: store["list"].pop(),
    "remove": lambda store: store["list"].remove(1),
    "reverse": lambda store: store["list"].reverse(),
    "sort": lambda store: store["list"].sort(),
    "list clear": lambda store: store["list"].clear(),
    "set item": lambda store: store["list"].__setitem__(0, 5),
    "set slice": lambda store: store["list"].__setitem__(slice(0, 1), [5]),
    "del item": lambda store: store["list"].__delitem__(0),
    "set key": lambda store: store["dict"].__setitem__("a", 5),
    "del key": lambda store: store["dict"].__delitem__("a"),
    "update": lambda store: store["dict"].update(a=5),
    "setdefault": lambda store: store["dict"].setdefault("b", 5),
    "pop": lambda store: store["dict"].pop("a"),
    "popitem": lambda store: store["dict"].popitem(),
    "clear": lambda store: store["dict"].clear(),
    "within a dict": lambda store: store["dict"]["a"].append(1),
    "within a tuple": lambda store: store["tuple"][0].append(1),
    "within a list": lambda store: store["list"][1].update(b=1),
    "of a list of the store": lambda store: store["items"][0].append(1),
    "of its slice": lambda store: store["items"][:][0].append(1),
    "of get": lambda store: store.get("list").append(1),
    "of setdefault": lambda store: store.setdefault("list", []).append(1),
    "bytes": lambda store: store["bytes"].append(1),
    "a byte": lambda store: store["bytes"].__setitem__(0, 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_was_looked_up_raises(tmp_path: Path, change: str) -> None:
    """It would be lost: a value is a copy each time it is looked up."""
    whole = {
        "list": [1, {"b": 2}],
        "dict": {"a": [1]},
        "tuple": ([1], 2),
        "bytes": bytearray(b"abc"),
    }
    with pmstore.open(tmp_path / "a.pm", size="8MiB") as store:
        store.update(whole)
        store.list("items").append([1])
        with pytest.raises(TypeError, match=r"is a copy.*Assign the whole"):
            CHANGES[change](store)
        assert {name: store[name] for name in whole} == whole


def test_what_was_looked_up_is_otherwise_as_plain(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "a.pm", size="8MiB") as store:
        store["config"] = config = {"lr": 0.1, "sizes": [1, 2], "names": {"a": (1, [2])}}
        found = store["config"]
        assert isinstance(found, dict)
        assert isinstance(found["sizes"], list)
        assert found == config
        assert repr(found) == repr(config)
        assert json.dumps(found) == json.dumps(config)
        for plain in (dict(found), found.copy(), {**found}, found | {}, copy.copy(found)):
            assert type(plain) is dict
            plain["lr"] = 0.2
        for items in (
            list(found["sizes"]),
            found["sizes"].copy(),
            found["sizes"] + [],
            copy.copy(found["sizes"]),
        ):
            assert type(items) is list
            items.append(3)
        deep = copy.deepcopy(found)
        deep["names"]["a"][1].append(3)
        store["again"] = store["config"]
        assert store["again"] == store["config"] == config


def test_an_augmented_assignment_is_an_assignment(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "a.pm", size="8MiB") as store:
        store["list"], store["dict"], store["bytes"] = [1], {"a": 1}, bytearray(b"a")
        store["list"] += (2,)
        store["list"] *= 2
        store["dict"] |= {"b": 2}
        store["bytes"] += b"b"
        store.commit()
        assert store["list"] == [1, 2, 1, 2]
        assert store["dict"] == {"a": 1, "b": 2}
        assert store["bytes"] == bytearray(b"ab")
        with pytest.raises(TypeError, match="is a copy"):
            store["dict"]["a"] += 1


@given(st.binary())
def test_any_bytes_decode_or_are_called_corrupt(data: bytes) -> None:
    with contextlib.suppress(CorruptStoreError):
        values.decode(data)


def test_a_store_reads_any_bytes_as_look_up_does(store: pmstore.Store) -> None:
    """What is small and holds no others is decoded in C."""
    tag = st.integers(0, 255).map(lambda byte: bytes([byte]))
    text = st.text(st.characters(codec=None), max_size=300)
    many = st.binary(min_size=240, max_size=600) | text.map(
        lambda value: value.encode(errors="surrogatepass")
    )
    long = st.tuples(st.sampled_from([b"\xd9", b"\xc4", b"\xda", b"\xc5"]), many).map(
        lambda pair: pair[0] + bytes([len(pair[1]) % 256]) + pair[1]
    )

    @given(
        leaves.map(values.encode)
        | (text | st.binary(max_size=600)).map(values.encode)
        | st.tuples(tag, st.binary(max_size=9)).map(b"".join)
        | long
    )
    def compare(data: bytes) -> None:
        store["x"] = values.Encoded(data)
        items[0] = values.Encoded(data)
        try:
            expected = values.look_up(data)
        except (CorruptStoreError, FormatVersionError) as error:
            for read in (lambda: store["x"], lambda: items[0]):
                with pytest.raises(type(error)):
                    read()
        else:
            assert same(store["x"], expected)
            assert same(items[0], expected)

    items = store.list("items")
    items.append(0)
    compare()


def test_a_store_takes_any_value_as_encode_makes_it(store: pmstore.Store) -> None:
    @given(trees)
    def compare(value: Any) -> None:
        store["x"] = value
        assert same(copy.deepcopy(store["x"]), value)
        store["x"] = values.Encoded(values.encode(value))
        assert same(copy.deepcopy(store["x"]), value)

    compare()


@given(trees, st.integers(0, 1 << 20), st.integers(0, 255))
def test_damaged_bytes_decode_or_are_called_corrupt(value: Any, at: int, byte: int) -> None:
    data = bytearray(values.encode(value))
    data[at % len(data)] = byte
    # a long double's format is a text like any other
    with contextlib.suppress(CorruptStoreError, FormatVersionError):
        values.decode(bytes(data))


def test_a_str_of_no_characters_is_damage() -> None:
    data = values.encode(np.str_("é")).replace("é".encode("utf-32-le"), b"\xe9\0\x11\x11")
    with pytest.raises(CorruptStoreError, match="character"):
        values.decode(data)


def test_a_long_double_without_its_format_is_damage() -> None:
    data = values.encode(np.longdouble("1.1")).replace(b"format", b"f\0rmat")
    with pytest.raises(CorruptStoreError, match="without its format"):
        values.decode(data)


@pytest.mark.parametrize(
    "data", [b"\x91" * 100_000 + b"\xc0", b"\x81\xa0" * 100_000 + b"\xc0", b"\xc7\x00\x03", b""]
)
def test_hostile_bytes(data: bytes) -> None:
    with pytest.raises(CorruptStoreError):
        values.decode(data)


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_nesting_has_a_limit(kind: type) -> None:
    value: Any = None
    for _ in range(values.MAX_DEPTH):
        value = {"a": value} if kind is dict else kind([value])
    assert values.decode(values.encode(value)) == value
    with pytest.raises(ValueError, match="nested"):
        values.encode([value])


def test_cycles() -> None:
    loop: list[Any] = []
    loop.append({"self": loop})
    with pytest.raises(ValueError, match="contains itself"):
        values.encode(loop)


class Int(int):
    pass


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        Int(3),
        len,
        int,
        np.zeros(2),
        [np.zeros(2)],
        range(3),
        memoryview(b"x"),
        dt.timezone.utc,
    ],
    ids=lambda value: type(value).__name__,
)
def test_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="What can be stored"):
        values.encode(value)


def test_refusal_names_the_remedy() -> None:
    with pytest.raises(TypeError, match="group"):
        values.encode({"w": np.zeros(2)})
    with pytest.raises(TypeError, match=r"int\(value\)"):
        values.encode(Int(3))
    with pytest.raises(TypeError, match="attach"):
        values.encode(type("Module", (), {"state_dict": dict})())
    with pytest.raises(TypeError, match="astimezone"):
        values.encode(dt.datetime(2020, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1), "here")))
    with pytest.raises(TypeError, match=r"replace\(tzinfo=None\)"):
        values.encode(dt.time(1, tzinfo=dt.timezone(dt.timedelta(hours=1), "here")))


@pytest.mark.parametrize(
    "microseconds", [0, 1, -1, 999_999, -999_999, 1_000_000, 3_600_000_001, -86_399_999_999]
)
def test_offsets_from_utc_of_any_length(microseconds: int) -> None:
    """Python itself reads one of less than a second as none."""
    zone = dt.timezone(dt.timedelta(microseconds=microseconds))
    for value in (
        dt.datetime(2020, 1, 1, tzinfo=zone),
        dt.datetime(2020, 1, 1, 0, 0, 0, 7, zone),
        dt.time(0, tzinfo=zone),
    ):
        back = values.decode(values.encode(value))
        assert back.utcoffset() == value.utcoffset()
        assert repr(back) == repr(value)


def test_a_finalizer_that_a_look_up_runs_closes_the_store(path: Path) -> None:
    """To make the lists of a value may run the collector, and with it anybody's finalizer."""

    class Closes:
        def __init__(self, store: pmstore.Store) -> None:
            self.me, self.store = self, store

        def __del__(self) -> None:
            self.store.close()

    value, closed = [[1], [2], [3], (1, 2)], set()
    thresholds = gc.get_threshold()
    try:
        for more in range(2, 16):
            store = pmstore.open(path, size="2MiB")
            store["v"] = value
            store.commit()
            gc.collect()
            Closes(store)
            gc.set_threshold(gc.get_count()[0] + more)
            with contextlib.suppress(ClosedStoreError):
                assert store["v"] == value
            gc.set_threshold(*thresholds)
            closed.add(store.closed)
            gc.collect()
            store.close()
    finally:
        gc.set_threshold(*thresholds)
    assert True in closed
