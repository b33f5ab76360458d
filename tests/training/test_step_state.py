"""The step that is open: what each event makes of it, who may ask, what is refused, and what of it
the store holds."""

from __future__ import annotations

import asyncio
import copy
import gc
import io
import os
import pickle
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pmstore
from pmstore.errors import TransactionError
from pmstore.scheduler import CommitScheduler, EveryN
from pmstore.torch import LookaheadError, RolledBackError, Run, UnfinishedStepError, attach
from pmstore.torch._step.state import TABLE, Event, Kind, OpenStep, StepState

IDLE, OPEN, MARKED, ENDED = StepState
BATCHES = 6
NEVER = EveryN(10**6)


class Kill(Exception):
    """The end of a life: it leaves the store, which goes back to its last commit."""


class Training:
    def __init__(self, store: pmstore.Store, *, data: bool = True, **given: Any) -> None:
        torch.manual_seed(1)
        self.store = store
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        if data:
            given.setdefault("loader", list(torch.arange(18.0).reshape(BATCHES, 1, 3) / 18))
        self.run: Run = attach(
            store, **{"model": self.model, "optimizer": self.optimizer, "policy": NEVER} | given
        )

    def update(self, batch: torch.Tensor | None = None) -> torch.Tensor:
        self.optimizer.zero_grad()
        given = torch.ones(1, 3) if batch is None else batch
        loss: torch.Tensor = self.model(given).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def add(self, name: str) -> None:
        """Counts in the store."""
        self.store[name] = self.store.get(name, 0) + 1

    def weights(self) -> list[float]:
        return [number for one in self.model.parameters() for number in one.flatten().tolist()]


Program = Callable[[Training], object]


def live(path: Path, program: Program, **given: Any) -> Run:
    """One life of a program; a kill in it is its end."""
    with suppress(Kill), pmstore.open(path, size="8MiB") as store:
        training = Training(store, **given)
        program(training)
    return training.run


def held(path: Path, *names: str) -> list[Any]:
    """What the store holds of finished steps and of counts."""
    with pmstore.open(path, mode="r") as store:
        return [int(store["run/progress"][0]), *(store.get(name, 0) for name in names)]


@pytest.fixture
def path(shm: Path) -> Path:
    return shm / "run.pm"


@pytest.fixture
def training(path: Path) -> Iterator[Training]:
    with pmstore.open(path, size="8MiB") as store:
        yield Training(store, data=False)


# ---- the table

OUTSIDE, NESTED, TWICE = "outside of a step", "of a batch is open", "ended already"
FOLLOWS: dict[tuple[StepState, Event], StepState | str] = {
    (IDLE, Event.BEGIN): OPEN,
    (IDLE, Event.END): IDLE,
    (IDLE, Event.MARK): OUTSIDE,
    (IDLE, Event.COMMIT): IDLE,
    (IDLE, Event.UPDATE): OUTSIDE,
    (IDLE, Event.BACK): IDLE,
    (OPEN, Event.BEGIN): NESTED,
    (OPEN, Event.END): IDLE,
    (OPEN, Event.MARK): MARKED,
    (OPEN, Event.COMMIT): ENDED,
    (OPEN, Event.UPDATE): OPEN,
    (OPEN, Event.BACK): IDLE,
    (MARKED, Event.BEGIN): NESTED,
    (MARKED, Event.END): IDLE,
    (MARKED, Event.MARK): TWICE,
    (MARKED, Event.COMMIT): ENDED,
    (MARKED, Event.UPDATE): MARKED,
    (MARKED, Event.BACK): IDLE,
    (ENDED, Event.BEGIN): NESTED,
    (ENDED, Event.END): IDLE,
    (ENDED, Event.MARK): TWICE,
    (ENDED, Event.COMMIT): ENDED,
    (ENDED, Event.UPDATE): "update after it would belong to no batch",
    (ENDED, Event.BACK): IDLE,
}


def test_the_table_is_whole() -> None:
    assert set(TABLE) == set(FOLLOWS) == set(product(StepState, Event))


@pytest.mark.parametrize(("state", "event"), FOLLOWS)
def test_what_follows(state: StepState, event: Event) -> None:
    step, follows = OpenStep(), FOLLOWS[state, event]
    step.state, step.kind = state, Kind.BATCH
    if isinstance(follows, StepState):
        step.go(event)
        assert step.state is follows
    else:
        with pytest.raises(TransactionError, match=f"^called: .*{follows}"):
            step.go(event, "called")
        assert step.state is state


# ---- in one step


def test_a_step_is_said_to_be_complete_once(training: Training) -> None:
    run = training.run
    for call in (run.end_step, run.stop):
        with pytest.raises(TransactionError, match="outside of a step"):
            call()
    with run.next_step():
        run.end_step()
        with pytest.raises(TransactionError, match="ended already"):
            run.end_step()
        training.update()  # is kept with the step
        run.commit()
        with pytest.raises(TransactionError, match="ended already"):
            run.end_step()
    assert (run.step, run.committed) == (1, 1)
    assert training.weights() == training.store["run/model"]["weight"].flatten().tolist() + (
        training.store["run/model"]["bias"].tolist()
    )


