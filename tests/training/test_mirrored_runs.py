"""Runs whose tensors are mirrored: as others, bit for bit, with commits that nobody waits for,
rolled back, killed."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

# which the first optimizer of a process imports: here once, in the fork server
import torch._dynamo
from torch import nn
from training import Job, assert_same, contents, make_job

import pmstore
from pmstore._engine.landing import Landing
from pmstore.errors import MirrorError, TransactionError
from pmstore.mirror.copier import HostCopier
from pmstore.scheduler import EveryN
from pmstore.testing import ForkServer
from pmstore.torch import AttachError, MismatchError, Run

STEPS = 20
KILLS = int(os.environ.get("PMSTORE_MIRROR_KILLS", "8"))
KINDS = {"model": "conv", "scheduler": "cosine"}


def advance(store: pmstore.Store, job: Job, until: int, total: int, **attach: Any) -> Run:
    """As `training.train`, mirrored, without waiting for a commit before the next one."""
    run = job.attach(store, mirror=True, **attach)
    losses = store.require("losses", (total,), "float64")
    order = store.require("order", (total, 6), "int64")
    if run.step < until:
        for batch in run.batches(epochs=None):
            loss = job.step(batch)  # reads and writes nothing of the store
            place = run.step
            losses[place], order[place] = loss, batch[2].numpy()  # waits
            run.log(loss=loss)
            if place + 1 == until:
                run.commit()
                break
    assert run.step == until
    return run


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


@pytest.mark.parametrize(
    ("optimizer", "model"),
    [
        ("adamw", "conv"),
        ("adam-amsgrad", "mlp"),
        ("sgd", "mlp"),
        ("sgd-momentum", "conv"),
        ("adamw-fused", "mlp"),
        ("lbfgs", "mlp"),
    ],
)
def test_the_same_bits(shm: Path, optimizer: str, model: str) -> None:
    """As without a store, and whether or not it was interrupted."""
    kinds = {"optimizer": optimizer, "model": model}
    job = make_job(**kinds)
    losses = [job.step(batch) for batch in islice(forever(job.loader), STEPS)]
    want = job.model.state_dict()
    with pmstore.open(shm / "mirror.pm") as store:
        job = make_job(**kinds)
        advance(store, job, STEPS, STEPS)
        assert store["losses"].tolist() == losses
        assert all(torch.equal(one, want[key]) for key, one in job.model.state_dict().items())
        whole = contents(store)
    for until in (1, 8, STEPS):
        with pmstore.open(shm / "resumed.pm") as store:
            job = make_job(**kinds, seed=until)
            run = advance(store, job, until, STEPS)
            assert run.resumed == (until > 1)
            assert store.check().problems == ()
    with pmstore.open(shm / "resumed.pm", mode="r") as store:
        assert_same(whole, contents(store))


def test_a_commit_before_the_first_step(shm: Path) -> None:
    """Of a resumed run, and after a roll back: nothing was handed over, so the mirror stays."""
    with pmstore.open(shm / "left.pm") as store:
        advance(store, make_job(**KINDS), 3, STEPS)
        whole = contents(store)
        shutil.copy(shm / "left.pm", shm / "mirror.pm")  # as after a kill: the other slot is older
    with pmstore.open(shm / "mirror.pm") as store:
        run = make_job(**KINDS, seed=1).attach(store, mirror=True)
        assert run.resumed
        store.commit()
        assert_same(whole, contents(store))
    with pmstore.open(shm / "mirror.pm") as store:
        assert_same(whole, contents(store))
        job = make_job(**KINDS, seed=2)
        run = job.attach(store, mirror=True, policy=EveryN(100))
        for _, batch in zip(range(2), run.batches(epochs=None), strict=False):
            job.step(batch)
        run.rollback()
    with pmstore.open(shm / "mirror.pm", mode="r") as store:
        held = contents(store)
        assert {name: held[name] for name in whole} == whole


def test_roll_back(store: pmstore.Store) -> None:
    job = make_job(**KINDS)
    run = job.attach(store, mirror=True, policy=None)  # each step commits
    batches = run.batches(epochs=None)
    first = next(batches)
    job.step(first)
    run.rollback()  # before the first step was committed: the optimizer has no state
    assert not job.optimizer.state
    steps = []
    for batch in batches:
        job.step(batch)
        steps.append({key: one.clone() for key, one in job.model.state_dict().items()})
        if len(steps) == 4:
            break
    assert torch.equal(first[2], next(iter(make_job(**KINDS).loader))[2])
    job.step(next(batches))
    assert not all(torch.equal(one, steps[-1][key]) for key, one in job.model.state_dict().items())
    with pytest.raises(TransactionError, match="only the run commits it"):
        store.commit()
    run.rollback()  # also waits for the commit of the fourth step, which goes on beside the fifth
    assert all(torch.equal(one, steps[-1][key]) for key, one in job.model.state_dict().items())
    assert run.step == 4
    job.step(next(batches))
    run.commit()
    assert run.step == 5


def test_a_write_at_the_beginning_of_the_next_step(store: pmstore.Store) -> None:
    """What clips weights before the update, as the first GANs did, writes while the commit of the
    step before may still be read."""
    model = nn.Linear(4096, 2048, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = pmstore.torch.attach(store, model=model, optimizer=optimizer, mirror=True, policy=None)
    last, tried = model.weight[-1, -1].item(), -1
    for step in run.steps(6):
        assert model.weight[-1, -1].item() == last
        model.weight.data[-1] = 1000  # torch counts no write of this kind
        if step and tried < step:
            tried = step
            run.rollback()
            continue
        last = float(step)
        model.weight.data.fill_(last)
    assert tried == 5


@pytest.mark.parametrize("gpu", [False, True])
def test_an_interrupt_at_every_bytecode_of_a_commit(
    shm: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    """A program that is interrupted while a commit still reads its parameters, and writes to them
    at once: the commit has all of them as they were at the end of the step."""
    import fake_cuda  # the fork server has none of these
    from interrupter import Interrupter

    if gpu:
        fake_cuda.install(monkeypatch.setattr)  # its copies come later
    model = nn.Linear(64 if gpu else 1024, 1024, bias=False)
    weight = model.weight
    begin, at = Landing.start, 0
    interrupter = Interrupter(-1)

    def start(landing: Landing, phase: int) -> None:
        begin(landing, phase)
        interrupter.seen, interrupter.at = 0, at

    monkeypatch.setattr(Landing, "start", start)
    with pmstore.open(shm / "run.pm", size="16MiB") as store:
        run = pmstore.torch.attach(store, model=model, mirror=True, policy=None)
        run.commit()
        values = {0: weight[0, 0].item()}
        while True:
            at += 3 if gpu else 1
            steps = iter(run.steps(run.step + 5))
            next(steps)
            before = run.step
            with torch.no_grad():
                weight.fill_(at)
            interrupter = Interrupter(-1)
            interrupter.run(lambda steps=steps: next(steps))
            if not 0 < interrupter.at <= interrupter.seen:
                break  # the whole end of the step ran
            weight.data.fill_(-1)
            step = run.step
            run.rollback()
            assert run.step in (step, before), (at, before, step, run.step)
            if run.step > before:
                values[run.step] = float(at)
            if run.step:
                assert torch.all(weight == values[run.step]), (at, before, step, run.step)
        run.rollback()
    assert at > 100


def test_gradients_that_accumulate(tmp_path: Path) -> None:
    """A commit in the middle of an accumulation keeps them."""
    ends = []
    for cut in (None, 3):
        path = tmp_path / f"{cut}.pm"
        for life in range(2):
            torch.manual_seed(3)
            model = nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            with pmstore.open(path) as store:
                run = pmstore.torch.attach(store, model=model, optimizer=optimizer, mirror=True)
                for step in run.steps(cut if cut and life == 0 else 8):
                    model(torch.full((1, 4), float(step))).sum().backward()
                    if step % 2:
                        optimizer.step()
                        optimizer.zero_grad()
        ends.append(model.weight.detach().clone())
    assert torch.equal(*ends)


def test_tied_and_replaced_tensors(tmp_path: Path) -> None:
    def make() -> nn.Sequential:
        made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        made[1].weight = made[0].weight
        return made

    with pmstore.open(tmp_path / "run.pm") as store:
        model = make()
        run = pmstore.torch.attach(store, model=model, mirror=True)
        assert len(store["run/mirror_layout"]) == 3
        state = {key: torch.full_like(one, 3) for key, one in model.state_dict().items()}
        with run.next_step():
            model.load_state_dict(state, assign=True)
            model[1].weight = model[0].weight
        with run.next_step():
            model[0].weight.data = torch.full((4, 4), 4.0)
        run.commit()
        with run.next_step():
            model[0].bias = nn.Parameter(torch.zeros(5))
        with pytest.raises(MismatchError):
            run.commit()
        store.rollback()
    with pmstore.open(tmp_path / "run.pm") as store:
        model = make()
        assert pmstore.torch.attach(store, model=model, mirror=True).resumed
        assert model[1].weight is model[0].weight
        assert (model[0].weight == 4).all()
        assert (model[1].bias == 3).all()


def test_bad_input(store: pmstore.Store) -> None:
    native = make_job(optimizer="native-adamw")
    with pytest.raises(AttachError, match="keeps its parameters in slots itself"):
        native.attach(store, mirror=True)
    with pytest.raises(AttachError, match="meta"):
        pmstore.torch.attach(store, model=nn.Linear(2, 2, device="meta"), mirror=True)
    assert "run" not in store
    make_job().attach(store, mirror=True).detach()
    with pytest.raises(AttachError, match="is mirrored, and so it stays"):
        make_job().attach(store)
    with pytest.raises(MismatchError):
        make_job(model="conv").attach(store, mirror=True)
    job = make_job()
    run = job.attach(store, mirror=True)
    assert run.resumed
    job.step(next(run.batches()))
    run.commit()
    run.detach()
    with torch.no_grad():
        job.model[0].weight.fill_(7)
    store.commit()  # it is no longer mirrored
    again = make_job()
    again.attach(store, mirror=True)
    assert not (again.model[0].weight == 7).any()


def test_a_copy_that_fails(store: pmstore.Store) -> None:
    class Failing(HostCopier):
        def start(self, pieces: Any) -> Any:
            raise RuntimeError("the device is gone")

    job = make_job()
    run = job.attach(store, mirror=True)
    batches = run.batches(epochs=None)
    job.step(next(batches))
    run.commit()
    copiers = store._open_mirrors()._copiers
    copiers[torch.device("cpu")] = Failing()
    job.step(next(batches))
    with pytest.raises(MirrorError, match="gone"):
        run.commit()
    assert run.committed == 1
    copiers[torch.device("cpu")] = HostCopier()
    run.rollback()
    assert run.step == 1
    job.step(next(batches))
    run.commit()
    assert run.step == 2


# ---- killed ----


def work(ack: Callable[[int], None], path: str, domain: str, kinds: dict[str, Any]) -> None:
    """One process's life: goes on where the store is. Runs in a child of the fork server."""
    torch.set_num_threads(1)
    with pmstore.open(path, domain=domain, size="8MiB") as store:  # type: ignore[arg-type]
        job = make_job(**kinds)
        ack(0)
        advance(store, job, STEPS, STEPS)
        ack(STEPS)


