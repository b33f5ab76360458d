"""Finished steps that no commit holds: a notice, an error or an exit keeps them, whatever the
program is at, if nothing of the next step was written. Else they are lost, and it says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import make_job

import pmstore
from pmstore.errors import TransactionError
from pmstore.scheduler import CommitScheduler, EveryN, PreemptionGuard
from pmstore.torch import Run, attach

LIMIT = 60.0
NEVER = EveryN(1 << 40)


class Boom(Exception):
    pass


def plain() -> nn.Module:
    """Its forward writes nothing; that of BatchNorm does."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def make(store: pmstore.Store, **more: Any) -> tuple[Run, nn.Module, torch.optim.Optimizer]:
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters())
    return attach(store, model=model, optimizer=optimizer, **more), model, optimizer


def one_step(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(6, 8)).square().mean().backward()
    optimizer.step()
    run.end_step()


def wait_until(condition: Callable[[], bool]) -> None:
    """As a program that does something else; signals are handled meanwhile."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


# ---- errors and exits

ENDS = [Boom(), KeyboardInterrupt(), SystemExit(0), SystemExit(3)]


def end_by(path: Path, error: BaseException, before: Callable[..., object], **more: Any) -> None:
    with pytest.raises(type(error)), pmstore.open(path) as store:
        store.require("moves", (4,), "int64")
        store.list("losses")
        run, model, optimizer = make(store, policy=NEVER, **more)
        for _ in range(5):
            one_step(run, model, optimizer)
        before(store, run, model, optimizer)
        raise error


def steps_of(path: Path, **more: Any) -> int:
    with pmstore.open(path) as store:
        return make(store, **more)[0].step


@pytest.mark.parametrize("error", ENDS, ids=repr)
@pytest.mark.parametrize("mirror", [None, True])
def test_an_end_between_two_steps_keeps_them(
    path: Path, error: BaseException, mirror: bool | None
) -> None:
    end_by(path, error, lambda *_: None, mirror=mirror)
    assert steps_of(path, mirror=mirror) == 5


def test_what_is_kept_is_the_last_step_bit_for_bit(path: Path) -> None:
    held: list[torch.Tensor] = []

    def half(store: Any, run: Run, model: nn.Module, optimizer: Any) -> None:
        held.extend(parameter.detach().clone() for parameter in model.parameters())
        torch.randn(7)
        model(torch.randn(6, 8)).sum().backward()  # of the next step; it has written nothing yet

    end_by(path, Boom(), half)
    with pmstore.open(path) as store:
        run, model, _ = make(store)
        assert run.step == 5
        assert all(map(torch.equal, held, model.parameters()))


def _forward(store: Any, run: Run, model: nn.Module, optimizer: Any) -> None:
    model(torch.randn(6, 8)).sum().backward()


def _updated(store: Any, run: Run, model: nn.Module, optimizer: Any) -> None:
    _forward(store, run, model, optimizer)
    optimizer.step()


def _clamped(store: Any, run: Run, model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        next(model.parameters()).clamp_(-0.01, 0.01)


def _data(store: Any, run: Run, model: nn.Module, optimizer: Any) -> None:
    next(model.parameters()).data.mul_(0.5)  # which torch does not count


def _row(store: Any, run: Run, model: nn.Module, optimizer: Any) -> None:
    next(model.parameters()).data[2, 3] = 0.5  # far from the ends


def _numpy(store: Any, run: Run, model: nn.Module, optimizer: Any) -> None:
    next(model.parameters()).detach().numpy()[2] *= 0.5


def _array(store: Any, run: Run, model: nn.Module, optimizer: Any) -> None:
    store["moves"][3] += 1


def _list(store: Any, run: Run, model: nn.Module, optimizer: Any) -> None:
    store.list("losses").append(1.0)


def _value(store: Any, run: Run, model: nn.Module, optimizer: Any) -> None:
    store["best"] = 0.5


@pytest.mark.parametrize("wrote", [_updated, _clamped, _data, _row, _numpy, _array, _list, _value])
def test_a_write_of_the_next_step_is_not_committed(path: Path, wrote: Callable[..., None]) -> None:
    with pytest.warns(RuntimeWarning, match=r"5 finished steps"):
        end_by(path, Boom(), wrote)
    with pmstore.open(path) as store:
        assert make(store)[0].step == 0
        assert store["moves"].tolist() == [0, 0, 0, 0]
        assert len(store.list("losses")) == 0
        assert "best" not in store


@pytest.mark.parametrize("wrote", [_updated, _clamped, _data, _row, _numpy])
def test_a_write_to_what_is_mirrored_is_not_committed(
    path: Path, wrote: Callable[..., None]
) -> None:
    with pytest.warns(RuntimeWarning, match=r"5 finished steps"):
        end_by(path, Boom(), wrote, mirror=True)
    assert steps_of(path, mirror=True) == 0


class Uncounted(nn.Module):
    """Its forward writes what torch does not count, far from the ends of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(1 << 22))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.data[1000 : 1 << 20] += 1e-9  # 4 MiB, and no norm changes
        return self.layer(x)


