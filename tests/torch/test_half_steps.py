"""A program may end anywhere: no half of a training step is ever committed, and it says what it
lost."""

from __future__ import annotations

import asyncio
import copy
import gc
import io
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# which the first optimizer of a process imports: here once, in the fork server
import torch._dynamo
from torch import nn
from training import BATCHES, assert_same, contents, make_job, mlp

import pmstore
from pmstore.errors import TransactionError
from pmstore.scheduler import CommitScheduler, EveryN, PreemptionGuard
from pmstore.testing import ForkServer
from pmstore.torch import AttachError, Run, TornStepError, attach

STEPS = 3 * BATCHES
MODES: dict[str, dict[str, Any]] = {
    "heap": {},
    "slots": {"optimizer": "native-adamw"},
    "mirror": {"optimizer": "sgd-momentum"},
}
PLACES = ("forward", "backward", "step", "commit")
WAYS = ("exit", "interrupt", "status", "error", "break")
DONE, RUNNING, EXITED, RAISED = 3, 0, 1, 2


class Boom(Exception):
    pass


def disturb(way: str) -> None:
    if way in ("exit", "interrupt", "guard"):
        os.kill(os.getpid(), signal.SIGTERM)  # the handler does the rest
    elif way == "status":
        sys.exit(3)
    elif way == "error":
        raise Boom


def on_signal(way: str) -> Callable[..., object]:
    def handle(*_: object) -> None:
        if way == "interrupt":
            raise KeyboardInterrupt
        sys.exit(0)

    return handle


def train(store: pmstore.Store, job: Any, mode: str, how: dict[str, Any], **more: Any) -> Run:
    """Trains to the end, or until it is disturbed: at a place in the loop, `after` steps."""
    policy = EveryN(how["every"]) if how["every"] else None
    run = job.attach(store, mirror=mode == "mirror", policy=policy, **more)
    losses, left = store.list("losses"), how.get("after", STEPS)

    def at(place: str) -> bool:
        if left or how.get("place") != place:
            return False
        disturb(how["way"])
        return how["way"] == "break"

    for features, labels, _ in run.batches(epochs=3):
        loss = nn.functional.cross_entropy(job.model(features), labels)
        if at("forward"):
            break
        job.optimizer.zero_grad()
        loss.backward()
        if at("backward"):
            break
        losses.append(loss.item())
        if how["use"] == "commit":
            job.optimizer.step()
            if at("step"):
                break
            run.end_step(loss)
        else:
            with run.transaction(loss):
                job.optimizer.step()
                if at("step"):
                    break
        if at("commit"):
            break
        left -= 1
    else:
        return run
    raise Boom if how.get("raise") else StopAsyncIteration


