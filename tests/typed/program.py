"""What users write, with every public name of pmstore, for type checkers: `make lint` has mypy
--strict read it, `make nightly WHAT=types` pyright. Nobody runs it; tests/house/test_typed.py sees
that no name is left out, and `assert_type` that what users get has a type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas
import torch
from typing_extensions import assert_type

import pmstore
import pmstore.dcp
import pmstore.exchange
import pmstore.portable
import pmstore.scheduler
import pmstore.testing
import pmstore.tiers
import pmstore.torch
import pmstore.torch.optim
from pmstore import (
    CheckReport,
    Compaction,
    Entry,
    Group,
    Info,
    List,
    Recovery,
    SegmentUsage,
    Slots,
    Stats,
    Store,
    TierConfig,
    Transaction,
)

Array = np.ndarray[Any, np.dtype[Any]]


def arrays(store: Store) -> None:
    assert_type(store.zeros("a", (3, 4), "float32"), Array)
    assert_type(store.empty("b", 3), Array)
    assert_type(store.full("c", [3], 1.5), Array)
    assert_type(store.require("d", (3,)), Array)
    assert_type(store.require("d", (3,), np.float32), Array)
    assert_type(store.require("d", (3,), "float32"), Array)
    assert_type(store.require("e", (3,), torch.float32), torch.Tensor)
    assert_type(store.tensor("f", (3, 4)), torch.Tensor)
    step: int = store.get("step", 0)
    with store.transaction() as transaction:
        assert_type(transaction, Transaction)
        store["step"] = step + 1
    for entry in store.entries():
        assert_type(entry, Entry)
        print(entry.name)


def versions(store: Store) -> None:
    means = store.slots("means", (10, 784), "float32")
    assert_type(means, Slots[Array])
    assert_type(means.current, Array)
    assert_type(means.next, Array)
    assert_type(means.target, Array)
    assert_type(means.previous, Array | None)
    weights = store.slots("weights", (10,), torch.float32)
    assert_type(weights.current, torch.Tensor)
    found: Slots = store.slots("means")
    with store.transaction():
        np.multiply(means.current, 0.9, out=means.next)
        means.flip()
    found.flip()


def containers(store: Store) -> None:
    assert_type(store.group("run"), Group)
    assert_type(store.list("losses"), List)
    store.list("losses").append(0.3)
    for name, value in store.items():
        print(name.upper(), value)
    assert_type(store.info(), Info)
    assert_type(store.stats(), Stats)
    assert_type(store.recovery, Recovery)
    assert_type(store.check(), CheckReport)
    usage: tuple[SegmentUsage, ...] = store.usage()
    print(usage)


def files() -> None:
    with pmstore.open("run.pm", "r+", size="4GiB", domain="file") as store:
        store.add_tier("disk", TierConfig("tier", keep=3))
        epoch: int = store.epoch
        store.flush("disk")
        print(epoch)
    assert_type(pmstore.compact("run.pm"), Compaction)
    print([one.epoch for one in pmstore.epochs("tier")], pmstore.restore("run.pm", "tier"))
    print(pmstore.__version__, pmstore.errors, pmstore.pymm, pmstore.dcp.StoreReader)
    print(
        pmstore.exchange.export_npz,
        pmstore.exchange.export_log,
        pmstore.exchange.export_tensorboard,
        pmstore.portable.dump,
        pmstore.testing.crash_test,
    )
    print(pmstore.tiers.EpochInfo, pmstore.scheduler.EveryN(100), pmstore.dcp.StoreWriter)


def told(values: dict[str, float], step: int) -> None:
    print(step, values)


def training(store: Store, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    run = pmstore.torch.attach(store, model=model, optimizer=optimizer)
    assert_type(run, pmstore.torch.Run)
    for inputs, targets in run.batches(epochs=3):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call] # torch's own
        optimizer.step()
        run.log(loss=loss)
    step: int = run.step
    for epoch in run.epochs(5):
        for inputs, targets in epoch:
            print(inputs, targets)
    with run.next_step():
        run.state["beta"] = 0.9
    run.commit()
    run.log_to(told)
    assert_type(run.history("loss"), tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]])
    assert_type(run.history(), pandas.DataFrame)
    assert_type(pmstore.exchange.read_log(store), pandas.DataFrame)
    assert_type(run.stats(), pmstore.torch.RunStats)
    print(step, pmstore.torch.Resume(lr="program"), pmstore.torch.Job, pmstore.torch.KeptState)
    pmstore.torch.load(store, model)


def policies(store: Store, model: torch.nn.Module) -> None:
    optimizer = pmstore.torch.optim.AdamW(model.parameters(), lr=1e-3)
    print(pmstore.torch.optim.Adam, pmstore.torch.optim.SGD)
    guard = pmstore.scheduler.PreemptionGuard()
    policy: pmstore.scheduler.CommitPolicy = pmstore.scheduler.Auto(max_loss=5)
    print(pmstore.scheduler.EverySeconds(1.0), pmstore.scheduler.policy_words(policy))
    outlook: pmstore.scheduler.Outlook = pmstore.scheduler.CommitScheduler(targets={})
    print(policy.decide(outlook))
    run = pmstore.torch.attach(store, model=model, optimizer=optimizer, policy=policy, guard=guard)
    for n in run.steps(100):
        run.log(loss=0.5 / n)
    for part in (
        *(pmstore.scheduler.Agreed, pmstore.scheduler.CommitScheduler, pmstore.scheduler.CostModel),
        *(pmstore.scheduler.Decision, pmstore.scheduler.HazardModel, pmstore.scheduler.Known),
        *(pmstore.scheduler.IterationTimer, pmstore.scheduler.LossFit, pmstore.scheduler.Target),
        *(pmstore.scheduler.Objective, pmstore.scheduler.OneTarget, pmstore.scheduler.Wish),
        *(pmstore.scheduler.TerminationModel, pmstore.scheduler.policy_digest),
        pmstore.scheduler.rule_of,
    ):
        print(part)


def names(place: pmstore.tiers.Place, suite: pmstore.testing.PlaceTests) -> dict[str, int]:
    return {**place.names(), **suite.open("empty").names()}


def data(store: Store) -> None:
    report: pmstore.tiers.RestoreReport = pmstore.tiers.restore("again.pm", "tier")
    flush: pmstore.tiers.Flush = store.flush("disk")
    print(report, flush, pmstore.tiers.FlushStats, pmstore.tiers.TierConfig, pmstore.tiers.epochs)
    pmstore.tiers.drain_all()
    pmstore.exchange.export_safetensors(store, "model.safetensors")
    pmstore.exchange.import_safetensors(store, "model.safetensors")
    pmstore.exchange.import_npz(store, "arrays.npz")
    print(pmstore.exchange.export_run, pmstore.exchange.import_run, pmstore.portable.load)


def crashes() -> None:
    for part in (
        *(pmstore.testing.CrashTestResult, pmstore.testing.ForkServer, pmstore.testing.KilledRun),
        *(pmstore.testing.Outcome, pmstore.testing.Program, pmstore.testing.job_test),
        *(pmstore.testing.kill_at_primitive, pmstore.testing.primitives_seen),
        pmstore.testing.shared_words,
    ):
        print(part)


def failures(path: str) -> None:
    try:
        pmstore.open(path).close()
    except (
        pmstore.ClosedStoreError,
        pmstore.CorruptStoreError,
        pmstore.DomainError,
        pmstore.ForkedStoreError,
        pmstore.FormatVersionError,
        pmstore.InDoubtError,
        pmstore.MirrorError,
        pmstore.MixedStoresError,
        pmstore.MovedError,
        pmstore.NameExistsError,
        pmstore.NotAStoreError,
        pmstore.PeerLostError,
        pmstore.ReadOnlyStoreError,
        pmstore.SnapshotLostError,
        pmstore.StoreFullError,
        pmstore.StoreLockedError,
        pmstore.TierError,
        pmstore.TransactionError,
        pmstore.UncleanCopyError,
        pmstore.UncleanMachineCrashError,
        pmstore.torch.AttachError,
        pmstore.torch.ChangedError,
        pmstore.torch.LookaheadError,
        pmstore.torch.MismatchError,
        pmstore.torch.NotKeptError,
        pmstore.torch.RolledBackError,
        pmstore.torch.TornStepError,
        pmstore.torch.UnfinishedStepError,
    ) as error:
        what: pmstore.PmstoreError = error
        print(what)