def large_job(
    store: pmstore.Store, mirror: bool | None
) -> tuple[Run, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Uncounted()
    model.seen[0] = 1e6
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = attach(store, model=model, optimizer=optimizer, policy=NEVER, mirror=mirror)
    return run, model, optimizer


def end_large(path: Path, mirror: bool | None, updates: bool) -> None:
    with pytest.raises(Boom), pmstore.open(path, size="256MiB") as store:
        run, model, optimizer = large_job(store, mirror)
        for step in range(4):
            model(torch.randn(6, 8)).square().mean().backward()
            if step == 3 and updates:
                break
            if updates:
                optimizer.step()
            else:
                for parameter in model.parameters():
                    parameter.data.mul_(0.9)
            optimizer.zero_grad()
            run.end_step()
        raise Boom


@pytest.mark.parametrize(("mirror", "updates"), [(None, True), (True, True), (True, False)])
def test_nothing_is_kept_of_a_large_state_once_something_is_computed(
    path: Path, mirror: bool | None, updates: bool
) -> None:
    """More than is summed up whole. Without steps of the optimizer nobody knows when a step
    begins to write."""
    with pytest.warns(RuntimeWarning, match=r"finished steps"):
        end_large(path, mirror, updates)
    with pmstore.open(path) as store:
        assert large_job(store, mirror)[0].step == 0


def test_too_much_is_pending_to_tell(path: Path) -> None:
    def fill(store: pmstore.Store, run: Run, model: nn.Module, optimizer: Any) -> None:
        store.zeros("large", 1 << 20)[:] = 1.0
        one_step(run, model, optimizer)

    with pytest.warns(RuntimeWarning, match="6 finished steps"):
        end_by(path, Boom(), fill)
    assert steps_of(path) == 0


def test_half_a_step_of_another_run(path: Path) -> None:
    others: list[Run] = []

    def before(store: pmstore.Store, run: Run, model: nn.Module, optimizer: Any) -> None:
        other = plain()
        others.append(attach(store, name="other", model=other))  # which commits the five
        one_step(run, model, optimizer)
        other(torch.randn(6, 8))

    with pytest.warns(RuntimeWarning, match="1 finished step among it"):
        end_by(path, Boom(), before)
    assert steps_of(path) == 5


def test_a_transaction_block_that_raises_keeps_what_was_finished(path: Path) -> None:
    with pmstore.open(path) as store:
        run, model, optimizer = make(store, policy=NEVER)
        for _ in range(3):
            one_step(run, model, optimizer)
        with pytest.raises(Boom), run.transaction():
            raise Boom
        assert (run.step, run.committed) == (3, 3)
        one_step(run, model, optimizer)
        with pytest.raises(Boom), run.transaction():
            store["half"] = 1
            raise Boom
        assert run.step == 3
        assert "half" not in store


def test_a_commit_that_fails_replaces_no_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Any, reason: str) -> None:
        raise OSError("no room")

    monkeypatch.setattr("pmstore.torch._step.schedule.Schedule.keep", fail)
    with pytest.warns(RuntimeWarning, match="5 finished steps"):
        end_by(path, Boom(), lambda *_: None)
    assert "finished steps are not committed: no room" in capsys.readouterr().err
    monkeypatch.undo()
    assert steps_of(path) == 0


