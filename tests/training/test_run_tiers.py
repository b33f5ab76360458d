"""A training run that is flushed to tiers: killed machine and all, it goes on from an epoch, bit
for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

torch = pytest.importorskip("torch")

import pmstore  # noqa: E402
import pmstore.torch  # noqa: E402
from pmstore.scheduler import Auto, CommitScheduler, EveryN  # noqa: E402
from pmstore.torch.run_errors import AttachError  # noqa: E402


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.Dropout(0.1), torch.nn.Linear(128, 4)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.randn(8, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train(
    store: pmstore.Store,
    until: int,
    *,
    patient: bool = False,
    lr: float | None = None,
    **options: object,
) -> list[torch.Tensor]:
    """patient: each flush ends before that of the next step, so that none is left out because the
    tier is busy. lr: another one."""
    model, optimizer = make()
    options = {"policy": None} | options
    run = pmstore.torch.attach(store, model=model, optimizer=optimizer, **options)  # type: ignore[arg-type]
    for _ in run.steps(until):
        if patient:
            store.drain()
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] if lr is None else lr
        run.log(loss=step(model, optimizer))
    store.drain()
    run.detach()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_restored_run_ends_as_one_that_was_not_interrupted(shm: Path) -> None:
    with pmstore.open(shm / "whole.pm") as store:
        want = train(store, 30)
    with pmstore.open(shm / "a.pm") as store:
        store.add_tier("disk", pmstore.TierConfig(shm / "tier", keep=3))
        train(store, 17, tiers=["disk"])
        assert store.tiers["disk"].keep == 3
    (shm / "a.pm").unlink()  # the machine is gone
    report = pmstore.restore(shm / "b.pm", shm / "tier")
    assert report.skipped == ()
    with pmstore.open(shm / "b.pm") as store:
        got = train(store, 30)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_branches_from_a_common_ancestor(shm: Path) -> None:
    """An old epoch under new names: one goes the way of the first run, bit for bit, one with
    another lr; all in one tier."""

    def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    tier, want, uuid = shm / "tier", {}, {}
    with pmstore.open(shm / "trunk.pm") as store:
        store.add_tier("disk", tier)
        want["trunk"] = train(store, 12, patient=True, tiers=["disk"])
        uuid["trunk"] = store.info().uuid
    ancestor = sorted(info.epoch for info in pmstore.epochs(tier))[4]
    for name, lr in (("again", None), ("slower", 1e-3)):
        pmstore.restore(shm / f"{name}.pm", tier, ancestor, run=uuid["trunk"])
        with pmstore.open(shm / f"{name}.pm") as store:
            store.add_tier("disk", tier)  # a restored store has none added
            want[name] = train(store, 12, patient=True, lr=lr, tiers=["disk"])
            uuid[name] = store.info().uuid
    assert same(want["trunk"], want["again"])
    assert not same(want["trunk"], want["slower"])
    with pmstore.open(shm / "trunk.pm") as store:  # goes on too
        want["trunk"] = train(store, 15, patient=True, tiers=["disk"])
    for name, run in uuid.items():
        pmstore.restore(shm / f"{name}.back.pm", tier, run=run)
        with pmstore.open(shm / f"{name}.back.pm") as store:
            assert same(train(store, 0), want[name])
    assert [info.problem for info in pmstore.epochs(tier) if info.problem] == []


@pytest.mark.parametrize("mirror", [False, True])
def test_commits_that_nobody_waits_for_are_flushed(shm: Path, mirror: bool) -> None:
    """Each when the next one is made. Only those of a mirrored run are not waited for."""
    with pmstore.open(shm / "a.pm") as store:
        store.add_tier("disk", shm / "tier")
        model, optimizer = make()
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, tiers=["disk"], mirror=mirror, policy=None
        )
        want = []
        for number in run.steps(5):
            store.drain(60)
            if number == 4:
                assert (run._steps.pending is not None) == mirror
                run.rollback()
                break
            step(model, optimizer)
            want.append([parameter.detach().clone() for parameter in model.parameters()])
        assert run.committed == 4
    durable = 3 if mirror else 4
    assert len(pmstore.epochs(shm / "tier")) == 1 + durable  # and the loop's beginning
    pmstore.restore(shm / "b.pm", shm / "tier")
    with pmstore.open(shm / "b.pm") as store:
        model, optimizer = make()
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, mirror=mirror)
        assert run.step == durable
        assert all(
            torch.equal(a, b) for a, b in zip(want[durable - 1], model.parameters(), strict=True)
        )


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_tier_that_fails_stops_the_run_or_not(
    shm: Path, on_error: Literal["raise", "warn"]
) -> None:
    with pmstore.open(shm / "a.pm") as store:
        store.add_tier("disk", pmstore.TierConfig(shm / "tier", on_error=on_error))
        (shm / "tier").write_text("no directory")
        model, optimizer = make()
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, tiers=["disk"], policy=None
        )
        with run.next_step():  # what stands before it is committed
            last = store._open_tiers().flusher("disk").last
            assert last is not None
            assert last.wait_over(60)
            step(model, optimizer)
        with (
            pytest.raises(OSError, match="tier")
            if on_error == "raise"
            else pytest.warns(UserWarning, match="'disk' failed")
        ):
            run.commit()
        assert run.step == run.committed == 1  # the store's own commit is not the tier's affair
        if on_error == "warn":
            with pytest.raises(OSError, match="tier"):  # it was tried again
                store.drain()
        (shm / "tier").unlink()
        with run.next_step():
            step(model, optimizer)
        run.commit()
        store.drain()
        assert run.step == run.committed == 2
    assert pmstore.epochs(shm / "tier")[0].problem is None


def test_a_rule_decides_for_the_tiers_too(shm: Path) -> None:
    with pmstore.open(shm / "a.pm") as store:
        store.add_tier("disk", shm / "tier")
        train(store, 12, patient=True, tiers=["disk"], policy=EveryN(4))
    flushed = [info.epoch for info in pmstore.tiers.epochs(str(shm / "tier"))]
    # the loop's beginning, every fourth step, and the loop's end, if the tier is idle by then
    assert len(flushed) - (1 + 3) in (0, 1)
    with pytest.raises(AttachError, match="no tier 'nope'"), pmstore.open(shm / "a.pm") as store:
        train(store, 12, tiers=["nope"])
    with (
        pytest.raises(AttachError, match="the scheduler has no tier 'disk'"),
        pmstore.open(shm / "a.pm") as store,
    ):
        train(store, 12, tiers=["disk"], policy=CommitScheduler(targets={"store": store.commit}))


def test_the_scheduler_chooses_among_the_tiers(shm: Path) -> None:
    with pmstore.open(shm / "whole.pm") as store:
        want = train(store, 400)
    lives = 0
    while True:
        with pmstore.open(shm / f"{lives}.pm") as store:
            for tier in ("near", "far"):
                store.add_tier(tier, pmstore.TierConfig(shm / tier, keep=2))
            # a failure every 8 h would have a test wait for hours
            policy = Auto("time", free_budget=0.2)
            lives += 1
            model, optimizer = make()
            run = pmstore.torch.attach(
                store, model=model, optimizer=optimizer, tiers=["near", "far"], policy=policy
            )
            scheduler = run.scheduler
            assert scheduler is not None
            assert [target.name for target in scheduler.targets] == ["store", "near", "far"]
            assert run.step == scheduler.steps
            assert run.resumed == (lives > 1)
            began = run.step
            for _ in range(150 if lives < 3 else 400 - began):
                with run.next_step():
                    step(model, optimizer)
                    run.log(loss=1.0)
            chosen = {decision.target for decision in scheduler.decisions}
            if lives < 3:
                assert {"store", "far"} <= chosen <= {"store", "near", "far"}
                store.drain()
                store.rollback()
            else:
                got = [parameter.detach().clone() for parameter in model.parameters()]
                break
        pmstore.restore(shm / f"{lives}.pm", shm / "far")  # the machine is gone
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_a_rule_learns_the_length_of_the_job(shm: Path) -> None:
    with pmstore.open(shm / "a.pm") as store:
        for number, (epochs, until) in enumerate(((4, 12), (4, 16))):
            model, optimizer = make()
            batches = [torch.randn(8, 64) for _ in range(8)]
            run = pmstore.torch.attach(
                store,
                model=model,
                optimizer=optimizer,
                loader=batches,
                policy=Auto("explore"),
                name=f"r{number}",
            )
            assert run.scheduler is not None
            for batch in run.batches(epochs, every=2):
                model(batch).square().mean().backward()
                if run.last_in_step:
                    optimizer.step()
                    optimizer.zero_grad()
                    run.log(loss=1.0 / (run.step + 1))
                    if run.step + 1 == until < 16:
                        run.stop()
            assert run.scheduler.total_steps == 16
            run.scheduler.commit()
            run.detach()
        other = CommitScheduler(Auto("explore"), store=store, run="next")
        assert other.worth.termination.ended_early == 1
