"""Ranks of a job commit, flush and stop at the same steps, whatever each one's rule would like."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import launch  # type: ignore[import-not-found, unused-ignore]

import pmstore
from pmstore.job import membership
from pmstore.scheduler import (
    Auto,
    CommitPolicy,
    CommitScheduler,
    EveryN,
    EverySeconds,
    HazardModel,
    Known,
    PreemptionGuard,
)
from pmstore.torch import Job, Run, attach
from pmstore_lab.simulation.baselines import COCI, CheckFreq, Daly, EveryStep, Young


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, list[Any]]]:
    """By two ranks, which run all these programs: to start them takes longer than they do."""
    programs = [
        *(_rules, _no_rule, _rolled_back, _alone, _called, _stopped, _refused, _own_rule, _tiers),
        _batches,  # which ends the process
    ]
    with tempfile.TemporaryDirectory(
        prefix=f"pmstore-test-{os.getpid()}-", dir="/dev/shm"
    ) as folder:
        yield launch(programs, Path(folder), 2)


class Ranks:
    """A run in a store of this rank's own."""

    def __init__(self, store: pmstore.Store, together: bool = True, **given: Any) -> None:
        """together: they add their gradients."""
        torch.manual_seed(1)
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.together = together
        self.run: Run = attach(
            store, model=self.model, optimizer=self.optimizer, job=Job(timeout=60.0), **given
        )
        self.committed: list[int] = []

    def update(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        data = torch.full((3, 4), 1.0 + self.run.step + dist.get_rank())
        loss: torch.Tensor = self.model(data).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            if self.together:
                dist.all_reduce(parameter.grad)
        self.optimizer.step()
        return loss.detach()

    def step(self) -> None:
        """One that ends when the next begins."""
        with self.run.next_step():
            if self.run.committed > (self.committed or [0])[-1]:
                self.committed.append(self.run.committed)
            self.run.log(loss=self.update())

    def train(self, until: int) -> list[int]:
        """Ends so many steps, and begins another one. Returns those that were committed so far."""
        while self.run.step <= until:
            self.step()
        return self.committed

    def go_back(self) -> None:
        """In the middle of a step."""
        with self.run.next_step():
            self.update()
            self.run.rollback()


class Clock:
    """Of one rank: fast or slow."""

    def __init__(self, rank: int) -> None:
        self.now = 0.0
        self.random = random.Random(rank)
        self.pace = (0.4, 1.3, 0.9)[rank]

    def __call__(self) -> float:
        self.now += self.pace * self.random.uniform(0.8, 1.2)
        return self.now


def rules() -> list[CommitPolicy]:
    return [
        EveryStep(),
        EveryN(7),
        EverySeconds(12.0),
        Young(0.02),
        Daly(0.02),
        CheckFreq(0.2),
        COCI(decay_per_second=-0.01, failure_rate_per_second=0.05, level=10.0),
        Auto("time"),
        Auto("balanced"),
        Auto("progress"),
        Auto("explore"),
    ]


def _rules(folder: Path, rank: int, results: dict[str, Any]) -> None:
    for number, rule in enumerate(rules()):
        with pmstore.open(folder / f"{number}-{rank}.pm", size="8MB") as store:
            known = Known(failure_rate_per_second=0.01 * (1 + rank))
            own = CommitScheduler(rule, store=store, clock=Clock(rank), known=known)
            ranks = Ranks(store, policy=own)
            results[str(number)] = ranks.train(80)
            assert own.policy is not rule
            begun, *decisions = own.decisions
            assert (begun.step, begun.reason) == (0, "asked for")  # the first step's beginning
            assert {one.reason for one in decisions} == {"agreed by all ranks"}
            assert [one.step for one in decisions] == ranks.committed
        assert own.policy is rule


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_of_other_paces_commit_the_same_steps(
    shm: Path, found: dict[str, list[Any]], world: int
) -> None:
    first, *others = (found if world == 2 else launch([_rules], shm, world))["_rules"]
    assert all(one == first for one in others)
    assert first["0"] == list(range(1, 81))
    assert first["1"] == list(range(7, 81, 7))
    assert all(len(committed) > 1 for committed in first.values()), str(first)
    assert any(len(committed) < 40 for committed in first.values())


def _no_rule(folder: Path, rank: int, results: dict[str, Any]) -> None:
    with pmstore.open(folder / f"{rank}.pm", size="8MB") as store:
        ranks = Ranks(store)
        results["committed"] = ranks.train(6)
        ranks.go_back()
        ranks.train(9)
        while ranks.run.step <= 12:
            ranks.run.commit(agree=True)
            ranks.step()
        results["agreed"] = ranks.run.agreed_step


def test_without_a_rule_every_step_commits(found: dict[str, list[Any]]) -> None:
    for one in found["_no_rule"]:
        assert one == {"committed": list(range(1, 13)), "agreed": 12}


def _rolled_back(folder: Path, rank: int, results: dict[str, Any]) -> None:
    for name, rule in {"n": EveryN(5), "step": EveryStep(), "own": None}.items():
        with pmstore.open(folder / f"{name}{rank}.pm", size="8MB") as store:
            if rule is None:
                known = Known(failure_rate_per_second=0.02)
                own = CommitScheduler(Young(0.02), store=store, clock=Clock(rank), known=known)
            ranks = Ranks(store, policy=rule or own)
            ranks.train(13)
            for _ in range(2):
                ranks.run.rollback()
                ranks.train(ranks.run.step + 3)
            ranks.go_back()
            ranks.run.rollback()
            results[name] = ranks.train(40)


def test_ranks_that_roll_back_together_go_on_meeting(found: dict[str, list[Any]]) -> None:
    first, second = found["_rolled_back"]
    assert first == second
    assert set(first["n"]) >= {5, 10, 15, 25, 30, 35, 40}
    assert all(step % 5 == 0 for step in first["n"])
    assert first["step"] == list(range(1, 41))
    assert first["own"] == sorted(first["own"])


def _alone(folder: Path, rank: int, results: dict[str, Any]) -> None:
    """The last rank rolls back, updates twice or commits, and goes on: in a program whose ranks do
    not wait for each other anywhere else."""
    for name in ("rollback", "twice", "called"):
        try:
            with pmstore.open(folder / f"{name}{rank}.pm", size="8MB") as store:
                ranks = Ranks(store, together=False, policy=EveryN(6))
                ranks.train(7)
                for step in range(30):
                    with ranks.run.next_step():
                        ranks.update()
                        if rank == 0 or step != 2:
                            continue
                        if name == "rollback":
                            ranks.run.rollback()
                        elif name == "called":
                            ranks.run.commit(agree=True)
                        else:
                            ranks.update()
        except pmstore.PmstoreError as error:
            results[name] = [type(error).__name__, str(error)]
        dist.barrier()


def test_a_rank_that_does_something_else_stops_all(found: dict[str, list[Any]]) -> None:
    for one in found["_alone"]:
        for name in ("rollback", "twice", "called"):
            kind, told = one[name]
            assert kind == "MixedStoresError", one
            assert "rank 0:" in told
            assert "rank 1:" in told
            assert "EveryN(interval=6)" in told


def _behind(folder: Path, rank: int, results: dict[str, Any]) -> None:
    """Rank 1 rolls back, and waits for rank 0 in the all-reduce of a later step, to which that does
    not come any more."""
    membership._DETAILS_SECONDS = 1.0
    with pmstore.open(folder / f"{rank}.pm", size="8MB") as store:
        ranks = Ranks(store)
        ranks.train(7)
        try:
            for step in range(30):
                if rank == 0 or step != 2:
                    ranks.step()
                else:
                    ranks.go_back()
        except (pmstore.MixedStoresError, RuntimeError) as error:
            print(json.dumps({"_behind": {"told": str(error)}}), flush=True)
            os._exit(0)  # the other's all-reduce ends with its peer


def test_ranks_that_wait_for_each_other_in_the_step_are_not_stuck(shm: Path) -> None:
    told = launch([_behind], shm, 2)["_behind"][0]["told"]
    assert "rank 0: has committed step 11" in told
    assert "after 12 optimizer updates; other ranks differ" in told


def _called(folder: Path, rank: int, results: dict[str, Any]) -> None:
    with pmstore.open(folder / f"{rank}.pm", size="8MB") as store:
        ranks = Ranks(store, policy=EveryN(10))
        ranks.train(4)
        ranks.run.commit(agree=True)
        assert ranks.run.agreed_step == 5
        results["committed"] = ranks.train(31)
        results["agreed"] = ranks.run.agreed_step


def test_a_commit_that_all_ask_for(found: dict[str, list[Any]]) -> None:
    assert found["_called"] == [{"committed": [5, 10, 20, 30], "agreed": 30}] * 2


# ---- told to stop


def _stopped(folder: Path, rank: int, results: dict[str, Any]) -> None:
    for name, policy in {"n": EveryN(1000), "aware": Auto(), "none": None}.items():
        dist.barrier()
        with pmstore.open(folder / f"{name}{rank}.pm", size="8MB") as store:
            ranks = Ranks(
                store, policy=policy, guard=(guard := PreemptionGuard(notice_seconds=600.0))
            )
            ranks.train(20)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(SystemExit) as left:
                ranks.train(1000)
            assert left.value.code == 0
            run = ranks.run
            assert run.stopping
            assert guard.finished
            assert guard.noticed() == (rank == 1)
            if run.scheduler is not None:
                assert run.scheduler.stopping
            results[name] = [run.step, run.committed]
        with pmstore.open(folder / f"{name}{rank}.pm") as store:
            results[name] += [HazardModel(store).preemptions]


def test_one_rank_that_is_told_to_stop_stops_all(found: dict[str, list[Any]]) -> None:
    first, second = found["_stopped"]
    assert first == second
    for name in ("n", "aware", "none"):
        step, committed, preemptions = first[name]
        assert committed == step
        # they meet at the latest when they have made as many steps again
        assert 20 < step <= (42 if name != "none" else 22)
        assert preemptions == (name != "none")


def _batches(folder: Path, rank: int, results: dict[str, Any]) -> None:
    with pmstore.open(folder / f"{rank}.pm", size="8MB") as store:
        loader = [torch.full((2, 4), float(i)) for i in range(500)]
        guard = PreemptionGuard(lambda: 100.0 if rank == 0 and told else None, notice_seconds=600.0)
        told = False
        ranks = Ranks(store, policy=EveryN(1000), loader=loader, guard=guard)
        try:
            for _ in ranks.run.batches(epochs=4):
                told = ranks.run.step >= 50
                ranks.run.log(loss=ranks.update())
        finally:
            results["step"], results["committed"] = ranks.run.step, ranks.run.committed


def test_the_loop_over_the_data_ends_at_all_ranks(found: dict[str, list[Any]]) -> None:
    first, second = found["_batches"]
    assert first == second
    assert 50 < first["step"] == first["committed"] < 1000


def _refused(folder: Path, rank: int, results: dict[str, Any]) -> None:
    with pmstore.open(folder / f"{rank}.pm", size="8MB") as store:
        own = CommitScheduler(EveryN(3), store=store, guard=PreemptionGuard())
        with pytest.raises(pmstore.PmstoreError, match=r"guard=\.\.\."):
            Ranks(store, policy=own)
        try:
            Ranks(store, policy=EveryN(3 + rank))
        except pmstore.PmstoreError as error:
            results["other"] = str(error)
        try:
            Ranks(store, guard=PreemptionGuard(signals=()) if rank else None)
        except pmstore.PmstoreError as error:
            results["guard"] = str(error)


def test_ranks_that_schedule_differently_are_refused(found: dict[str, list[Any]]) -> None:
    for one in found["_refused"]:
        assert "rank 0: EveryN(interval=3), rank 1: EveryN(interval=4)" in one["other"]
        assert "rank 0: every step, rank 1: every step, with a guard" in one["guard"]


# ---- rules of the user's own


class Counting:
    """Wants to commit every third time that it is asked, at the rank that is first."""

    reason = "counted"

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.asked: list[int] = []

    def decide(self, scheduler: CommitScheduler) -> int:
        self.asked.append(scheduler.steps)
        return -1 if self._rank or len(self.asked) % 3 else 0


def _own_rule(folder: Path, rank: int, results: dict[str, Any]) -> None:
    with pmstore.open(folder / f"{rank}.pm", size="8MB") as store:
        rule = Counting(rank)
        results["committed"] = Ranks(store, policy=rule).train(20)
        results["asked"] = rule.asked


def test_a_rule_with_a_state_is_followed_a_step_later(found: dict[str, list[Any]]) -> None:
    for one in found["_own_rule"]:
        # first when it joins, and at the loop's beginning; last when the store is left
        assert one["asked"] == [0, *range(22)]
        assert one["committed"] == [2, 5, 8, 11, 14, 17, 20]


# ---- tiers


def _tiers(folder: Path, rank: int, results: dict[str, Any]) -> None:
    flushed: list[tuple[str, int]] = []
    flush = pmstore.Store.flush

    def noted(store: pmstore.Store, tier: str, **given: Any) -> Any:
        flushed.append((tier, store.epoch))
        return flush(store, tier, **given)

    pmstore.Store.flush = noted  # type: ignore[assignment]
    for name in ("aware", "n", "none"):
        with pmstore.open(folder / f"{name}{rank}.pm", size="8MB") as store:
            for tier in ("disk", "far"):
                slow = 1_000_000 if rank and tier == "far" else None
                place = folder / f"{name}{tier}{rank}"
                store.add_tier(tier, pmstore.TierConfig(place, keep=1000, max_rate=slow))
            policy: Any = EveryN(3) if name == "n" else None
            if name == "aware":
                rates = {"store": 0.05, "disk": 0.05, "far": 0.03}
                policy = CommitScheduler(
                    Auto(),
                    store=store,
                    tiers=["disk", "far"],
                    clock=Clock(rank),
                    known=Known(failure_rate_per_second=rates),
                )
            flushed.clear()
            committed = Ranks(store, policy=policy, tiers=["disk", "far"]).train(150)
            results[name] = [committed, [*flushed]]


def test_tiers_are_flushed_to_at_the_same_steps(found: dict[str, list[Any]]) -> None:
    """One of them is slow at one rank: it is not waited for, and the others leave theirs out."""
    first, second = found["_tiers"]
    assert first == second
    for name, (committed, flushed) in first.items():
        assert committed
        assert {tier for tier, _ in flushed} == {"disk", "far"}, name
        if name != "aware":
            tiers = [tier for tier, _ in flushed]
            assert tiers.count("disk") > tiers.count("far")
    assert len(first["aware"][1]) > 4
    assert first["n"][0] == list(range(3, 151, 3))
    assert first["none"][0] == list(range(1, 151))