def test_commits_in_one_step(training: Training) -> None:
    run, store = training.run, training.store
    with run.next_step():
        training.update()
        run.commit()
        epoch = store.epoch
        run.commit()
        assert (run.step, run.committed, store.epoch) == (1, 1, epoch)
        before = training.weights()
        with pytest.raises(TransactionError, match="would belong to no batch"):
            training.update()
        assert training.weights() == before
        store["more"] = 1
        with pytest.raises(TransactionError, match="goes with the next one"):
            run.commit()
    with run.next_step():
        pass
    run.commit()
    store["later"] = 1
    with pytest.raises(TransactionError, match="outside of a step"):
        run.commit()
    store.rollback()
    run.rollback()
    assert (run.step, store["more"], "later" in store) == (2, 1, False)


def test_an_update_outside_of_a_step_is_refused(training: Training) -> None:
    before = training.weights()
    with pytest.raises(TransactionError, match="outside of a step"):
        training.update()
    with training.run.next_step():
        training.update()
    training.run.commit()
    with pytest.raises(TransactionError, match="outside of a step"):
        training.update()
    assert training.weights() != before
    training.run.rollback()


def test_half_an_update_is_refused(training: Training) -> None:
    run = training.run

    def closure() -> float:
        raise Kill

    steps = run.steps(2)
    next(steps)
    training.update()
    next(steps)
    with pytest.raises(Kill):
        training.optimizer.step(closure)
    for end in (run.commit, lambda: next(steps)):
        with pytest.raises(TransactionError, match="half an update is in this step"):
            end()
    run.rollback()
    for _ in run.steps(2):
        training.update()
    assert (run.step, run.stats().steps) == (2, 3)


SCOPES: dict[str, Callable[[Run], Iterator[Any]]] = {
    "batches": lambda run: run.batches(epochs=9, name="inner"),
    "epochs": lambda run: run.epochs(9, name="inner"),
    "steps": lambda run: run.steps(9, name="inner"),
    "next_step": lambda run: iter([run.next_step().__enter__()]),
}


def in_batch(run: Run) -> None:
    next(run.batches(epochs=2))


def in_head(run: Run) -> None:
    next(run.epochs(2))


def in_epoch(run: Run) -> None:
    next(iter(next(run.epochs(2))))


def in_tail(run: Run) -> None:
    for _ in next(run.epochs(2, batches=1, ahead=0)):
        pass


def in_steps(run: Run) -> None:
    next(run.steps(1))


def by_hand(run: Run) -> None:
    run.next_step().__enter__()


KINDS: dict[Callable[[Run], None], str] = {
    in_batch: "of a batch",
    in_head: "of the head of an epoch",
    in_epoch: "of a batch",
    in_tail: "of the tail of an epoch",
    in_steps: r"of run.steps\(\)",
    by_hand: r"of run.next_step\(\)",
}


@pytest.mark.parametrize("inner", SCOPES)
@pytest.mark.parametrize("outer", KINDS)
def test_a_step_has_no_steps_in_it(path: Path, outer: Callable[[Run], None], inner: str) -> None:
    with pmstore.open(path, size="8MiB") as store:
        training = Training(store)
        keep = []  # the loop goes on
        outer(training.run)
        training.model(torch.ones(1, 3))
        told = "has no steps in it" + ("" if outer is in_tail else "|was left in a step")
        with pytest.raises(TransactionError, match=told):
            keep.append(next(SCOPES[inner](training.run)))
        with suppress(RolledBackError):
            training.run.rollback()


# ---- who asks


def in_thread(call: Callable[[], object]) -> BaseException | None:
    """What it raises there."""
    told: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            told.append(error)
        else:
            told.append(None)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return told[0]


def test_another_thread_is_refused(training: Training) -> None:
    run, model, x = training.run, training.model, torch.ones(1, 3)
    steps = run.steps(3)
    next(steps)
    training.update()
    for call in (lambda: next(steps), run.commit, training.optimizer.step, lambda: model(x)):
        error = in_thread(call)
        assert isinstance(error, TransactionError)
        assert "begun in another thread" in str(error)
    assert in_thread(lambda: torch.no_grad()(model)(x)) is None
    model.eval()
    assert in_thread(lambda: model(x)) is None
    model.train()
    run.rollback()
    assert run.step == 0
    assert in_thread(lambda: model(x)) is None  # no step is open


def test_a_checkpoint_is_computed_again_in_the_thread_of_the_backward(training: Training) -> None:
    for _ in training.run.steps(1):
        training.optimizer.zero_grad()
        loss = checkpoint(training.model, torch.ones(2, 3), use_reentrant=False).sum()
        assert in_thread(loss.backward) is None
        training.optimizer.step()
    assert training.model.weight.grad is not None


def test_a_replica_computes_in_a_thread_of_its_own(training: Training) -> None:
    with training.run.next_step():
        replica: Any = training.model._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica.weight, replica.bias = (one * 1 for one in training.model.parameters())
        assert in_thread(lambda: replica(torch.ones(1, 3))) is None