@pytest.mark.parametrize("mode", ["heap", "slots", "mirror"])
def test_a_run_goes_on_bit_for_bit_after_an_error(path: Path, tmp_path: Path, mode: str) -> None:
    def train(at: Path, stop: int | None) -> list[torch.Tensor]:
        with pmstore.open(at) as store:
            job = make_job(**({"optimizer": "native-adamw"} if mode == "slots" else {}))
            run = job.attach(store, policy=NEVER, mirror=mode == "mirror")
            for features, labels, _ in run.batches(epochs=3):
                if run.step == stop:
                    raise Boom
                loss = nn.functional.cross_entropy(job.model(features), labels)
                job.optimizer.zero_grad()
                loss.backward()
                job.optimizer.step()
                run.end_step(loss)
            return [parameter.detach().clone() for parameter in job.model.parameters()]

    whole = train(tmp_path / "whole.pm", None)
    for stop in (3, 7, 11):
        with pytest.raises(Boom):
            train(path, stop)
        with pmstore.open(path, mode="r") as store:
            assert int(store["run/progress"][0]) == stop
    assert all(map(torch.equal, whole, train(path, None)))


# ---- notices


def test_a_notice_during_an_evaluation(path: Path) -> None:
    with pmstore.open(path) as store:
        run, model, optimizer = make(store, policy=NEVER, guard=PreemptionGuard())
        for _ in range(3):
            one_step(run, model, optimizer)
        model.eval()
        assert run.committed == 0
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: run.committed == 3)  # and no step ends meanwhile
        assert not run.stopping
        model.train()
        one_step(run, model, optimizer)
        assert (run.committed, run.stopping) == (4, True)


@pytest.mark.parametrize("source", ["file", "callable"])
def test_a_notice_that_is_no_signal_during_an_evaluation(path: Path, source: str) -> None:
    told = path.with_suffix(".end")
    guard = PreemptionGuard(
        f"file:{told}" if source == "file" else lambda: 30.0 if told.exists() else None
    )
    object.__setattr__(guard.source, "every_seconds", 0.01)
    before = signal.getsignal(signal.SIGTERM)
    with pmstore.open(path) as store:
        run, model, optimizer = make(store, policy=NEVER, guard=guard)
        one_step(run, model, optimizer)
        told.touch()
        wait_until(lambda: run.committed == 1)
    told.unlink()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_notice_in_a_long_step(path: Path) -> None:
    """It commits the last whole step, and what has begun goes on."""
    with pmstore.open(path) as store:
        run, model, optimizer = make(store, policy=NEVER, guard=PreemptionGuard())
        for _ in range(3):
            one_step(run, model, optimizer)
        optimizer.zero_grad()
        loss = model(torch.randn(6, 8)).square().mean()
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: run.committed == 3)
        with pytest.raises(TransactionError, match="called in training mode"):
            store.commit()
        loss.backward()
        optimizer.step()
        assert run.end_step()
        assert (run.committed, run.stopping) == (4, True)


@pytest.mark.parametrize("wrote", [_updated, _array, _value])
def test_a_notice_in_a_step_that_has_written_waits_for_its_end(
    path: Path, wrote: Callable[..., None]
) -> None:
    guard = PreemptionGuard()
    with pmstore.open(path) as store:
        store.require("moves", (4,), "int64")
        run, model, optimizer = make(store, policy=NEVER, guard=guard)
        one_step(run, model, optimizer)
        wrote(store, run, model, optimizer)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(guard.noticed)  # by the handler, which has tried
        assert run.committed == 0
        assert run.end_step()
        assert run.committed == 2


def test_a_notice_inside_an_operation_is_honoured_after_it(path: Path) -> None:
    """The handler may come anywhere in pmstore, where a commit is out of place."""
    guard = PreemptionGuard()
    with pmstore.open(path) as store:
        run, model, optimizer = make(store, policy=NEVER, guard=guard)
        one_step(run, model, optimizer)
        inside: list[int] = []

        class Told(float):
            def __float__(self) -> float:
                if not inside:
                    os.kill(os.getpid(), signal.SIGTERM)
                    wait_until(guard.noticed)
                    inside.append(run.committed)
                return 1.0

        run.keep(best="x", value=Told())
        assert inside == [0]
        wait_until(lambda: run.committed == 1)


