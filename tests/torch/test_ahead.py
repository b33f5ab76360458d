"""Programs that take batches ahead of training on them: killed at each step, nothing is lost and
nothing comes twice; those that say otherwise than they do are refused."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import Steps, bits, in_child, killed_at_each_step
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import pmstore
from pmstore.torch import LookaheadError, Run, attach

EPOCHS = 2


class Noisy(Dataset[torch.Tensor]):
    """Random transforms: loading a batch draws from all default generators, as training does."""

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(3) + random.random() + np.random.rand()
        return (torch.full((3,), index / 19) + 0.1 * noise).float()

    def __len__(self) -> int:
        return 19


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(19):
            yield torch.full((3,), float(index)) + torch.rand(3) + random.random()


def quiet() -> TensorDataset:
    return TensorDataset(torch.arange(57.0).reshape(19, 3) / 57)


LOADERS: dict[str, Callable[..., Any]] = {
    "noisy": lambda **given: DataLoader(Noisy(), batch_size=3, shuffle=True, **given),
    "quiet": lambda **given: DataLoader(quiet(), batch_size=4, shuffle=True, **given),
    "workers": lambda **given: DataLoader(Noisy(), 4, shuffle=True, num_workers=2, **given),
    "stream": lambda **given: DataLoader(Stream(), batch_size=4, **given),
    "short": lambda **given: DataLoader(Noisy(), batch_size=16, shuffle=True, **given),
    "list": lambda **given: list(torch.arange(15.0).reshape(5, 1, 3) / 15),
}


def looking_ahead(batches: Iterator[Any], held: int) -> Iterator[Any]:
    """As prefetchers have it."""
    queue = deque(batch for _, batch in zip(range(held), batches, strict=False))
    for batch in batches:
        queue.append(batch)
        yield queue.popleft()
    yield from queue


def seed() -> None:
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)


class Program:
    """Trains, with dropout and an optimizer with a state, and logs what it trained on."""

    def __init__(self, path: Path, loader: Any, log: list[Any] | None = None) -> None:
        self.path = path
        self.loader = loader
        self.end: Any = None

    def train(
        self,
        steps: Steps,
        *,
        ahead: int = 0,
        told: int | None = None,
        accumulation: int = 1,
        by_epoch: bool = False,
        skip: Callable[[Run], bool] = lambda run: False,
        leave_out: Callable[[Any], bool] = lambda batch: False,
        commits: int = 1,
        forwards: Callable[[Any], int] = lambda batch: 1,
    ) -> None:
        seed()
        model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.3), nn.Linear(5, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with pmstore.open(self.path) as store:
            run = attach(store, model=model, optimizer=optimizer, loader=self.loader)
            log = store.list("log")
            waiting = 0

            def step(batches: list[Any]) -> None:
                optimizer.step()
                optimizer.zero_grad()
                log.append(batches)
                steps.before_commit()
                run.commit()

            for epoch in range(run.data_epoch, EPOCHS) if by_epoch else [EPOCHS - 1]:
                seen: list[Any] = []
                batches = run.batches(epochs=epoch + 1, ahead=told)
                for given in looking_ahead(batches, ahead):
                    batch = given[0] if isinstance(given, list) else given
                    loss = torch.zeros(())
                    for _ in range(forwards(batch)):
                        loss = loss + model(batch).square().mean()
                    if skip(run) or leave_out(batch):
                        continue
                    loss.backward()
                    seen.append(batch.tolist())
                    if len(seen) == accumulation:
                        for _ in range(commits - 1):
                            step(seen)
                            model(batch).square().mean().backward()
                        step(seen)
                        seen = []
                if seen:
                    step(seen)
                waiting += len(seen)
            state = [model.state_dict(), optimizer.state_dict(), torch.get_rng_state()]
            state += [random.getstate(), np.random.get_state()[1:3]]
            self.end = bits([state, list(log), run.step])
            if "end" not in store:
                store["end"] = repr(self.end)


def compare(tmp_path: Path, make: Callable[[], Any], each: int = 1, **given: Any) -> int:
    """Undisturbed, and killed after every `each` commits: bit for bit the same. Returns the
    children."""

    def program(path: Path) -> Callable[[Steps], None]:
        return lambda steps: Program(path, make()).train(steps, **given)

    assert in_child(program(tmp_path / "whole.pm"), None)
    children = killed_at_each_step(program(tmp_path / "killed.pm"), each)
    with (
        pmstore.open(tmp_path / "whole.pm", mode="r") as whole,
        pmstore.open(tmp_path / "killed.pm", mode="r") as killed,
    ):
        assert list(killed["log"]) == list(whole["log"])
        assert killed["end"] == whole["end"]
        if not given.keys() & {"skip", "leave_out", "commits"} and not given.get("by_epoch"):
            per_epoch = make()
            taken = sum(len(step) for step in whole["log"])
            assert taken == EPOCHS * sum(1 for _ in per_epoch)
    return children


@pytest.mark.pairwise
@pytest.mark.parametrize("drop_last", [False, True], ids=["rest", "no rest"])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_killed_at_each_step(shm: Path, ahead: int, accumulation: int, drop_last: bool) -> None:
    children = compare(
        shm,
        lambda: LOADERS["noisy"](drop_last=drop_last),
        ahead=ahead,
        told=ahead or None,
        accumulation=accumulation,
        by_epoch=drop_last,
    )
    assert children > EPOCHS


@pytest.mark.parametrize("by_epoch", [False, True], ids=["one loop", "a loop an epoch"])
@pytest.mark.parametrize("kind", LOADERS)
def test_every_loader_ahead(shm: Path, kind: str, by_epoch: bool) -> None:
    compare(shm, LOADERS[kind], each=2, ahead=2, told=2, by_epoch=by_epoch)


def test_steps_left_out(shm: Path) -> None:
    """A guard against losses that are not finite: the batch is taken all the same."""
    compare(shm, LOADERS["noisy"], ahead=1, told=1, accumulation=2, skip=lambda run: run.batch == 2)
    # the first of all, without look-ahead: not mistaken for it
    (shm / "none").mkdir()
    compare(shm / "none", LOADERS["noisy"], accumulation=1, skip=lambda run: run.batch == 0)


def in_order(batches: int, size: int = 1) -> Callable[[], Any]:
    return lambda: list(torch.arange(3.0 * batches * size).reshape(batches, size, 3) / 50)


@pytest.mark.pairwise
@pytest.mark.parametrize("by_epoch", [False, True], ids=["one loop", "a loop an epoch"])
@pytest.mark.parametrize("forwards", ["the same", "others"])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_several_commits_a_batch(shm: Path, ahead: int, forwards: str, by_epoch: bool) -> None:
    """Killed between two batches nothing is lost, at the end of the data neither; killed between
    the commits of a batch, only those that would have followed of that batch."""
    given: dict[str, Any] = {"ahead": ahead, "told": ahead, "by_epoch": by_epoch, "commits": 2}
    if forwards == "others":
        given["forwards"] = lambda batch: 1 + int(round(batch[0, 0].item() * 50) % 2)
    compare(shm, in_order(6), 2, **given)
    path = shm / "each.pm"
    killed_at_each_step(lambda steps: Program(path, in_order(6)()).train(steps, **given), 1)
    with pmstore.open(path, mode="r") as store, pmstore.open(shm / "whole.pm", mode="r") as whole:
        seen = list(store["log"])
        assert [one for one in whole["log"] if one not in seen] == []
        once = [one for index, one in enumerate(seen) if one not in seen[max(index - 1, 0) : index]]
        assert once == list(whole["log"])[::2]


@pytest.mark.parametrize("accumulation", [1, 2, 3, 4])
@pytest.mark.parametrize("batches", [3, 4, 5])
def test_short_data_epochs(shm: Path, batches: int, accumulation: int) -> None:
    compare(shm, in_order(batches), ahead=2, told=2, accumulation=accumulation, by_epoch=True)


@pytest.mark.parametrize("number", range(5))
def test_a_step_left_out_at_the_end(shm: Path, number: int) -> None:
    first = in_order(6)()[number]
    compare(shm, in_order(6), ahead=3, told=3, leave_out=lambda batch: torch.equal(batch, first))


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_other_forwards_with_each_batch(shm: Path, accumulation: int) -> None:
    compare(
        shm,
        in_order(6),
        ahead=2,
        told=2,
        accumulation=accumulation,
        forwards=lambda batch: 1 + int(round(batch[0, 0].item() * 50) % 2),
    )


def test_what_the_end_would_not_show_is_refused(path: Path) -> None:
    with pmstore.open(path) as store:
        run, step = small(store, in_order(2)())
        model = run._steps.pieces.modules[0]
        batches = looking_ahead(run.batches(ahead=2), 2)
        model(next(batches)).sum().backward()
        with pytest.raises(LookaheadError, match=r"run\.batches\(epochs"):
            step(next(batches))
        assert run.step == 0
        run.rollback()


def test_other_forwards_and_commits_with_each_batch(path: Path) -> None:
    with pytest.raises(LookaheadError, match=r"ahead=1"), pmstore.open(path) as store:
        run, step = small(store, in_order(9)())
        for number, batch in enumerate(looking_ahead(run.batches(ahead=2), 2)):
            for _ in range(1 + number % 2):
                step(batch)
    assert 2 < run.step < 6
    with pmstore.open(path) as store:
        run, step = small(store, in_order(9)())
        for number, batch in enumerate(looking_ahead(run.batches(ahead=1), 1)):
            for _ in range(1 + number % 2):
                step(batch)


def small(store: pmstore.Store, batches: Any = None) -> tuple[Run, Callable[[Any], None]]:
    """A run and a step of it."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = batches if batches is not None else DataLoader(quiet(), batch_size=2)
    run = attach(store, model=model, optimizer=optimizer, loader=loader)

    def step(batch: Any) -> None:
        given = batch[0] if isinstance(batch, list) else batch
        model(given).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.commit()

    return run, step