def test_two_tasks(training: Training) -> None:
    run = training.run
    began, over = asyncio.Event(), asyncio.Event()

    async def steps() -> None:
        with run.next_step():
            training.update()
            began.set()
            await over.wait()

    async def other() -> None:
        await began.wait()
        for call in (training.optimizer.step, run.commit):
            with pytest.raises(TransactionError, match="begun in another task of asyncio"):
                call()
        with pytest.raises(TransactionError, match="has no steps in it"):
            run.next_step().__enter__()
        over.set()

    async def both() -> None:
        await asyncio.gather(steps(), other())
        run.commit()  # the task of the step is over

    asyncio.run(both())
    assert run.step == 1


def test_nobody_else_commits_an_open_step(training: Training) -> None:
    """Whoever asks for it: a scheduler of one's own, a block that was made before, a task, a
    thread, a child."""
    run, store = training.run, training.store
    block = store.transaction()
    scheduler = CommitScheduler(EveryN(1), store=store)
    scheduler.step()

    async def task() -> None:
        async with store.transaction():
            store["task"] = 1

    with run.next_step():
        for commit in (scheduler.step, block.__enter__, lambda: asyncio.run(task())):
            with pytest.raises(TransactionError, match="only the run commits it"):
                commit()
        assert not store.in_transaction
        assert isinstance(in_thread(store.commit), TransactionError)
        child = os.fork()
        if child == 0:
            with suppress(pmstore.PmstoreError):
                store.commit()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert (run.committed, "task" in store) == (0, False)
    run.commit()
    scheduler.step()
    with block:
        store["beside"] = 1


def test_a_block_around_a_step_is_taken_back(training: Training) -> None:
    run, store, before = training.run, training.store, training.weights()
    for told in ("inside a transaction block", "only the run commits it"):
        # the first step by hand is the beginning of a loop, too, which is committed
        with pytest.raises(TransactionError, match=told), store.transaction():
            store["beside"] = 1
            with run.next_step():
                training.update()
        assert ("beside" in store, training.weights()) == (False, before)
        run.rollback()
        with run.next_step():
            pass
        run.commit()
    assert run.step == 2


def test_a_flush_in_a_step_takes_the_last_commit(training: Training, tmp_path: Path) -> None:
    store, before = training.store, training.weights()
    store.add_tier("disk", tmp_path / "tier")
    with training.run.next_step():
        training.update()
        store.flush("disk", wait=True)
    pmstore.restore(tmp_path / "again.pm", tmp_path / "tier")
    with pmstore.open(tmp_path / "again.pm") as other:
        assert Training(other, data=False).weights() == before


def test_copies_of_the_model_are_no_part_of_the_step(training: Training) -> None:
    run, model, x = training.run, training.model, torch.ones(1, 3)
    kept = io.BytesIO()
    torch.save(model, kept)
    kept.seek(0)
    copies = (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(kept, weights_only=False),
        torch.optim.swa_utils.AveragedModel(model),
    )
    with run.next_step():
        for one in copies:
            assert in_thread(partial(one, x)) is None
        assert isinstance(in_thread(lambda: model(x)), TransactionError)
        assert not run._steps.step.used
    handles = len(model._forward_pre_hooks)
    run.detach()
    assert len(model._forward_pre_hooks) == handles - 1


def test_scripting_an_attached_model(training: Training) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(AttributeError, match=r"call run\.detach\(\) before"):
            torch.jit.script(training.model)
        training.run.detach()
        torch.jit.script(training.model)


def test_guards_of_detached_runs_are_forgotten(training: Training) -> None:
    training.run.detach()
    guards = training.store._guards
    of_one = len(guards._guards)
    for number in range(5):
        Training(training.store, data=False, name=f"run {number}").run.detach()
        gc.collect()
    assert len(guards._guards) <= 2 * of_one  # the last one's go with the next


# ---- leaving


@pytest.mark.parametrize("kind", KINDS)
def test_an_unfinished_step_is_taken_back(path: Path, kind: Callable[[Run], None]) -> None:
    keep = []

    def leave(training: Training) -> None:
        keep.append(training.run)
        for batch in training.run.batches(name="before"):
            training.update(batch)
        kind(training.run)
        training.add("x")

    with pytest.raises(UnfinishedStepError, match=KINDS[kind] + r".*run\.stop\(\).*run\.end_step"):
        live(path, leave)
    assert held(path, "x") == [BATCHES, 0]


