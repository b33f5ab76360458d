"""A training run that is flushed to tiers: killed machine and all, it goes on from an epoch, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import pmstore  # noqa: E402
import pmstore.torch  # noqa: E402
from pmstore.scheduler import EveryN  # noqa: E402
from pmstore.torch.errors import AttachError  # noqa: E402


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Dropout(0.1), torch.nn.Linear(128, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(store: pmstore.Store, until: int, **options: object) -> list[torch.Tensor]:
    model, optimizer = make()
    run = pmstore.torch.attach(store, model=model, optimizer=optimizer, **options)  # type: ignore[arg-type]
    while run.step < until:
        loss = model(torch.randn(8, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.commit(loss.item())
    store.drain()
    run.detach()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_restored_run_ends_as_one_that_was_not_interrupted(shm: Path) -> None:
    with pmstore.open(shm / "whole.pm") as store:
        want = train(store, 30)
    with pmstore.open(shm / "a.pm") as store:
        store.add_tier("disk", shm / "tier", keep=3)
        train(store, 17, tiers=["disk"])
        assert store.tiers["disk"].keep == 3
    (shm / "a.pm").unlink()  # the machine is gone
    report = pmstore.restore(shm / "b.pm", shm / "tier")
    assert report.skipped == ()
    with pmstore.open(shm / "b.pm") as store:
        got = train(store, 30)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_a_rule_decides_for_the_tiers_too(shm: Path) -> None:
    with pmstore.open(shm / "a.pm") as store:
        store.add_tier("disk", shm / "tier")
        train(store, 12, tiers=["disk"], policy=EveryN(4))
    with pytest.raises(AttachError, match="no tier 'nope'"), pmstore.open(shm / "a.pm") as store:
        train(store, 12, tiers=["nope"])