def test_a_transaction_block_is_not_committed_by_a_notice(path: Path) -> None:
    guard = PreemptionGuard()
    with pmstore.open(path) as store:
        run, model, optimizer = make(store, policy=NEVER, guard=guard)
        one_step(run, model, optimizer)
        with pytest.raises(Boom), run.transaction():
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(guard.noticed)
            assert run.committed == 0
            store["half"] = 1
            raise Boom
        assert "half" not in store


def test_a_notice_while_the_program_waits_for_a_thread(path: Path) -> None:
    """As for an evaluation in an executor."""
    with pmstore.open(path) as store, ThreadPoolExecutor(1) as executor:
        run, model, optimizer = make(store, policy=NEVER, guard=PreemptionGuard())
        one_step(run, model, optimizer)

        def told() -> bool:
            os.kill(os.getpid(), signal.SIGTERM)
            end = time.monotonic() + LIMIT
            while run.committed == 0 and time.monotonic() < end:
                time.sleep(0.001)
            return run.committed == 1

        assert executor.submit(told).result()


def test_a_commit_for_a_notice_that_fails_is_told_once_and_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the middle of the program would be taken for its own."""
    tries: list[None] = []
    with pmstore.open(path) as store:
        run, model, optimizer = make(store, policy=NEVER, guard=PreemptionGuard())
        one_step(run, model, optimizer)
        keep = run._steps.schedule.keep

        def full(reason: str) -> None:
            tries.append(None)
            if len(tries) < 3:
                raise OSError(28, "No space left on device")
            keep(reason)

        monkeypatch.setattr(run._steps.schedule, "keep", full)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: run.committed == 1)
        assert len(tries) == 3
        assert ["No space left" in str(one.message) for one in heard] == [True]


def test_a_loader_whose_processes_were_told_too(path: Path) -> None:
    """As Slurm does: it signals every process of the job, and workers end at once."""

    class Workers:
        ended = False

        def __iter__(self) -> Iterator[torch.Tensor]:
            for _ in range(6):
                if self.ended:
                    raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")
                yield torch.ones(1)

    for told in (True, False):
        loader = Workers()
        with (
            pytest.raises(SystemExit if told else RuntimeError) as end,
            pmstore.open(path) as store,
        ):
            run, model, optimizer = make(
                store, policy=NEVER, guard=PreemptionGuard(), loader=loader
            )
            for _ in run.batches(epochs=2):
                one_step(run, model, optimizer)
                if run.step in (3, 8):
                    loader.ended = True
                    if told:
                        os.kill(os.getpid(), signal.SIGTERM)
        if told:
            assert getattr(end.value, "code", None) == 0
        assert steps_of(path, loader=Workers()) == (3 if told else 8)


def test_another_handler_that_came_later_is_never_woken(path: Path) -> None:
    seen: list[int] = []
    told: list[float] = []
    guard = PreemptionGuard(lambda: told[0] if told else None)
    object.__setattr__(guard.source, "every_seconds", 0.001)
    with pmstore.open(path) as store:
        run, model, optimizer = make(store, policy=NEVER, guard=guard)
        one_step(run, model, optimizer)
        ours = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
        told.append(30.0)
        wait_until(guard.noticed)
        assert not guard.wake()
        signal.signal(signal.SIGTERM, ours)
        assert not seen


def test_a_run_in_another_thread_stops_at_the_end_of_a_step(path: Path) -> None:
    guard = PreemptionGuard(signals=())
    done: list[tuple[int, bool]] = []

    def work() -> None:
        with pmstore.open(path) as store:
            run, model, optimizer = make(store, policy=NEVER, guard=guard)
            for number in range(4):
                if number == 2:
                    guard.notify()
                one_step(run, model, optimizer)
            done.append((run.committed, run.stopping))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [(4, True)]


def test_a_killed_evaluation_loses_no_step(path: Path) -> None:
    """SIGTERM, and SIGKILL as soon as the last commit is made: as a grace period ends."""
    program = f"""
