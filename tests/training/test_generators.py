"""Generators that a loader's objects hold: killed at each step, everything is drawn as it would
have been; and as plain torch draws it, where that does not depend on workers."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import Steps, in_child, killed_at_each_step
from pairwise import ALL
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

import pmstore
from pmstore.scheduler import EveryN
from pmstore.torch import MismatchError, attach
from pmstore.torch._random import defaults as rng
from pmstore.torch._random.search import find

SIZE = 14
KINDS: dict[str, Callable[[], Any]] = {
    "numpy": lambda: np.random.default_rng(3),
    "mt": lambda: np.random.Generator(np.random.MT19937(3)),
    "state": lambda: np.random.RandomState(3),
    "python": lambda: random.Random(3),
    "torch": lambda: torch.Generator().manual_seed(3),
}
MODULE_RNG = np.random.default_rng(8)


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return torch.rand(1, generator=generator).item()
    if isinstance(generator, random.Random):
        return generator.gauss(0, 1)
    return float(generator.normal())


class Augmented(Dataset[torch.Tensor]):
    def __init__(self, kind: str = "numpy") -> None:
        self.rng = KINDS[kind]()

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, draw(self.rng)], dtype=torch.float64)

    def __len__(self) -> int:
        return SIZE


class Late(Augmented):
    """Makes its generator when it is read from."""

    def __init__(self, made: Callable[[], Any] | None = None) -> None:
        self.rng = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rng is None:
            info = get_worker_info()
            self.rng = np.random.default_rng(info.seed if info else 5)
        return super().__getitem__(index)


class Global(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, draw(MODULE_RNG)], dtype=torch.float64)


class Jitter:
    def __init__(self) -> None:
        self.rng = random.Random(9)

    def __call__(self, batch: list[Any]) -> Any:
        return default_collate(batch) + self.rng.random()

    def method(self, batch: list[Any]) -> Any:
        return self(batch)


def jitter(rng: Any, batch: list[Any]) -> Any:
    return default_collate(batch) + draw(rng)


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(4)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(SIZE):
            yield torch.tensor([draw(self.rng)], dtype=torch.float64)


class Renewed(Stream):
    """Makes its generator anew in each epoch."""

    epoch = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.epoch += 1
        self.rng = np.random.default_rng(self.epoch)
        yield from super().__iter__()


class Curriculum(Sampler[int]):
    """Counts its epochs, and has a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        yield from self.rng.permutation(SIZE)[: 5 + 3 * self.epoch].tolist()

    def __len__(self) -> int:
        return 5


class Told(Curriculum):
    """With a state_dict."""

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]
        self.epoch = state["epoch"]


