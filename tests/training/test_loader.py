"""The order of the data, over resumes and roll backs, for every kind of loader."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import pmstore
from pmstore.torch import AttachError, Run, attach
from pmstore.torch._data import batch_source

NUMBERS = TensorDataset(torch.arange(20))


class Noisy(Dataset[torch.Tensor]):
    """Items with noise from all three generators, as random augmentation has it."""

    loads = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        if get_worker_info() is None:
            Noisy.loads += 1
        return torch.tensor(
            [index, torch.rand(1).item(), random.random(), np.random.rand()], dtype=torch.float64
        )

    def __len__(self) -> int:
        return 20


class Stream(IterableDataset[torch.Tensor]):
    """No indices, and a random order of its own making, drawn as it goes."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        left = list(range(20))[worker.id :: worker.num_workers] if worker else list(range(20))
        while left:
            yield torch.tensor(
                [left.pop(random.randrange(len(left))), torch.rand(1).item()], dtype=torch.float64
            )


class Restless(Sampler[int]):
    """Draws from the default generator for every index."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(20):
            yield int(torch.randint(20, ()))

    def __len__(self) -> int:
        return 20


class Again:
    """Something that can be iterated again, with an order drawn from `random` while it runs."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(7):
            yield random.randrange(1000)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: list(range(7)),
    "iterable": Again,
    "in order": lambda: DataLoader(NUMBERS, batch_size=3),
    "shuffled": lambda: DataLoader(NUMBERS, batch_size=3, shuffle=True),
    "shuffled, no rest": lambda: DataLoader(NUMBERS, batch_size=3, shuffle=True, drop_last=True),
    "generator": lambda: DataLoader(NUMBERS, batch_size=4, shuffle=True, generator=seeded()),
    "generator of the sampler": lambda: DataLoader(
        NUMBERS, 3, sampler=RandomSampler(NUMBERS, generator=seeded())
    ),
    "replacement": lambda: DataLoader(
        NUMBERS, 3, sampler=RandomSampler(NUMBERS, replacement=True, num_samples=70)
    ),
    "replacement, generator": lambda: DataLoader(
        NUMBERS,
        3,
        sampler=RandomSampler(NUMBERS, replacement=True, num_samples=70, generator=seeded()),
    ),
    "subset": lambda: DataLoader(NUMBERS, 3, sampler=SubsetRandomSampler(range(0, 20, 2))),
    "weighted": lambda: DataLoader(NUMBERS, 3, sampler=WeightedRandomSampler([1.0, 2.0] * 10, 20)),
    "restless": lambda: DataLoader(NUMBERS, 3, sampler=Restless()),
    "restless, workers": lambda: DataLoader(NUMBERS, 3, sampler=Restless(), num_workers=2),
    "batch sampler": lambda: DataLoader(
        NUMBERS, batch_sampler=BatchSampler(RandomSampler(NUMBERS), 6, True)
    ),
    "no batches": lambda: DataLoader(NUMBERS, batch_size=None, shuffle=True),
    "noisy": lambda: DataLoader(Noisy(), batch_size=3, shuffle=True),
    "noisy, workers": lambda: DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=2),
    "noisy, workers, generator": lambda: DataLoader(
        Noisy(), 4, True, num_workers=2, generator=seeded()
    ),
    "noisy, persistent workers": lambda: DataLoader(
        Noisy(), 3, True, num_workers=1, persistent_workers=True
    ),
    "stream": lambda: DataLoader(Stream(), batch_size=3),
    "stream, workers": lambda: DataLoader(Stream(), batch_size=3, num_workers=2),
}
EPOCHS = 3


def plain(batch: Any) -> Any:
    if isinstance(batch, (list, tuple)):
        return [plain(part) for part in batch]
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def take(run: Run, limit: int | None = None, epochs: int = EPOCHS) -> list[Any]:
    """Batches with the place in the data and a number that the step draws, as dropout does; each is
    committed. limit: so many, and one more that is taken back."""
    seen = []
    for batch in run.batches(epochs=epochs, ahead=0):
        if len(seen) == limit:
            torch.rand(3)  # one more, never committed
            break
        seen.append(
            (run.data_epoch, run.batch, plain(batch), torch.rand(1).item(), random.random())
        )
        run.commit()
    return seen


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


@pytest.mark.parametrize("kind", LOADERS)
def test_order_over_resumes(tmp_path: Path, kind: str) -> None:
    seed(1)
    with pmstore.open(tmp_path / "whole.pm") as store:
        whole = take(attach(store, loader=LOADERS[kind]()))
    assert {entry[0] for entry in whole} == set(range(EPOCHS))
    pieces: list[Any] = []
    seed(1)
    # To the middle of an epoch, twice; to an epoch's last batch; beyond; to the end.
    epoch = sum(entry[0] == 0 for entry in whole)
    for number, limit in enumerate((2, 1, epoch - 3, 1, epoch, None)):
        store = pmstore.open(tmp_path / "pieces.pm")
        run = attach(store, loader=LOADERS[kind]())
        pieces += take(run, limit)
        run.detach()
        store.close()
        seed(50 + number)
    assert pieces == whole


