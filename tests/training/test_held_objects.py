"""Objects of the program's own that modules hold: a change that is not kept is told, once."""

from __future__ import annotations

import argparse
import threading
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pmstore
from pmstore.objects import structure
from pmstore.torch import attach
from pmstore.torch._state import module_attributes


class Meter:
    def __init__(self) -> None:
        self.name, self.count, self.values, self.mean = "loss", 0, [0.0], np.float32(0)
        self.average, self.best, self.inner = torch.zeros(3), None, SimpleNamespace(seen=0)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Counting(torch.optim.SGD):
    """An optimizer that keeps something outside of its state."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)


class Net(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held, self.inner = held, nn.Sequential(nn.Linear(3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


def told(
    path: Path, held: Any, change: Any, *, optimizer: Any = torch.optim.SGD, **given: Any
) -> list[str]:
    """What is warned of in a run of four steps, each of which makes the change."""
    net = held if isinstance(held, Net) else Net(held)
    sgd = optimizer(net.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught, pmstore.open(path) as store:
        warnings.simplefilter("always")
        run = attach(store, model=net, optimizer=sgd, **given)
        for _ in run.steps(4):
            sgd.zero_grad()
            net(torch.ones(2, 3)).sum().backward()
            sgd.step()
            change(net)
    return [str(one.message).partition(" has changed")[0] for one in caught]


def count(net: Any) -> None:
    net.held.count += 1


def append(net: Any) -> None:
    net.held.values.append(1.0)


def average(net: Any) -> None:
    net.held.average.lerp_(torch.ones(3), 0.1)


def deeper(net: Any) -> None:
    net.held.inner.seen += 1


def best(net: Any) -> None:
    net.held.best = (net.held.best or 0.0) + 1.0


def mean(net: Any) -> None:
    net.held.mean += np.float32(1)


CHANGES = {count: "count", append: "values", average: "average", best: "best", mean: "mean"}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_told_once(shm: Path, change: Any) -> None:
    assert told(shm / "a.pm", Meter(), change) == [f"{CHANGES[change]} in held"]


def test_where_it_lies(shm: Path) -> None:
    assert told(shm / "a.pm", Meter(), deeper) == ["seen in held.inner"]

    def in_a_list(net: Any) -> None:
        net.held["m"][1].count += 1

    assert told(shm / "b.pm", {"m": (None, Meter())}, in_a_list) == ["count in held['m'][1]"]
    assert told(shm / "c.pm", argparse.Namespace(count=0), count) == ["count in held"]
    nothing: Any = lambda _: None  # noqa: E731
    assert told(shm / "d.pm", None, nothing, optimizer=Counting) == ["calls in the optimizer"]


def test_a_dict_with_something_that_is_no_data_is_told(shm: Path) -> None:
    def call(net: Any) -> None:
        net.held["calls"] += 1

    assert told(shm / "a.pm", {"f": call, "calls": 0, 1: 2}, call) == ["calls in held"]


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        self.transform.count += 1
        return torch.full((3,), float(self.transform.count))


class StatefulRows(Rows):
    def state_dict(self) -> dict[str, Any]:
        return {"count": self.transform.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.transform.count = state["count"]


@pytest.mark.parametrize("kind", [Rows, StatefulRows])
def test_what_a_data_set_holds_is_told(shm: Path, kind: Any) -> None:
    net = nn.Linear(3, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.Subset(kind(Meter()), [0, 1, 2]))
    with warnings.catch_warnings(record=True) as caught, pmstore.open(shm / "a.pm") as store:
        warnings.simplefilter("always")
        run = attach(store, model=net, optimizer=sgd, loader=loader)
        for batch in run.batches():
            sgd.zero_grad()
            net(batch).sum().backward()
            sgd.step()
    told = [str(one.message).partition(" has changed")[0] for one in caught]
    assert told == (["count in dataset.dataset.transform"] if kind is Rows else [])


def test_each_object_is_told(shm: Path) -> None:
    def both(net: Any) -> None:
        count(net)
        deeper(net)

    assert told(shm / "a.pm", Meter(), both) == ["count in held", "seen in held.inner"]


def test_a_large_one_is_told(shm: Path) -> None:
    meter: Any = SimpleNamespace(table=np.zeros(1 << 20))

    def write(net: Any) -> None:
        net.held.table += 1

    assert told(shm / "a.pm", meter, write) == ["table in held"]


def test_what_answers_for_itself_is_not_told(shm: Path) -> None:
    meter = Meter()
    assert told(shm / "a.pm", meter, count, stateful={"meter": meter}) == []
    agent: Any = Meter()
    agent.meter = meter
    assert told(shm / "b.pm", meter, count, stateful={"agent": agent}) == []


def test_collections_that_have_no_end(shm: Path) -> None:
    held: Any = {"m": Meter(), "rows": [[[[0] * 64 for _ in range(64)]] * 64] * 64}
    held["rows"].append(held)
    held["rows"].append(held["rows"])

    def change(net: Any) -> None:
        net.held["m"].count += 1

    assert told(shm / "a.pm", held, change) == ["count in held['m']"]


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
def test_tensors_of_all_kinds(shm: Path) -> None:
    """They are looked at, or not, and none that rests is told. A buffer is the module's."""
    held: Any = SimpleNamespace(
        strided=torch.ones(10, 10)[::2, ::3],
        conjugate=torch.ones(3, dtype=torch.complex64).conj(),
        sparse=torch.eye(3).to_sparse(),
        nested=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        meta=torch.ones(3, device="meta"),
        freed=torch.ones(3),
        objects=np.array([None, {}]),
        nan=float("nan"),
        long=tuple(range(100)),
        keys={(1, 2): 1, "f": len},
    )
    held.freed.untyped_storage().resize_(0)

    def rest(net: Any) -> None:
        held.nan = float("nan")
        net.mean.add_(1)

    net = Net(held)
    net.register_buffer("mean", torch.zeros(3))
    held.mean = net.mean
    assert told(shm / "a.pm", net, rest) == []