@pytest.mark.parametrize("domain", ["process", "file"])
def test_kills(tmp_path: Path, server: ForkServer, domain: str) -> None:
    """At any instruction, and at the engine's writes: what is found is a step's end, whole; the end
    is the same to the bit."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # shown if it fails
    chance = random.Random(seed)
    workload = "test_mirrored_runs:work"
    assert server.run(workload, [str(tmp_path / "whole.pm"), domain, KINDS]).exit_code == 0
    with pmstore.open(tmp_path / "whole.pm", mode="r") as store:
        whole = contents(store)
    path = tmp_path / "killed.pm"
    kills = 0
    while True:
        how: dict[str, Any] = {}
        if kills < KILLS:
            how = (
                {"kill_at": chance.randrange(1, 900)}
                if chance.random() < 0.6
                else {"delay_seconds": chance.random() / 3}
            )
        run = server.run(workload, [str(path), domain, KINDS], **how)
        kills += run.killed
        if not run.killed:
            assert run.exit_code == 0
            with pmstore.open(path, mode="r") as store:
                assert_same(whole, contents(store))
            if kills >= KILLS:
                break
            path.unlink()
        elif path.exists() and path.stat().st_size:
            with pmstore.open(path) as store:
                assert store.check().problems == ()


# ---- where there is a GPU ----


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "sgd-momentum"])
def test_cuda(shm: Path, optimizer: str) -> None:
    """A resumed run ends as one that was not interrupted."""

    def life(path: Path, until: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3)
        ).cuda()
        made = {
            "adamw": lambda: torch.optim.AdamW(model.parameters()),
            "adamw-fused": lambda: torch.optim.AdamW(model.parameters(), fused=True),
            "sgd-momentum": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        }[optimizer]()
        with pmstore.open(path, size="64MiB") as store:
            run = pmstore.torch.attach(store, model=model, optimizer=made)
            for _ in run.steps(until):
                features = torch.randn(16, 8, device="cuda")
                made.zero_grad()
                model(features).square().mean().backward()
                made.step()
        return {key: one.cpu() for key, one in model.state_dict().items()}

    whole = life(shm / "whole.pm", 20)
    life(shm / "parts.pm", 7)
    parts = life(shm / "parts.pm", 20)
    assert all(torch.equal(one, parts[key]) for key, one in whole.items())