def work(ack: Callable[[int], None], path: str, mode: str, how: dict[str, Any]) -> None:
    """One process's life. Runs in a child of the fork server."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # that it says what it lost: below
    ack(RUNNING)
    guard: dict[str, Any] = {}
    if how["way"] == "guard":
        guard["guard"] = PreemptionGuard()
    else:
        signal.signal(signal.SIGTERM, on_signal(how["way"]))
    if "delay" in how:
        timer = threading.Timer(how["delay"], disturb, [how["way"]])
        timer.daemon = True
    try:
        if "delay" in how:
            timer.start()  # which waits: the signal may come before it returns
        with pmstore.open(path, size="8MiB") as store:
            try:
                train(store, make_job(**MODES[mode]), mode, how, **guard)
            except StopAsyncIteration:
                ended = RAISED  # it broke out of the loop: the store's block is left in order
            else:
                ended = DONE
        if "delay" in how and not guard:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except SystemExit as end:
        ended = EXITED if end.code == 0 else RAISED
    except (KeyboardInterrupt, Boom):
        ended = RAISED
    if "delay" in how:
        timer.cancel()
    ack(ended)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer([str(Path(__file__).parent)]) as server:
        yield server


def result(path: Path) -> tuple[dict[str, Any], list[float]]:
    with pmstore.open(path, mode="r") as store:
        held = contents(store["run"])
        held.pop("gradients/value", None)
        return held, list(store["losses"])


def check_same(path: Path, whole: Path) -> None:
    (ours, our_losses), (theirs, their_losses) = result(path), result(whole)
    assert our_losses == their_losses
    assert len(our_losses) == STEPS
    assert_same(theirs, ours)


@pytest.mark.pairwise
@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("use", ["commit", "transaction"])
@pytest.mark.parametrize("mode", MODES)
def test_ends_at_every_place(
    tmp_path: Path, server: ForkServer, mode: str, use: str, every: int
) -> None:
    """One training, ended in many ways and places: bit for bit the one that was left alone."""
    chance = random.Random(f"{mode} {use} {every}")  # half of the ends each, all in all
    how = {"use": use, "every": every, "way": ""}
    whole, path = tmp_path / "whole.pm", tmp_path / "run.pm"
    assert server.run("test_half_steps:work", [str(whole), mode, how]).acknowledged == DONE
    ends = [(way, place) for way in WAYS for place in PLACES]
    for way, place in chance.sample(ends, 10):
        more = {"way": way, "place": place, "after": chance.randrange(3 if every else 2)}
        life = server.run("test_half_steps:work", [str(path), mode, {**how, **more}])
        assert life.acknowledged in (EXITED if way == "exit" else RAISED, DONE), more
        assert life.exit_code == 0
    assert server.run("test_half_steps:work", [str(path), mode, how]).acknowledged == DONE
    check_same(path, whole)


@pytest.mark.parametrize("way", ["exit", "interrupt", "guard"])
@pytest.mark.parametrize("mode", MODES)
def test_sigterm_at_any_moment(tmp_path: Path, server: ForkServer, mode: str, way: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # shown if it fails
    chance = random.Random(seed)
    how: dict[str, Any] = {"use": "commit", "every": chance.choice([0, 3]), "way": way}
    whole, path = tmp_path / "whole.pm", tmp_path / "run.pm"
    assert server.run("test_half_steps:work", [str(whole), mode, how]).acknowledged == DONE
    for _ in range(6):
        more = {"delay": chance.uniform(0.0, 0.15)}
        life = server.run("test_half_steps:work", [str(path), mode, {**how, **more}])
        if life.exit_code == -signal.SIGTERM:  # outside of the store's block
            assert way == "guard"
            continue
        assert life.exit_code == 0
        assert life.acknowledged in ((RAISED, DONE) if way == "interrupt" else (EXITED, DONE))
    assert server.run("test_half_steps:work", [str(path), mode, how]).acknowledged == DONE
    check_same(path, whole)


# ---- the guard


@pytest.mark.pairwise
@pytest.mark.parametrize("every", [0, 100])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_the_guard_finishes_the_step(
    tmp_path: Path, server: ForkServer, mode: str, place: str, every: int
) -> None:
    how = {"use": "commit", "every": every, "way": "guard"}
    path = tmp_path / "run.pm"
    for steps in (5, 10):
        after = {"place": place, "after": 4}
        life = server.run("test_half_steps:work", [str(path), mode, {**how, **after}])
        assert (life.acknowledged, life.exit_code) == (EXITED, 0)
        with pmstore.open(path, mode="r") as store:
            assert int(store["run/progress"][0]) == steps
            assert len(store["losses"]) == steps


class Notice(PreemptionGuard):
    """A guard without signals, for tests in one process."""

    def __init__(self) -> None:
        super().__init__(signals=())


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, forward: bool = True) -> None:
    optimizer.zero_grad()
    features = torch.randn(6, 8)
    (model(features) if forward else model.forward(features)).square().mean().backward()
    optimizer.step()


def make(store: pmstore.Store, **more: Any) -> tuple[Run, nn.Module, torch.optim.Optimizer]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    return attach(store, model=model, optimizer=optimizer, **more), model, optimizer


def test_a_loop_of_ones_own_is_told(store: pmstore.Store) -> None:
    guard = Notice()
    run, model, optimizer = make(store, policy=EveryN(100), guard=guard)
    for number in range(6):
        one_step(model, optimizer)
        if number == 4:
            guard.notify()
        assert run.end_step() == (number >= 4)
        assert run.stopping == (number >= 4)
    assert run.step == 6


def test_finished_steps_are_committed_before_the_next_begins(store: pmstore.Store) -> None:
    guard = Notice()
    run, model, optimizer = make(store, policy=EveryN(100), guard=guard)
    for _ in range(3):
        one_step(model, optimizer)
        run.end_step()
    guard.notify()
    assert run.committed == 0
    model(torch.randn(6, 8))
    assert run.committed == 3
    held = {name: one.clone() for name, one in model.state_dict().items()}
    run.rollback()
    assert not torch.equal(held["1.running_mean"], model.state_dict()["1.running_mean"])


def test_a_step_of_several_batches_is_finished(path: Path) -> None:
    guard = Notice()
    given = 0
    with pytest.raises(SystemExit) as ended, pmstore.open(path) as store:
        job = make_job()
        run = job.attach(store, policy=EveryN(100), guard=guard)
        for number, (features, labels, _) in enumerate(run.batches()):
            given += 1
            nn.functional.cross_entropy(job.model(features), labels).backward()
            if number == 3:  # the first of two
                job.optimizer.zero_grad()
                guard.notify()
            if number in (2, 4):
                job.optimizer.step()
                run.end_step()
    assert ended.value.code == 0
    assert given == 5
    with pmstore.open(path) as store:
        assert make_job().attach(store, policy=EveryN(100)).step == 2


def test_a_guard_that_was_told_before_the_first_batch(path: Path) -> None:
    guard = Notice()
    guard.notify()
    with pytest.raises(SystemExit), pmstore.open(path) as store:
        run = make_job().attach(store, guard=guard)
        next(run.batches())


def test_signal_handlers_come_back(path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pmstore.open(path) as store:
        run, _, _ = make(store, guard=PreemptionGuard())
        assert signal.getsignal(signal.SIGTERM) != before
        run.detach()
        assert signal.getsignal(signal.SIGTERM) == before
        make(store, name="second", guard=PreemptionGuard())
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    with PreemptionGuard() as guard:
        held = signal.getsignal(signal.SIGTERM)
        with pmstore.open(path) as store:
            make(store, guard=guard)
        assert signal.getsignal(signal.SIGTERM) == held
    assert signal.getsignal(signal.SIGTERM) == before


def test_which_guards_are_refused(store: pmstore.Store) -> None:
    before = signal.getsignal(signal.SIGTERM)
    scheduler = CommitScheduler(EveryN(2), store=store, guard=Notice())
    with pytest.raises(AttachError, match="the scheduler has a guard already"):
        make(store, policy=scheduler, guard=PreemptionGuard())
    with pytest.raises(TypeError, match="guard is a PreemptionGuard"):
        make(store, guard=30.0)
    assert signal.getsignal(signal.SIGTERM) == before
    guard = Notice()
    scheduler = CommitScheduler(EveryN(100), store=store)
    run, model, optimizer = make(store, policy=scheduler, guard=guard)
    one_step(model, optimizer)
    guard.notify()
    assert run.end_step()
    assert scheduler.stopping
    assert run.stopping


def test_a_refused_guard_changes_nothing(store: pmstore.Store) -> None:
    scheduler = CommitScheduler(EveryN(2), store=store, guard=Notice())
    store.commit()
    before = store.epoch
    for _ in range(2):
        model = mlp()
        memory = [one.data_ptr() for one in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(AttachError, match="has a guard already"):
            attach(store, model=model, optimizer=optimizer, policy=scheduler, guard=Notice())
        assert "run" not in store
        assert store.epoch == before
        assert [one.data_ptr() for one in model.parameters()] == memory


def test_a_forward_after_the_store_was_closed(path: Path) -> None:
    guard = Notice()
    with pmstore.open(path) as store:
        run, model, optimizer = make(store, guard=guard)
        one_step(model, optimizer)
        guard.notify()
        run.end_step()
        assert run.stopping
    model(torch.randn(6, 8))  # is the program's own business


def test_the_last_commit_is_flushed(tmp_path: Path, path: Path) -> None:
    guard = Notice()
    with pmstore.open(path) as store:
        store.add_tier("disk", tmp_path / "tier")
        run, model, optimizer = make(store, policy=EveryN(100), tiers=["disk"], guard=guard)
        one_step(model, optimizer)
        guard.notify()
        run.end_step()
        epoch = store.epoch
    pmstore.restore(tmp_path / "again.pm", tmp_path / "tier")
    with pmstore.open(tmp_path / "again.pm", mode="r") as store:
        assert store.epoch == epoch


# ---- what begins a step, and what is refused then

BEGINNINGS: dict[str, Callable[[nn.Module], object]] = {
    "forward": lambda model: model(torch.randn(6, 8)),
    "functional_call": lambda model: torch.func.functional_call(
        model, dict(model.named_parameters()), (torch.randn(6, 8),)
    ),
    "wrapped": lambda model: nn.Sequential(model)(torch.randn(6, 8)),
    "compiled": lambda model: torch.compile(model, backend="eager", fullgraph=True)(
        torch.randn(6, 8)
    ),
    "checkpoint": lambda model: torch.utils.checkpoint.checkpoint(
        model, torch.randn(6, 8), use_reentrant=False
    ),
    "a submodule's forward": lambda model: model[1](torch.randn(6, 16)),
    "statistics under no_grad": lambda model: torch.no_grad()(model)(torch.randn(6, 8)),
    "a write": lambda model: torch.no_grad()(model[0].bias.add_)(1.0),
    "a write by .data": lambda model: model[0].bias.data.add_(1.0),
    "a write by numpy": lambda model: model[0].bias.detach().numpy().__setitem__(0, 7.0),
    "another thread": lambda model: _in_thread(model),
}
UNSEEN_WITH_A_POLICY = ("a write by .data", "a write by numpy")


def _in_thread(model: nn.Module) -> None:
    thread = threading.Thread(target=model, args=(torch.randn(6, 8),))
    thread.start()
    thread.join()


def enter(store: pmstore.Store) -> None:
    with store.transaction():
        pass


@pytest.mark.parametrize("begin", BEGINNINGS)
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("mode", ["heap", "slots", "mirror"])
def test_what_begins_a_step(store: pmstore.Store, mode: str, pending: bool, begin: str) -> None:
    job = make_job(**MODES[mode])
    job.loader = None  # the steps here take no data
    run = job.attach(store, mirror=mode == "mirror", policy=EveryN(2))
    begins = not ((pending or mode == "mirror") and begin in UNSEEN_WITH_A_POLICY)
    for _ in range(3 if pending else 2):
        one_step(job.model, job.optimizer)
        run.end_step()
    store["between"] = 1
    if not pending:
        store.commit()  # between two steps
    BEGINNINGS[begin](job.model)
    held = {name: one.clone() for name, one in job.model.state_dict().items()}
    if begins:
        for commit in (store.commit, enter):
            with pytest.raises(
                TransactionError, match=r"in the middle of a training step: .* not "
            ):
                commit() if commit is store.commit else commit(store)
    job.optimizer.zero_grad()
    job.model(torch.randn(6, 8)).sum().backward()
    job.optimizer.step()
    run.end_step()
    assert not torch.equal(held["4.bias"], job.model.state_dict()["4.bias"])
    store.commit()
    run.rollback()
    store["after"] = 1
    store.commit()


def test_a_wrapper_that_was_attached(store: pmstore.Store) -> None:
    inner = mlp()
    model = nn.DataParallel(inner)  # without devices: it calls the module itself
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = attach(store, model=model, optimizer=optimizer)
    model(torch.randn(6, 8))
    with pytest.raises(TransactionError, match="called in training mode"):
        store.commit()
    run.rollback()
    compiled = torch.compile(nn.Linear(8, 3), backend="eager")
    second = attach(store, name="second", model=compiled)
    compiled(torch.randn(6, 8))
    with pytest.raises(TransactionError, match="'second' is in the middle"):
        store.commit()
    second.rollback()


def test_several_models(store: pmstore.Store) -> None:
    models = {"g": nn.Linear(8, 3), "d": nn.Linear(3, 1)}
    run = attach(store, model=models)
    for model, features in ((models["g"], 8), (models["d"], 3)):
        model(torch.randn(6, features))
        with pytest.raises(TransactionError, match="called in training mode"):
            store.commit()
        run.commit()


def test_evaluation_begins_no_step(store: pmstore.Store) -> None:
    run, model, optimizer = make(store)
    one_step(model, optimizer)
    run.commit()
    model.eval()
    model(torch.randn(6, 8))
    store["accuracy"] = 0.5
    store.commit()
    model.train()
    plain = nn.Linear(8, 3)  # nothing that a forward in training mode writes
    attach(store, model=plain, name="plain")
    with torch.no_grad():
        plain(torch.randn(6, 8))
    store["accuracy"] = 0.6
    with store.transaction():
        store["more"] = 1


def test_what_lies_beside_the_run_is_no_step(store: pmstore.Store) -> None:
    """Small arrays share pages with the run's tensors."""
    mine = [store.zeros(f"mine{number}", 3) for number in range(4)]
    attach(store, model=nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    mine += [store.zeros(f"theirs{number}", 3) for number in range(4)]
    for number in range(12):  # pages become hot: they stay writable
        for one in mine:
            one[0] = number
        store.commit()
    for one in mine:
        one[0] = -1
    with store.transaction():
        mine[0][1] = 5
    assert store["mine0"].tolist() == [-1, 5, 0]


def test_after_the_loop_a_forward_is_no_step(path: Path) -> None:
    with pmstore.open(path) as store:
        job = make_job(model="mlp")
        run = attach(store, model=nn.Linear(8, 3), loader=job.loader, policy=EveryN(4))
        model = run._steps.pieces.modules[0]
        for features, _, _ in run.batches():
            model(features)
            run.end_step()
        store["loss"] = model(features).sum().item()  # a program that forgot no_grad
    with pmstore.open(path) as store:
        assert "loss" in store
        assert int(store["run/progress"][0]) == BATCHES


def test_what_an_accumulation_leaves_at_the_end_is_half_a_step(path: Path) -> None:
    def accumulate() -> None:
        with pmstore.open(path) as store:
            job = make_job()
            run = job.attach(store)
            for number, (features, _, _) in enumerate(run.batches()):
                job.model(features).sum().backward()
                if number % 2:
                    job.optimizer.step()
                    run.commit()

    with pytest.warns(RuntimeWarning, match="with step 3; what was written since then is lost"):
        accumulate()
    with pmstore.open(path) as store:
        assert make_job().attach(store).batch == 5


def test_a_block_around_a_forward_is_rolled_back(store: pmstore.Store) -> None:
    run, model, _ = make(store)
    before = model[1].running_mean.clone()
    with (
        pytest.raises(TransactionError, match="in the middle of a training step"),
        store.transaction(),
    ):
        store["beside"] = 1
        model(torch.randn(6, 8))
    assert "beside" not in store
    assert torch.equal(before, model[1].running_mean)
    run.rollback()
    run.commit()


def test_a_block_made_before_the_step(store: pmstore.Store) -> None:
    run, model, _ = make(store)
    block = store.transaction()
    model(torch.randn(6, 8))
    with pytest.raises(TransactionError, match="in the middle of a training step"):
        block.__enter__()
    assert not store.in_transaction
    run.rollback()
    with block:
        store["beside"] = 1


def test_inside_the_runs_own_block(store: pmstore.Store) -> None:
    run, model, optimizer = make(store)
    with run.transaction():
        store["in"] = 1
        with pytest.raises(TransactionError, match=r"run\.transaction\(\) is open"):
            store.commit()
        with run.transaction():
            one_step(model, optimizer)
    assert run.step == 1


def test_commits_of_a_scheduler_of_ones_own(store: pmstore.Store) -> None:
    run, model, _ = make(store)
    scheduler = CommitScheduler(EveryN(1), store=store)
    scheduler.step()
    model(torch.randn(6, 8))
    with pytest.raises(TransactionError, match="in the middle of a training step"):
        scheduler.step()
    run.rollback()
    scheduler.step()


def test_two_runs_of_one_store(store: pmstore.Store) -> None:
    """A commit of one is a commit of the store."""
    first, model, optimizer = make(store, name="first")
    second, other, others = make(store, name="second")
    one_step(other, others)
    one_step(model, optimizer)
    with pytest.raises(TransactionError, match="'second' is in the middle of a training step"):
        first.commit()
    assert first.stats().steps == 0
    second.rollback()
    first.rollback()
    one_step(other, others)
    second.commit()
    one_step(model, optimizer)
    first.commit()
    assert (first.step, second.step) == (1, 1)


def test_flush_takes_the_last_commit(tmp_path: Path, store: pmstore.Store) -> None:
    run, model, _ = make(store)
    store.add_tier("disk", tmp_path / "tier")
    store.commit()
    before = model[1].running_mean.clone()
    model(torch.randn(6, 8))
    store.flush("disk", wait=True)
    pmstore.restore(tmp_path / "again.pm", tmp_path / "tier")
    with pmstore.open(tmp_path / "again.pm", mode="r") as other:
        assert torch.equal(other["run/model/1.running_mean"], before)
    run.rollback()


class Interrupting(torch.Tensor):
    """A loss that is interrupted when the commit takes it."""

    def detach(self) -> torch.Tensor:
        raise KeyboardInterrupt


def test_an_interrupted_commit_does_not_hide_the_next_step(store: pmstore.Store) -> None:
    """The program goes on after Ctrl-C; the step after it is a step as any other."""
    run, model, optimizer = make(store)
    one_step(model, optimizer)
    with pytest.raises(KeyboardInterrupt):
        run.commit(torch.zeros(()).as_subclass(Interrupting))
    model(torch.randn(6, 8))
    with pytest.raises(TransactionError, match="called in training mode"):
        store.commit()
    run.rollback()
    assert run.step == 0


def test_guards_of_detached_runs_are_forgotten(store: pmstore.Store) -> None:
    for number in range(5):
        make(store, name=f"run {number}")[0].detach()
        gc.collect()
    assert len(store._guards._guards) <= 2


def test_copies_of_the_model_begin_nothing(store: pmstore.Store) -> None:
    run, model, _ = make(store)
    kept = io.BytesIO()
    torch.save(model, kept)
    kept.seek(0)
    for twin in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(kept, weights_only=False),
        torch.optim.swa_utils.AveragedModel(model),
    ):
        twin(torch.randn(6, 8))
        store.commit()
    model(torch.randn(6, 8))
    with pytest.raises(TransactionError):
        store.commit()
    run.rollback()
    handles = len(model._forward_pre_hooks)
    run.detach()
    assert len(model._forward_pre_hooks) == handles - 1
    model(torch.randn(6, 8))
    store.commit()