def test_another_thread_that_writes(shm: Path) -> None:
    held: Any = SimpleNamespace(count=0, seen={number: [number] for number in range(1500)})
    ends = threading.Event()

    def write() -> None:
        number = 0
        while not ends.is_set():
            held.seen.pop(number, None)
            setattr(held, f"name{number % 7}", number)
            number += 1
            held.seen[number + 1500] = [number]

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert set(told(shm / "a.pm", held, lambda _: None)) <= {
            "seen in held",
            *(f"name{number} in held" for number in range(7)),
        }
    finally:
        ends.set()
        thread.join()


def test_what_is_no_change(shm: Path) -> None:
    """Something made at its first use, an object of a library, another object each time, and what
    has a graph."""

    def use(net: Any) -> None:
        net.held.best = net.held.best or 1.0
        net.held.made = 1

    assert told(shm / "a.pm", Meter(), use) == []

    def locked(net: Any) -> None:
        with net.held:
            net.held.others = 1

    assert told(shm / "b.pm", threading.Condition(), locked) == []

    def replaced(net: Any) -> None:
        net.held = SimpleNamespace(x=torch.rand(1))

    assert told(shm / "c.pm", SimpleNamespace(x=torch.rand(1)), replaced) == []

    def hidden(net: Any) -> None:
        net.held.average = net.inner(torch.ones(3))

    assert told(shm / "d.pm", Meter(), hidden) == []


def test_a_resumed_run_tells_it_again(shm: Path) -> None:
    assert told(shm / "a.pm", Meter(), lambda _: None) == []
    net = Net(Meter())
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    with pmstore.open(shm / "a.pm") as store:
        run = attach(store, model=net, optimizer=sgd)
        for _ in run.steps(6):
            sgd.zero_grad()
            net(torch.ones(2, 3)).sum().backward()
            sgd.step()
            count(net)
            with pytest.warns(RuntimeWarning, match="count in held has changed since the run"):
                run.commit()
            break
        run.stop()


class Odd:
    """A proxy, that is asked outside of what it stands for."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("nothing is here")


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
def test_odd_objects_are_passed_over(shm: Path) -> None:
    rest: Any = lambda _: None  # noqa: E731
    deep: Any = ()
    for number in range(5000):
        deep = deep, number
    assert told(shm / "a.pm", SimpleNamespace(odd=Odd(), deep=deep), rest) == []
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for number, held in enumerate((Odd(), freed, nested)):
        assert told(shm / f"{number}.pm", held, rest) == []


def test_another_tuple_that_is_the_same(shm: Path) -> None:
    def replace(net: Any) -> None:
        net.held.nan = (float("nan"), 1)
        net.held.long = (*range(100),)

    held: Any = SimpleNamespace(nan=(float("nan"), 1), long=tuple(range(100)))
    assert told(shm / "a.pm", held, replace) == []

    def grow(net: Any) -> None:
        net.held.long += (1,)

    assert told(shm / "b.pm", held, grow) == ["long in held"]


def test_what_the_first_head_changes_is_done_at_each_start(shm: Path) -> None:
    held: Any = SimpleNamespace(start=-1, best=1.0)
    net = Net(held)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)

    def steps(name: str) -> None:
        for _ in run.steps(3, name=name):
            net(torch.ones(2, 3)).sum().backward()
            sgd.step()
            sgd.zero_grad()

    with pmstore.open(shm / "a.pm") as store:
        run = attach(store, model=net, optimizer=sgd)
        held.start = run.step
        steps("one")
        held.best /= 2  # what stands behind a loop a restart does over other weights
        with pytest.warns(RuntimeWarning, match="best in held has changed"):
            steps("two")


def test_what_the_program_drops_is_not_held(shm: Path) -> None:
    net = Net(Meter())
    there = weakref.ref(net.held.average)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    with pmstore.open(shm / "a.pm") as store:
        run = attach(store, model=net, optimizer=sgd)
        for _ in run.steps(2):
            sgd.zero_grad()
            net(torch.ones(2, 3)).sum().backward()
            sgd.step()
            net.held = None
        assert there() is None


def test_a_collection_is_not_looked_through_in_each_step(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has something that is no data in it is none, however much else there is."""
    encoded: list[int] = []

    def encode(value: Any, *given: Any, **more: Any) -> Any:
        if type(value) is dict:
            encoded.append(len(value))
        return structure.encode(value, *given, **more)

    monkeypatch.setattr(module_attributes, "encode", encode)
    assert told(shm / "a.pm", {"rows": [0] * 10000, "f": len}, lambda _: None) == []
    assert 2 not in encoded
