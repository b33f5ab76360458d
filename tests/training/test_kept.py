"""Earlier states of a run: kept in a tier, and gone back to while the process goes on."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import nn
from training import BATCHES, Job, assert_same, contents, make_job, train, undisturbed

import pmstore
from pmstore.errors import TierError, TransactionError
from pmstore.scheduler import EveryN
from pmstore.testing import ForkServer
from pmstore.tiers._epochs import kept_epochs
from pmstore.tiers._epochs.kept_epochs import KeptName, Reason
from pmstore.tiers._places.local import LocalPlace
from pmstore.torch import MismatchError, NotKeptError, RolledBackError, Run, attach

STEPS = BATCHES + 6
KEPT = 4


loops: WeakKeyDictionary[Run, Iterator[Any]] = WeakKeyDictionary()


def go(store: pmstore.Store, run: Run, job: Job, until: int, total: int = STEPS) -> None:
    """Trains on, in one loop, until so many steps are committed; what is in the store is what
    `train` leaves."""
    losses = store.require("losses", (total,), "float64")
    order = store.require("order", (total, 6), "int64")
    while run.step < until:
        if run not in loops:
            loops[run] = run.batches(epochs=None)
        batch = next(loops[run])
        place = run.step
        losses[place] = job.step(batch)
        order[place] = batch[2].numpy()
        run.log(loss=losses[place])
        run.commit()


@pytest.mark.parametrize(("kept", "domain"), [(0, "file"), (KEPT, "process")])
@pytest.mark.parametrize(
    ("kinds", "more"),
    [
        ({}, {}),
        ({"model": "conv", "scaler": True, "scheduler": "sequential"}, {}),
        ({"optimizer": "lbfgs"}, {}),
        ({"optimizer": "native-adamw", "scheduler": "cosine"}, {}),
        ({"optimizer": "native-sgd"}, {}),
        ({"scheduler": "onecycle"}, {"mirror": True}),
        ({"optimizer": "adam-tensor-lr"}, {"policy": pmstore.scheduler.EveryN(1)}),
        ({"num_workers": 2}, {}),
    ],
    ids=lambda one: "-".join(map(str, one)) or "plain",
)
def test_a_rewound_run_is_the_one_that_stopped_there(
    tmp_path: Path, kinds: dict[str, Any], more: dict[str, Any], kept: int, domain: str
) -> None:
    """Bit for bit, also where the optimizer had no state yet."""
    with pmstore.open(tmp_path / "whole.pm") as store:
        train(store, make_job(**kinds), STEPS, STEPS, **more).detach()
        whole = contents(store)
    with pmstore.open(tmp_path / "run.pm", domain=domain) as store:  # type: ignore[arg-type]
        job = make_job(**kinds)
        run = job.attach(store, **more)
        go(store, run, job, kept)
        run.keep("here")
        store["later/name"] = {"not": "there"}
        go(store, run, job, BATCHES + 2)
        store["uncommitted"] = 1
        with nullcontext() if kept else pytest.raises(RolledBackError):
            run.rewind(to="here")
        if not kept:
            del loops[run]  # the program begins the loop again
        assert run.step == kept
        assert "later" not in store
        assert "uncommitted" not in store
        go(store, run, job, STEPS)
        run.detach()
        assert_same(whole, contents(store))
        assert store.check().problems == ()
    assert sorted(os.listdir(tmp_path)) == ["run.pm", "run.pm.kept", "whole.pm"]


def test_a_loop_goes_on_from_the_rewound_state(tmp_path: Path) -> None:
    """`batches` gives the batch after the kept one; rewinding is done within the loop."""
    whole = undisturbed(tmp_path / "whole.pm", STEPS)
    with pmstore.open(tmp_path / "run.pm") as store:
        job = make_job()
        run = job.attach(store)
        losses = store.require("losses", (STEPS,), "float64")
        order = store.require("order", (STEPS, 6), "int64")
        rewound = 0
        for batch in run.batches(epochs=None):
            place = run.step
            losses[place] = job.step(batch)
            order[place] = batch[2].numpy()
            run.log(loss=losses[place])
            run.commit()
            if run.step == 3 and not rewound:
                run.keep("three")
            if run.step in (5, BATCHES + 1) and rewound < 4:
                rewound += 1
                run.rewind(to=3)
            if run.step == STEPS:
                break
        assert rewound == 4
        run.detach()
        assert_same(whole, contents(store))


def test_all_of_the_store_goes_back(store: pmstore.Store) -> None:
    """Lists, values, groups, slots and arrays, that grew, changed, came or went."""
    job = make_job()
    run = job.attach(store)
    held = store.zeros("held", 300_000)
    held[::5000] = 1
    losses = store.list("losses")
    losses.extend([0.5, np.ones(3), "text"])
    store["config"] = {"lr": 0.5}
    store["gone/deep"] = torch.arange(7)
    store["other"] = np.ones(4)
    means = store.slots("means", 20_000)
    means.next[:] = 3.0
    means.flip()
    store.slots("shape", 10)
    store.list("becomes").append(1)
    store.commit()
    before = {**contents(store), "losses": None, "becomes": None}
    run.keep("here")

    held[7] = 9
    losses[0] = 1.5
    losses[1][:] = 5
    losses.extend(range(3000))
    store["config"] = {"lr": 0.1}
    del store["gone"]
    store["other"] = np.zeros((2, 2))
    store["new/deep/er"] = 1
    means.next[:] = 4.0
    means.flip()
    del store["shape"]
    store.slots("shape", 20)
    del store["becomes"]
    store["becomes/group"] = 1
    store.commit()
    means.next[:] = 5.0
    run.rewind(to="here")

    assert {**contents(store), "losses": None, "becomes": None} == before
    assert held is store["held"]
    assert held[7] == 0
    assert held[5000] == 1
    assert losses[0] == 0.5
    assert losses[1].tolist() == [1, 1, 1]
    assert losses[2:] == ["text"]
    assert store["becomes"][:] == [1]
    assert means.current[3] == 3.0
    assert means.previous is None
    means.next[:] = 6.0
    means.flip()
    store.commit()
    assert store["means"].current[0] == 6.0


def test_only_what_differs_is_written(tmp_path: Path) -> None:
    """A rewind writes the pages that differ, and a keep the chunks that changed."""
    with pmstore.open(tmp_path / "run.pm") as store:
        job = make_job()
        run = job.attach(store)
        large = store.zeros("large", 4 << 20, "uint8")
        store.commit()
        first = run.keep("here")
        assert first is not None
        stats = first.wait().stats
        assert stats is not None
        assert stats.written_bytes > len(large)
        large[5] = 1
        store.commit()
        second = run.keep("there")
        assert second is not None
        stats = second.wait().stats
        assert stats is not None
        assert not stats.full
        assert stats.written_bytes <= len(large) // 2  # a chunk of it, and one of the run
        run.rewind(to="here")
        assert large[5] == 0


def test_the_last_n(store: pmstore.Store) -> None:
    job = make_job()
    run = job.attach(store)
    for step in range(1, 7):
        go(store, run, job, step)
        run.keep(n=3)
    assert [(one.step, one.names) for one in run.kept()] == [(4, ()), (5, ()), (6, ())]
    run.rewind(to=5)
    assert run.step == 5
    with pytest.raises(NotKeptError, match=r"no state 3. Kept: step 4; step 5; step 6"):
        run.rewind(to=3)
    with pytest.raises(NotKeptError, match="no state 'x'"):
        run.rewind(to="x")
    assert run.step == 5
    go(store, run, job, 6)
    run.keep(n=2)  # fewer from now on
    assert [one.step for one in run.kept()] == [6, 6]
    place = Path(run.kept()[0].place)
    assert len(list(place.glob("*.kept"))) == 2
    assert len(pmstore.epochs(place)) == 2


@pytest.mark.parametrize(("mode", "best"), [("min", [2, 5]), ("max", [1, 4])])
def test_the_best_n(store: pmstore.Store, mode: Any, best: list[int]) -> None:
    job = make_job()
    run = job.attach(store)
    losses = [0.9, 0.1, 0.5, 0.8, 0.05, 0.1, math.nan]
    kept = []
    loop = run.batches(epochs=None)
    for step, loss in enumerate(losses, 1):
        job.step(next(loop))
        run.log(loss=torch.tensor(loss, requires_grad=True))
        run.commit()
        if run.keep(best="loss", n=2, mode=mode) is not None:
            kept.append(step)
        assert run.keep(best="loss", n=2, mode=mode) is None  # the same commit again
    assert kept == ([1, 2, 3, 5] if mode == "min" else [1, 2, 3, 4])
    assert sorted(one.step for one in run.kept()) == best
    by_step = {one.step: one for one in run.kept()}
    found = by_step[best[0]]
    assert found.loss == pytest.approx(losses[best[0] - 1])
    assert found.values == (("loss", found.loss),)


def test_the_best_of_a_run_with_a_policy(tmp_path: Path) -> None:
    """Called in each step, as without one; also before the first commit, and after a resume."""
    job = make_job()
    for losses in ([0.5, 0.4, 0.3, 0.2], [0.1, 0.1, 0.1]):
        with pmstore.open(tmp_path / "s") as store:
            run = job.attach(store, policy=EveryN(3))
            for loss, batch in zip(losses, run.batches(epochs=None), strict=False):
                job.step(batch)
                run.log(loss=loss)
                run.keep(best="loss")
            run.commit()
            states = [one.loss for one in run.kept()]
        job = make_job()
    assert states == [0.1]


def test_the_best_of_another_figure_over_processes(tmp_path: Path) -> None:
    """What was the best is known to the next process too."""
    kept = []
    for figures in ([0.5, 0.7], [0.6, 0.65, 0.8], [0.75]):
        with pmstore.open(tmp_path / "run.pm") as store:
            job = make_job()
            run = job.attach(store)
            for value in figures:
                go(store, run, job, run.step + 1)
                done = run.keep(best="accuracy", value=value, mode="max")
                kept.append(done is not None)
            (state,) = run.kept()
    assert kept == [True, True, False, False, True, False]
    assert state.values == (("accuracy", 0.8),)
    assert state.step == 5


def test_a_state_that_could_not_be_kept_is_not_the_best(
    store: pmstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job()
    run = job.attach(store)
    publish = LocalPlace.publish

    def full(self: LocalPlace, name: str, data: bytes) -> None:
        if name.endswith(".manifest"):
            raise OSError(errno.ENOSPC, "no room", name)
        publish(self, name, data)

    go(store, run, job, 1)
    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "publish", full)
        failed = run.keep(best="figure", value=0.1)
        assert failed is not None
        with pytest.raises(OSError, match="no room"):
            failed.wait()
    assert run.kept() == []
    go(store, run, job, 2)
    assert run.keep(best="figure", value=0.2) is not None
    assert [one.values for one in run.kept()] == [(("figure", 0.2),)]


def test_a_state_that_is_kept_for_several_reasons(store: pmstore.Store) -> None:
    job = make_job()
    run = job.attach(store)
    go(store, run, job, 1)
    run.keep("a")
    run.keep("b")
    run.keep(n=1)
    run.keep(best="loss")
    (state,) = run.kept()
    assert state.names == ("a", "b")
    assert state.step == 1
    go(store, run, job, 2)
    run.keep("a")
    run.keep(n=1)
    assert [(one.step, one.names) for one in run.kept()] == [(1, ("b",)), (2, ("a",))]
    run.rewind(to="b")
    assert run.step == 1


def test_in_a_tier_of_the_store(tmp_path: Path) -> None:
    """`keep` of the tier does not forget it, and the tier goes on."""
    tier = tmp_path / "tier"
    with pmstore.open(tmp_path / "run.pm") as store:
        store.add_tier("disk", pmstore.TierConfig(tier, keep=2))
        job = make_job()
        run = job.attach(store, tiers=["disk"])
        go(store, run, job, 2)
        run.keep("two", tier="disk")
        for step in range(3, 12):
            go(store, run, job, step)
            store.flush("disk", wait=True)
        store.drain()
        steps = [one.step for one in run.kept()]
        assert steps == [2]
        assert len(pmstore.epochs(tier)) == 3
        assert not (tmp_path / "run.pm.kept").exists()
        run.rewind(to="two")
        assert run.step == 2
        go(store, run, job, 3)
        run.keep("two", tier="disk")
        store.drain()
        assert len(pmstore.epochs(tier)) == 2
        with pytest.raises(TierError, match="no tier 'other'"):
            run.keep("x", tier="other")


def test_a_kept_state_by_the_command_line(tmp_path: Path) -> None:
    """After the store is lost, too."""
    with pmstore.open(tmp_path / "run.pm") as store:
        job = make_job()
        run = job.attach(store)
        for step in range(1, 4):
            go(store, run, job, step)
            run.keep(n=3)
        run.keep("good")
        run.keep("7")
        go(store, run, job, 5)
        run.keep(best="loss")
    os.unlink(tmp_path / "run.pm")
    url = str(tmp_path / "run.pm.kept")

    def pmstore_(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from pmstore.commands.cli import main; main()"]
        return subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "COLUMNS": "200"},
        )

    told = pmstore_("epochs", url).stdout
    assert "step 3: good" in told
    rows = json.loads(pmstore_("epochs", url, "--json").stdout)
    assert [len(row["kept"]) for row in rows] == [1, 3, 1, 1]
    for kept, step in (("good", 3), ("2", 2), ("7", 3)):
        target = tmp_path / f"{kept}.pm"
        done = pmstore_("restore", str(target), url, "--kept", kept)
        assert done.returncode == 0, done.stderr
        with pmstore.open(target) as store:
            job = make_job()
            assert job.attach(store).step == step
    failed = pmstore_("restore", str(tmp_path / "x.pm"), url, "--kept", "bad")
    assert failed.returncode == 2
    assert "good" in failed.stderr


def test_states_of_a_store_that_was_there_before(tmp_path: Path) -> None:
    """A store that was restored, or compacted, has another uuid; its states are still its own."""
    path = tmp_path / "run.pm"
    with pmstore.open(path) as store:
        job = make_job()
        run = job.attach(store)
        go(store, run, job, 2)
        run.keep("two")
        go(store, run, job, 3)
    pmstore.compact(path)
    with pmstore.open(path) as store:
        job = make_job()
        run = job.attach(store)
        run.keep("three")
        assert [one.names for one in run.kept()] == [("two",), ("three",)]
        run.rewind(to="two")
        assert run.step == 2
        run.rewind(to="three")
        assert run.step == 3


# ---- refused


def test_what_is_refused(store: pmstore.Store) -> None:
    job = make_job()
    run = job.attach(store)
    for wrong in (
        {},
        {"n": 0},
        {"n": True},
        {"best": "accuracy"},
        {"best": "loss"},  # no commit gave one
        {"best": "loss", "mode": "low"},
        {"n": 3, "value": 1.0},
    ):
        with pytest.raises(ValueError, match=r"n=|keep|best=|mode="):
            run.keep(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one of"):
        run.keep("x", n=3)
    with pytest.raises(TypeError):
        run.keep("")
    with pytest.raises(TypeError):
        run.keep(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="to="):
        run.rewind()
    with pytest.raises(TypeError, match="a step"):
        run.rewind(to=True)
    with store.transaction(), pytest.raises(TransactionError, match="transaction block"):
        run.keep("x")
    with store.transaction(), pytest.raises(TransactionError, match="transaction block"):
        run.rewind(to=0)
    assert run.kept() == []
    run.detach()
    with pytest.raises(pmstore.torch.AttachError):
        run.keep("x")


def test_in_the_middle_of_a_step(store: pmstore.Store) -> None:
    """It is the state at its end; of a step that is taken back, none."""
    job = make_job()
    run = job.attach(store)
    go(store, run, job, 2)
    run.keep("two")
    go(store, run, job, 3)
    assert run.keep("three") is not None
    job.step(next(loops[run]))
    assert run.keep("dropped") is None
    run.rewind(to="two")
    assert run.step == 2
    job.step(next(loops[run]))
    assert run.keep("half") is None
    job.model(torch.ones(2, 8)).sum().backward()
    run.commit()
    assert [(one.step, one.names) for one in run.kept()] == [
        (2, ("two",)),
        (3, ("three",)),
        (3, ("half",)),
    ]
    gradient = job.model[0].weight.grad.clone()  # type: ignore[index, union-attr, operator]
    go(store, run, job, 5)
    run.rewind(to="half")
    assert torch.equal(job.model[0].weight.grad, gradient)  # type: ignore[index, arg-type]
    go(store, run, job, 4)


def test_a_state_of_another_model(tmp_path: Path) -> None:
    """It is refused, and store and program are at the last commit."""
    path = tmp_path / "run.pm"
    with pmstore.open(path) as store:
        job = make_job()
        run = job.attach(store)
        go(store, run, job, 2)
        run.keep("small")
    with pmstore.open(path) as store:
        del store["run"]
        store.commit()
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = attach(store, model=model, optimizer=optimizer, loader=[torch.ones(2, 3)])
        for batch in run.batches(epochs=2):
            model(batch).sum().backward()
            optimizer.step()
        run.keep("other")
        before = contents(store)
        weights = model.weight.detach().clone()
        with pytest.raises(MismatchError):
            run.rewind(to="small")
        assert_same(before, contents(store))
        assert torch.equal(model.weight, weights)
        assert run.step == 2
        with pytest.raises(RolledBackError, match="to the end of a loop that is over"):
            run.rewind(to="other")
        assert_same(before, contents(store))
    assert sorted(os.listdir(tmp_path)) == ["run.pm", "run.pm.kept"]


def test_a_mirror_beside_the_run_goes_back(store: pmstore.Store) -> None:
    job = make_job()
    run = job.attach(store)
    ema = torch.ones(1000)
    store.mirror("ema", ema)
    store.commit()
    run.keep("ones")
    ema += 1
    store.commit()
    ema += 1
    run.rewind(to="ones")
    assert ema.eq(1).all()
    ema += 3
    store.commit()
    assert store["ema"].current.eq(4).all()


def test_a_commit_under_way_is_waited_for(store: pmstore.Store) -> None:
    job = make_job()
    run = job.attach(store, mirror=True, policy=None)
    rewound = False
    for batch in run.batches(epochs=1):
        if run.step == BATCHES - 1 and not rewound:
            rewound = True
            assert run._steps.pending is not None
            assert [one.step for one in run.kept()] == [2, 3]
            run.rewind(to=3)
            assert run.step == run.committed == 3
            continue
        job.step(batch)
        if run.step < 3:
            run.keep(n=2)
    assert rewound
    assert run.step == BATCHES


def test_what_a_policy_left_is_committed_to_be_kept(store: pmstore.Store) -> None:
    job = make_job()
    run = job.attach(store, policy=pmstore.scheduler.EveryN(3))
    losses = [1.0, 1.0, 0.5, 0.1, 0.1, 0.4, 0.2]
    for loss, batch in zip(losses, run.batches(epochs=2), strict=False):
        assert run.committed == (run.step if run.step > 2 else 0)
        job.step(batch)
        run.log(loss=loss)
        if run.step >= 2:
            run.keep(best="loss", n=2)
    run.stop()
    assert list(run.batches(epochs=2)) == []
    assert [(one.step, one.loss) for one in run.kept()] == [(4, 0.1), (5, 0.1)]
    weights = [one.detach().clone() for one in job.model.parameters()]
    kept = run.keep("here")
    assert kept is not None
    assert run.committed == run.step == 7
    run.rollback()
    assert all(map(torch.equal, weights, job.model.parameters()))


# ---- what lies in the tier


@pytest.fixture
def reason() -> Reason:
    return Reason("run", "best", "loss", 3, 0.5, 0.5, 1.0)


def test_reasons_are_read_back_or_refused(reason: Reason) -> None:
    data = kept_epochs.pack([reason])
    assert kept_epochs.unpack(data) == (reason,)
    for damaged in (b"", data[:-1], data + b"x", data[:30] + b"\xff" + data[31:], b"x" * 100):
        with pytest.raises(ValueError, match="keeps an epoch"):
            kept_epochs.unpack(damaged)
    for wrong in ({"step": "3"}, {"series": "x"}, {"value": None}, {"time": math.inf}):
        said = {**{name: getattr(reason, name) for name in reason.__slots__}, **wrong}
        with pytest.raises(ValueError, match="reason"):
            kept_epochs.unpack(kept_epochs.pack([Reason(**said)]))


def test_names_of_kept_epochs() -> None:
    name = KeptName(12, "job", 0, 1)
    assert KeptName.parse(str(name)) == name
    for wrong in (
        "12.job.0-1.kept",
        "0000000000012.job.0-1.kept",
        "000000000012.job.1-1.kept",
        "000000000012.job.00-1.kept",
        "000000000012.j/b.0-1.kept",
        "000000000012.job.0-1.kept.new",
    ):
        assert KeptName.parse(wrong) is None


def test_a_damaged_reason_keeps_its_epoch(tmp_path: Path) -> None:
    """It cannot be told what it is, but it is not let go."""
    with pmstore.open(tmp_path / "run.pm") as store:
        job = make_job()
        run = job.attach(store)
        go(store, run, job, 1)
        run.keep("one")
        store.drain()
    (file,) = (tmp_path / "run.pm.kept").glob("*.kept")
    file.write_bytes(b"damaged")
    with pmstore.open(tmp_path / "run.pm") as store:
        job = make_job()
        run = job.attach(store)
        for step in (2, 3):
            go(store, run, job, step)
            run.keep(n=1)
        assert [one.step for one in run.kept()] == [3]
    assert len(pmstore.epochs(tmp_path / "run.pm.kept")) == 2


# ---- kills


def work(ack: Any, path: str, domain: str, kinds: dict[str, Any]) -> None:
    """One process's life: trains, keeps, goes back now and then. The store always holds all of one
    step."""
    torch.set_num_threads(1)
    with pmstore.open(path, domain=domain, size="8MiB") as store:  # type: ignore[arg-type]
        job = make_job(**kinds)
        run = job.attach(store)
        steps = store.list("steps")
        loop = run.batches(epochs=None)
        for _ in range(12):
            job.step(next(loop))
            steps.append(run.step + 1)
            store[f"of/{run.step + 1}"] = np.full(100, run.step + 1)
            run.commit()
            if run.step % 2:
                run.keep(n=3)
            if run.step % 5 == 4:
                run.rewind(to=run.kept()[0].step)
            ack(run.step)


def check(path: Path, kinds: dict[str, Any]) -> None:
    with pmstore.open(path) as store:
        assert store.check().problems == ()
        if "run" not in store:
            return
        step = int(store["run/progress"][0])
        if step:
            assert store["steps"][:] == list(range(1, step + 1))
            assert list(map(int, store["of"])) == list(range(1, step + 1))
        job = make_job(**kinds)
        assert job.attach(store).step == step
    url = path.with_name(f"{path.name}.kept")
    found = pmstore.epochs(url)
    assert [one.problem for one in found if one.problem] == []


@pytest.mark.parametrize(
    ("domain", "kinds"), [("process", {}), ("file", {"optimizer": "native-adamw"})]
)
def test_kills_of_keeps_and_rewinds(
    tmp_path: Path, server: ForkServer, domain: str, kinds: dict[str, Any]
) -> None:
    """The old state or the new one; and what a killed process left is cleared by the next."""
    chance = random.Random(f"{domain}{kinds}")
    path = tmp_path / "run.pm"
    arguments = [str(path), domain, kinds]
    assert server.run("test_kept:work", arguments).exit_code == 0
    check(path, kinds)
    killed = 0
    for number in range(12):
        how: dict[str, Any] = (
            {"kill_at": chance.randrange(1, 2500)}
            if number % 2
            else {"delay_seconds": chance.uniform(0.01, 0.6)}
        )
        done = server.run("test_kept:work", arguments, **how)
        assert done.killed or done.exit_code == 0, done
        killed += done.killed
        check(path, kinds)
    assert killed > 3
    assert server.run("test_kept:work", arguments).exit_code == 0
    left = sorted(os.listdir(tmp_path))
    assert left == ["run.pm", "run.pm.kept"]
    kept = [name for name in os.listdir(tmp_path / "run.pm.kept") if name.endswith(".kept")]
    assert len(kept) <= 4
    assert not [name for name in os.listdir(tmp_path / "run.pm.kept") if name.endswith(".new")]


def test_no_room_to_go_back(path: Path) -> None:
    """The state needs more room than a full store has: all is as before, and goes on."""
    with pmstore.open(path, size="4MiB", max_size="4MiB") as store:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters())
        run = attach(store, model=model, optimizer=optimizer)

        def step() -> None:
            with run.next_step():
                optimizer.zero_grad()
                model(torch.randn(3, 4)).sum().backward()
                optimizer.step()
            run.commit()

        store["large"] = np.zeros(100_000)
        step()
        flush = run.keep("large")
        assert flush is not None
        flush.wait()
        del store["large"]
        step()
        with pytest.raises(pmstore.StoreFullError):
            for number in range(1000):
                store[f"fill{number}"] = np.zeros(10_000)
        step()
        before = contents(store)
        with pytest.raises(pmstore.StoreFullError):
            run.rewind(to="large")
        assert run.step == 3
        assert_same(contents(store), before)
        step()
        assert run.committed == 4
        assert store.check().problems == ()
