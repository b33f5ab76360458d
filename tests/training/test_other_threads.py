"""Collections that another thread of the program fills while a training runs: caches."""

from __future__ import annotations

import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import pmstore
import pmstore.torch
from pmstore.objects.structure import at_once

ITEMS = 40


class Cached(Dataset[torch.Tensor]):
    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


@contextmanager
def filled(cache: Any) -> Iterator[None]:
    """A thread changes it all the time, and gets its turn often."""
    over, interval = threading.Event(), sys.getswitchinterval()

    def fill() -> None:
        at = 0
        while not over.is_set():
            at += 1
            if isinstance(cache, deque):
                cache.append(at)
            else:
                cache[at % 200] = np.zeros(2)
                cache.pop(at * 7 % 200, None)

    thread = threading.Thread(target=fill)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)


def trained(path: Path, cache: Any, epochs: int) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = DataLoader(Cached(cache), batch_size=8, shuffle=True)
    with filled(cache), pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
        for batch in run.batches(epochs=epochs):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        assert run.step == epochs * ITEMS // 8
        return model.weight.detach().clone()


@pytest.mark.parametrize(
    "kind", [dict, OrderedDict, lambda: deque(maxlen=200)], ids=["dict", "OrderedDict", "deque"]
)
def test_a_thread_fills_a_cache(shm: Path, kind: Any) -> None:
    """No step ends in an error of the walk over it, and no resume."""
    expected = trained(shm / "whole.pm", kind(), 4)
    trained(shm / "resumed.pm", kind(), 2)
    assert torch.equal(trained(shm / "resumed.pm", kind(), 4), expected)


class Pair(NamedTuple):
    first: Any
    second: Any


def test_copies_of_collections_alone() -> None:
    array, shared = np.zeros(2), [1]
    given: dict[str, Any] = {
        "list": [array, shared, shared],
        "tuple": (shared, Pair(array, {"a": {1, 2}})),
        "deque": deque([[1], [2]], maxlen=3),
        "more": [OrderedDict(a=[1]), Counter("aab"), defaultdict(list, a=[1]), bytearray(b"a")],
        "frozen": frozenset([(1, 2)]),
    }
    given["itself"] = given
    made = at_once(given)
    assert made["itself"] is made
    del given["itself"], made["itself"]
    assert repr(made) == repr(given)
    assert made["list"][0] is array
    assert made["list"][1] is made["list"][2] is made["tuple"][0]
    assert made["list"][1] is not shared
    assert type(made["tuple"][1]) is Pair
    assert made["tuple"][1].second["a"] is not given["tuple"][1].second["a"]
    assert made["deque"][0] is not given["deque"][0]
    assert made["more"][2].default_factory is list
    assert made["more"][2]["a"] is not given["more"][2]["a"]