@pytest.mark.parametrize("said", ["end_step", "stop", "commit"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_step_is_kept(path: Path, kind: Callable[[Run], None], said: str) -> None:
    def leave(training: Training) -> None:
        kind(training.run)
        training.add("x")
        getattr(training.run, said)()

    if kind is in_head and said != "stop":
        with pytest.raises(TransactionError, match="in the head of an epoch"):
            live(path, leave)
        assert held(path, "x") == [0, 0]
    else:
        live(path, leave)
        assert held(path, "x") == [int(kind not in (in_head, in_tail)) + (kind is in_tail), 1]


def test_a_marked_break_goes_on_with_the_next_loop(path: Path) -> None:
    def program(training: Training) -> None:
        for epoch in training.run.epochs(2):
            for batch in epoch:
                training.update(batch)
                if training.run.batch == 1:
                    training.run.end_step()
                    break
            training.add("tail")
        with pytest.raises(TransactionError, match=r"left in a step .* by break"):
            for batch in training.run.batches(epochs=4):
                training.update(batch)
                break
            next(training.run.steps(1))
        training.run.rollback()

    run = live(path, program)
    assert held(path, "tail") == [4, 2]
    assert run.step == 4


# ---- batches taken ahead


def held_in_a_list(batches: Iterator[Any]) -> Any:
    return list(batches)


def by_islice(batches: Iterator[Any]) -> Any:
    while some := list(islice(batches, 2)):
        yield from some


def by_a_pool(batches: Iterator[Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        yield from pool.map(lambda batch: batch, list(islice(batches, 3)))
        yield from pool.map(lambda batch: batch, list(batches))


def prefetched(batches: Iterator[Any]) -> Any:
    following = next(batches)
    for batch in batches:
        yield following
        following = batch
    yield following


HOLDERS: dict[Callable[..., Any], int] = {
    held_in_a_list: 2 * BATCHES,
    by_islice: 2,
    by_a_pool: 2 * BATCHES,
    prefetched: 1,
}


@pytest.mark.parametrize("holds", HOLDERS)
@pytest.mark.parametrize("by_epoch", [False, True])
def test_batches_that_are_held(path: Path, holds: Callable[..., Any], by_epoch: bool) -> None:
    """Refused before anything is trained. Each in a step of its own: as if they were not held,
    also over a kill in their midst."""

    def secretly(training: Training) -> None:
        for epoch in training.run.epochs(1) if by_epoch else [training.run.batches()]:
            for batch in holds(iter(epoch)):
                training.update(batch)

    with pytest.raises(LookaheadError, match=r"second batch .* before anything was done"):
        live(path, secretly)
    assert held(path) == [0]
    path.unlink()
    seen: list[float] = []

    def train(training: Training, kill: int = -1) -> list[float]:
        run = training.run
        ahead = HOLDERS[holds]
        loops = [run.batches(epochs=2, ahead=ahead)]
        if by_epoch:
            loops = (iter(one) for one in run.epochs(2, ahead=ahead))  # type: ignore[assignment]
        for loop in loops:
            for batch in holds(loop):
                with run.next_step():
                    if run.step == kill:
                        raise Kill
                    training.update(batch)
        return training.weights()

    def killed(training: Training) -> None:
        train(training, 4)

    live(path, killed, policy=None)
    assert held(path) == [4]
    live(path, lambda training: seen.extend(train(training)), policy=None)
    assert held(path) == [2 * BATCHES]
    plain: list[float] = []

    def plainly(training: Training) -> None:
        for batch in training.run.batches(epochs=2):
            training.update(batch)
        plain.extend(training.weights())

    live(path.with_name("plain.pm"), plainly)
    assert seen == plain


def test_batches_that_are_passed_over(path: Path) -> None:
    with pmstore.open(path, size="8MiB") as store:
        training = Training(store)
        for number, batch in enumerate(training.run.batches(ahead=0)):
            if number % 2:
                training.update(batch)
        assert training.run.step == BATCHES


def test_batches_are_copied_to_a_device_ahead(path: Path) -> None:
    plain: list[list[float]] = []

    def train(training: Training, device: Any, kill: int = -1) -> None:
        for batch in training.run.batches(epochs=2, device=device):
            assert training.run.batch == training.run.step % BATCHES
            training.update(batch)
            if training.run.step == kill:
                raise Kill
        plain.append(training.weights())

    live(path.with_name("plain.pm"), lambda training: train(training, None))
    live(path, lambda training: train(training, "cpu", 3), policy=None)
    assert held(path) == [3]
    live(path, lambda training: train(training, "cpu"), policy=None)
    assert plain[0] == plain[1]


def test_more_is_held_than_was_said(path: Path) -> None:
    def program(training: Training) -> None:
        batches = training.run.batches(ahead=1)
        for batch in [next(batches), next(batches), next(batches)]:
            with training.run.next_step():
                training.update(batch)

    with pytest.raises(LookaheadError, match=r"ahead=1\) says .* while it holds 2"):
        live(path, program)


def test_arguments_of_loops(training: Training) -> None:
    run = training.run
    with pytest.raises(pmstore.torch.AttachError, match="has no loader"):
        run.epochs(1)
    run.detach()
    run = attach(training.store, loader=[1, 2], name="data")
    for call, told in (
        (lambda: run.batches(ahead=-1), "ahead=-1"),
        (lambda: run.batches(every=0), "every=0"),
        (lambda: run.epochs(1, batches=0), "batches=0"),
        (lambda: run.epochs(-1), "n=-1"),
        (lambda: run.batches(ahead=1, every=2), "ahead=1: the program holds batches"),
        (lambda: run.batches(ahead=1, device="cpu"), "ahead=1: the program holds batches"),
    ):
        with pytest.raises(ValueError, match=told):
            call()
    with pytest.raises(TypeError, match="n=None"):
        run.steps(None)  # type: ignore[arg-type]


# ---- steps of several batches


def accumulate(training: Training, kill: int = -1) -> list[bool]:
    last = []
    loss: Any = 0.0
    for number, batch in enumerate(training.run.batches(epochs=2, every=4)):
        loss = training.model(batch).square().mean()
        loss.backward()
        last.append(training.run.last_in_step)
        if number == kill:
            raise Kill
        if training.run.last_in_step:
            training.optimizer.step()
            training.optimizer.zero_grad()
            training.run.log(loss=loss)
    return last


def test_several_batches_are_a_step(path: Path) -> None:
    """An epoch's last step has fewer, and a kill in its midst does a whole step again."""
    found: list[Any] = []

    def whole(training: Training) -> None:
        found.append(accumulate(training))
        found.append(training.weights())

    live(path.with_name("whole.pm"), whole)
    assert found[0] == [False, False, False, True, False, True] * 2
    for kill in (2, 5, 3):
        live(path, partial(accumulate, kill=kill), policy=None)
    assert held(path) == [2]  # killed in the first, in the second, and in the third one
    live(path, whole, policy=None)
    assert held(path) == [4]
    assert found[1] == found[3]


class Unsized:
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.ones(3, 1, 3)


class Short(Unsized):
    def __len__(self) -> int:
        return 4


def test_a_length_is_needed_to_know_the_last_batch(path: Path) -> None:
    with pmstore.open(path, size="8MiB") as store:
        training = Training(store, loader=Unsized())
        with pytest.raises(ValueError, match=r"every=2 has to know"):
            next(training.run.batches(every=2))
        with pytest.raises(TypeError, match="does not say how many"):
            len(next(training.run.epochs(2)))
        with pytest.raises(RolledBackError):
            training.run.rollback()
        training.run.detach()
        training = Training(store, loader=Short(), name="short")
        with pytest.raises(RuntimeError, match="fewer batches than its length says, 4"):
            for batch in training.run.batches(every=2):
                training.model(batch).sum().backward()
        training.run.rollback()


def test_some_batches_of_each_epoch(path: Path) -> None:
    seen: list[Any] = []

    def program(training: Training, kill: Any = None) -> None:
        for epoch in training.run.epochs(3, batches=4):
            assert len(epoch) == 4
            for batch in epoch:
                training.update(batch)
                if (epoch, training.run.batch) == kill:
                    raise Kill
                seen.append((epoch, round(batch.flatten()[0].item() * 6)))
            training.add("tail")

    live(path, lambda training: program(training, (1, 2)), policy=None)
    live(path, program, policy=None)
    assert seen == [(epoch, batch) for epoch in range(3) for batch in range(4)]
    assert held(path, "tail") == [12, 3]


# ---- several loops


def test_loops_with_names_count_for_themselves(path: Path) -> None:
    numbers: list[Any] = []

    def program(training: Training) -> None:
        run = training.run
        for name in ("", "more"):
            for epoch in run.epochs(1, name=name):
                for batch in epoch:
                    training.update(batch)
                numbers.append((name, int(epoch)))
            numbers.extend((name, number) for number in run.steps(2, name=name))
            for batch in run.batches(epochs=2, name="b" + name):
                training.update(batch)

    live(path, program)
    assert numbers == [(name, number) for name in ("", "more") for number in (0, 0, 1)]
    assert held(path) == [4 + 2 * 3 * BATCHES]
    live(path, program)
    assert held(path) == [4 + 2 * 3 * BATCHES]


def test_loops_in_another_order_are_refused(path: Path) -> None:
    def first(training: Training) -> None:
        for batch in training.run.batches(name="fine"):
            training.update(batch)
        for _ in training.run.steps(1):
            training.update()

    live(path, first)
    for call, told in (
        (
            lambda run: run.steps(1),
            r"run\.batches\(epochs=1, name='fine'\).*run\.steps\(1\) begins",
        ),
        (lambda run: run.batches(name="other"), r"epochs=1, name='other'\) begins now"),
        (lambda run: run.epochs(1), r"run\.epochs\(1\) begins now"),
    ):
        with pytest.raises(RuntimeError, match=told):
            live(path, lambda training, call=call: next(call(training.run)))
    live(path, first)
    assert held(path) == [BATCHES + 1]


# ---- stop


@pytest.mark.parametrize("where", ["head", "body", "tail"])
@pytest.mark.parametrize("killed", [False, True])
def test_a_run_that_stops(path: Path, where: str, killed: bool) -> None:
    """It stays stopped, until it is asked for more."""

    def program(training: Training, epochs: int = 5, kill: bool = False) -> None:
        run = training.run
        for epoch in run.epochs(epochs):
            training.add("head")
            if (epoch, where) == (1, "head"):
                run.stop()
            for batch in epoch:
                training.update(batch)
                if (epoch, run.batch, where) == (1, 2, "body"):
                    run.stop()
            training.add("tail")
            if (epoch, where) == (1, "tail"):
                run.stop()
        assert run.stopping == (epochs == 5)
        if kill:
            raise Kill

    live(path, lambda training: program(training, kill=killed))
    steps = {"head": BATCHES, "body": BATCHES + 3, "tail": 2 * BATCHES}[where]
    for _ in range(2):
        assert held(path, "head", "tail") == [steps, 2, 2]
        live(path, program)
    live(path, lambda training: program(training, 6))
    assert held(path, "head", "tail") == [steps + 4 * BATCHES, 6, 6]


def test_stop_and_a_kill_before_the_next_is_asked_for(path: Path) -> None:
    def program(training: Training, kill: bool) -> None:
        for batch in training.run.batches():
            training.update(batch)
            if training.run.step == 2:
                training.run.stop()
                if kill:
                    raise Kill

    live(path, lambda training: program(training, True), policy=None)
    assert held(path) == [2]  # the step that said so was not kept
    live(path, lambda training: program(training, False), policy=None)
    assert held(path) == [3]


def test_steps_by_hand_stop(training: Training) -> None:
    run = training.run
    while not run.stopping:
        with run.next_step():
            training.update()
            if run.step == 2:
                run.stop()
    assert run.step == 3
    with pytest.raises(RuntimeError, match=r"run\.stop\(\) has ended the run"):
        run.next_step().__enter__()
    assert run.step == 3


# ---- what stands at the end


@pytest.mark.parametrize("every", [1, 4, BATCHES, 100])
def test_the_last_tail_is_done_once(path: Path, every: int) -> None:
    """Also where only Python has seen it, and the policy commits the step before."""
    tails = []

    def program(training: Training) -> None:
        for epoch in training.run.epochs(1):
            for batch in epoch:
                training.update(batch)
            tails.append(epoch)
            training.run.state["tails"] = training.run.state.get("tails", 0) + 1
        assert training.run.state == {"tails": 1}

    for _ in range(2):
        live(path, program, policy=EveryN(every))
    assert tails == [0]


# ---- what is logged


def logs(training: Training, kill: int = -1) -> None:
    run = training.run
    for epoch in run.epochs(2):
        for batch in epoch:
            run.log(loss=9.0)
            run.log(loss=run.step, batch=float(run.batch))
            training.update(batch)
            run.state["beta"] = 0.5 * run.state.get("beta", 1.0)
            run.state.setdefault("seen", []).append(run.batch)
            if run.step == kill:
                raise Kill
        run.log(accuracy=epoch)


@pytest.mark.parametrize("policy", [None, EveryN(4), NEVER])
def test_what_is_logged_and_kept_of_steps_done_again(path: Path, policy: Any) -> None:
    for kill in (3, 5, 8):
        live(path, partial(logs, kill=kill), policy=policy)
    live(path, logs, policy=policy)
    with pmstore.open(path) as store:
        run = Training(store).run
        steps, losses = run.history("loss")
        assert steps.tolist() == list(range(1, 13))
        assert losses.tolist() == [float(one) for one in range(12)]
        assert [one.tolist() for one in run.history("accuracy")] == [[6, 12], [0.0, 1.0]]
        assert run.state == {"beta": 0.5**12, "seen": [*range(6)] * 2}
        with pytest.raises(KeyError, match="'loss', 'batch', 'accuracy'"):
            run.history("nothing")


def test_a_roll_back_takes_back_what_was_logged(training: Training) -> None:
    run = training.run
    state = run.state
    with run.next_step():
        run.log(loss=1)
        state["n"] = 1
    run.commit()
    with run.next_step():
        run.log(loss=2)
        state["n"] = 2
        run.rollback()
    assert run.history("loss")[1].tolist() == [1.0]
    assert state == {"n": 1}
    assert run.state is state


def test_the_history_has_a_step_by_hand_whose_block_was_left(training: Training) -> None:
    """As `run.step` has it."""
    run = training.run
    for number in range(3):
        with run.next_step():
            run.log(loss=number)
            if number == 2:
                run.log(new=7)
        assert run.step == number + 1
        assert run.history("loss")[0].tolist() == [*range(1, number + 2)]
    table = run.history()
    assert [*table["loss"]] == [0.0, 1.0, 2.0]
    assert [*table["new"].dropna().items()] == [(3, 7.0)]
    run.commit()
    assert run.history().equals(table)


def test_what_is_logged_behind_a_commit(training: Training) -> None:
    """It goes with the next step."""
    run = training.run
    with run.next_step():
        run.log(loss=1)
        run.commit()
        run.log(late=2)
    with run.next_step():
        run.log(loss=3)
    run.commit()
    assert [one.tolist() for one in run.history("loss")] == [[1, 2], [1.0, 3.0]]
    assert run.history("late")[1].tolist() == [2.0]


class Writer:
    def __init__(self, told: list[Any]) -> None:
        self.told = told

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.told.append((step, {tag: value}))


def test_loggers_are_told_each_step_in_order(path: Path) -> None:
    """Those told since the commit before a kill are told again, with the same numbers."""
    lives: list[list[tuple[int, dict[str, float]]]] = []
    written: list[Any] = []

    def program(training: Training, kill: int = -1) -> None:
        lives.append([])
        training.run.log_to(lambda values, step: lives[-1].append((step, values)), name="mine")
        training.run.log_to(Writer(written))
        logs(training, kill)

    for kill in (3, 5, 8):
        live(path, partial(program, kill=kill), policy=EveryN(2))
    live(path, program, policy=EveryN(2))
    live(path, program, policy=EveryN(2))
    told = [one for life in lives for one in life]
    for life in lives:
        assert life == sorted(life, key=lambda one: one[0])
    once = [one for number, one in enumerate(told) if one not in told[:number]]
    assert lives[-1] == []  # a normal end leaves nothing to be told
    assert [values["loss"] for _, values in once if "loss" in values] == list(range(12))
    assert [step for step, values in once if "loss" in values] == list(range(1, 13))
    assert [values["accuracy"] for _, values in once if "accuracy" in values] == [0.0, 1.0]
    assert written == [(step, {name: one}) for step, given in told for name, one in given.items()]


def test_a_logger_that_fails_is_told_again(training: Training) -> None:
    run = training.run
    told: list[Any] = []
    fails = True

    def logger(values: dict[str, float], step: int) -> None:
        if fails:
            raise OSError("no network")
        told.append((step, values))

    run.log_to(logger, name="mine")
    for number in run.steps(4):
        run.log(loss=number)
        fails = number < 2
        if number == 0:
            with pytest.warns(RuntimeWarning, match=r"'mine' failed, .* again .*no network"):
                run.commit()
        else:
            run.commit()
    assert told == [(number + 1, {"loss": float(number)}) for number in range(4)]


def test_loggers_are_told_what_is_logged_behind_the_last_loop(path: Path) -> None:
    told: list[Any] = []

    def program(training: Training) -> None:
        training.run.log_to(lambda values, step: told.append((step, values)), name="mine")
        for number in training.run.steps(2):
            training.run.log(loss=number)
        training.run.log(test=0.5)

    live(path, program)
    assert told == [(1, {"loss": 0.0}), (2, {"loss": 1.0}), (2, {"test": 0.5})]


def test_what_is_no_logger(training: Training) -> None:
    with pytest.raises(TypeError, match="is no logger"):
        training.run.log_to(3)  # type: ignore[arg-type]


def test_what_the_program_has_put_into_its_state_is_not_written_to(training: Training) -> None:
    """A roll back gives back what was there at the last commit, and writes into nothing else."""
    run, data, held = training.run, torch.arange(6.0).reshape(3, 2), {"names": ["a"]}
    state = run.state
    for number in run.steps(2):
        if number == 0:
            state.update(last=[1], best=[0], row=data[0], held={"names": ["b"]})
            run.commit()
        else:
            state["best"] = state["last"]
            state.update(row=data[2], held=held)
            run.rollback()
            break
    assert state["last"] == [1]
    assert state["best"] == [0]
    assert state["row"].tolist() == [0.0, 1.0]
    assert state["held"] == {"names": ["b"]}
    assert held == {"names": ["a"]}
    assert torch.equal(data, torch.arange(6.0).reshape(3, 2))


def test_arrays_that_are_not_written_to_in_place(path: Path) -> None:
    """A head puts them into the state of the program at each start."""
    seen: list[Any] = []

    def program(training: Training) -> None:
        state = training.run.state
        with torch.inference_mode():
            state["before"] = training.model(torch.ones(3)).mean()
        state["wide"] = torch.ones(1).expand(3)
        state["for reading"] = np.broadcast_to(np.ones(1), 3)
        state["leaf"] = torch.ones(2, requires_grad=True)
        for _ in training.run.steps(3):
            training.update()
            training.run.commit()
            training.run.rollback()
            seen.append({name: one.tolist() for name, one in state.items()})
            if len(seen) == 1:
                raise Kill

    live(path, program)
    live(path, program)
    assert len(seen) == 3
    assert all(one == seen[0] for one in seen)


# ---- going back


def test_a_step_by_hand_counts_when_its_block_is_left(training: Training) -> None:
    run, made = training.run, 0
    while run.step < 3:
        with run.next_step():
            assert run.step == made
            training.update()
        made += 1
        assert run.step == run.metrics()["step"] == made
    assert made == 3
    run.commit()
    assert run.step == run.committed == 3
    with run.next_step():
        pass
    run.rollback()
    assert run.step == 3


def test_an_error_of_a_step_by_hand_takes_it_back(training: Training) -> None:
    before = training.weights()
    with pytest.raises(Kill), training.run.next_step():
        training.update()
        training.add("x")
        raise Kill
    assert training.weights() == before
    assert "x" not in training.store
    with training.run.next_step():
        training.update()
    training.run.commit()
    assert training.run.step == 1


def epochs(training: Training, back: Callable[[Training, int, str], bool]) -> int:
    """Begins again whenever it is told to. back: whether it went back there."""
    again = 0
    while True:
        try:
            for epoch in training.run.epochs(3):
                training.add("head")
                for batch in epoch:
                    training.update(batch)
                    back(training, epoch, f"batch {training.run.batch}")
                training.add("tail")
                back(training, epoch, "tail")
            return again
        except RolledBackError:
            again += 1


@pytest.mark.parametrize(
    ("where", "committed", "begins_again"),
    [
        ((1, "batch 2"), None, True),  # to the first epoch's beginning
        ((1, "batch 2"), (1, "batch 0"), False),  # within its epoch
        ((1, "tail"), (1, "batch 1"), False),  # from its tail into it
        ((1, "tail"), (0, "batch 1"), True),
        ((0, "batch 1"), None, False),  # the first head of a process is committed
        ((2, "tail"), (2, "batch 5"), False),
    ],
)
def test_roll_backs_in_epochs(path: Path, where: Any, committed: Any, begins_again: bool) -> None:
    done: set[Any] = set()
    weights: list[list[float]] = []

    def back(training: Training, epoch: int, place: str) -> bool:
        here = (int(epoch), place)
        if here == committed and here not in done:
            done.add(here)
            training.run.commit()
        if here == where and (here, "back") not in done:
            done.add((here, "back"))
            training.run.rollback()
            return True
        return False

    def program(training: Training) -> None:
        assert epochs(training, back) == begins_again
        weights.append(training.weights())

    live(path, program)
    assert held(path, "head", "tail") == [3 * BATCHES, 3, 3]

    def plain(training: Training) -> None:
        epochs(training, lambda *_: False)
        weights.append(training.weights())

    live(path.with_name("plain.pm"), plain)
    assert weights[0] == weights[1]


def test_a_roll_back_in_a_head(path: Path) -> None:
    def program(training: Training) -> None:
        again = 0
        while again < 2:
            try:
                for epoch in training.run.epochs(2):
                    training.add("head")
                    if epoch == 1 and not again:
                        training.run.rollback()
                    for batch in epoch:
                        training.update(batch)
                again = 2
            except RolledBackError:
                again += 1
        assert again == 2

    live(path, program)
    assert held(path, "head") == [2 * BATCHES, 2]


def test_a_roll_back_behind_a_loop_that_is_over(path: Path) -> None:
    def program(training: Training) -> None:
        for batch in training.run.batches():
            training.update(batch)
        training.run.rollback()  # of nothing
        training.add("after")
        with pytest.raises(RolledBackError, match="Begin the loops of the program from the first"):
            training.run.rollback()
        for _ in training.run.batches():
            raise AssertionError

    live(path, program)
    assert held(path, "after") == [BATCHES, 0]


def test_a_roll_back_over_the_beginning_of_a_loop(path: Path) -> None:
    """That is durable: no roll back goes further."""

    def program(training: Training) -> None:
        training.add("setup")
        for batch in training.run.batches(name="first"):
            training.update(batch)
        training.add("between")
        for turn, batch in enumerate(training.run.batches(name="second")):
            training.update(batch)
            training.add("body")
            if turn == 3:
                training.run.rollback()

    live(path, program)
    assert held(path, "setup", "between", "body") == [2 * BATCHES, 1, 1, BATCHES]


def test_what_is_done_before_and_behind_loops_over_kills(path: Path) -> None:
    """Heads are done once; what stands behind the last loop is done again at each start."""

    def program(training: Training, kill: str = "") -> None:
        training.add("setup")
        for batch in training.run.batches(name="first"):
            training.update(batch)
        training.add("between")
        for epoch in training.run.epochs(2, name="second"):
            training.add("head")
            for batch in epoch:
                training.update(batch)
                if f"{epoch} {training.run.batch}" == kill:
                    raise Kill
            training.add("tail")
            if f"{epoch} tail" == kill:
                raise Kill
        training.add("behind")
        if kill == "behind":
            raise Kill

    for kill in ("0 0", "0 3", "0 tail", "1 0", "1 tail", "behind"):
        live(path, partial(program, kill=kill))
    live(path, program)
    names = ("setup", "between", "head", "tail", "behind")
    assert held(path, *names) == [3 * BATCHES, 1, 1, 2, 2, 1]


def test_what_was_set_up_is_committed_by_the_store(path: Path) -> None:
    def first(training: Training) -> None:
        training.add("setup")
        training.store.commit()
        for _ in training.run.steps(2):
            training.update()

    def overwrites(training: Training) -> None:
        with torch.no_grad():
            training.model.weight.fill_(0)
        training.store.commit()

    live(path, first, data=False)
    with pytest.raises(TransactionError, match="a commit would overwrite that"):
        live(path, overwrites, data=False)
    live(path, first, data=False)
    assert held(path, "setup") == [2, 2]


def test_what_lies_beside_the_run_is_set_up(path: Path) -> None:
    """Small arrays share pages with the run's tensors: a commit of them overwrites nothing."""
    live(path, lambda training: [training.update(batch) for batch in training.run.batches()])
    with pmstore.open(path) as store:
        mine = [store.zeros(f"before{number}", 3) for number in range(4)]
        training = Training(store)
        mine += [store.zeros(f"behind{number}", 3) for number in range(4)]
        for number in range(12):  # pages become hot: they stay writable
            for one in mine:
                one[0] = number
            store.commit()
        with store.transaction():
            mine[0][1] = 5
        assert store["before0"].tolist() == [11, 5, 0]
        with torch.no_grad():
            training.model.bias.add_(1)
        with pytest.raises(TransactionError, match="a commit would overwrite that"):
            store.commit()
        training.run.rollback()


def test_messages_name_what_to_write() -> None:
    for told in (one for one in TABLE.values() if isinstance(one, str)):
        assert re.search(r"run\.\w+\(\)|a step has no steps in it", told)


def test_what_is_replaced_outside_of_steps(shm: Path) -> None:
    """It is set-up: leaving the store keeps it; run.commit() says that it belongs to no step."""
    path = shm / "replaced.pm"
    for life in range(2):
        model = nn.Linear(2, 2)
        model.register_buffer("seen", torch.zeros(2))
        with pmstore.open(path) as store:
            run = attach(store, model=model)
            if life == 0:
                model.seen = torch.arange(5.0)
                with pytest.raises(TransactionError, match="outside of a step"):
                    run.commit()
            else:
                assert model.seen.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