def test_scripting_an_attached_model(store: pmstore.Store) -> None:
    model = nn.Linear(8, 3)
    run = attach(store, model=model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(AttributeError, match=r"call run\.detach\(\) before"):
            torch.jit.script(model)
        run.detach()
        torch.jit.script(model)


def test_detaching_in_the_middle_of_a_step(path: Path) -> None:
    with pmstore.open(path) as store:
        run, model, _ = make(store)
        model(torch.randn(6, 8))
        run.detach()
    with pmstore.open(path) as store, pytest.raises(TornStepError, match="in the middle"):
        make(store)


# ---- what is said at the end


def test_what_leaving_says(path: Path) -> None:
    def leave(finished: int, error: BaseException | None) -> None:
        with pmstore.open(path, mode="w") as store:
            run, model, optimizer = make(store, policy=EveryN(100))
            for _ in range(finished):
                one_step(model, optimizer)
                run.end_step()
            model(torch.randn(6, 8))
            store["pending"] = 1
            if error is not None:
                raise error

    half = "the store was left in the middle of a training step of the run 'run': the model was "
    with pytest.warns(RuntimeWarning, match=half + ".*with step 0;.*is lost, 2 finished steps am"):
        leave(2, None)
    with (
        pytest.warns(RuntimeWarning, match=half + r".*is lost\. To keep"),
        pytest.raises(SystemExit),
    ):
        leave(0, SystemExit(0))
    with pytest.raises(Boom):
        leave(0, Boom())
    lost = "the run 'run' wrote since its last commit, with step 0, is lost, 1 finished step among"
    for error in (Boom(), SystemExit(3), KeyboardInterrupt()):
        with pytest.warns(RuntimeWarning, match=lost), pytest.raises(type(error)):
            leave(1, error)
    with pmstore.open(path, mode="r") as store:
        assert "pending" not in store


def test_closing_says_what_is_lost(path: Path) -> None:
    store = pmstore.open(path)
    run, model, optimizer = make(store, policy=EveryN(100))
    one_step(model, optimizer)
    run.end_step()
    with pytest.warns(RuntimeWarning, match="is lost, 1 finished step among it"):
        store.close()
    store.close()
    del run
    gc.collect()


def test_the_end_of_the_block_commits_finished_steps(path: Path) -> None:
    with pmstore.open(path) as store:
        run, model, optimizer = make(store, policy=EveryN(100))
        for _ in range(3):
            one_step(model, optimizer)
            run.end_step()
        store["pending"] = 1
    with pmstore.open(path) as store:
        assert make(store)[0].step == 3
        assert "pending" in store


@pytest.mark.parametrize("every", [1, 100])
def test_an_exit_between_two_steps(path: Path, every: int) -> None:
    """What the program writes of a step before its forward is lost with it: else it would be
    written twice, as after no kill."""

    def play() -> None:
        with pmstore.open(path) as store:
            run, model, optimizer = make(store, policy=EveryN(every))
            moves = store.require("moves", (1,), "int64")
            while run.stats().steps < 5:
                moves[0] += 1
                if moves[0] == 4:
                    sys.exit(0)
                one_step(model, optimizer)
                run.end_step()

    with (
        pytest.raises(SystemExit),
        pytest.warns(RuntimeWarning, match="was left by an exit, while the run 'run' was between"),
    ):
        play()
    with pmstore.open(path) as store:
        step = make(store)[0].step
        assert step == (3 if every == 1 else 0)
        assert store.require("moves", (1,), "int64")[0] == step


@pytest.mark.parametrize("how", ["nothing pending", "the loop is over", "told", "store.commit()"])
def test_exits_that_lose_nothing(path: Path, how: str) -> None:
    guard = Notice()
    with pytest.raises(SystemExit), pmstore.open(path) as store:
        job = make_job()
        run = job.attach(store, guard=guard)
        for features, labels, _ in run.batches():
            job.step((features, labels, None))
            run.end_step()
            if how == "nothing pending":
                sys.exit(0)
            if how == "told":
                guard.notify()
                job.model(features)
                run.end_step()
                store["after"] = 1
                sys.exit(0)
        store["after"] = 1
        if how == "store.commit()":
            run.batches()
            store.commit()
        sys.exit(0)
    with pmstore.open(path) as store:
        assert ("after" in store) == (how != "nothing pending")


@pytest.mark.parametrize("error", [SystemExit(0), Boom(), None])
def test_warnings_that_are_errors_replace_no_exit(
    path: Path, capsys: pytest.CaptureFixture[str], error: BaseException | None
) -> None:
    """They are, in these tests."""
    with (
        pytest.raises(RuntimeWarning if error is None else type(error)) as raised,
        pmstore.open(path) as store,
    ):
        run, model, optimizer = make(store, policy=EveryN(100))
        one_step(model, optimizer)
        run.end_step()
        model(torch.randn(6, 8))
        if error is not None:
            raise error
    told = capsys.readouterr().err if error is not None else str(raised.value)
    assert "1 finished step" in told
    assert store.closed


def test_without_a_with(path: Path) -> None:
    """The interpreter closes the store at its end."""
    program = f"""
import pmstore, torch, pmstore.scheduler
from pmstore.torch import attach
store = pmstore.open({str(path)!r})
model = torch.nn.Linear(2, 2)
run = attach(store, model=model, policy=pmstore.scheduler.EveryN(9))
model(torch.ones(1, 2)); run.end_step()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    assert "is lost, 1 finished step among it" in done.stderr
    with pmstore.open(path) as store:
        assert attach(store, model=nn.Linear(2, 2)).step == 0


def test_from_a_task_a_thread_and_a_child(store: pmstore.Store) -> None:
    """The step is the store's, whoever else would commit."""
    run, model, optimizer = make(store)
    one_step(model, optimizer)
    run.commit()
    model(torch.randn(6, 8))

    async def task() -> None:
        async with store.transaction():
            store["task"] = 1

    with pytest.raises(TransactionError, match="called in training mode"):
        asyncio.run(task())
    told: list[type[BaseException]] = []

    def commits() -> None:
        try:
            store.commit()
        except TransactionError as error:
            told.append(type(error))

    thread = threading.Thread(target=commits)
    thread.start()
    thread.join()
    assert told == [TransactionError]
    child = os.fork()
    if child == 0:
        try:
            store.commit()
        except pmstore.PmstoreError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    run.rollback()
    assert run.step == 1
    assert "task" not in store