import os, signal, sys, time
import torch, pmstore
from pmstore.scheduler import EveryN, PreemptionGuard
torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with pmstore.open({str(path)!r}) as store:
    run = pmstore.torch.attach(
        store, model=model, optimizer=optimizer, policy=EveryN(1 << 40), guard=PreemptionGuard()
    )
    for _ in range(7):
        optimizer.zero_grad(); model(torch.randn(3, 4)).sum().backward(); optimizer.step()
        run.end_step()
    print("evaluating", flush=True)
    while run.committed < 7:
        time.sleep(0.001)
    print("committed", flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "evaluating\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "committed\n"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with pmstore.open(path) as store:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert attach(store, model=model, optimizer=optimizer).step == 7


# ---- batches, and validation


def test_batches_stop_when_a_scheduler_of_ones_own_does(path: Path) -> None:
    guard = PreemptionGuard(signals=())
    with pytest.raises(SystemExit) as end, pmstore.open(path) as store:
        job = make_job()
        scheduler = CommitScheduler(EveryN(3), store=store, guard=guard)
        run = job.attach(store, policy=scheduler)
        for features, labels, _ in run.batches(epochs=100):
            job.step((features, labels, None))
            if run.step == 4:
                guard.notify(0.0)
            run.end_step()
    assert end.value.code == 0
    with pmstore.open(path, mode="r") as store:
        assert int(store["run/progress"][0]) == 5


def test_a_notice_while_a_batch_is_loaded(path: Path) -> None:
    """Between two data epochs, say: workers start, files are opened. The steps are committed
    meanwhile, and no batch is handed out."""
    guard = PreemptionGuard()
    runs: list[Run] = []

    class Numbers(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            if runs and runs[0].step == 2 and not guard.noticed():
                os.kill(os.getpid(), signal.SIGTERM)
                wait_until(lambda: runs[0].committed == 2)
            return torch.ones(8)

    loader = torch.utils.data.DataLoader(Numbers(), batch_size=2)
    with pytest.raises(SystemExit), pmstore.open(path) as store:
        run, model, optimizer = make(store, policy=NEVER, guard=guard, loader=loader)
        runs.append(run)
        for batch in run.batches(epochs=3):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            run.end_step()
    assert run.step == 2
    with pmstore.open(path, mode="r") as store:
        assert int(store["run/progress"][0]) == 2


def test_validation_commits_before_it_and_is_no_slow_step(path: Path) -> None:
    now = [0.0]
    with pmstore.open(path) as store:
        scheduler = CommitScheduler(NEVER, store=store, clock=lambda: now[0])
        run, model, optimizer = make(store, policy=scheduler)
        for _ in range(20):
            now[0] += 1.0
            one_step(run, model, optimizer)
        assert run.committed == 0
        with run.validation():
            assert run.committed == 20
            now[0] += 500.0
            model.eval()
        model.train()
        now[0] += 1.0
        one_step(run, model, optimizer)
        assert scheduler.timer.largest < 2.0
        assert scheduler.work_seconds == pytest.approx(21.0)
        assert scheduler.decisions[-1].reason == "before a validation"
        model(torch.randn(6, 8))
        with pytest.raises(TransactionError, match="called in training mode"), run.validation():
            pass
        run.rollback()
        assert run.step == 20


def test_validation_without_a_policy(path: Path) -> None:
    with pmstore.open(path) as store:
        run, model, optimizer = make(store, policy=None)
        one_step(run, model, optimizer)
        commits = run.stats().commits
        with run.validation():
            model.eval()
        assert run.stats().commits == commits  # nothing was pending
        with pytest.raises(Boom), run.validation():
            raise Boom


@pytest.mark.parametrize("policy", [None, EveryN(5)])
def test_what_does_not_fit_is_said_as_soon_as_it_is_measured(path: Path, policy: Any) -> None:
    """And at the start of the next life, where the store knows it."""

    def live(steps: int) -> list[str]:
        with warnings.catch_warnings(record=True) as seen, pmstore.open(path) as store:
            warnings.simplefilter("always")
            guard = PreemptionGuard(notice_seconds=1e-9, signals=())
            run, model, optimizer = make(store, policy=policy, guard=guard)
            for _ in range(steps):
                one_step(run, model, optimizer)
        return [str(one.message) for one in seen if "from a notice to the end" in str(one.message)]

    assert len(live(40)) == 1
    assert len(live(0)) == (0 if policy is None else 1)