@pytest.mark.parametrize("kind", LOADERS)
def test_order_over_roll_backs_and_breaks(tmp_path: Path, kind: str) -> None:
    """After each, workers begin anew: two epochs of those."""
    epochs = 2 if "workers" in kind else EPOCHS
    seed(1)
    with pmstore.open(tmp_path / "whole.pm") as store:
        whole = take(attach(store, loader=LOADERS[kind]()), epochs=epochs)
    seed(1)
    pieces = []
    with pmstore.open(tmp_path / "pieces.pm") as store:
        run = attach(store, loader=LOADERS[kind](), policy=None)
        turn = 0
        while len(pieces) < len(whole):
            for batch in run.batches(epochs=epochs, ahead=0):
                turn += 1
                entry = (
                    run.data_epoch,
                    run.batch,
                    plain(batch),
                    torch.rand(1).item(),
                    random.random(),
                )
                if turn % 3 == 0:
                    run.rollback()
                    continue
                pieces.append(entry)
                if turn % 4 == 0:
                    run.end_step()
                    break
    assert pieces == whole


def test_the_order_is_that_of_the_loader_alone(store: pmstore.Store) -> None:
    loader = DataLoader(NUMBERS, batch_size=3, shuffle=True)
    seed(4)
    alone = [plain(batch) for _ in range(2) for batch in loader]
    seed(4)
    run = attach(store, loader=loader)
    assert [plain(batch) for batch in run.batches(epochs=2, ahead=0)] == alone
    assert len(list(run.batches(epochs=3, ahead=0))) == 7


def test_what_is_skipped_is_not_loaded(path: Path) -> None:
    for loads in (9 * 2, 2 * 2):
        Noisy.loads = 0
        store = pmstore.open(path)
        run = attach(store, loader=DataLoader(Noisy(), batch_size=2, shuffle=True))
        take(run, limit=loads // 2 - 1)
        store.close()
        assert Noisy.loads == loads


def test_the_given_loader_is_untouched(store: pmstore.Store) -> None:
    loader = DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=1, persistent_workers=True)
    sampler, dataset = loader.batch_sampler, loader.dataset
    list(attach(store, loader=loader).batches(ahead=0))
    assert loader.batch_sampler is sampler
    assert loader.dataset is dataset
    assert loader.persistent_workers
    assert len(list(loader)) == 7
    loader._iterator = None


def test_place_in_the_data(store: pmstore.Store) -> None:
    run = attach(store, loader=["a", "b"])
    assert (run.data_epoch, run.batch) == (0, -1)
    places = [(run.data_epoch, run.batch, batch) for batch in run.batches(epochs=2, ahead=0)]
    assert places == [(0, 0, "a"), (0, 1, "b"), (1, 0, "a"), (1, 1, "b")]


def test_bad_use(store: pmstore.Store) -> None:
    run = attach(store, name="none")
    with pytest.raises(AttachError, match=r"attach\(\.\.\., loader=\.\.\.\)"):
        run.batches()
    run.detach()
    run = attach(store, name="empty", loader=[])
    with pytest.raises(ValueError, match="no batch in a whole data epoch"):
        next(run.batches())
    run.detach()
    run = attach(store, name="two", loader=[1, 2, 3])
    first = run.batches(ahead=0)
    assert next(first) == 1
    run.end_step()
    assert next(run.batches()) == 2
    with pytest.raises(RuntimeError, match="one loop at a time"):
        next(first)
    run.rollback()


def test_a_loop_that_an_earlier_one_has_used_up(store: pmstore.Store) -> None:
    """`epochs` counts in all: it would train nothing, silently."""
    run = attach(store, loader=[1, 2])
    assert list(run.batches(ahead=0)) == [1, 2]
    with pytest.raises(RuntimeError, match=r"nothing to hand out.*used it up.*name="):
        next(run.batches())
    assert list(run.batches(ahead=0, name="again")) == [1, 2]
    assert run.step == 4


def test_a_loader_with_other_generators(path: Path) -> None:
    with pmstore.open(path) as store:
        run = attach(store, loader=DataLoader(NUMBERS, shuffle=True, generator=seeded()))
        take(run, limit=1)
        run.rollback()
    with (
        pmstore.open(path) as store,
        pytest.raises(AttachError, match=r"not given:\n +generator: torch Generator"),
    ):
        attach(store, loader=DataLoader(NUMBERS, shuffle=True))


class Words(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(20.0)


@pytest.mark.parametrize("data", [NUMBERS, Words()], ids=["indices", "all"])
def test_what_takes_long_to_go_through_again_says_so(
    store: pmstore.Store,
    data: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = attach(store, loader=DataLoader(data, batch_size=2))
    batches = run.batches(ahead=0)
    for _ in range(6):
        next(batches)
    run.commit()
    run.rollback()
    next(batches)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(batch_source, "_FIRST", 0.0)
    run.rollback()
    next(batches)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "pmstore: going through 1 of 6 batches again ..."
    assert last.startswith("pmstore: went through 6 batches again in ")
    run.rollback()


def test_a_loader_that_nobody_loops_over_is_told(
    shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that loops over the DataLoader itself: its data begins anew after a resume."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.ones(6, 2), batch_size=2)
    with pmstore.open(shm / "run.pm") as store:
        run = attach(store, model=model, optimizer=optimizer, loader=loader)
        for batch in loader:
            with run.next_step():
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
    assert caplog.text.count("no batch of it was taken from the run") == 1