class Prefetcher:
    """As programs on accelerators have it: the batch is copied when it is taken."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches = batches
        self.load()

    def load(self) -> None:
        taken = next(self.batches, None)
        self.batch = None if taken is None else taken[0].clone()

    def __iter__(self) -> Iterator[Any]:
        while self.batch is not None:
            batch = self.batch
            self.load()
            yield batch


def one_by_one(batches: Iterator[Any]) -> Iterator[Any]:
    """All taken in one place."""
    queue: deque[Any] = deque()
    for batch in batches:
        queue.append(batch)
        if len(queue) > 1:
            yield queue.popleft()
    yield from queue


def two_lines(batches: Iterator[Any]) -> Iterator[Any]:
    following = next(batches)
    for batch in batches:
        current, following = following, batch
        yield current
    yield following


@pytest.mark.parametrize("ahead", [Prefetcher, one_by_one, two_lines])
def test_look_ahead_that_is_not_told(
    path: Path, tmp_path: Path, ahead: Callable[[Iterator[Any]], Any]
) -> None:
    with pytest.raises(LookaheadError, match=r"batches\(ahead=1\)"), pmstore.open(path) as store:
        run, step = small(store)
        for batch in ahead(run.batches()):
            step(batch)
    assert run.step < 5
    # what was stored meanwhile is enough to go on with
    with pmstore.open(path) as store:
        run, step = small(store)
        taken = 0
        for batch in ahead(run.batches(ahead=1)):
            step(batch)
            taken += 1
        assert run.step == 10
        assert taken < 10


@pytest.mark.parametrize("ahead", [Prefetcher, one_by_one, two_lines])
def test_look_ahead_that_is_told(store: pmstore.Store, ahead: Callable[..., Any]) -> None:
    run, step = small(store)
    for batch in ahead(run.batches(epochs=2, ahead=1)):
        step(batch)
    assert run.step == 20


@pytest.mark.parametrize("told", [1, 2])
def test_nothing_is_held(store: pmstore.Store, told: int) -> None:
    run, step = small(store)
    with pytest.raises(LookaheadError, match=r"it took one batch before .*\(ahead=0\)"):
        for batch in run.batches(ahead=told):
            step(batch)
    assert run.step == 0
    run.rollback()


def test_more_is_held(store: pmstore.Store) -> None:
    run, step = small(store)
    with pytest.raises(LookaheadError, match=r"ahead=2\)"):
        for batch in looking_ahead(run.batches(ahead=1), 2):
            step(batch)
    run.rollback()


def passing_over(batches: Iterator[Any], step: Callable[[Any], None]) -> None:
    for number, batch in enumerate(batches):
        if number == 0:
            continue
        step(batch)


def pairs(batches: Iterator[Any], step: Callable[[Any], None]) -> None:
    for batch in batches:
        other = next(batches)
        step(torch.cat([batch[0], other[0]]))


def pairs_in_two_places(batches: Iterator[Any], step: Callable[[Any], None]) -> None:
    while (first := next(batches, None)) is not None:
        second = next(batches)
        step(torch.cat([first[0], second[0]]))


def zipped(batches: Iterator[Any], step: Callable[[Any], None]) -> None:
    for first, second in zip(batches, batches, strict=True):
        step(torch.cat([first[0], second[0]]))


def first_for_a_look(batches: Iterator[Any], step: Callable[[Any], None]) -> None:
    with torch.no_grad():
        print(nn.Linear(3, 3)(next(batches)[0]).mean())
    for batch in batches:
        step(batch)


def some_passed_over(batches: Iterator[Any], step: Callable[[Any], None]) -> None:
    for number, batch in enumerate(batches):
        if number % 3:
            step(batch)


def several_steps_a_batch(batches: Iterator[Any], step: Callable[[Any], None]) -> None:
    for batch in batches:
        step(batch)
        step(batch)


def more_and_more(batches: Iterator[Any], step: Callable[[Any], None]) -> None:
    waiting: list[Any] = []
    size = 1
    for batch in batches:
        nn.Linear(3, 1)(batch[0]).sum().backward()
        waiting.append(batch[0])
        if len(waiting) == size:
            step(torch.cat(waiting))
            waiting, size = [], size + 1


def less_and_less(batches: Iterator[Any], step: Callable[[Any], None]) -> None:
    waiting: list[Any] = []
    size = 3
    for batch in batches:
        nn.Linear(3, 1)(batch[0]).sum().backward()
        waiting.append(batch[0])
        if len(waiting) == size:
            step(torch.cat(waiting))
            waiting, size = [], max(size - 1, 1)


ORDINARY = [
    passing_over,
    pairs,
    pairs_in_two_places,
    zipped,
    first_for_a_look,
    some_passed_over,
    several_steps_a_batch,
    more_and_more,
    less_and_less,
]


@pytest.mark.parametrize("told", [None, 0])
@pytest.mark.parametrize("program", ORDINARY)
def test_ordinary_programs_are_left_alone(
    path: Path, program: Callable[..., None], told: int | None
) -> None:
    with pmstore.open(path) as store:
        run, step = small(store)
        program(run.batches(ahead=told), step)
        assert run.step >= 3
        assert (run.data_epoch, run.batch) == (1, -1)
        run.commit()
    with pmstore.open(path) as store:
        run, _ = small(store)
        assert list(run.batches()) == []


def test_without_gradients(store: pmstore.Store) -> None:
    """Nothing to see: as it was."""
    run = attach(store, loader=list(range(6)))
    batches = run.batches()
    assert [next(batches), next(batches)] == [0, 1]
    run.commit()
    for _ in batches:
        run.commit()
    assert run.step == 5
    run.rollback()
    with pytest.raises(ValueError, match="has come to its end already"):
        list(run.batches())


def test_left_and_begun_again(store: pmstore.Store) -> None:
    """What a loop held when it was left comes again."""
    run, step = small(store, list(torch.arange(24.0).reshape(8, 1, 3)))
    seen = []
    while run.data_epoch == 0:
        for batch in looking_ahead(run.batches(ahead=2), 2):
            seen.append(batch.flatten()[0].item() / 3)
            step(batch)
            if len(seen) % 3 == 0:
                break
    assert seen == list(range(8))


def test_roll_backs(store: pmstore.Store) -> None:
    run, step = small(store, list(torch.arange(24.0).reshape(8, 1, 3)))
    batches = looking_ahead(run.batches(ahead=1), 1)
    step(next(batches))
    next(batches)
    run.rollback()
    with pytest.raises(LookaheadError, match="begun anew"):
        next(batches)
    batches = looking_ahead(run.batches(ahead=1), 1)
    rest = list(batches)
    assert [one.flatten()[0].item() / 3 for one in rest] == [1, 2, 3, 4, 5, 6, 7]
    run.rollback()
    with pytest.raises(LookaheadError, match="begun anew"):
        step(rest[0])
    assert run.step == 1
    run.rollback()


def test_from_another_thread(store: pmstore.Store) -> None:
    run, step = small(store)
    batches = run.batches()
    taken: list[Any] = []
    thread = threading.Thread(target=lambda: taken.append(next(batches)))
    thread.start()
    thread.join()
    with pytest.raises(LookaheadError, match="another thread"):
        step(taken[0])
    run.rollback()


def test_bad_numbers(store: pmstore.Store) -> None:
    run, _ = small(store)
    with pytest.raises(ValueError, match="ahead=-1"):
        run.batches(ahead=-1)