class Restless(Curriculum):
    """Draws while it goes."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield int(self.rng.integers(SIZE))


def numbers() -> TensorDataset:
    return TensorDataset(torch.arange(SIZE, dtype=torch.float64))


def worker_init(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.rng = np.random.default_rng(info.seed)  # type: ignore[attr-defined]


def closed_over() -> Callable[[list[Any]], Any]:
    rng = np.random.default_rng(6)
    return lambda batch: default_collate(batch) + draw(rng)


ALONE: dict[str, Callable[[], Any]] = {
    **{
        kind: functools.partial(lambda kind: DataLoader(Augmented(kind), 3, True), kind)
        for kind in KINDS
    },
    "subset": lambda: DataLoader(Subset(Augmented(), range(2, 12)), 3, True),
    "concat": lambda: DataLoader(ConcatDataset([Augmented(), Augmented("python")]), 4, True),
    "late": lambda: DataLoader(Late(), 3, True),
    "global": lambda: DataLoader(Global(), 3, True),
    "collate": lambda: DataLoader(Augmented(), 3, True, collate_fn=Jitter()),
    "method": lambda: DataLoader(Augmented(), 3, True, collate_fn=Jitter().method),
    "partial": lambda: DataLoader(
        Augmented(), 3, collate_fn=functools.partial(jitter, np.random.default_rng(6))
    ),
    "closure": lambda: DataLoader(Augmented(), 3, collate_fn=closed_over()),
    "stream": lambda: DataLoader(Stream(), 3),
    "renewed": lambda: DataLoader(Renewed(), 3),
    "curriculum": lambda: DataLoader(numbers(), 3, sampler=Curriculum()),
    "told": lambda: DataLoader(numbers(), 3, sampler=Told()),
    "restless": lambda: DataLoader(Augmented(), 3, sampler=Restless()),
    "iterable": lambda: Stream(),
    "shuffled": lambda: DataLoader(
        numbers(), 3, shuffle=True, generator=torch.Generator().manual_seed(2)
    ),
    "stream, workers": lambda: DataLoader(Stream(), 3, num_workers=2),
    "restless, workers": lambda: DataLoader(numbers(), 3, sampler=Restless(), num_workers=2),
}
"""As plain torch draws them."""
WORKERS: dict[str, Callable[[], Any]] = {
    "dataset, workers": lambda: DataLoader(Augmented(), 3, True, num_workers=2),
    "torch, workers": lambda: DataLoader(Augmented("torch"), 3, True, num_workers=2),
    "init": lambda: DataLoader(Augmented(), 3, True, num_workers=2, worker_init_fn=worker_init),
    "late, workers": lambda: DataLoader(Late(), 3, True, num_workers=2),
    "collate, workers": lambda: DataLoader(
        Augmented(), 3, True, num_workers=2, collate_fn=Jitter()
    ),
    "workers live on": lambda: DataLoader(Augmented(), 3, num_workers=2, persistent_workers=True),
}
EPOCHS = 2
EACH_STEP = {("numpy", 0), ("collate", 2), ("renewed", 0), ("curriculum", 2)}
"""Killed at each step in `make test`, too."""


def start() -> None:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)


def train(path: Path, make: Callable[[], Any], steps: Steps, ahead: int) -> None:
    start()
    with pmstore.open(path) as store:
        run = attach(store, loader=make())
        seen = store.list("seen")
        batches = run.batches(epochs=EPOCHS, ahead=ahead or None)
        held = list(islice(batches, ahead))

        def step(batch: Any) -> None:
            given = batch[0] if isinstance(batch, list) else batch
            seen.append([given.tolist(), torch.rand(1).item(), random.random()])
            steps.before_commit()
            run.commit()

        if not ahead:
            for batch in batches:
                step(batch)
        while held:
            with run.next_step():
                step(held.pop(0))
            held.extend(islice(batches, 1))


def seen_in(path: Path) -> list[Any]:
    with pmstore.open(path, mode="r") as store:
        return list(store["seen"])


def killed_cases() -> Iterator[Any]:
    """Forks of forks are dear: of kinds with workers `make test` looks ahead in every other one."""
    with_workers = 0
    for kind in {**ALONE, **WORKERS}:
        workers = "workers" in kind or kind == "init"
        with_workers += workers
        for ahead in (0, 2):
            left_out = workers and ahead != 2 * (with_workers % 2)
            marks = (pytest.mark.nightly,) if left_out else ()
            yield pytest.param(kind, ahead, id=f"{kind}-{ahead}", marks=marks)


@pytest.mark.parametrize(("kind", "ahead"), list(killed_cases()))
def test_killed(shm: Path, kind: str, ahead: int) -> None:
    make = {**ALONE, **WORKERS}[kind]
    workers = "workers" in kind or kind == "init"
    assert in_child(functools.partial(_child, shm / "whole.pm", make, ahead), None)
    program = functools.partial(_child, shm / "killed.pm", make, ahead)
    # most epochs have 5 batches, or 14: another place in each; nightly: at each step
    each = 1 if (ALL and not workers) or (kind, ahead) in EACH_STEP else 3
    assert killed_at_each_step(program, each) > 2
    whole = seen_in(shm / "whole.pm")
    assert seen_in(shm / "killed.pm") == whole
    if kind in ALONE and not ahead:
        start()
        loader = make()
        plain = []
        for _ in range(EPOCHS):
            for batch in loader:
                given = batch[0] if isinstance(batch, list) else batch
                plain.append([given.tolist(), torch.rand(1).item(), random.random()])
        if "restless" in kind or kind == "late":
            assert [one[0] for one in whole] == [one[0] for one in plain]
        else:
            assert whole == plain


def _child(path: Path, make: Callable[[], Any], ahead: int, steps: Steps) -> None:
    train(path, make, steps, ahead)


MADE: dict[str, Callable[[int], Any]] = {
    "numpy": np.random.default_rng,
    "python": random.Random,
    "torch": lambda seed: torch.Generator().manual_seed(seed),
}


@pytest.mark.parametrize("kind", MADE)
def test_made_anew_in_heads(tmp_path: Path, kind: str) -> None:
    """As `set_epoch` of a data set may do; also when nobody looks for new ones any longer."""

    def life(path: Path, end: int) -> list[Any]:
        data = Augmented(kind)
        seen: list[Any] = []
        with pmstore.open(path) as store:
            run = attach(store, loader=DataLoader(data, 1))
            stored = store.list("seen")
            for epoch in run.epochs(3):
                data.rng = MADE[kind](int(epoch))
                for (batch,) in epoch:
                    stored.append(batch.tolist())
                    if len(stored) == end:
                        run.commit()
                        run.detach()
                        return seen
            seen += stored
        return seen

    for end in (3, SIZE + 5, 2 * SIZE + 4):
        life(tmp_path / "pieces.pm", end)
    assert life(tmp_path / "pieces.pm", -1) == life(tmp_path / "whole.pm", -1)


class WhoLoads(Dataset[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, os.getpid()])

    def __len__(self) -> int:
        return SIZE


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("end", ["detach", "close"])
def test_workers_live_on(path: Path, end: str) -> None:
    start()
    with pmstore.open(path) as store:
        loader = DataLoader(WhoLoads(), 7, shuffle=True, num_workers=2, persistent_workers=True)
        run = attach(store, loader=loader)
        seen = []
        for epoch in range(2):  # from one loop to the next
            for batch in run.batches(epochs=2 * epoch + 2):
                seen.append(batch)
                run.commit()
        pids = {int(pid) for batch in seen for pid in batch[:, 1]}
        assert len(pids) == 2
        assert os.getpid() not in pids
        if end == "detach":
            run.detach()
            assert all(map(gone, pids))
    assert all(map(gone, pids))
    start()
    plain = [batch for _ in range(4) for batch in loader]
    loader._iterator = None
    assert [batch[:, 0].tolist() for batch in seen] == [batch[:, 0].tolist() for batch in plain]


def test_epochs_differ_where_workers_live_on(store: pmstore.Store) -> None:
    """Nothing is drawn in between, and yet each epoch has noise of its own."""
    run = attach(store, loader=WORKERS["workers live on"]())
    epochs: list[list[Any]] = [[], []]
    for batch in run.batches(epochs=2, ahead=0):
        epochs[run.data_epoch].append(batch.tolist())
    assert epochs[0] != epochs[1]
    run.detach()


def test_a_roll_back_with_workers_that_live_on(store: pmstore.Store) -> None:
    run = attach(store, loader=WORKERS["workers live on"](), policy=EveryN(99))
    batches = run.batches(epochs=2, ahead=0)
    first = next(batches).tolist()
    run.rollback()
    assert next(batches).tolist() == first
    run.commit()
    for _ in range(2):
        following = [next(batches).tolist(), next(batches).tolist()]
        run.rollback()
        assert [next(batches).tolist(), next(batches).tolist()] == following
        run.end_step()
        batches = run.batches(epochs=2, ahead=0)  # the first one is left
    run.detach()


def test_what_is_found() -> None:
    class Slotted:
        __slots__ = ("rng",)

    slotted = Slotted()
    slotted.rng = random.Random(1)  # type: ignore[attr-defined]
    shared = np.random.default_rng(1)
    deep = np.random.default_rng(2)
    for _ in range(4):
        deep = [deep]  # type: ignore[assignment]
    roots = {
        "a": {"b": [shared, np.random.Generator(shared.bit_generator)], "c": slotted},
        "d": functools.partial(jitter, shared, batch=[torch.Generator()]),
        "deep": deep,
        "default": [torch.default_generator, np.random.mtrand._rand, random.SystemRandom()],
        "module": Global(),
    }
    found = find(roots)
    assert {one.place: one.kind for one in found} == {
        "a['b'][0]": "numpy Generator (PCG64)",
        "a['c'].rng": "random Random",
        "d.keywords['batch'][0]": "torch Generator",
        "deep[0][0][0][0]": "numpy Generator (PCG64)",
        "module.rng": "numpy Generator (PCG64)",
        f"{__name__}.MODULE_RNG": "numpy Generator (PCG64)",
    }
    assert find({"far": [[[[[[[[np.random.default_rng()]]]]]]]]}) == []


def test_classes_are_looked_at_where_they_are_near() -> None:
    """What methods close over belongs to a class, and is looked at once; but not only with an
    object that lies at the end of a way."""
    generator = np.random.default_rng()

    class Draws:
        def draw(self) -> float:
            return generator.random()

    far: Any = Draws()
    for _ in range(6):
        far = [far]
    found = find({"far": far, "near": Draws(), "beside": Draws()})
    assert [one.place for one in found] == ["near closure generator"]


def test_a_stream_is_apart() -> None:
    """It goes on where it was, whatever is drawn outside, of each default generator and of all."""

    def draw(kinds: tuple[int, ...]) -> list[float]:
        draws: list[Callable[[], float]] = [
            random.random,
            lambda: random.gauss(0.0, 1.0),  # keeps a second number for the next call
            np.random.random,
            np.random.standard_normal,  # and so does this
            lambda: torch.rand(()).item(),
        ]
        return [draws[kind]() for kind in kinds]

    every = (0, 1, 2, 3, 4)
    turns = [*((kind,) for kind in every), (), every, (1,), every, (), (3, 4)]
    start = rng.capture()
    inside = [draw(kinds) for kinds in turns]
    rng.restore(start)
    outside = [draw(kinds[::-1]) for kinds in turns]
    rng.restore(start)
    stream = rng.Stream()
    seen: tuple[list[Any], list[Any]] = ([], [])
    for kinds in turns:
        with stream:
            seen[0].append(draw(kinds))
        seen[1].append(draw(kinds[::-1]))
    assert seen == (inside, outside)


@pytest.mark.parametrize("kind", KINDS)
def test_given_as_stateful(path: Path, kind: str) -> None:
    with pmstore.open(path) as store:
        rng = KINDS[kind]()
        run = attach(store, stateful={"noise": rng})
        with run.next_step():
            draw(rng)
        run.commit()
        following = [draw(rng) for _ in range(3)]
        run.rollback()
        assert [draw(rng) for _ in range(3)] == following
    with pmstore.open(path) as store:
        rng = KINDS[kind]()
        attach(store, stateful={"noise": rng})
        assert [draw(rng) for _ in range(3)] == following


def test_other_generators(path: Path) -> None:
    with pmstore.open(path) as store:
        run = attach(store, loader=DataLoader(Augmented("python"), 3))
        next(run.batches())
        run.commit()
    with (
        pmstore.open(path) as store,
        pytest.raises(MismatchError, match=r"dataset\.rng: a numpy Generator \(PCG64\), was a ran"),
    ):
        attach(store, loader=DataLoader(Augmented(), 3))


class Noisy(torch.nn.Module):
    """A module whose class has a generator, and whose objects have one each, in a slot."""

    __slots__ = ("own",)
    shared = torch.Generator()

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.own = torch.Generator().manual_seed(seed)


class Twice(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize("parametrized", [False, True])
def test_modules_of_one_class(path: Path, parametrized: bool) -> None:
    """A parametrization puts a class of torch's before the user's."""

    def made() -> torch.nn.Sequential:
        modules = [Noisy(1), Noisy(2)]
        for module in modules if parametrized else ():
            torch.nn.utils.parametrize.register_parametrization(module, "weight", Twice())
        return torch.nn.Sequential(*modules)

    def drawn(model: Any) -> list[float]:
        generators = [Noisy.shared, model[0].own, model[1].own]
        return [float(torch.rand((), generator=one)) for one in generators]

    with pmstore.open(path) as store:
        model = made()
        run = attach(store, model=model)
        with run.next_step():
            drawn(model)
        run.commit()
        following = drawn(model)
        run.rollback()
    with pmstore.open(path) as store:
        model = made()
        attach(store, model=model)
        assert drawn(model) == following
